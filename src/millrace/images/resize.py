"""A box of an image scaled to the size of an array: by the C core without the GIL, or by its twin in numpy.

Bilinear, and where the image shrinks over all pixels that a pixel of the result covers: what Pillow calls BILINEAR with
``box=`` and torchvision ``antialias=True``. Pixels beside the box, but inside the image, count at its edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s

CHANNELS = 3
Three: TypeAlias = tuple[float, float, float]


class Box(NamedTuple):
    """A part of an image, in pixels from its upper left corner."""

    top: float
    left: float
    height: float
    width: float


def resize(pixels: Array, box: Box, out: Array, *, planar: bool, flip: bool, factors: tuple[Three, Three]) -> None:
    """Fills ``out``, (3, h, w) if ``planar`` or else (h, w, 3), uint8 or float32, from uint8 ``pixels`` (H, W, 3).

    ``flip`` mirrors left and right. Every number is scaled and shifted by the ``factors`` of its channel.
    """
    (resize_in_numpy if core is None else core.resize_image)(pixels, box, out, planar, flip, factors)


def resize_in_numpy(
    pixels: Array, box: Box, out: Array, planar: bool, flip: bool, factors: tuple[Three, Three]
) -> None:
    """The twin of the core's ``resize_image``: the same sums in the same order, so the same bytes."""
    target = out.transpose(1, 2, 0) if planar else out
    rows = _sum(pixels, *_taps(pixels.shape[0], box[0], box[2], target.shape[0]))
    found = _sum(rows.transpose(1, 0, 2), *_taps(pixels.shape[1], box[1], box[3], target.shape[1])).transpose(1, 0, 2)
    scale, offset = (np.array(factor, np.float32) for factor in factors)
    found = found * scale + offset
    if target.dtype == np.uint8:
        found = np.clip(found + np.float32(0.5), 0, 255).astype(np.uint8)
    target[:] = found[:, ::-1] if flip else found


def _taps(size: int, start: float, length: float, count: int) -> tuple[Int64s, Any]:
    """Which pixel of a line is the first for each pixel of the result, and the weights from there on, one tap at a time."""
    step = length / count
    width = max(step, 1.0)
    centres = start + (np.arange(count) + 0.5) * step
    firsts = np.maximum(centres - width + 0.5, 0).astype(np.int64)
    lasts = np.minimum((centres + width + 0.5).astype(np.int64), size)
    firsts = np.minimum(firsts, lasts - 1)
    taps = firsts[:, None] + np.arange(int((lasts - firsts).max()))
    far = np.abs((taps - centres[:, None] + 0.5) / width)
    weights = np.where((far < 1) & (taps < lasts[:, None]), 1 - far, 0)
    sums = np.zeros(count)
    for column in weights.T:  # in this order, as the core adds them
        sums = sums + column
    return firsts, (weights / sums[:, None]).astype(np.float32)


def _sum(lines: Array, firsts: Int64s, weights: Array) -> Array:
    found = np.zeros((len(firsts), *lines.shape[1:]), np.float32)
    for k, weight in enumerate(weights.T):
        found += weight[:, None, None] * lines[np.minimum(firsts + k, len(lines) - 1)].astype(np.float32)
    return found
