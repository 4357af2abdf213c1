"""Mixup and CutMix: each sample of a batch with another of its group.

Groups are fixed runs of positions, [g * group, (g + 1) * group). Who is mixed with whom is a function of the seed and the
group, so it is the same for every batch and world whose shares hold whole groups. Where a share begins or ends within a
group, as passes of ``by_epoch()`` may, a sample whose partner is elsewhere is left as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.augment.step import Step, beside, column_of, like, where
from millrace.errors import ConfigError
from millrace.feed.rng import Rng
from millrace.ragged import Array, Int64s


@dataclass(frozen=True)
class _Mix(Step):
    """Draws partners, and how much of each sample stays: Beta(alpha, alpha).

    Adds the column ``<label>_partner``, and ``mix``, the share of the sample's own label in the loss.
    """

    alpha: float = 1.0
    group: int = 8
    column: str = "image"
    label: str = "label"

    def __post_init__(self) -> None:
        if self.alpha <= 0 or self.group < 2:
            raise ConfigError(
                f"alpha={self.alpha}, group={self.group}; expected alpha above 0, and groups of 2 or more"
            )

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        if self.alpha == 1:
            shares = rng.uniform()
        else:
            rows = range(len(rng.positions))
            shares = np.array([rng.generator(row).beta(self.alpha, self.alpha) for row in rows])
        partners = _partners(rng, self.group)
        return {"partners": partners, "shares": np.where(partners == np.arange(len(partners)), 1.0, shares)}

    def _labels(self, batch: Mapping[str, Any], partners: Array, shares: Array) -> dict[str, Any]:
        label, image = column_of(batch, self.label), column_of(batch, self.column)
        return {f"{self.label}_partner": label[like(partners, label)], "mix": like(shares, image)}


@dataclass(frozen=True)
class Mixup(_Mix):
    """Blends each sample with a partner: ``mix * x + (1 - mix) * partner``.

    Adds the columns ``label_partner`` and ``mix``: weight the losses of the two labels by ``mix`` and ``1 - mix``.
    """

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, floats=True)
        own, other = (beside(share, image) for share in (drawn["shares"], 1 - drawn["shares"]))
        mixed = image * own + image[like(drawn["partners"], image)] * other
        return {self.column: mixed, **self._labels(batch, drawn["partners"], drawn["shares"])}


@dataclass(frozen=True)
class CutMix(_Mix):
    """Puts a box of a partner's image into each image; ``mix`` is the share of the area that stays.

    Adds the columns ``label_partner`` and ``mix`` as ``Mixup`` does.
    """

    def draw(self, batch: Mapping[str, Any], rng: Rng) -> dict[str, Array]:
        drawn = super().draw(batch, rng)
        height, width = column_of(batch, self.column, axes=4).shape[2:]
        side = np.sqrt(1 - drawn["shares"])
        (top, bottom), (left, right) = (_span(size, side, rng.uniform()) for size in (height, width))
        share = 1 - (bottom - top) * (right - left) / (height * width)
        return {**drawn, "top": top, "bottom": bottom, "left": left, "right": right, "shares": share}

    def apply(self, batch: Mapping[str, Any], drawn: Mapping[str, Array]) -> dict[str, Any]:
        image = column_of(batch, self.column, axes=4)
        rows, columns = np.arange(image.shape[2])[None, None, :, None], np.arange(image.shape[3])[None, None, None, :]
        top, bottom, left, right = (drawn[edge][:, None, None, None] for edge in ("top", "bottom", "left", "right"))
        is_theirs = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
        mixed = where(like(is_theirs, image), image[like(drawn["partners"], image)], image)
        return {self.column: mixed, **self._labels(batch, drawn["partners"], drawn["shares"])}


def _span(size: int, share: Array, centre: Array) -> tuple[Int64s, Int64s]:
    """The part [start, stop) of a side: of this share, around a random place, cut at the edges."""
    length, middle = (size * share).astype(np.int64), (size * centre).astype(np.int64)
    start = middle - length // 2
    return start.clip(0, size), (start + length).clip(0, size)


def _partners(rng: Rng, group: int) -> Int64s:
    """The row of each sample's partner in this batch; its own where there is none."""
    positions = rng.positions
    if len(positions) % group:
        raise ConfigError(
            f"a share of {len(positions)} samples does not hold whole groups of {group}; make batch / ranks a multiple of "
            f"group, or choose another group"
        )
    groups, places = np.divmod(positions, group)
    turns = rng.of_group(groups).integers(1, group)
    wanted = groups * group + (places + turns) % group
    by_position = np.argsort(positions, kind="stable")
    found = by_position[np.searchsorted(positions, wanted, sorter=by_position).clip(0, len(positions) - 1)]
    has_partner = (positions[found] == wanted) & (positions >= 0)
    return np.where(has_partner, found, np.arange(len(positions)))
