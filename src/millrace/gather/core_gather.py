"""Gathering by the C core: the fields of a view as one ``Gather`` that copies a batch in a single call.

``Native.of`` is None where only numpy can do what a field asks for; the twin then serves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.native import core, num_cores
from millrace.ragged import Array, Int64s, Ragged, Spans, as_int64s

if TYPE_CHECKING:
    from millrace.gather.gather import Allocate, Field

THREAD_BYTES = 4 << 20  # another thread for every so many: starting one takes tens of microseconds
MAX_THREADS = 8

# Numbered as in core.h.
_DENSE, _RAGGED, _PADDED, _RECORD, _LENGTHS, _MASK, _START = range(7)
_WIDENED = {"i1": 1, "u1": 2, "i2": 3, "u2": 4, "i4": 5, "u4": 6}
_FROM_F16, _FROM_BF16 = 7, 8


def _cast(field: Field, stored: np.dtype[Any]) -> int | None:
    """How stored numbers become delivered ones: 0 copies, None is for numpy."""
    if field.is_bits:
        return _FROM_BF16 if stored == np.uint16 and field.dtype == np.float32 else None
    if stored == field.dtype or (stored == np.uint64 and field.dtype == np.int64):
        return 0
    if field.dtype == np.int64:
        return _WIDENED.get(stored.str[1:])
    return _FROM_F16 if stored == np.float16 and field.dtype == np.float32 else None


def _describe(field: Field, column: Any, number: int, axes: list[str]) -> tuple[Any, ...] | None:
    """A field as the core knows it."""
    tail, cast = tuple(column.shape[1:]), 0 if field.measure else _cast(field, column.dtype)
    delivered = (*tail, 1) if field.is_single else tail
    group = delivered[-1] if delivered else 1
    if field.items is not None and delivered:
        delivered = (*delivered[:-1], len(field.items))
    row_items = int(np.prod(tail, dtype=np.int64))
    if cast is None or (delivered != field.tail and not field.measure) or row_items == 0 or field.items == ():
        return None
    kind, axis, length = _RECORD, 0, 1
    if field.axis is not None:
        axis = axes.index(field.axis)
        kind = _DENSE if field.length is not None else _RAGGED if field.pad is None else _PADDED
        length = field.length if field.length is not None else field.pad or 0
    first = field.first
    if field.measure == "lengths":
        kind, first, length = _LENGTHS, length, 1
    elif field.measure == "mask":
        kind = _MASK
    elif field.measure == "start":
        kind, length = _START, 1
    items = None if field.items is None else tuple(field.items)
    # Names are only for errors.
    name = repr(field.name)[:60].encode("ascii", "replace").decode()
    fill = None if field.fill is None else np.array(field.fill, field.dtype).tobytes()
    return (name, number, kind, axis, cast, first, length, row_items, group, column.dtype.itemsize, items, fill)


class Native:
    """The fields of a view and where their columns lie, shards found as they are first met."""

    def __init__(
        self, columns: Mapping[str, Any], fields: Sequence[Field], gather: Any, tables: dict[str, Any]
    ) -> None:
        self.columns, self.gather, self.tables = columns, gather, tables
        self.fields = [field for field in fields if not field.is_text]
        self.axes = _axes(fields)

    @classmethod
    def of(cls, columns: Mapping[str, Any], fields: Sequence[Field]) -> Native | None:
        if core is None:
            return None
        axes, names = _axes(fields), list(dict.fromkeys(field.column for field in fields if not field.is_text))
        if len(axes) > 16 or len(fields) > 64 or not all(hasattr(columns[name], "shape") for name in names):
            return None
        described = [_describe(f, columns[f.column], names.index(f.column), axes) for f in fields if not f.is_text]
        if None in described:
            return None
        tables = {}
        for name, column in ((name, columns[name]) for name in names):
            row_bytes = int(np.prod(column.shape[1:], dtype=np.int64)) * int(column.dtype.itemsize)
            tables[name] = core.Column(as_int64s(column.starts), row_bytes)
        return cls(columns, fields, core.Gather(tuple(tables.values()), tuple(described)), tables)

    def give(self, name: str, shard: int, whole: Array | None) -> bool:
        """One shard of a column, for good; False where it is not one run of memory."""
        if whole is None or whole.dtype != self.columns[name].dtype or not whole.flags.c_contiguous:
            return False
        self.tables[name].give(shard, whole)
        return True

    def find(self, spans: Mapping[str, Spans], records: Int64s | None) -> bool:
        """Whether all the shards of these spans are at hand."""
        pieces = {axis: (found.starts, found.stops) for axis, found in spans.items()}
        asked = {field.column: pieces.get(field.axis or "") for field in self.fields}
        for name, own in asked.items():
            starts, stops = own if own is not None else (records, records + 1)  # type: ignore[operator]
            missing = self.tables[name].missing(starts, stops)
            if not missing:
                continue
            column = self.columns[name]
            shards, files = column.files(missing)
            # Known before any is mapped: numpy, which then reads them, needs maps too.
            if not shards.will_need(files) or not all(self.give(name, k, column.random(k)) for k in missing):
                return False
        return True

    def fill(
        self, spans: Mapping[str, Spans], records: Int64s | None, first: int, last: int, allocate: Allocate, asked: int
    ) -> tuple[dict[str, Any], int]:
        """Samples [first, last) by field; the caller has found their shards.

        Where the data is cold, rows of the next samples are asked for too: ``asked`` is up to which that was done, and
        returned for the next call.
        """
        out: dict[str, Any] = {}
        arrays, places = [], []
        shared: dict[str, Int64s] = {}  # columns of one axis have one array of offsets
        for field in self.fields:
            offsets = None
            if field.axis is not None and field.length is None and field.pad is None:
                if field.axis not in shared:
                    shared[field.axis] = np.concatenate(([0], np.cumsum(spans[field.axis].lengths[first:last])))
                offsets = shared[field.axis]
                array = allocate(field.name, (int(offsets[-1]), *field.tail), field.dtype)
                out[field.name] = Ragged.trusted(array, offsets)
            else:
                shape = (last - first, *(n or 0 for n in field.shape))
                array = out[field.name] = allocate(field.name, shape, field.dtype)
            arrays.append(array)
            places.append(offsets)
        axes = tuple((own.starts, own.stops, own.offsets) for own in (spans[axis] for axis in self.axes))
        threads = min(MAX_THREADS, num_cores(), 1 + sum(array.nbytes for array in arrays) // THREAD_BYTES)
        asked = self.gather.fill(axes, records, first, last, tuple(arrays), tuple(places), threads, asked)
        return out, asked


def _axes(fields: Sequence[Field]) -> list[str]:
    return list(dict.fromkeys(field.axis for field in fields if field.axis is not None))
