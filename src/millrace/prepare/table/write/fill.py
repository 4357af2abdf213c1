"""Fills missing values of an entity's rows, by the policy of each column; observed values never change.

``ffill`` repeats the last observation. ``interpolate`` draws a line to the next one, which looks ahead, but never across
a cut between splits: there it repeats. ``mask``, and the rows before the first observation, take the centre of the
scaling, which is 0 when scaled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from millrace.prepare.table.settle.index import Slice
from millrace.ragged import Array, Int64s

Observation = tuple[int, Any, float]  # row, time as it is stored, value


class Filler:
    """Fills the slices of one entity, one after the other."""

    def __init__(self, policies: Sequence[tuple[str, float]], center: Array, cuts: Sequence[int]) -> None:
        self._policies, self._center, self._cuts = policies, center, np.array(cuts, np.int64)
        self._last: list[Observation | None] = [None] * len(policies)
        self._row = 0
        self._ahead: list[list[Observation | None]] = []
        self.filled = np.zeros(len(policies), np.int64)
        self.leading = np.zeros(len(policies), np.int64)

    def carry(self, rows: int, time: Any, values: Array) -> None:
        """Continues after the rows of the entity in the store; its last row held these values."""
        self._row = rows
        self._last = [(rows - 1, time, float(value)) for value in values[: len(self._policies)]]

    def look_ahead(self, slices: Iterable[Slice]) -> None:
        """Notes the first observation of each column in each slice: interpolation needs it in advance."""
        row = self._row
        for rows in slices:
            observed = ~np.isnan(rows.values)
            first = np.where(observed.any(axis=0), observed.argmax(axis=0), -1).tolist()
            self._ahead.append(
                [None if at < 0 else (row + at, rows.time[at], float(rows.values[at, k])) for k, at in enumerate(first)]
            )
            row += len(rows.time)

    def fill(self, number: int, rows: Slice, values: Array) -> Array:
        """Fills ``values``, the float64 copy of a slice's values; returns 1 where they were observed, else 0."""
        observed = ~np.isnan(values)
        for k in np.flatnonzero(~observed.all(axis=0)).tolist():
            self._column(number, k, rows, values[:, k], observed[:, k])
        for k in range(values.shape[1]):
            if len(places := np.flatnonzero(observed[:, k])):
                at = int(places[-1])
                self._last[k] = (self._row + at, rows.time[at], float(values[at, k]))
        self._row += len(values)
        return observed.astype(np.uint8)

    def skip(self, rows: Slice, values: Array) -> None:
        """Passes a slice in which nothing is missing."""
        last = len(values) - 1
        self._last = [(self._row + last, rows.time[last], float(value)) for value in values[last]]
        self._row += len(values)

    def _column(self, number: int, k: int, rows: Slice, column: Array, observed: Array) -> None:
        kind, constant = self._policies[k]
        gaps = np.flatnonzero(~observed)
        self.filled[k] += len(gaps)
        if kind == "value":
            column[gaps] = constant
            return
        if kind == "mask":
            column[gaps] = self._center[k]
            return
        known = np.flatnonzero(observed)
        before = np.searchsorted(known, gaps) - 1  # of known; -1: from earlier slices, or none
        last = self._last[k]
        first_value = self._center[k] if last is None else last[2]
        has_none = (before < 0) & (last is None)
        self.leading[k] += int(has_none.sum())
        repeated = np.where(before < 0, first_value, column[known[np.maximum(before, 0)]] if len(known) else 0.0)
        column[gaps] = repeated
        if kind == "interpolate":
            self._interpolate(number, k, rows, column, known, gaps[~has_none], before[~has_none])

    def _interpolate(
        self, number: int, k: int, rows: Slice, column: Array, known: Int64s, gaps: Int64s, before: Int64s
    ) -> None:
        """A line from the last observation to the next, where both lie in one split."""
        later = next((found[k] for found in self._ahead[number + 1 :] if found[k] is not None), None)
        ends = [point for point in (self._last[k], later) if point is not None]
        shift = int(self._last[k] is not None)  # observations before those of this slice

        def with_ends(j: int, own: Array) -> Array:
            outer = np.array([point[j] for point in ends], own.dtype)
            return np.concatenate((outer[:shift], own, outer[shift:]))

        row, time = with_ends(0, self._row + known), with_ends(1, rows.time[known])
        value = with_ends(2, column[known])
        left = before + shift
        has_next = left + 1 < len(row)
        gaps, left = gaps[has_next], left[has_next]
        right = left + 1
        split = np.searchsorted(self._cuts, row, side="right")
        crossed = split[left] != split[right]
        share = (rows.time[gaps] - time[left]) / (time[right] - time[left])
        line = value[left] + share * (value[right] - value[left])
        column[gaps[~crossed]] = line[~crossed]


def fill_block(
    policies: Sequence[tuple[str, float]], values: Array, offsets: Int64s, centers: Array
) -> tuple[Array, Int64s, Int64s]:
    """Fills some whole entities at once, as ``Filler`` does; no policy may interpolate.

    Fills ``values``; returns 1 where they were observed, else 0, and the filled and the leading cells of each column.
    ``centers`` are those of each entity, or one for all.
    """
    observed = ~np.isnan(values)
    filled = (~observed).sum(axis=0)
    leading = np.zeros(len(policies), np.int64)
    for k in np.flatnonzero(filled).tolist():
        kind, constant = policies[k]
        gaps = np.flatnonzero(~observed[:, k])
        entity = np.searchsorted(offsets, gaps, side="right") - 1
        center = np.broadcast_to(centers, (len(offsets) - 1, centers.shape[-1]))[entity, k]
        if kind == "ffill":
            last = np.maximum.accumulate(np.where(observed[:, k], np.arange(len(values)), -1))[gaps]
            has_none = last < offsets[entity]
            leading[k] = has_none.sum()
            values[gaps, k] = np.where(has_none, center, values[last, k])
        else:
            values[gaps, k] = constant if kind == "value" else center
    return observed.astype(np.uint8), filled, leading
