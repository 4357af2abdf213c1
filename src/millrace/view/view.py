"""View: how many samples there are, and which rows each covers.

A view is asked for many samples at once. ``spans`` says which rows they cover, ``located`` finds those rows in
the shards, ready to be gathered. A view of one's own gives ``__len__``, ``spans``, ``fields`` and ``spec``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, did_you_mean
from millrace.gather.gather import Field, Located, Sources
from millrace.identity import canonical, digest
from millrace.lazy import cached_property
from millrace.ragged import Int64s, Spans, as_indices

# What is delivered for what is stored: frameworks compute in these. Everything else stays as it is.
_WIDER = {"uint16": "int64", "uint32": "int64", "float16": "float32", "bfloat16": "float32", "dictionary": "int32"}


class StoreLike(Protocol):
    """The part of a store that views use."""

    @property
    def layout(self) -> Any: ...
    @property
    def meta(self) -> Mapping[str, Any]: ...
    @property
    def columns(self) -> Mapping[str, Any]: ...
    @property
    def offsets(self) -> Int64s: ...
    @property
    def cuts(self) -> tuple[Int64s, Int64s] | None: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_records(self) -> int: ...
    @property
    def root(self) -> Any: ...

    @property
    def whole(self) -> Any: ...

    split_name: str | None
    time_cuts: Any
    condition: str | None
    chosen: Int64s | None

    def axis_index(self, axis: str) -> Any: ...
    def kept_table(self, what: str, make: Callable[[], Int64s]) -> Int64s: ...
    def record_spans(self, axis: str | None = None) -> tuple[Int64s, Int64s]: ...


class View(ABC):
    """Samples over a store. ``fields`` are what an item and a batch hold, row columns first."""

    store: StoreLike
    fields: tuple[Field, ...]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        """The rows each sample covers, on the view's own axis or another one."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """JSON that rebuilds the view over its store."""

    @cached_property
    def fingerprint(self) -> str:
        return digest(canonical(self.spec()))

    @cached_property
    def stores(self) -> tuple[Any, ...]:
        """The root stores behind the view."""
        return (self.store.root,)

    def plan(self) -> list[tuple[Any, ...]] | None:
        """The view as plain steps that the C core runs; None where only Python knows it, as with a view of one's own.

        Steps: ``("take", ids)``, ``("select", words, ranks)`` of a bitmap, ``("concat", ends, [plan of each])``, and last
        ``("stride", view, count, stride, rows)``, ``("locate", view, ends, firsts, stride, rows)``, ``("offsets", view)`` or
        ``("ranked", view, ranks, stride, rows)``.
        """
        return None

    def records(self, samples: npt.ArrayLike) -> Int64s:
        """The record each sample starts in."""
        spans = self.spans(samples)
        starts = spans.starts if spans.offsets is None else spans.starts[spans.offsets[:-1]]
        index = self.store.axis_index(self.store.layout.primary)
        owners: Int64s = np.minimum(index.owners(starts), self.store.num_records - 1)
        return owners

    def located(self, samples: Int64s) -> Located:
        """The samples found in their shards, ready for ``fill``."""
        axes = {field.axis for field in self.fields if field.axis is not None}
        spans = {axis: self.spans(samples, axis) for axis in axes}
        needs_records = any(field.axis is None for field in self.fields)
        return Located(self._sources, self.fields, spans, self.stored_records(samples) if needs_records else None)

    def stored_records(self, samples: npt.ArrayLike) -> Int64s:
        """The record each sample starts in, as the whole store numbers it: the number ``where`` chose it by."""
        records, chosen = self.records(samples), self.store.chosen
        return records if chosen is None else chosen[records]

    def files(self, samples: Int64s) -> Iterator[tuple[Any, list[tuple[int, int]]]]:
        """The files that samples are read from: for each field the ``Shards`` that have them, and (shard, file)."""
        for stored, starts, stops in self.reads(samples):
            yield stored.files(stored.shards_of(starts, stops))

    def reads(self, samples: Int64s) -> Iterator[tuple[Any, Int64s, Int64s]]:
        """What samples are read from: for each field the stored column, and its rows [start, stop)."""
        for field in self.fields:
            if field.measure is not None:  # it reads nothing
                continue
            column = self.store.columns[field.column]
            if field.axis is not None:
                spans = self.spans(samples, field.axis)
                starts, stops = spans.starts, spans.stops
                if field.length is None and field.pad is None:
                    starts, stops = starts[stops > field.first], stops[stops > field.first]
            else:
                starts = self.records(samples)
                starts, stops = column.spans(starts) if field.is_text else (starts, starts + 1)
            stored = getattr(column, "codes", getattr(column, "raw", column))
            yield stored, starts, stops

    def shard_bytes(self) -> Int64s:
        """The bytes of each shard in the columns that the view reads."""
        total = np.zeros(0, np.int64)
        for column in dict.fromkeys(field.column for field in self.fields):
            found = self.store.columns[column]
            stored = getattr(found, "codes", getattr(found, "raw", found))
            bytes_each = np.diff(stored.starts) * stored.dtype.itemsize * int(np.prod(stored.shape[1:], dtype=np.int64))
            total = bytes_each if not len(total) else total + bytes_each
        return total

    @cached_property
    def _sources(self) -> Sources:
        """The columns as they are stored: codes of dictionaries, bits of bfloat16; only those asked for."""
        names = {field.column: field for field in self.fields}
        columns = self.store.whole.columns
        return Sources({name: source(columns[name], field) for name, field in names.items()})

    def __getstate__(self) -> dict[str, Any]:
        """What a worker process needs: not what can be computed again there."""
        members = {name: value for kind in reversed(type(self).__mro__) for name, value in vars(kind).items()}
        return {k: value for k, value in vars(self).items() if not isinstance(members.get(k), cached_property)}

    def __getitem__(self, key: Any) -> dict[str, Any]:
        """One sample as a dict of arrays, or several stacked (ragged ones as ``Ragged``)."""
        if isinstance(key, (int, np.integer)):
            one = self.located(self._checked(np.array([key]))).fill(0, 1)
            return {name: value[0] for name, value in one.items()}
        if isinstance(key, slice):
            rows = range(len(self))[key]
            key = np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)
        samples = self._checked(key)
        return self.located(samples).fill(0, len(samples))

    def _checked(self, samples: npt.ArrayLike) -> Int64s:
        """Sample numbers as int64, negative ones from the end, refused outside the view."""
        return as_indices(samples, len(self), "sample", "the view", "1-D integers (Subset takes masks)")

    def unused_rows(self) -> int | None:
        """Rows of the store (or of its split) that no sample covers; None where the view does not know."""
        return None

    def __repr__(self) -> str:
        shapes = [", ".join("any" if n is None else str(n) for n in field.shape) for field in self.fields]
        each_field = zip(self.fields, shapes, strict=True)
        fields = ", ".join(f"{own.name} {own.dtype}" + (f"({shape})" if shape else "") for own, shape in each_field)
        is_ragged = any(field.is_text or None in field.shape for field in self.fields)
        sizes = [math.prod(n or 0 for n in field.shape) * field.dtype.itemsize for field in self.fields]
        each = "ragged" if is_ragged else f"{sum(sizes):,} bytes each"
        unused = self.unused_rows()
        never = "" if unused is None else f"; {unused:,} rows never delivered"
        return f"<{type(self).__name__}: {len(self):,} samples; {fields}; {each}{never}>"


def source(column: Any, field: Field) -> Any:
    """What a gather reads: the text itself, else the stored numbers."""
    if field.is_text:
        return column
    return getattr(column, "codes", getattr(column, "raw", column))


def column_field(store: StoreLike, name: str, **options: Any) -> Field:
    """The field of a column as it is delivered."""
    column = store.layout.columns.get(name)
    if column is None:
        known = store.layout.columns
        raise ConfigError(f"column {name!r} is unknown{did_you_mean(name, known)}; the store has {', '.join(known)}")
    if column.dtype == "string":
        return Field(name, name, None, np.dtype(object), is_text=True)
    dtype = np.dtype(_WIDER.get(column.dtype, column.dtype))
    options["is_bits"] = column.dtype == "bfloat16"
    return Field(options.pop("key", name), name, column.axis, dtype, column.shape, **options)


def check_store(store: Any) -> None:
    if not hasattr(store, "layout"):
        raise ConfigError(f"a view reads a store, not {store!r}; open it first: mr.open_store(path)")


def row_column(store: StoreLike, name: str | None, preferred: str, view: str) -> str:
    """The row column that was named, else the ``preferred`` one, else the only one, unless it holds bytes."""
    rows: list[str] = [column for column, own in store.layout.columns.items() if own.axis is not None]
    if name is not None or preferred in rows:
        return name or preferred
    if len(rows) != 1:
        example = f"{view}(store, column={(rows[0] if rows else preferred)!r})"
        raise ConfigError(
            f"{view} reads the row column {preferred!r}, and this store has {', '.join(rows) or 'none'}; name one, as in "
            f"{example}, or take Records for whole records"
        )
    declared = store.layout.columns[rows[0]]
    if declared.dtype == "uint8" and not declared.shape and rows[0] not in ("tokens", "values"):
        raise ConfigError(
            f"{view} reads numbers, and {rows[0]!r} holds bytes, such as those of a file; take Records and decode=, or name it "
            f"to read bytes as numbers: {view}(store, column={rows[0]!r})"
        )
    return rows[0]


def store_spec(store: StoreLike) -> dict[str, Any]:
    """What a spec says of its store: whose contents, which split, and by what its records were chosen."""
    found = {"store": store.root.fingerprint, "split": store.split_name}
    return found if store.condition is None else {**found, "where": store.condition}
