"""Gathering in numpy: the slow twin, and the contract that every faster gather must meet byte for byte.

A batch's rows are copied as slices of the mapped shards by one ``np.concatenate`` per field. Locating them
(which shard, which place) is vectorised over many batches at once, in ``Located``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s, Ragged, Spans

Allocate: TypeAlias = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]


class ColumnSource(Protocol):
    """What a gather reads from: the column of a store."""

    starts: Int64s  # the first row of each shard, and the end

    @property
    def dtype(self) -> np.dtype[Any]: ...
    def whole(self, shard: int) -> Array | None: ...
    def span(self, start: int, stop: int) -> Array: ...
    def take(self, rows: Array) -> Array: ...


@dataclass(frozen=True)
class Field:
    """One entry of a batch: which column it comes from, which rows of a sample's span, and how it is delivered.

    On an axis with a ``length`` it is dense: rows ``first .. first + length`` of the span. Without, it is ragged:
    the whole span, or padded and cut to ``pad`` rows. Without an axis it is one item of the sample's record.
    ``items`` picks entries of the last axis of a row. ``is_bits`` marks bfloat16, delivered as float32.
    """

    name: str
    column: str
    axis: str | None
    dtype: np.dtype[Any]
    tail: tuple[int, ...] = ()
    first: int = 0
    length: int | None = None
    pad: int | None = None
    items: tuple[int, ...] | None = None
    is_bits: bool = False
    is_single: bool = False  # a row of one number, delivered as a row of one feature
    is_text: bool = False

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Of one sample; None where lengths differ."""
        if self.axis is None:
            return self.tail
        return (self.length if self.length is not None else self.pad, *self.tail)


def new_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype)


class Located:
    """Samples of one view, found in their shards; ``fill`` copies a run of them into arrays."""

    def __init__(
        self,
        columns: Mapping[str, Any],
        fields: Sequence[Field],
        spans: Mapping[str, Spans],
        records: Int64s | None,
    ) -> None:
        self._fields, self._spans, self._records, self._columns = fields, spans, records, columns
        self._dense: dict[str, _Dense] = {}
        known: dict[Any, _Rows] = {}
        for field in fields:
            if field.axis is None or field.length is None:
                continue
            dense = _Dense(fields, field, columns[field.column].dtype)
            key = (field.column, dense.first, dense.length, dense.items)
            if key not in known:
                column = columns[field.column] if dense.items is None else _Items(columns[field.column], dense.items)
                known[key] = _Rows(column, *_cut(spans[field.axis], dense.first, dense.length))
            dense.rows = known[key]
            self._dense[field.name] = dense

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        """Samples [first, last) as a dict of arrays and ``Ragged``s."""
        out: dict[str, Any] = {}
        shared: dict[int, Array] = {}
        for field in self._fields:
            if field.axis is None:
                out[field.name] = self._record_items(field, first, last, allocate)
            elif field.length is None:
                out[field.name] = self._ragged(field, first, last, allocate)
            else:
                array = allocate(field.name, (last - first, field.length, *field.tail), field.dtype)
                out[field.name] = self._dense[field.name].fill(first, last, array, shared)
        return out

    def _record_items(self, field: Field, first: int, last: int, allocate: Allocate) -> Array:
        assert self._records is not None
        records = self._records[first:last]
        if field.is_text:
            return self._columns[field.column][records]  # type: ignore[no-any-return]
        out = allocate(field.name, (last - first, *field.tail), field.dtype)
        out[...] = _delivered(field, self._columns[field.column].take(records))
        return out

    def _ragged(self, field: Field, first: int, last: int, allocate: Allocate) -> Any:
        spans = self._spans[field.axis or ""]
        low, high = (first, last) if spans.offsets is None else spans.offsets[[first, last]].tolist()
        rows = _Rows(self._columns[field.column], spans.starts[low:high], spans.stops[low:high])
        offsets = np.concatenate(([0], np.cumsum(spans.lengths[first:last])))
        if field.pad is None:
            values = allocate(field.name, (int(offsets[-1]), *field.tail), field.dtype)
            if field.is_bits or rows.dtype != field.dtype:
                values[...] = _delivered(field, rows.joined(0, high - low))
            else:
                rows.copy(0, high - low, values)
            return Ragged(values, offsets)
        padded = allocate(field.name, (last - first, field.pad, *field.tail), field.dtype)
        padded[...] = Ragged(_delivered(field, rows.joined(0, high - low)), offsets).pad(length=field.pad)
        return padded


class _Dense:
    """How one dense field is filled: straight from the shards, or by way of a copy in the stored dtype.

    The fields of a column that is widened (tokens as x and shifted y) share one copy of all their rows.
    """

    rows: _Rows

    def __init__(self, fields: Sequence[Field], field: Field, stored: np.dtype[Any]) -> None:
        self._field = field
        # Neighbouring items of a row are a slice of it, which needs no copy of the rest.
        self.items = _run(field.items) if stored == field.dtype and not field.is_bits else None
        self._is_straight = (
            stored == field.dtype and not field.is_bits and (field.items is None or self.items is not None)
        )
        group = [f for f in fields if f.column == field.column and f.length is not None and f.axis is not None]
        if self._is_straight:
            group = [field]
        self.first = min(f.first for f in group)
        self.length = max(f.first + (f.length or 0) for f in group) - self.first

    def fill(self, first: int, last: int, out: Array, shared: dict[int, Array]) -> Array:
        field, count = self._field, last - first
        if self._is_straight:
            rows = count * self.length
            self.rows.copy(first, last, out.reshape(rows) if field.is_single else out.reshape(rows, *field.tail))
            return out
        stored = shared.get(id(self.rows))
        if stored is None:
            joined = self.rows.joined(first, last)
            stored = shared[id(self.rows)] = joined.reshape(count, self.length, *joined.shape[1:])
        skip = field.first - self.first
        out[...] = _delivered(field, stored[:, skip : skip + (field.length or 0)])
        return out


def _cut(spans: Spans, first: int, length: int) -> tuple[Int64s, Int64s, Int64s | None]:
    """Rows [first, first + length) of every sample's span: starts, stops, and the pieces of each sample."""
    if spans.offsets is None:
        return spans.starts + first, spans.starts + (first + length), None
    return _pieces(spans, first, length)


def _pieces(spans: Spans, first: int, length: int) -> tuple[Int64s, Int64s, Int64s]:
    """Rows [first, first + length) of samples made of several pieces: cut pieces and how many each sample has."""
    assert spans.offsets is not None
    sizes = spans.stops - spans.starts
    ends = np.cumsum(sizes)
    sample_of = np.repeat(np.arange(len(spans)), np.diff(spans.offsets))
    before = ends - sizes - np.concatenate(([0], ends))[spans.offsets[sample_of]]  # rows of the sample before the piece
    low = np.clip(first - before, 0, sizes)
    high = np.clip(first + length - before, 0, sizes)
    return spans.starts + low, spans.starts + high, spans.offsets


def _run(items: tuple[int, ...] | None) -> tuple[int, int] | None:
    """[first, last) where the items are neighbours in order."""
    if items is None or items != tuple(range(items[0], items[0] + len(items))):
        return None
    return items[0], items[-1] + 1


class _Items:
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

    def take(self, rows: Array) -> Array:
        return self._column.take(rows)[..., self._items]


class _Rows:
    """Spans of one column, each with its shard and its place in it."""

    def __init__(self, column: ColumnSource, starts: Int64s, stops: Int64s, offsets: Int64s | None = None) -> None:
        self._column, self._offsets = column, offsets
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
        for shard in set(shards[first:last]) - whole.keys():
            whole[shard] = self._column.whole(shard) if len(self._column.starts) > 1 else None
        found: list[Array] = []
        for k in range(first, last):
            mapped, end = whole[shards[k]], ends[k]
            if mapped is None or end < 0:
                found.append(self._column.span(int(self._starts[k]), int(self._stops[k])))
            else:
                found.append(mapped[begins[k] : end])
        return found

    def copy(self, first: int, last: int, out: Array) -> None:
        if self._indexed(first, last, out):
            return
        parts = self.slices(first, last)
        if parts:
            np.concatenate(parts, out=out)

    def joined(self, first: int, last: int) -> Array:
        if self._is_regular and last > first:
            shape = self._column.span(0, 0).shape[1:]
            out = np.empty(((last - first) * self._length, *shape), self.dtype)
            if self._indexed(first, last, out):
                return out
        parts = self.slices(first, last)
        return np.concatenate(parts) if parts else self._column.span(0, 0)

    def _indexed(self, first: int, last: int, out: Array) -> bool:
        """Copies by one fancy index per shard where a batch meets few shards; that is 3x as fast as slices there."""
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


def _delivered(field: Field, stored: Array) -> Array:
    """Stored values as they are delivered: chosen items, bits as floats; the caller's assignment widens."""
    if field.is_single:
        stored = stored[..., None]
    if field.items is not None:
        stored = stored[..., list(field.items)]
    if field.is_bits:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored
