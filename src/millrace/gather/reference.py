"""Gathering: by the C core where it is there, else in numpy, which is the contract that the core meets byte for byte.

A batch's rows are copied as slices of the mapped shards by one ``np.concatenate`` per field. Locating them
(which shard, which place) is vectorised over many batches at once, in ``Located``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from millrace.errors import ConfigError
from millrace.gather.core_gather import Native
from millrace.gather.rows import Items, Rows, check_inside, neighbours
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s, Ragged, Spans, as_int64s

Allocate: TypeAlias = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True)
class Field:
    """One entry of a batch: which column it comes from, which rows of a sample's span, and how it is delivered.

    On an axis with a ``length`` it is dense: rows ``first .. first + length`` of the span. Without, it is ragged:
    the whole span, or padded and cut to ``pad`` rows. Without an axis it is one item of the sample's record.
    ``items`` picks entries of the last axis of a row. ``is_bits`` marks bfloat16, delivered as float32. With a ``measure``
    no rows are delivered: "lengths" is how many of the ``pad`` rows the span has, "mask" says which.
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
    measure: str | None = None

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Of one sample; None where lengths differ."""
        if self.axis is None or self.measure == "lengths":
            return self.tail
        return (self.length if self.length is not None else self.pad, *self.tail)


def any_of(answers: Iterable[bool | None]) -> bool | None:
    """Whether one of them is true; None where none is known."""
    known = [answer for answer in answers if answer is not None]
    return any(known) if known else None


def new_array(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    return np.empty(shape, dtype)


class Sources(dict[str, Any]):
    """The columns of a view by name, as they are stored, with the native gather over them."""

    _native: tuple[Any, Native | None] | None = None

    def native(self, fields: Sequence[Field]) -> Native | None:
        if self._native is None or self._native[0] is not fields:
            self._native = fields, Native.of(self, fields)
        return self._native[1]

    def bytes_of(self, field: Field) -> tuple[Sources, tuple[Field, ...]]:
        """The bytes of a text column, as ragged rows on an axis of their own."""
        found = self._bytes.get(field.column)
        if found is None:
            name = field.column
            rows = Field(name, name, name, np.dtype(np.uint8))
            found = self._bytes[name] = Sources({name: self[name].raw}), (rows,)
        return found

    @cached_property
    def _bytes(self) -> dict[str, tuple[Sources, tuple[Field, ...]]]:
        return {}


class Located:
    """Samples of one view, found in their shards; ``fill`` copies a run of them into arrays."""

    def __init__(
        self,
        columns: Mapping[str, Any],
        fields: Sequence[Field],
        spans: Mapping[str, Spans],
        records: Int64s | None,
    ) -> None:
        self._fields, self._spans, self._columns = fields, spans, columns
        self._records = records = None if records is None else as_int64s(records)
        native = columns.native(fields) if isinstance(columns, Sources) else Native.of(columns, fields)
        self._native = native if native is not None and native.find(spans, records) else None
        self._asked = 0  # the sample up to which rows were asked for ahead

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        """Samples [first, last) as a dict of arrays and ``Ragged``s."""
        filled: dict[str, Any] = {}
        if self._native is not None:
            filled, self._asked = self._native.fill(self._spans, self._records, first, last, allocate, self._asked)
        out: dict[str, Any] = {}
        shared: dict[int, Array] = {}
        for field in self._fields:
            if field.name in filled:
                out[field.name] = filled[field.name]
            elif field.measure is not None:
                out[field.name] = self._measured(field, first, last, allocate)
            elif field.axis is None:
                out[field.name] = self._record_items(field, first, last, allocate)
            elif field.length is None:
                out[field.name] = self._ragged(field, first, last, allocate)
            else:
                array = allocate(field.name, (last - first, field.length, *field.tail), field.dtype)
                out[field.name] = self._dense[field.name].fill(first, last, array, shared)
        return out

    def is_cold(self) -> bool | None:
        """Whether rows are asked for ahead of the copy; None where numpy copies."""
        each = [None if self._native is None else self._native.gather.is_cold()]
        return any_of([*each, *(texts.is_cold() for texts in self._texts.values())])

    @cached_property
    def _texts(self) -> dict[str, Located]:
        """The bytes of text columns, found like other rows."""
        found: dict[str, Located] = {}
        for field in (field for field in self._fields if field.is_text):
            sources, rows = self._columns.bytes_of(field)  # type: ignore[attr-defined]
            spans = {field.column: Spans(*self._columns[field.column].spans(self._records))}
            found[field.column] = Located(sources, rows, spans, None)
        return found

    @cached_property
    def _dense(self) -> dict[str, _Dense]:
        found: dict[str, _Dense] = {}
        known: dict[Any, Rows] = {}
        for field in self._fields:
            if field.axis is None or field.length is None:
                continue
            dense = _Dense(self._fields, field, self._columns[field.column].dtype)
            key = (field.column, dense.first, dense.length, dense.items)
            if key not in known:
                column = self._columns[field.column]
                spans = self._spans[field.axis]
                check_inside(spans.starts, spans.stops, int(column.starts[-1]))
                _check_lengths(spans, field)
                items = column if dense.items is None else Items(column, dense.items)
                known[key] = Rows(items, *_cut(spans, dense.first, dense.length))
            dense.rows = known[key]
            found[field.name] = dense
        return found

    def _record_items(self, field: Field, first: int, last: int, allocate: Allocate) -> Array:
        assert self._records is not None
        records = self._records[first:last]
        if field.is_text:
            found = self._texts[field.column].fill(first, last)[field.column]
            return self._columns[field.column].decoded(found, records)  # type: ignore[no-any-return]
        out = allocate(field.name, (last - first, *field.tail), field.dtype)
        out[...] = _delivered(field, self._columns[field.column].take(records))
        return out

    def _measured(self, field: Field, first: int, last: int, allocate: Allocate) -> Array:
        pad = field.pad or 0
        lengths = np.minimum(self._spans[field.axis or ""].lengths[first:last], pad)
        out = allocate(field.name, (last - first, *(n or 0 for n in field.shape)), field.dtype)
        out[...] = lengths if field.measure == "lengths" else np.arange(pad) < lengths[:, None]
        return out

    def _ragged(self, field: Field, first: int, last: int, allocate: Allocate) -> Any:
        spans = self._spans[field.axis or ""]
        low, high = (first, last) if spans.offsets is None else spans.offsets[[first, last]].tolist()
        rows = Rows(self._columns[field.column], spans.starts[low:high], spans.stops[low:high])
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

    rows: Rows

    def __init__(self, fields: Sequence[Field], field: Field, stored: np.dtype[Any]) -> None:
        self._field = field
        # Neighbouring items of a row are a slice of it, which needs no copy of the rest.
        self.items = neighbours(field.items) if stored == field.dtype and not field.is_bits else None
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


def _check_lengths(spans: Spans, field: Field) -> None:
    """A span shorter than a field would read rows of others."""
    needed = field.first + (field.length or 0)
    short = np.flatnonzero(spans.lengths < needed)
    if len(short):
        rows = spans.lengths[short[0]]
        raise ConfigError(
            f"sample {short[0]} has {rows} rows for {field.name!r}, which needs {needed}; its view is wrong"
        )


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


def _delivered(field: Field, stored: Array) -> Array:
    """Stored values as they are delivered: chosen items, bits as floats; the caller's assignment widens."""
    if field.is_single:
        stored = stored[..., None]
    if field.items is not None:
        stored = stored[..., list(field.items)]
    if field.is_bits:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored
