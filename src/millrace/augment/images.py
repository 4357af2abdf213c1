"""Steps for images: a column of (batch, channels, height, width)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.augment.step import Step, beside, check_share, column_of, like, where
from millrace.errors import ConfigError
from millrace.feed.rng import Rng
from millrace.ragged import Array

GREY = (0.299, 0.587, 0.114)  # shares of red, green and blue (ITU-R 601)


@dataclass(frozen=True)
class RandomFlip(Step):
    """Mirrors left and right with probability ``p``."""

    p: float = 0.5
    column: str = "image"

    def __post_init__(self) -> None:
        check_share("p", self.p)

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        return {"is_flipped": rng.uniform() < self.p}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, axes=4)
        mirrored = image[..., like(np.arange(image.shape[3])[::-1], image)]
        return {self.column: where(beside(drawn["is_flipped"], image), mirrored, image)}


@dataclass(frozen=True)
class RandomCrop(Step):
    """Pads by ``padding`` zeros on every side and cuts out ``size`` (height, width), by default the size it had."""

    padding: int = 4
    size: tuple[int, int] | None = None
    column: str = "image"

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        height, width = column_of(batch, self.column, axes=4).shape[2:]
        size = self.size or (height, width)
        room = height + 2 * self.padding - size[0], width + 2 * self.padding - size[1]
        if self.padding < 0 or min(size) < 1 or min(room) < 0:
            raise ConfigError(
                f"size={size}, padding={self.padding} of images {height} x {width}; lower size, or pad more"
            )
        tops, lefts = rng.integers(0, room[0] + 1), rng.integers(0, room[1] + 1)
        return {
            "rows": tops[:, None] - self.padding + np.arange(size[0]),
            "columns": lefts[:, None] - self.padding + np.arange(size[1]),
        }

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, axes=4)
        rows, columns = drawn["rows"][:, None, :, None], drawn["columns"][:, None, None, :]
        height, width = image.shape[2:]
        is_inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
        samples, channels = np.arange(len(image))[:, None, None, None], np.arange(image.shape[1])[None, :, None, None]
        places = samples, channels, rows.clip(0, height - 1), columns.clip(0, width - 1)
        return {self.column: image[tuple(like(place, image) for place in places)] * like(is_inside, image)}


@dataclass(frozen=True)
class ColorJitter(Step):
    """Changes brightness, then contrast, then saturation, each by a factor within 1 - x and 1 + x. Images are 0 to 1."""

    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    column: str = "image"

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            check_share(name, getattr(self, name))

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        names = ("brightness", "contrast", "saturation")
        return {name: 1 + getattr(self, name) * (2 * rng.uniform() - 1) for name in names}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, axes=4, floats=True)
        brightness, contrast, saturation = (beside(drawn[name], image) for name in drawn)
        image = (image * brightness).clip(0, 1)
        means = _grey(image).reshape(len(image), -1).mean(1)[:, None, None, None]
        image = (image * contrast + means * (1 - contrast)).clip(0, 1)
        return {self.column: (image * saturation + _grey(image)[:, None] * (1 - saturation)).clip(0, 1)}


def _grey(image: Any) -> Any:
    if image.shape[1] == 1:
        return image[:, 0]
    return image[:, 0] * GREY[0] + image[:, 1] * GREY[1] + image[:, 2] * GREY[2]


@dataclass(frozen=True)
class Normalize(Step):
    """(image - mean) / std of each channel; draws nothing."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    column: str = "image"

    def __post_init__(self) -> None:
        if min(self.std) <= 0:
            raise ConfigError(f"std={self.std}; expected deviations above 0")

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, axes=4, floats=True)
        mean, std = (like(np.asarray(part, np.float64)[None, :, None, None], image) for part in (self.mean, self.std))
        return {self.column: (image - mean) / std}
