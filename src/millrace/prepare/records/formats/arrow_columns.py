"""Columns of Arrow tables as columns of records: lists with offsets, structs flattened, texts as bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Reading, Source, need, unreadable
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column


def arrow(what: str = "this format") -> Any:
    return need("pyarrow", "table", what)


@contextmanager
def arrow_errors(source: Source, what: str) -> Iterator[None]:
    """Names the file in what Arrow raises."""
    problems = (arrow().ArrowException, OSError)  # named before: a reader may be closed as Python ends
    try:
        yield
    except MillraceError:
        raise
    except problems as error:
        raise unreadable(source, what, error) from error


def asked_schema(schema: Any, asked: Sequence[str] | None) -> Any:
    """The columns of a table that were asked for, also by the name of a column within one."""
    if asked is None:
        return schema
    above = with_parents(asked)
    return arrow().schema([field for field in schema if field.name in above], schema.metadata)


def with_parents(names: Iterable[str]) -> set[str]:
    """The names, and the columns that they lie in: of ``a.b.c`` also ``a.b`` and ``a``."""
    return {".".join(parts[:k]) for name in names for parts in [name.split(".")] for k in range(1, len(parts) + 1)}


def _compute() -> Any:
    return need("pyarrow.compute", "table", "this format")


def outline_columns(schema: Any, asked: Sequence[str] | None = None) -> dict[str, Column]:
    """The columns that a table has here. A list is a run of rows; a list of fixed size is one item."""
    columns: dict[str, Column] = {}
    for field in schema:
        mine: dict[str, Column] = {}
        _outline(field.name, field.type, None, mine, asked)
        if twice := sorted(mine.keys() & columns.keys()):
            raise ConfigError(f"two columns are called {twice[0]!r}; give them different names in the source")
        columns |= mine
    return columns


def _outline(name: str, kind: Any, axis: str | None, columns: dict[str, Column], asked: Sequence[str] | None) -> None:
    types = arrow().types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_struct(kind):
        for field in kind:
            _outline(f"{name}.{field.name}", field.type, axis, columns, asked)
    elif asked is not None and not any(f"{name}.".startswith(f"{own}.") or own.startswith(f"{name}.") for own in asked):
        return  # it may be of any type
    elif _is_list(kind) and axis is None:
        _outline(name, kind.value_type, name, columns, asked)
    elif _is_list(kind) and dtype_of(kind.value_type) is not None:  # a list of lists: their lengths, and all values
        columns[f"{name}.lengths"] = Column("int64", axis=axis)
        columns[name] = Column(str(dtype_of(kind.value_type)), axis=f"{name}.values")
    elif types.is_fixed_size_list(kind) or types.is_fixed_size_binary(kind):
        dtype, shape = _fixed(kind)
        if dtype is None:
            raise _unsupported(name, kind, axis)
        columns[name] = Column(dtype, shape, per="record") if axis is None else Column(dtype, shape, axis=axis)
    elif _is_text(kind) and axis is None:
        columns[name] = Column("string", per="record")
    elif _is_bytes(kind) and axis is None:
        columns[name] = Column("uint8", axis=name)
    elif (dtype := dtype_of(kind)) is not None:
        columns[name] = Column(dtype, per="record") if axis is None else Column(dtype, axis=axis)
    else:
        raise _unsupported(name, kind, axis)


def _unsupported(name: str, kind: Any, axis: str | None) -> ConfigError:
    what = f"{kind}, which cannot be stored" if axis is None else f"a list of {kind}, and lists hold numbers alone"
    return ConfigError(
        f"column {name!r} is {what}; take numbers, texts, bytes, lists of numbers or structs of them, and leave it out with "
        "--columns"
    )


def dtype_of(kind: Any) -> str | None:
    """The dtype of numbers, also of times, which are stored as integers; None for anything else."""
    types = arrow().types
    if types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
        return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(kind), str(kind))
    return "int64" if types.is_temporal(kind) and not types.is_interval(kind) else None


def _fixed(kind: Any) -> tuple[str | None, tuple[int, ...]]:
    types, shape = arrow().types, []
    while types.is_fixed_size_list(kind):
        shape.append(kind.list_size)
        kind = kind.value_type
    if types.is_fixed_size_binary(kind):
        return "uint8", (*shape, kind.byte_width)
    return (dtype_of(kind), tuple(shape)) if all(shape) else (None, ())


def _is_list(kind: Any) -> bool:
    types = arrow().types
    known = (types.is_list, types.is_large_list, types.is_list_view, types.is_large_list_view)
    return any(is_kind(kind) for is_kind in known)


def _is_text(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    types = arrow().types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def free_lengths(batch: Any) -> dict[str, Int64s]:
    """By column: how long the lists of the first records are, for lists that may share an axis."""
    found = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if _is_list(array.type) and not arrow().types.is_struct(array.type.value_type):
            counts = _compute().list_value_length(array[:SAMPLE]).fill_null(0)
            found[name] = counts.to_numpy(zero_copy_only=False).astype(np.int64)
    return found


class _Level(NamedTuple):
    """Where values lie: on an axis, whose offsets say which record they belong to; None per record."""

    axis: str | None
    offsets: Int64s | None

    def records(self, places: Int64s) -> Int64s:
        """The records of these values."""
        return places if self.offsets is None else np.searchsorted(self.offsets, places, side="right") - 1


class BatchReader:
    """Takes the wanted columns of a batch apart, and remembers records with nulls."""

    def __init__(self, wanted: Mapping[str, Column]) -> None:
        self._wanted, self._above = wanted, with_parents(wanted)

    def read(self, batch: Any, where: Callable[[int], str], source: str, reading: Reading) -> Chunk:
        self._columns: dict[str, Array] = {}
        self._offsets: dict[str, Int64s] = {}
        self._problems: dict[int, str] = {}
        for name, array in zip(batch.schema.names, batch.columns, strict=True):
            if name in self._above:
                self._take(name, array, _Level(None, None))
        columns = {name: array for name, array in self._columns.items() if name in self._wanted}
        if lost := [name for name in self._wanted if name not in columns]:
            raise SourceError(
                f"{source!r}, {where(0)}: column {lost[0]!r} is not here, though the file says so; copy it again",
                source=source,
            )
        chunk = Chunk(columns, self._offsets, batch.num_rows, where)
        if not self._problems:
            return chunk
        for record, problem in sorted(self._problems.items()):
            reading.refuse(source, where(record), problem)
        are_good = np.ones(batch.num_rows, bool)
        are_good[list(self._problems)] = False
        return chunk.take(are_good, self._wanted)

    def _take(self, name: str, array: Any, level: _Level) -> None:
        pa, kind = arrow(), array.type
        if pa.types.is_dictionary(kind):
            return self._take(name, array.dictionary_decode(), level)
        is_float = pa.types.is_floating(kind)
        if array.null_count and not is_float:
            self._refuse_nulls(name, array, level)
        if pa.types.is_struct(kind):
            for k, field in enumerate(kind):
                own = f"{name}.{field.name}"
                if own in self._above:
                    self._take(own, array.flatten()[k], level)
        elif _is_list(kind) and level.axis is None:
            offsets = _list_offsets(array)
            self._offsets[name] = offsets
            self._take(name, array.flatten(), _Level(name, offsets))
        elif _is_list(kind):
            inner = _list_offsets(array)
            assert level.offsets is not None
            self._columns[f"{name}.lengths"] = np.diff(inner)
            self._offsets[f"{name}.values"] = inner[level.offsets]
            self._take(name, array.flatten(), _Level(f"{name}.values", inner[level.offsets]))
        elif _is_text(kind) or _is_bytes(kind):
            self._columns[name], self._offsets[name] = _bytes(
                array, pa.large_string() if _is_text(kind) else pa.large_binary()
            )
        elif pa.types.is_fixed_size_list(kind) or pa.types.is_fixed_size_binary(kind):
            self._columns[name] = self._fixed_items(name, array, level)
        else:
            self._columns[name] = _numbers(array)
        return None

    def _fixed_items(self, name: str, array: Any, level: _Level) -> Array:
        """Lists of one size. A null has a place among the values; its record is refused, but for a float, which is NaN."""
        pa, (_, shape) = arrow(), _fixed(array.type)
        count = len(array)
        if pa.types.is_fixed_size_binary(array.type):
            width, data = array.type.byte_width, array.buffers()[1]
            found = np.zeros(count * width, np.uint8) if data is None else np.frombuffer(data, np.uint8)
            start = 0 if data is None else array.offset * width
            return found[start : start + count * width].reshape(count, *shape)
        inside, size = array, 1
        while pa.types.is_fixed_size_list(inside.type):
            each = inside.type.list_size
            inside = inside.values.slice(inside.offset * each, len(inside) * each)
            size *= each
            if inside.null_count and not pa.types.is_floating(inside.type):
                self._refuse_nulls(name, inside, level, size)
        return _numbers(inside).reshape(count, *shape)

    def _refuse_nulls(self, name: str, array: Any, level: _Level, size: int = 1) -> None:
        """``size`` values are one item of the level."""
        places = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) // size
        for record in np.unique(level.records(places)).tolist():
            self._problems.setdefault(record, f"column {name!r} is null or missing")


def _numbers(array: Any) -> Array:
    """Numbers; a null among floats is NaN, and any other null 0 (its record is refused)."""
    pa = arrow()
    if pa.types.is_temporal(array.type):
        array = array.cast(pa.int32() if array.type.bit_width == 32 else pa.int64()).cast(pa.int64())
    if array.null_count and not pa.types.is_floating(array.type):
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    found: Array = array.to_numpy(zero_copy_only=False)
    return found


def _list_offsets(array: Any) -> Int64s:
    """Offsets of lists from 0; a null is an empty list."""
    counts = _compute().list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _bytes(array: Any, kind: Any) -> tuple[Array, Int64s]:
    """Texts or bytes one after the other, and their offsets."""
    array = array.fill_null("" if "string" in str(kind) else b"").cast(kind)
    _, places, data = array.buffers()
    offsets = (
        np.frombuffer(places, np.int64)[array.offset : array.offset + len(array) + 1]
        if places
        else np.zeros(1, np.int64)
    )
    found = np.frombuffer(data, np.uint8) if data else np.zeros(0, np.uint8)
    return found[offsets[0] : offsets[-1]], offsets - offsets[0]


def top_names(names: Any, wanted: Mapping[str, Column]) -> list[str]:
    """The columns of a table that hold what is wanted."""
    above = with_parents(wanted)
    return [name for name in names if name in above]


def batch_chunks(batches: Iterator[Any], first: int, source: str, reading: Reading) -> Iterator[Chunk]:
    """Chunks of record batches whose first record is row ``first`` of its source."""
    reader = BatchReader(reading.wanted)
    for batch in batches:
        start = first
        yield reader.read(batch, lambda k, start=start: f"row {start + k}", source, reading)  # type: ignore[misc]
        first += batch.num_rows
