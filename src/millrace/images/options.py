"""``mr.images.decode``: checks its options and chooses the library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.images.crops import Centre, Random, Whole
from millrace.images.decode import ImageDecode
from millrace.images.read import LIBRARIES, fastest, module_of
from millrace.images.resize import Three
from millrace.ragged import as_integer

MAX_PIXELS = 89_478_485  # where Pillow begins to warn: a quarter of a gigabyte of pixels
MAX_SIDE = 1 << 14
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and standard deviation of its channels


def decode(
    column: str = "image",
    *,
    size: int | tuple[int, int] = 224,
    crop: str | None = "random",
    scale: float | tuple[float, float] | None = None,
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    flip: float | None = None,
    normalize: Any = None,
    dtype: str = "float32",
    layout: str = "chw",
    on_error: str = "stop",
    library: str = "auto",
    exif: bool = True,
    max_pixels: int = MAX_PIXELS,
) -> ImageDecode:
    """Decodes the images of records, for ``Feed(decode=...)``.

    ``crop="random"`` takes a random part, with ``scale`` its area as shares of the image, default (0.08, 1), and ``ratio``
    its width to height. ``"center"`` takes the centre, ``scale`` of the area of the largest that fits, default 1. None
    takes all. The part is scaled to ``size`` (a side, or height and width), and mirrored with probability ``flip``, by
    default 0.5 for random crops and else 0. float32 is 0 to 1, or ``normalize=(mean, std)``, or ``"imagenet"``; uint8 is
    0 to 255. ``on_error="replace"`` delivers zeros for an image that cannot be read, and a column ``image_ok`` that says so;
    "skip" delivers zeros in a row that is no longer ``valid``, as padding. ``exif`` turns images upright as their cameras
    say. ``library`` is "simplejpeg", "torchvision" or "pillow".

    >>> decode(size=64, crop="center", dtype="uint8", library="pillow").shape
    (3, 64, 64)
    """
    for name, value, known in (
        ("crop", crop, ("random", "center", None)), ("dtype", dtype, ("float32", "uint8")), ("layout", layout, ("chw", "hwc")),
        ("on_error", on_error, ("stop", "skip", "replace")), ("library", library, ("auto", *LIBRARIES)),
    ):  # fmt: skip
        if value not in known:
            raise ConfigError(f"{name}={value!r}; expected one of {', '.join(map(str, known))}")
    sides = tuple(as_integer("size", side) for side in ((size, size) if np.isscalar(size) else tuple(size)))  # type: ignore[arg-type]
    if len(sides) != 2 or not all(1 <= side <= MAX_SIDE for side in sides):
        raise ConfigError(f"size={size}; expected a side of 1 to {MAX_SIDE} pixels, or (height, width)")
    flip = (0.5 if crop == "random" else 0.0) if flip is None else float(flip)
    if not 0 <= flip <= 1:
        raise ConfigError(f"flip={flip}; expected a probability of 0 to 1")
    if as_integer("max_pixels", max_pixels) < 1:
        raise ConfigError(f"max_pixels={max_pixels}; expected 1 or more")
    if library == "auto":
        library = fastest()
    module_of("pillow")
    module_of(library)
    return ImageDecode(
        column, (sides[0], sides[1]), _crop(crop, scale, ratio), flip, _factors(normalize, dtype), dtype, layout, on_error,
        library, bool(exif), max_pixels,
    )  # fmt: skip


def _crop(crop: str | None, scale: Any, ratio: tuple[float, float]) -> Random | Centre | Whole:
    if crop is None:
        return Whole()
    if crop == "center":
        share = 1.0 if scale is None else scale
        if not np.isscalar(share) or not 0 < share <= 1:  # type: ignore[operator]
            raise ConfigError(f"scale={scale} of crop='center'; expected one share of the area, above 0 and at most 1")
        return Centre(float(share))  # type: ignore[arg-type]
    least, most = _pair("scale", (0.08, 1.0) if scale is None else scale)
    if not 0 < least <= most <= 1:
        raise ConfigError(
            f"scale={scale}; expected the least and the greatest share of the area, above 0 and at most 1"
        )
    low, high = _pair("ratio", ratio)
    if not 0 < low <= high < float("inf"):
        raise ConfigError(f"ratio={ratio}; expected the least and the greatest width to height, above 0")
    return Random((least, most), (low, high))


def _pair(name: str, value: Any) -> tuple[float, float]:
    if not isinstance(value, Sequence) or len(value) != 2:
        raise ConfigError(f"{name}={value!r}; expected two numbers")
    return float(value[0]), float(value[1])


def _factors(normalize: Any, dtype: str) -> tuple[Three, Three]:
    """What every number of 0 to 255 is multiplied by, and what is added then."""
    if dtype == "uint8":
        if normalize is not None:
            raise ConfigError("normalize= with dtype='uint8'; use float32, or normalise on the device")
        return (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
    given = IMAGENET if normalize == "imagenet" else (0.0, 1.0) if normalize is None else normalize
    try:
        mean, std = (np.broadcast_to(np.asarray(part, np.float64), (3,)).tolist() for part in given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"normalize={normalize!r}; expected (mean, std), each of three channels, or 'imagenet'"
        ) from error
    if not all(np.isfinite([*mean, *std])) or min(std) <= 0:
        raise ConfigError(f"normalize={normalize!r}; expected finite means and deviations above 0")
    scale, offset = (
        [1 / (255 * deviation) for deviation in std],
        [-m / deviation for m, deviation in zip(mean, std, strict=True)],
    )
    return (scale[0], scale[1], scale[2]), (offset[0], offset[1], offset[2])
