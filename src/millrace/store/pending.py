"""Records on their way into a shard: joined while they wait, measured, and cut where a shard ends."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from millrace.ragged import Array, Int64s
from millrace.store.layout import Layout


class Pending:
    """Records appended one by one, joined before they are written."""

    def __init__(self, layout: Layout) -> None:
        self._arrays: dict[str, list[Array]] = {name: [] for name in layout.columns}
        self._lengths: dict[str, list[int]] = {axis: [0] for axis in layout.axes}
        self.num_bytes = 0

    def add(self, arrays: dict[str, Array], lengths: dict[str, int]) -> None:
        for name, array in arrays.items():
            # A copy: the caller may fill the same buffer again for the next record.
            self._arrays[name].append(array.copy())
            self.num_bytes += array.nbytes
        for axis, length in lengths.items():
            self._lengths[axis].append(length)

    def joined(self) -> tuple[dict[str, Array], dict[str, Int64s]]:
        arrays = {name: np.concatenate(parts) for name, parts in self._arrays.items()}
        return arrays, {axis: np.cumsum(lengths, dtype=np.int64) for axis, lengths in self._lengths.items()}


def record_bytes(layout: Layout, offsets: Mapping[str, Int64s]) -> Int64s:
    """What each record adds to a shard, offsets included."""
    sizes = np.full(len(offsets[layout.primary]) - 1, 8 * len(layout.axes), np.int64)
    for name, column in layout.columns.items():
        axis = layout.column_axis(name)
        sizes += column.item_bytes if axis is None else np.diff(offsets[axis]) * column.item_bytes
    return sizes


def part(
    layout: Layout, arrays: Mapping[str, Array], offsets: Mapping[str, Int64s], first: int, last: int
) -> tuple[dict[str, Array], dict[str, Int64s]]:
    """Records [first, last) of a normalised batch."""
    local = {axis: array[first : last + 1] - array[first] for axis, array in offsets.items()}
    columns = {}
    for name, array in arrays.items():
        axis = layout.column_axis(name)
        start, stop = (first, last) if axis is None else (int(offsets[axis][first]), int(offsets[axis][last]))
        columns[name] = array[start:stop]
    return columns, local
