"""The gather in numpy: the contract that the C core meets byte for byte, and the slow version to read first.

A batch's rows are copied as slices of the mapped shards by one ``np.concatenate`` per field. Locating them (which shard,
which place) is vectorised over many batches at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.errors import ConfigError
from millrace.gather.rows import ColumnSpans, ItemColumn, check_inside, neighbours
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s, Ragged, Spans

if TYPE_CHECKING:
    from millrace.gather.gather import Allocate, Field


class Reference:
    """Samples of one view, found in their shards, and copied in numpy. Text is not its business."""

    def __init__(
        self, columns: Mapping[str, Any], fields: Sequence[Field], spans: Mapping[str, Spans], records: Int64s | None
    ) -> None:
        self._fields = [field for field in fields if not field.is_text]
        self._columns, self._spans, self._records = columns, spans, records

    def fill(self, first: int, last: int, allocate: Allocate) -> dict[str, Any]:
        """Samples [first, last) as a dict of arrays and ``Ragged``s."""
        out: dict[str, Any] = {}
        shared: dict[int, Array] = {}
        offsets: dict[str, Int64s] = {}
        for field in self._fields:
            if field.measure is not None:
                out[field.name] = self._measured(field, first, last, allocate)
            elif field.axis is None:
                out[field.name] = self._record_items(field, first, last, allocate)
            elif field.length is None:
                found = self._ragged(field, first, last, allocate)
                if field.pad is None:  # columns of one axis have one array of offsets
                    found.offsets = offsets.setdefault(field.axis, found.offsets)
                out[field.name] = found
            else:
                array = allocate(field.name, (last - first, field.length, *field.tail), field.dtype)
                out[field.name] = self._dense[field.name].fill(first, last, array, shared)
        return out

    @cached_property
    def _dense(self) -> dict[str, _Dense]:
        found: dict[str, _Dense] = {}
        known: dict[Any, ColumnSpans] = {}
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
                items = column if dense.items is None else ItemColumn(column, dense.items)
                known[key] = ColumnSpans(items, *_pieces(spans, dense.first, dense.length))
            dense.rows = known[key]
            found[field.name] = dense
        return found

    def _record_items(self, field: Field, first: int, last: int, allocate: Allocate) -> Array:
        assert self._records is not None
        out = allocate(field.name, (last - first, *field.tail), field.dtype)
        out[...] = _delivered(field, self._columns[field.column].take(self._records[first:last]))
        return out

    def _measured(self, field: Field, first: int, last: int, allocate: Allocate) -> Array:
        pad, spans = field.pad or 0, self._spans[field.axis or ""]
        lengths = np.minimum(spans.lengths[first:last], pad)
        out = allocate(field.name, (last - first, *(n or 0 for n in field.shape)), field.dtype)
        if field.measure == "start":
            firsts = slice(first, last) if spans.offsets is None else spans.offsets[first:last]
            out[...] = spans.starts[firsts] + field.first
        else:
            out[...] = lengths if field.measure == "lengths" else np.arange(pad) < lengths[:, None]
        return out

    def _ragged(self, field: Field, first: int, last: int, allocate: Allocate) -> Any:
        spans = self._spans[field.axis or ""]
        low, high = (first, last) if spans.offsets is None else spans.offsets[[first, last]].tolist()
        rows = ColumnSpans(self._columns[field.column], spans.starts[low:high], spans.stops[low:high])
        offsets = np.concatenate(([0], np.cumsum(spans.lengths[first:last])))
        if field.pad is None:
            values = allocate(field.name, (int(offsets[-1]), *field.tail), field.dtype)
            if field.is_bits or rows.dtype != field.dtype:
                values[...] = _delivered(field, rows.join(0, high - low))
            else:
                rows.copy(0, high - low, values)
            return Ragged(values, offsets)
        padded = allocate(field.name, (last - first, field.pad, *field.tail), field.dtype)
        padded[...] = Ragged(_delivered(field, rows.join(0, high - low)), offsets).pad(length=field.pad)
        if field.fill is not None:  # which the stored dtype may not hold
            padded[np.arange(field.pad) >= np.diff(offsets)[:, None]] = field.fill
        return padded


class _Dense:
    """How one dense field is filled: straight from the shards, or by way of a copy in the stored dtype.

    The fields of a column that is widened (tokens as x and shifted y) share one copy of all their rows.
    """

    rows: ColumnSpans

    def __init__(self, fields: Sequence[Field], field: Field, stored: np.dtype[Any]) -> None:
        self._field = field
        # Neighbouring items of a row are a slice of it, which needs no copy of the rest.
        self.items = neighbours(field.items) if stored == field.dtype and not field.is_bits else None
        is_picked = field.items is not None and self.items is None
        self._is_straight = stored == field.dtype and not field.is_bits and not is_picked
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
            joined = self.rows.join(first, last)
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
        raise ConfigError(f"sample {short[0]} has {rows} rows for {field.name!r}, not {needed}; its view is wrong")


def _pieces(spans: Spans, first: int, length: int) -> tuple[Int64s, Int64s, Int64s | None]:
    """Rows [first, first + length) of every sample's span: starts, stops, and the pieces of each sample."""
    if spans.offsets is None:
        return spans.starts + first, spans.starts + (first + length), None
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
