"""mr.images.decode on single records: every format against Pillow, orientation, scaled decoding, what is refused."""

import io
import pickle
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageOps

import millrace as mr
from millrace.feed.rng import RecordRng
from millrace.images import read
from millrace.images.crops import DRAWS, Random

from .conftest import compressed, photo

WHOLE = {"crop": None, "dtype": "uint8", "layout": "hwc"}


def decoded(data, position=0, **options):
    return mr.images.decode(**options)({"image": data}, RecordRng(7, position))["image"]


def by_pillow(data, size):
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data.tobytes()))).convert("RGB")
    return np.asarray(image.resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize(
    ("pixels", "options"),
    [
        (photo(1), {"quality": 95, "subsampling": 0}),
        (photo(1), {"quality": 80, "progressive": True}),
        (photo(1)[:, :, 0], {}),
        (Image.fromarray(photo(1)).convert("CMYK"), {}),
        (photo(1), {"format": "PNG"}),
        (photo(1)[:, :, 1], {"format": "PNG"}),
        (Image.fromarray(photo(1)).convert("P"), {"format": "PNG"}),
        (Image.fromarray(photo(1)).convert("RGBA"), {"format": "PNG"}),
        (photo(1), {"format": "WEBP", "lossless": True}),
        (photo(1), {"format": "GIF"}),
        (photo(1), {"format": "BMP"}),
    ],
)
def test_every_format_gives_the_pixels_of_pillow(pixels, options, library):
    data = compressed(pixels, **options)
    found = decoded(data, size=(60, 80), library=library, **WHOLE).astype(int)
    assert np.abs(found - by_pillow(data, (60, 80))).max() <= (4 if options.get("format") is None else 1)
    assert found.std() > 20


def test_sixteen_bits_become_eight():
    grey = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    found = decoded(compressed(Image.fromarray(grey), "PNG"), size=64, **WHOLE)
    assert found[:, :, 0].tolist() == found[:, :, 2].tolist() == (grey >> 8).tolist()


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_images_stand_upright_as_their_exif_says(turn, library):
    exif = Image.Exif()
    exif[0x0112] = turn
    data = compressed(photo(2, 40, 64), quality=95, exif=exif)
    size = (40, 64) if turn < 5 else (64, 40)
    found = decoded(data, size=size, library=library, **WHOLE).astype(int)
    assert np.abs(found - by_pillow(data, size)).max() <= 4
    as_stored = decoded(data, size=(40, 64), library=library, exif=False, **WHOLE).astype(int)
    assert np.abs(as_stored - photo(2, 40, 64)).mean() < 6


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
def test_large_jpegs_are_decoded_small(library, monkeypatch):
    """An eighth of 801 x 1203 pixels is enough for 100 x 150: about the same image, with a part of the work."""
    data = compressed(Image.fromarray(photo(3, 27, 41)).resize((1203, 801), Image.Resampling.BICUBIC), quality=95)
    shrinks = []
    kind = read.Jpeg if library == "simplejpeg" else read.ByPillow
    plain = kind.pixels
    monkeypatch.setattr(kind, "pixels", lambda image, shrink: shrinks.append(shrink) or plain(image, shrink))
    for size, shrink in (((100, 150), 8), ((200, 300), 4), ((201, 300), 2), ((500, 600), 1)):
        found = decoded(data, size=size, library=library, **WHOLE).astype(int)
        assert shrinks.pop() == shrink
        assert np.abs(found - by_pillow(data, size)).mean() < 1.5
    half = decoded(data, size=101, library=library, crop="center", dtype="uint8", layout="hwc").astype(int)
    pillow = ImageOps.fit(Image.open(io.BytesIO(data.tobytes())), (101, 101), Image.Resampling.BILINEAR)
    assert shrinks == [4]
    assert np.abs(half - np.asarray(pillow)).mean() < 1.5


def test_float_is_scaled_and_normalised_and_pixels_need_no_decoding():
    pixels = photo(4, 32, 32)
    plain = decoded(pixels, size=32, crop=None)
    assert plain.dtype == np.float32
    assert plain.tolist() == (pixels.transpose(2, 0, 1) * np.float32(1 / 255)).tolist()
    found = decoded(pixels, size=32, crop="center", normalize="imagenet", layout="hwc")
    expected = (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.abs(found - expected).max() < 1e-5


def test_random_crops_are_within_scale_and_ratio_and_reach_every_corner():
    crop, seen, areas = Random((0.25, 0.5), (0.5, 2.0)), Counter(), []
    for position in range(400):
        draws = RecordRng(1, position).uniform(DRAWS).tolist()
        top, left, height, width = crop.box(100, 120, (1, 1), draws)
        assert 0 <= top <= top + height <= 100
        assert 0 <= left <= left + width <= 120
        areas.append(height * width / 12_000)
        assert 0.45 < width / height < 2.2
        seen[top > 20, left > 20] += 1
    assert 0.24 < min(areas) < 0.28 < 0.47 < max(areas) < 0.51
    assert len(seen) == 4
    assert crop.box(3, 1000, (1, 1), draws) == (0, 497, 3, 6)  # no such box fits: the centre


def test_the_result_follows_the_position_and_nothing_else(photos):
    decode = mr.images.decode(size=24, flip=0.5)
    again = pickle.loads(pickle.dumps(decode))  # noqa: S301 - our own
    assert again == decode
    assert repr(again) == repr(decode)
    assert "by simplejpeg 1." in repr(decode)
    first = [decode({"image": data}, RecordRng(7, k))["image"] for k, data in enumerate(photos)]
    for k in reversed(range(len(photos))):
        assert again({"image": photos[k]}, RecordRng(7, k))["image"].tolist() == first[k].tolist()
    other = decode({"image": photos[0]}, RecordRng(7, 99))["image"]
    assert other.tolist() != first[0].tolist()


BAD = {
    "half": compressed(photo(5))[:600],
    "without its end": compressed(photo(5))[:-40],
    "empty": np.zeros(0, np.uint8),
    "noise": np.arange(100, dtype=np.uint8),
    "header": compressed(photo(5))[:20],
    "truncated PNG": compressed(photo(5), "PNG")[:2000],
    "postscript": np.frombuffer(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n", np.uint8),
}


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("kind", BAD)
def test_bad_bytes_are_an_error_with_the_key_or_zeros_with_a_mark(kind, library):
    record = {"image": BAD[kind], "key": "cats/7.jpg", "label": 3}
    with pytest.raises(mr.SourceError, match=r"the image 'cats/7.jpg' cannot be read: .*on_error='replace'"):
        mr.images.decode(library=library)(record, RecordRng(0, 0))
    with pytest.warns(UserWarning, match="image_ok marks it"):
        found = mr.images.decode(library=library, size=8, on_error="replace")(record, RecordRng(0, 0))
    assert not found["image_ok"]
    assert not found["image"].any()
    assert found["label"] == 3
    good = mr.images.decode(size=8, on_error="replace")({"image": compressed(photo(5))}, RecordRng(0, 0))
    assert good["image_ok"]


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_an_image_that_claims_too_many_pixels_is_not_decoded(format, monkeypatch):
    monkeypatch.setattr(read.Jpeg, "pixels", None)
    monkeypatch.setattr(read.ByPillow, "pixels", None)
    data = compressed(np.zeros((300, 400, 3), np.uint8), format)
    with pytest.raises(mr.SourceError, match=r"it has 400 x 300 pixels, more than max_pixels=100,000"):
        decoded(data, max_pixels=100_000)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"crop": "middle"}, "crop='middle'; expected one of random, center, None"),
        ({"size": 0}, "size=0; expected a side"),
        ({"size": (3, 4, 5)}, "size=.* expected a side"),
        ({"scale": (0.5, 0.1)}, "scale=.* the least and the greatest"),
        ({"scale": 0.5}, "scale=0.5; expected two numbers"),
        ({"scale": (0.1, 1), "crop": "center"}, "scale=.* one share"),
        ({"ratio": (0, 1)}, "ratio=.* above 0"),
        ({"flip": 2}, "flip=2.0; expected a probability"),
        ({"normalize": "cifar"}, "normalize='cifar'; expected"),
        ({"normalize": (0.5, 0)}, "deviations above 0"),
        ({"normalize": "imagenet", "dtype": "uint8"}, "normalise on the device"),
        ({"library": "opencv"}, "library='opencv'; expected one of auto, simplejpeg, torchvision, pillow"),
        ({"max_pixels": 0}, "max_pixels=0"),
    ],
)
def test_wrong_options_are_refused_when_they_are_given(options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.images.decode(**options)


def test_a_process_without_the_library_refuses_the_object(monkeypatch):
    sent = pickle.dumps(mr.images.decode(library="simplejpeg"))
    monkeypatch.setitem(read.LIBRARIES, "simplejpeg", "no_such_module")
    read.module_of.cache_clear()
    with pytest.raises(
        mr.ConfigError, match=r"simplejpeg, which is not installed; pip install .*made this decode had it"
    ):
        pickle.loads(sent)  # noqa: S301 - our own
    assert mr.images.decode().library != "simplejpeg"
    read.module_of.cache_clear()


def test_a_column_that_is_missing_is_named():
    with pytest.raises(mr.ConfigError, match="no column 'picture'; they have image"):
        mr.images.decode("picture")({"image": photo(0)}, RecordRng(0, 0))
