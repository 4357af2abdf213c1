"""Which part of an image becomes a sample: a random part, its centre, or all of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.images.resize import Box

TRIES = 10  # boxes that are tried before the centre is taken, as torchvision does
DRAWS = 3 + 2 * TRIES  # numbers of [0, 1) for one image: flip, top, left, areas, ratios
RATIO_BITS = 24  # of a number that chooses a ratio


@dataclass(frozen=True)
class Whole:
    """All of the image: its width and height are scaled each on its own."""

    def box(self, height: int, width: int, size: tuple[int, int], draws: Sequence[float]) -> Box:
        return Box(0, 0, height, width)

    def __str__(self) -> str:
        return "whole"


@dataclass(frozen=True)
class Centre:
    """The centre, with the ratio of the result: of the largest such part the share ``scale`` of its area."""

    scale: float = 1.0

    def box(self, height: int, width: int, size: tuple[int, int], draws: Sequence[float]) -> Box:
        share = math.sqrt(self.scale) * min(height / size[0], width / size[1])
        rows, columns = min(size[0] * share, height), min(size[1] * share, width)
        return Box((height - rows) / 2, (width - columns) / 2, rows, columns)

    def __str__(self) -> str:
        return f"centre, {self.scale:g} of the area"


@dataclass(frozen=True)
class Random:
    """A random part: its area a share of the image's in ``scale``, its ratio of width to height in ``ratio``."""

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def box(self, height: int, width: int, size: tuple[int, int], draws: Sequence[float]) -> Box:
        least, most = self.scale
        for area, ratio in zip(draws[3 : 3 + TRIES], draws[3 + TRIES :], strict=True):
            pixels = height * width * (least + (most - least) * area)
            aspect = self.ratio[0] * _power(self.ratio[1] / self.ratio[0], ratio)
            rows, columns = round(math.sqrt(pixels / aspect)), round(math.sqrt(pixels * aspect))
            if 0 < rows <= height and 0 < columns <= width:
                return Box(int(draws[1] * (height - rows + 1)), int(draws[2] * (width - columns + 1)), rows, columns)
        aspect = min(max(width / height, self.ratio[0]), self.ratio[1])  # the centre, as near to the ratios as can be
        rows, columns = min(height, max(1, round(width / aspect))), min(width, max(1, round(height * aspect)))
        return Box((height - rows) // 2, (width - columns) // 2, rows, columns)

    def __str__(self) -> str:
        return f"random, {self.scale[0]:g} to {self.scale[1]:g} of the area"


def _power(base: float, exponent: float) -> float:
    """base ** exponent for an exponent in [0, 1), by square roots: their last bit is the same on every machine."""
    found, bits = 1.0, int(exponent * (1 << RATIO_BITS))
    for bit in range(RATIO_BITS - 1, -1, -1):
        base = math.sqrt(base)
        if bits >> bit & 1:
            found *= base
    return found
