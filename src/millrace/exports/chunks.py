"""Source: the records of a store in chunks of bounded size, columns as they are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.errors import ConfigError, did_you_mean
from millrace.ragged import Array, Int64s, Ragged, concatenated_ranges
from millrace.store.store import Store
from millrace.store.times import has_times, time_unit

CHUNK_BYTES = 32 << 20


@dataclass(frozen=True)
class Chunk:
    """Some records. Row columns and texts (as utf-8) are ``Ragged``; dictionaries are their codes."""

    first: int  # the number of its first record, in the export
    count: int
    columns: dict[str, Any]


class Source:
    """What is exported: some columns of all records of a store, a split, or of what ``where`` chose."""

    def __init__(self, store: Store, columns: Sequence[str] | None) -> None:
        known = store.layout.columns
        for name in columns or ():
            if name not in known:
                raise ConfigError(
                    f"column {name!r} is unknown{did_you_mean(name, known)}; there are {', '.join(known)}"
                )
        self.store = store
        self.columns = {name: column for name, column in known.items() if columns is None or name in columns}
        if not self.columns:
            raise ConfigError("columns=[] asks for nothing; leave it out for every column")
        #: The unit of the column ``time``, where that holds dates.
        self.time_unit = time_unit(store) if has_times(store) and known["time"].dtype == "int64" else None
        self.axes = list(dict.fromkeys(axis for name in self.columns if (axis := store.layout.column_axis(name))))
        self.spans = {axis: self._spans(axis) for axis in self.axes}

    def _spans(self, axis: str) -> tuple[Int64s, Int64s]:
        starts, stops = self.store.record_spans(axis)
        cuts = self.store.cuts
        if cuts is None or axis != self.store.layout.primary:
            return starts, stops
        return starts + cuts[0], starts + cuts[1]

    def axis_of(self, name: str) -> str | None:
        """The axis of a row column, or of the bytes of a text."""
        return self.store.layout.column_axis(name)

    def lengths(self, axis: str) -> Int64s:
        starts, stops = self.spans[axis]
        return stops - starts

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole column."""
        axis = self.axis_of(name)
        count = self.store.num_records if axis is None else int(self.lengths(axis).sum())
        return (count, *self.columns[name].shape)

    def chunks(self, num_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
        """All records, some at a time: as many as ``num_bytes`` hold, or one that is larger."""
        sizes = np.zeros(self.store.num_records, np.int64)
        for name, column in self.columns.items():
            axis = self.axis_of(name)
            sizes += column.item_bytes * (1 if axis is None else self.lengths(axis))
        ends, first = np.cumsum(sizes), 0
        while first < len(sizes):
            full = int(ends[first - 1]) + num_bytes if first else num_bytes
            last = max(first + 1, int(np.searchsorted(ends, full, side="right")))
            yield Chunk(first, last - first, {name: self._read(name, first, last) for name in self.columns})
            first = last

    def _read(self, name: str, first: int, last: int) -> Any:
        column: Any = self.store.whole.columns[name]
        axis = self.axis_of(name)
        column = column.raw if self.columns[name].dtype == "string" else getattr(column, "codes", column)
        if axis is None:
            chosen = self.store.chosen
            return np.asarray(column[first:last] if chosen is None else column[chosen[first:last]])
        starts, stops = (edge[first:last] for edge in self.spans[axis])
        if np.array_equal(starts[1:], stops[:-1]):  # neighbours
            rows = column[int(starts[0]) : int(stops[-1])]
        else:
            rows = column[concatenated_ranges(starts, stops - starts)]
        values = np.asarray(rows)
        if name == "time" and self.time_unit is not None:
            values = values.view(f"M8[{self.time_unit}]")
        return Ragged(values, np.concatenate(([0], np.cumsum(stops - starts))))


def texts(found: Ragged) -> list[str]:
    """The texts of a chunk."""
    data, offsets = found.values.tobytes(), found.offsets.tolist()
    return [data[start:stop].decode() for start, stop in pairwise(offsets)]


def words(codes: Array, values: Sequence[str]) -> Any:
    """The values that codes of a dictionary stand for."""
    return np.array([*values, None], object)[:-1][codes]
