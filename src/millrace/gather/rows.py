"""Spans of one column, found in its shards, and the two ways numpy copies them: slices joined, or one fancy index."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s


class ColumnSource(Protocol):
    """What a gather reads from: the column of a store."""

    starts: Int64s  # the first row of each shard, and the end

    @property
    def dtype(self) -> np.dtype[Any]: ...
    def whole(self, shard: int) -> Array | None: ...
    def span(self, start: int, stop: int) -> Array: ...
    def spans(self, starts: Int64s, stops: Int64s) -> list[Array]: ...
    def take(self, rows: Array) -> Array: ...


def neighbours(items: tuple[int, ...] | None) -> tuple[int, int] | None:
    """[first, last) where the items are neighbours in order."""
    if items is None or items != tuple(range(items[0], items[0] + len(items))):
        return None
    return items[0], items[-1] + 1


def check_inside(starts: Int64s, stops: Int64s, num_rows: int) -> None:
    outside = np.flatnonzero(stops > num_rows)
    if len(outside):
        span = f"[{starts[outside[0]]}, {stops[outside[0]]})"
        raise ConfigError(f"a sample covers rows {span} of a column that has {num_rows}; its view is wrong")


class ItemColumn:
    """Some neighbouring items of every row of a column, as a column."""

    def __init__(self, column: ColumnSource, items: tuple[int, int]) -> None:
        self._column, self._items, self.starts = column, slice(*items), column.starts

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._column.dtype

    def whole(self, shard: int) -> Array | None:
        found = self._column.whole(shard)
        return None if found is None else found[..., self._items]

    def span(self, start: int, stop: int) -> Array:
        return self._column.span(start, stop)[..., self._items]

    def spans(self, starts: Int64s, stops: Int64s) -> list[Array]:
        return [rows[..., self._items] for rows in self._column.spans(starts, stops)]

    def take(self, rows: Array) -> Array:
        return self._column.take(rows)[..., self._items]


class ColumnSpans:
    """Spans of one column, each with its shard and its place in it."""

    def __init__(self, column: ColumnSource, starts: Int64s, stops: Int64s, offsets: Int64s | None = None) -> None:
        self._column, self._offsets = column, offsets
        check_inside(starts, stops, int(column.starts[-1]))
        shards = np.searchsorted(column.starts, starts, side="right") - 1
        # An empty span may stand at the very end, where there is no shard.
        shards = np.minimum(shards, max(len(column.starts) - 2, 0))
        if len(column.starts) < 2:  # a store without shards has no rows: every span is empty
            base, ends = np.zeros_like(starts), np.zeros_like(starts)
        else:
            base, ends = column.starts[shards], column.starts[shards + 1]
        self._local = starts - base
        self._shard_of = shards
        self._length = int(stops[0] - starts[0]) if len(starts) else 0
        # Equal lengths within their shards, as windows are: then a batch is one index into a strided view.
        self._is_regular = offsets is None and bool(np.all(stops - starts == self._length) and np.all(stops <= ends))
        self._is_regular &= len(column.starts) > 1
        self._starts, self._stops, self._inside = starts, stops, stops <= ends
        self._whole: dict[int, Array | None] = {}
        self._strided: dict[int, Array] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._column.dtype

    @cached_property
    def _places(self) -> tuple[list[int], list[int], list[int]]:
        """Shard, begin and end of every span as plain integers; an end of -1 marks one that leaves its shard."""
        ends = np.where(self._inside, self._local + (self._stops - self._starts), -1)
        return self._shard_of.tolist(), self._local.tolist(), ends.tolist()

    def slices(self, first: int, last: int) -> list[Array]:
        if self._offsets is not None:
            first, last = int(self._offsets[first]), int(self._offsets[last])
        shards, begins, ends = self._places
        whole = self._whole
        met = set(shards[first:last])
        for shard in met - whole.keys():
            whole[shard] = self._column.whole(shard) if len(self._column.starts) > 1 else None
        ends_here = ends[first:last]
        if last > first and min(ends_here) >= 0 and all(whole[shard] is not None for shard in met):
            mapped_all: dict[int, Any] = whole
            spans = zip(shards[first:last], begins[first:last], ends_here, strict=True)
            return [mapped_all[shard][begin:end] for shard, begin, end in spans]
        found: list[Any] = [None] * (last - first)
        others = []
        for k in range(first, last):
            mapped, end = whole[shards[k]], ends[k]
            if mapped is None or end < 0:
                others.append(k)
            else:
                found[k - first] = mapped[begins[k] : end]
        for k, rows in zip(others, self._column.spans(self._starts[others], self._stops[others]), strict=True):
            found[k - first] = rows
        return found

    def copy(self, first: int, last: int, out: Array) -> None:
        if self._indexed(first, last, out):
            return
        parts = self.slices(first, last)
        if parts:
            np.concatenate(parts, out=out)

    def join(self, first: int, last: int) -> Array:
        if self._is_regular and last > first:
            shape = self._column.span(0, 0).shape[1:]
            out = np.empty(((last - first) * self._length, *shape), self.dtype)
            if self._indexed(first, last, out):
                return out
        parts = self.slices(first, last)
        return np.concatenate(parts) if parts else self._column.span(0, 0)

    def _indexed(self, first: int, last: int, out: Array) -> bool:
        """Copies by one fancy index per shard where a batch meets few shards.

        For 512 windows of 64 x 16 in two shards that takes 340 us, slices 440.
        """
        if not self._is_regular or last <= first:
            return False
        shards = self._shard_of[first:last]
        low, high = int(shards.min()), int(shards.max())
        if high - low >= 64 or (high - low + 1) * 16 > last - first:
            return False
        met = [low] if low == high else (np.flatnonzero(np.bincount(shards - low)) + low).tolist()
        views = {shard: self._view(shard) for shard in met}
        if any(view is None for view in views.values()):
            return False
        rows = out.reshape(last - first, self._length, *out.shape[1:])
        for shard, view in views.items():
            if len(met) == 1:
                rows[...] = view[self._local[first:last]]
            else:
                places = np.flatnonzero(shards == shard)
                rows[places] = view[self._local[first:last][places]]
        return True

    def _view(self, shard: int) -> Any:
        """All runs of rows of one shard as a strided view, or None where it is not mapped."""
        view = self._strided.get(shard)
        if view is None:
            whole = self._column.whole(shard)
            if whole is None:
                return None
            shape = (len(whole) - self._length + 1, self._length, *whole.shape[1:])
            strides = (whole.strides[0], *whole.strides)
            view = self._strided[shard] = np.lib.stride_tricks.as_strided(whole, shape, strides, writeable=False)
        return view
