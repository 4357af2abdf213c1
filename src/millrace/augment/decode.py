"""Images decoded on a GPU: compressed bytes of a batch from the host, pixels on the device.

The boxes and flips are those of ``Feed(decode=...)`` with the same seed, drawn on the host from the positions. nvJPEG
decodes JPEGs of usual colours, and the CPU all other images. Then boxes are scaled by two products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.batch import MARKS, Batch
from millrace.feed.rng import Rng
from millrace.images.crops import DRAWS
from millrace.images.decode import ImageDecode
from millrace.images.read import BadImage, Image, module_of
from millrace.images.resize import CHANNELS
from millrace.ragged import Array, Ragged

CHUNK = 32  # images whose weights are in memory at a time
END_OF_IMAGE = b"\xff\xd9"  # a JPEG without it was cut short: the CPU says so, where a GPU would not


def decode_on_device(batch: Batch, decode: ImageDecode, *, device: Any = "cuda", seed: int = 0) -> Batch:
    """Decodes the compressed images of a batch on a device, with the crops of ``Feed(decode=decode, seed=seed)``.

    Take the batch from a feed on the host without ``decode=``. The pixels follow the positions, so a resumed run gets the
    same ones. They are not those of the CPU to the last bit: decoders of JPEG differ, and a GPU decodes at full size.
    Images that cannot be read are treated as ``decode.on_error`` says. All columns of the result are on the device.
    """
    import torch

    device = torch.device(device)
    marks = {name: getattr(batch, name) for name in MARKS}
    if marks["positions"] is None:
        raise ConfigError("this batch has lost its positions, which the crops follow; use it as the feed gave it")
    if decode.column not in batch:
        raise ConfigError(f"the batch has no column {decode.column!r}; it has {', '.join(batch)}")
    files, names = _files(batch[decode.column]), batch.get("key")

    def attempt(row: int, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except BadImage as error:
            where = f" at position {marks['positions'][row]} (sample {marks['samples'][row]})"
            decode.refuse({} if names is None else {"key": names[row]}, error, where)
            return None

    images = [attempt(row, partial(decode.header, data)) for row, data in enumerate(files)]
    pixels = _by_gpu(files, images, device)
    for row, image in enumerate(images):
        if image is not None and pixels[row] is None:
            found = attempt(row, partial(image.pixels, 1))  # memory that the next image is decoded to
            pixels[row] = None if found is None else torch.from_numpy(found.copy()).permute(2, 0, 1).to(device)
        elif image is not None:
            pixels[row] = _upright(pixels[row], image.turn)
    draws = Rng.of_records(seed, marks["positions"]).uniform(DRAWS)
    are_good = np.array([one is not None for one in pixels], bool)
    if decode.on_error == "skip":
        marks["valid"] = marks["valid"] & are_good
    columns = decode.columns(dict(dict.items(batch)), _cut(pixels, draws, decode, device), are_good)
    return Batch(columns, **marks).to(device)


def _files(column: Any) -> list[Array]:
    """The bytes of each image, or its pixels, on the host."""
    if not isinstance(column, Ragged):
        return [np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in column]
    own: tuple[Any, Any] = (column.values, column.offsets)
    values, offsets = (np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in own)
    return [values[first:last] for first, last in pairwise(offsets.tolist())]


def _by_gpu(files: Sequence[Array], images: Sequence[Image | None], device: Any) -> list[Any]:
    """(3, height, width) of the JPEGs that nvJPEG reads; None for the others."""
    import torch

    found: list[Any] = [None] * len(files)
    if device.type != "cuda":
        return found
    rows = [k for k, image in enumerate(images) if image is not None and image.is_plain]
    rows = [k for k in rows if files[k][-2:].tobytes() == END_OF_IMAGE]
    library = module_of("torchvision")
    data = [torch.from_numpy(np.array(files[k])) for k in rows]
    mode = library.ImageReadMode.RGB
    try:
        for k, one in zip(rows, library.decode_jpeg(data, mode, device=device) if data else [], strict=True):
            found[k] = one
    except RuntimeError:  # one of them: each alone
        for k, own in zip(rows, data, strict=True):
            try:
                (found[k],) = library.decode_jpeg([own], mode, device=device)
            except RuntimeError:  # the CPU says what is wrong
                found[k] = None
    for k in rows:  # as the header says, in three channels
        image, one = images[k], found[k]
        size = None if image is None else (image.height, image.width)[:: -1 if image.turn > 4 else 1]
        found[k] = one.expand(CHANNELS, -1, -1) if one is not None and tuple(one.shape[1:]) == size else None
    return found


def _upright(pixels: Any, turn: int) -> Any:
    """As ``read.upright``, for (3, height, width)."""
    pixels = pixels.transpose(1, 2) if turn in (5, 6, 7, 8) else pixels
    axes = [axis for axis, turns in ((1, (3, 4, 7, 8)), (2, (2, 3, 6, 7))) if turn in turns]
    return pixels.flip(axes) if axes else pixels


def _cut(pixels: Sequence[Any], draws: Array, decode: ImageDecode, device: Any) -> Any:
    """The box of each image in the size, layout and type of the result; zeros where there is no image."""
    import torch

    out = torch.zeros((len(pixels), CHANNELS, *decode.size), device=device)
    rows = [k for k, one in enumerate(pixels) if one is not None]
    for first in range(0, len(rows), CHUNK):
        some = rows[first : first + CHUNK]
        sizes = np.array([pixels[k].shape[1:] for k in some])
        given = zip(sizes.tolist(), draws[some].tolist(), strict=True)
        boxes = np.array([decode.crop.box(height, width, decode.size, own) for (height, width), own in given])
        ways = [_weights(boxes[:, a], boxes[:, a + 2], sizes[:, a], decode.size[a], device) for a in range(2)]
        (down, tops, bottoms), (along, lefts, rights) = ways
        for i, k in enumerate(some):
            part = pixels[k][:, tops[i] : bottoms[i], lefts[i] : rights[i]].float()
            out[k] = down[i, :, : part.shape[1]] @ part @ along[i, :, : part.shape[2]].T
    is_flipped = torch.from_numpy(draws[:, 0] < decode.flip).to(device)
    out = torch.where(is_flipped[:, None, None, None], out.flip(3), out)
    scale, offset = (torch.tensor(factor, device=device)[:, None, None] for factor in decode.factors)
    out = out * scale + offset
    if decode.dtype == "uint8":
        out = (out + 0.5).clamp(0, 255).to(torch.uint8)
    missing = [k for k, one in enumerate(pixels) if one is None]
    out[missing] = 0
    return out if decode.layout == "chw" else out.permute(0, 2, 3, 1).contiguous()


def _weights(starts: Array, lengths: Array, sizes: Array, count: int, device: Any) -> tuple[Any, list[int], list[int]]:
    """As ``resize`` weighs pixels: (images, count, pixels) from the first to the last pixel that each image needs."""
    import torch

    steps = lengths / count
    widths = np.maximum(steps, 1.0)
    firsts = np.maximum(np.floor(starts + steps / 2 - widths - 0.5), 0).astype(np.int64)
    lasts = np.minimum(np.ceil(starts + lengths - steps / 2 + widths + 0.5), sizes).astype(np.int64)
    centres = (starts - firsts)[:, None] + (np.arange(count) + 0.5) * steps[:, None]
    needed = int((lasts - firsts).max())
    places = torch.arange(needed, device=device, dtype=torch.float64) + 0.5
    centre, width, end = (torch.from_numpy(own).to(device) for own in (centres, widths, lasts - firsts))
    weights = (1 - (places - centre[:, :, None]).abs() / width[:, None, None]).clamp(min=0)
    weights = weights * (places < end[:, None, None])
    return (weights / weights.sum(2, keepdim=True)).float(), firsts.tolist(), lasts.tolist()
