"""Images through a feed: the same in threads, processes, ranks, batches and after a resume, also with a corrupt one."""

import warnings

import numpy as np
import pytest

import millrace as mr
from millrace.feed.rng import RecordRng

BROKEN = 5


@pytest.fixture(scope="module")
def path(photos, tmp_path_factory):
    """Twelve JPEGs, the sixth cut off in the middle."""
    path = tmp_path_factory.mktemp("images") / "store"
    per_record = {"label": mr.Column("int64", per="record"), "key": mr.Column("string", per="record")}
    with mr.StoreWriter(path, columns={"image": mr.Column("uint8"), **per_record}) as writer:
        for k, data in enumerate(photos):
            image = data[: len(data) // 2] if k == BROKEN else data
            writer.append({"image": image, "label": k, "key": f"shapes/{k}.jpg"})
    return path


def feed_of(path, columns=None, **options):
    decode = mr.images.decode(size=20, normalize="imagenet", on_error=options.pop("on_error", "replace"))
    view = mr.Records(mr.open_store(path), columns=columns)
    return mr.Feed(view, **{"batch": 4, "seed": 3, "device": "numpy", "epochs": 2, "decode": decode, **options})


def by_position(*feeds):
    found = {}
    for feed in feeds:
        with feed:
            for batch in feed:
                for k in np.flatnonzero(batch.valid):
                    record = batch["image"][k].tobytes(), bool(batch["image_ok"][k]), int(batch["label"][k])
                    found[int(batch.positions[k])] = record
    return found


@pytest.fixture(scope="module")
def expected(path):
    """Every position on its own, without a feed."""
    store = mr.open_store(path)
    view, order = mr.Records(store), mr.Shuffled(12, 3)
    decode, found = mr.images.decode(size=20, normalize="imagenet", on_error="replace"), {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for position, sample in enumerate(order.samples(np.arange(24))):
            record = decode(view[int(sample)], RecordRng(3, position))
            found[position] = record["image"].tobytes(), bool(record["image_ok"]), int(record["label"])
    return found


ignore_replaced = pytest.mark.filterwarnings("ignore:an image cannot be read:UserWarning")


@ignore_replaced
@pytest.mark.parametrize(
    "options",
    [
        {"workers": 2},
        {"batch": 7},
        pytest.param({"workers": 2, "processes": True}, marks=pytest.mark.needs_core),
        {"columns": ["image", "label"]},
    ],
    ids=str,
)
def test_every_way_and_batch_gives_the_same_images(path, expected, options):
    assert by_position(feed_of(path, **options)) == expected


@ignore_replaced
@pytest.mark.parametrize("on_error", ["replace", "skip"])
def test_a_corrupt_image_leaves_ranks_and_resume_as_they_are(path, expected, on_error):
    """Two ranks, stopped after their second batch, continued by one rank with another batch."""
    feeds = [feed_of(path, rank=rank, world=2, on_error=on_error) for rank in range(2)]
    seen, lengths = {}, []

    def see(batch):
        for k in np.flatnonzero(batch.positions >= 0):
            ok = batch["image_ok"][k] if on_error == "replace" else batch.valid[k]
            assert int(batch.positions[k]) not in seen
            seen[int(batch.positions[k])] = batch["image"][k].tobytes(), bool(ok), int(batch["label"][k])

    for feed in feeds:
        with feed:
            steps = [batch for _, batch in zip(range(2), feed, strict=False)]
            lengths.append(len(steps))
            for batch in steps:
                see(batch)
    assert lengths == [2, 2]
    rest = feed_of(path, batch=5, on_error=on_error)
    rest.load_state_dict(feeds[0].state_dict())
    assert feeds[0].state_dict() == feeds[1].state_dict()
    with rest:
        for batch in rest:
            see(batch)
    assert seen == expected
    assert sum(not ok for _, ok, _ in expected.values()) == 2  # once an epoch


@pytest.mark.parametrize("options", [{}, pytest.param({"processes": True}, marks=pytest.mark.needs_core)], ids=str)
def test_a_corrupt_image_stops_the_feed_and_is_named(path, options):
    position = mr.Shuffled(12, 3).samples(np.arange(12)).tolist().index(BROKEN)
    with feed_of(path, on_error="stop", **options) as feed, pytest.raises(mr.StageFailed) as caught:
        list(feed)
    assert (caught.value.sample, caught.value.position) == (BROKEN, position)
    assert f"at position {position} (sample {BROKEN}): SourceError: the image 'shapes/5.jpg' cannot be read" in str(
        caught.value
    )
    assert feed.state_dict()["position"] == position // 4 * 4


@ignore_replaced
def test_batches_keep_their_images_while_somebody_holds_them(path, expected):
    with feed_of(path, workers=2) as feed:
        batches = list(feed)
    images = [image.tobytes() for batch in batches for image in batch["image"]]
    assert images == [expected[position][0] for position in range(24)]


@ignore_replaced
def test_memory_is_used_again(path):
    """A loop that keeps nothing sees few arrays, however many batches it takes."""
    addresses = set()
    with feed_of(path, epochs=10, workers=1, depth=2) as feed:
        for batch in feed:
            addresses.add(batch["image"].ctypes.data)
            del batch
    assert len(addresses) <= 2 + 2


@ignore_replaced
@pytest.mark.parametrize("options", [{}, pytest.param({"processes": True}, marks=pytest.mark.needs_core)], ids=str)
def test_a_skipped_image_is_a_row_that_does_not_count(path, options):
    """Its position is kept, so that ranks, steps and a resumed run are what they would be without it."""
    order = mr.Shuffled(12, 3).samples(np.arange(24)).tolist()
    with feed_of(path, on_error="skip", **options) as feed:
        batches = list(feed)
    assert len(batches) == 6
    assert np.concatenate([batch.positions for batch in batches]).tolist() == list(range(24))
    skipped = [int(sample) for batch in batches for sample in batch.samples[~batch.valid]]
    assert skipped == [BROKEN, BROKEN]
    assert not any(batch["image"][~batch.valid].any() for batch in batches)
    assert "image_ok" not in batches[0]
    assert np.concatenate([batch.samples for batch in batches]).tolist() == order


@ignore_replaced
@pytest.mark.parametrize("decode", [
    {"normalize": "imagenet"},
    {"crop": "center", "scale": 0.7, "dtype": "uint8", "layout": "hwc"},
    {"crop": None, "on_error": "skip"},
], ids=str)  # fmt: skip
def test_images_decoded_on_a_device_are_those_of_the_feed(path, photos, decode):
    """The arithmetic of a GPU, here on the CPU, with all pixels of each image and no decoding at a part of the size."""
    decode = mr.images.decode(**{"size": 80, "on_error": "replace", "library": "simplejpeg", **decode})
    options = {"batch": 4, "seed": 3, "epochs": 2}
    view = mr.Records(mr.open_store(path))
    with mr.Feed(view, decode=decode, **options) as expected, mr.Feed(view, **options) as raw:
        for theirs, batch in zip(expected, raw, strict=True):
            ours = mr.augment.decode_on_device(batch, decode, device="cpu", seed=3)
            assert set(ours) == set(theirs)
            assert ours["image"].dtype == theirs["image"].dtype
            assert ours["image"].shape == theirs["image"].shape
            difference = ours["image"].double() - theirs["image"].double()
            assert difference.abs().max() <= (1 if decode.dtype == "uint8" else 1e-4)
            assert ours.valid.tolist() == theirs.valid.tolist()
            assert ours["label"].tolist() == theirs["label"].tolist()


def test_a_corrupt_image_on_a_device_is_named(path):
    decode = mr.images.decode(size=20)
    with mr.Feed(mr.Records(mr.open_store(path)), batch=12) as feed:
        with pytest.raises(mr.SourceError, match=r"'shapes/5.jpg' at position \d+ \(sample 5\) cannot be read"):
            mr.augment.decode_on_device(next(iter(feed)), decode, device="cpu")
        with pytest.raises(mr.ConfigError, match="no column 'picture'; it has image"):
            mr.augment.decode_on_device(next(iter(feed)), mr.images.decode("picture"), device="cpu")
