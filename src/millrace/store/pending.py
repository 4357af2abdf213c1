"""Records on their way into a shard: joined while they wait, measured, and cut where a shard ends."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, as_offsets
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

    def join(self) -> tuple[dict[str, Array], dict[str, Int64s]]:
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
    layout: Layout, arrays: Mapping[str, Any], offsets: Mapping[str, Int64s], first: int, last: int
) -> tuple[dict[str, Any], dict[str, Int64s]]:
    """Records [first, last) of a batch; columns whose axis has no offsets here hold one item per record."""
    local = {axis: array[first : last + 1] - array[first] for axis, array in offsets.items()}
    columns = {}
    for name, array in arrays.items():
        axis = layout.column_axis(name)
        edges = None if axis is None else offsets.get(axis)
        start, stop = (first, last) if edges is None else edges[[first, last]].tolist()
        columns[name] = array[start:stop]
    return columns, local


PIECE_BYTES = 16 << 20  # what is cast at a time: a large array is never converted whole


def pieces(layout: Layout, columns: Mapping[str, Any], offsets: Any) -> Iterator[tuple[Mapping[str, Any], Any]]:
    """A large batch of records in pieces of about 16 MiB; a small or faulty one as it is, for ``Normaliser`` to judge."""
    given = dict(offsets) if isinstance(offsets, Mapping) else {layout.primary: offsets}
    arrays = [value for value in columns.values() if isinstance(value, np.ndarray)]
    if sum(array.nbytes for array in arrays) <= PIECE_BYTES or not _fits(layout, columns, given):
        yield columns, offsets
        return
    edges = {axis: as_offsets(array) for axis, array in given.items()}
    sizes = np.zeros(len(edges[layout.primary]) - 1, np.int64)
    for name, value in columns.items():
        axis = layout.columns[name].axis
        each = value.nbytes // max(len(value), 1) if isinstance(value, np.ndarray) else 64
        sizes += each if axis is None else np.diff(edges[axis]) * each
    ends = np.cumsum(sizes)
    first = 0
    while first < len(ends):
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + PIECE_BYTES, side="right")))
        yield part(layout, columns, edges, first, last)
        first = last


def _fits(layout: Layout, columns: Mapping[str, Any], offsets: Mapping[str, Any]) -> bool:
    """Whether names and lengths agree, so that records can be cut out by their offsets."""
    if columns.keys() != layout.columns.keys() or offsets.keys() != set(layout.row_axes):
        return False
    try:
        edges = {axis: as_offsets(array) for axis, array in offsets.items()}
    except ConfigError:
        return False
    records = {len(array) - 1 for array in edges.values()}
    lengths = {name: len(value) for name, value in columns.items() if hasattr(value, "__len__") and np.ndim(value) > 0}
    count = len(edges[layout.primary]) - 1
    wanted = {name: count if own.axis is None else edges[own.axis][-1] for name, own in layout.columns.items()}
    return len(records) == 1 and lengths == wanted
