"""Gathering: what a batch holds, and the choice between the C core and numpy.

The core (core_gather.py) copies a whole batch in one call. Its twin (reference.py) does the same in numpy, byte for byte,
where the core is missing or cannot do what a field asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from millrace.gather.core_gather import Native
from millrace.gather.reference import Reference
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s, Spans, as_int64s

Allocate: TypeAlias = Callable[[str, tuple[int, ...], np.dtype[Any]], Array]


@dataclass(frozen=True)
class Field:
    """One entry of a batch: which column it comes from, which rows of a sample's span, and how it is delivered.

    On an axis with a ``length`` it is dense: rows ``first .. first + length`` of the span. Without, it is ragged:
    the whole span, or padded and cut to ``pad`` rows, with ``fill`` (None: zeros) behind them. Without an axis it is one
    item of the sample's record. ``items`` picks entries of the last axis of a row. ``is_bits`` marks bfloat16, delivered as
    float32. With a ``measure`` no rows are delivered: "lengths" is how many of the ``pad`` rows the span has, "mask" says
    which, "start" is its first row plus ``first``. A ragged field with ``first`` leaves out spans that end there or before;
    only programs know that.
    """

    name: str
    column: str
    axis: str | None
    dtype: np.dtype[Any]
    tail: tuple[int, ...] = ()
    first: int = 0
    length: int | None = None
    pad: int | None = None
    fill: int | float | None = None
    items: tuple[int, ...] | None = None
    is_bits: bool = False
    is_single: bool = False  # a row of one number, delivered as a row of one feature
    is_text: bool = False
    measure: str | None = None

    @property
    def shape(self) -> tuple[int | None, ...]:
        """Of one sample; None where lengths differ."""
        if self.axis is None or self.measure in ("lengths", "start"):
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
        if self._is_limited:
            return Native.of(self, fields)  # which keeps its shards: a new one for each use
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
    def _is_limited(self) -> bool:
        return any(column.files(())[0].is_limited for column in self.values() if hasattr(column, "files"))

    @cached_property
    def _bytes(self) -> dict[str, tuple[Sources, tuple[Field, ...]]]:
        return {}


class Located:
    """Samples of one view, found in their shards; ``fill`` copies a run of them into arrays."""

    def __init__(
        self, columns: Mapping[str, Any], fields: Sequence[Field], spans: Mapping[str, Spans], records: Int64s | None
    ) -> None:
        self._fields, self._spans, self._columns = fields, spans, columns
        self._records = records = None if records is None else as_int64s(records)
        native = columns.native(fields) if isinstance(columns, Sources) else Native.of(columns, fields)
        self._native = native if native is not None and native.find(spans, records) else None
        self._reference = Reference(columns, fields, spans, records) if self._native is None else None
        self._asked = 0  # the sample up to which rows were asked for ahead

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        """Samples [first, last) as a dict of arrays and ``Ragged``s."""
        if self._native is not None:
            arrays, self._asked = self._native.fill(self._spans, self._records, first, last, allocate, self._asked)
        else:
            assert self._reference is not None
            arrays = self._reference.fill(first, last, allocate)
        if len(arrays) == len(self._fields):
            return arrays
        assert self._records is not None
        for name, column in ((field.name, field.column) for field in self._fields if field.is_text):
            rows = self._texts[column].fill(first, last)[column]
            arrays[name] = self._columns[column].decode(rows, self._records[first:last])
        return {field.name: arrays[field.name] for field in self._fields}

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
