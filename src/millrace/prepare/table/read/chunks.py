"""Reads files of a table in chunks of rows: decoded, passed through the user's function, filtered, as arrays."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.functions import load_function
from millrace.prepare.quarantine import Skips
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read import arrow_types
from millrace.prepare.table.read.arrow_types import as_texts, encode_texts, flatten, logical, null_rows, type_of
from millrace.prepare.table.read.csv_files import misfit_error, open_csv
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.read.table_file import TableSource, arrow, native, partition_type
from millrace.prepare.table.read.time_format import MAX_GUESSED_FROM, check_format_fits, guess_formats, parse_times
from millrace.prepare.table.read.where import expression
from millrace.ragged import Array

CHUNK_BYTES = 8 << 20  # decoded at once, about, within these numbers of rows:
CHUNK_ROWS = (1 << 12, 1 << 16)
NO_KEY, BAD_TIME = "null time or entity", "unreadable time"  # why --on-error skip drops rows
SEPARATOR = "|"  # between the columns of an entity's name


class Chunk:
    """Rows of one source: the entity and the time of each, and the columns to take."""

    def __init__(self, names: list[str], codes: Array | None, time: Array, table: Any) -> None:
        self.names, self.codes, self.time = names, codes, time  # without codes, all rows belong to names[0]
        self._table = table

    def numbers(self, column: str) -> Array:
        """A column as floats, nulls as NaN."""
        import pyarrow

        array = flatten(self._table.column(column))
        if pyarrow.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if pyarrow.types.is_boolean(array.type):
            array = array.cast(pyarrow.uint8())
        elif pyarrow.types.is_decimal(array.type) or pyarrow.types.is_null(array.type):
            array = array.cast(pyarrow.float64())
        return array.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def labels(self, column: str) -> tuple[list[str], Array]:
        """A column as (distinct texts that occur, code of each row, -1 for null)."""
        texts, codes = encode_texts(flatten(self._table.column(column)))
        used = np.zeros(len(texts) + 1, bool)
        used[codes] = True  # the dictionary of a file may hold values of rows that were left out
        if used[:-1].all():
            return texts, codes
        numbers = np.where(used, np.cumsum(used) - 1, -1).astype(np.int32)
        numbers[-1] = -1
        return [text for text, is_used in zip(texts, used[:-1], strict=True) if is_used], numbers[codes]


class Reader:
    """Reads the files of a table; counts the rows that are left out, and why."""

    def __init__(self, options: TableOptions, schema: Schema) -> None:
        self._options, self._schema = options, schema
        self._transform = load_function(options.transform, "--transform")
        self._types = {name: type_of(text) for name, text in schema.types.items()}
        self.dropped: Counter[str] = Counter()
        self.rows_read = 0
        self._first_skipped = ""

    @property
    def skips(self) -> Skips:
        """The rows that ``--on-error skip`` left out."""
        return Skips(self.dropped[NO_KEY] + self.dropped[BAD_TIME], self.rows_read, self._first_skipped)

    def _skip(self, why: str, rows: int, place: str) -> None:
        self.dropped[why] += rows
        self._first_skipped = self._first_skipped or f"{place}: {why}"

    def read(self, source: TableSource, groups: tuple[int, ...]) -> Iterator[Chunk]:
        """The rows of some row groups of a file, or of a whole CSV file."""
        pyarrow = arrow()
        path = source.file.path
        try:
            for first, table in self._tables(source, groups):
                self.rows_read += len(table)
                chunk = self._chunk(source, first, self._selected(source, table))
                if len(chunk.time):
                    yield chunk
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            is_guessed = self._transform is not None
            if source.format == "csv" and (misfit := misfit_error(source, error, is_guessed=is_guessed)) is not None:
                raise misfit from error
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SourceError(
                f"{path!r}{self._damage(source, groups)} cannot be read: {message}; write the file again, or leave it out",
                source=path,
            ) from error

    def _damage(self, source: TableSource, groups: tuple[int, ...]) -> str:
        """Where in a file the damage lies, found by reading its columns one by one."""
        from pyarrow import ArrowException, parquet

        if not groups:
            return ""
        place = whole = f" (row groups {groups[0]} to {groups[-1]})"
        with contextlib.suppress(ArrowException, OSError, UnicodeDecodeError), native(source) as raw:
            with parquet.ParquetFile(raw, page_checksum_verification=True) as file:
                names = file.schema_arrow.names if self._transform is not None else self._file_columns(source)
                for group, name in itertools.product(groups, names):
                    place = f" (row group {group}, column {name!r})"
                    for _ in file.iter_batches(CHUNK_ROWS[1], row_groups=[group], columns=[name], use_threads=False):
                        pass
            place = whole  # one by one, all can be read
        return place

    def _tables(self, source: TableSource, groups: tuple[int, ...]) -> Iterator[tuple[int, Any]]:
        """(number of the first row in the file, rows) of each chunk, as the file has them."""
        pyarrow = arrow()
        wanted = None if self._transform is not None else self._file_columns(source)
        first = 0
        if source.format == "csv":
            types = None if wanted is None else {name: self._csv_type(name) for name in wanted}
            with open_csv(source, types) as reader:
                for batch in reader:
                    yield first, arrow_types.without_empty_texts(pyarrow.Table.from_batches([batch]))
                    first += len(batch)
            return
        from pyarrow import parquet

        texts = [name for name in wanted or () if self._types[name] == pyarrow.string()]
        least, most = CHUNK_ROWS
        with (
            native(source) as raw,
            parquet.ParquetFile(raw, read_dictionary=texts, page_checksum_verification=True) as file,
        ):
            rows = min(max(least, CHUNK_BYTES // (8 * len(wanted or file.schema_arrow))), most)
            metadata = file.metadata
            starts = list(
                itertools.accumulate(
                    (metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)), initial=0
                )
            )
            for group in groups:
                first = starts[group]
                for batch in file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False):
                    yield first, batch
                    first += len(batch)

    def _file_columns(self, source: TableSource) -> list[str]:
        return [name for name in self._schema.role.needed if name not in dict(source.partition)]

    def _csv_type(self, name: str) -> Any:
        """Numbers are read as floats: a column that begins with whole numbers may go on with others."""
        import pyarrow

        role = self._schema.role
        if name == self._options.time and self._options.time_format is not None:
            return pyarrow.string()
        if name in (*role.features, *role.static) and self._types[name] != pyarrow.bool_():
            return pyarrow.float64()
        if name in (*self._options.entity, *role.categorical, *role.static_categorical):
            return pyarrow.string()
        return self._types[name]

    def _selected(self, source: TableSource, table: Any) -> Any:
        """The rows that are asked for, with the columns of the path."""
        pyarrow = arrow()
        if not (source.partition or self._options.where or self._transform):
            return table
        if not isinstance(table, pyarrow.Table):
            table = pyarrow.Table.from_batches([table])
        for name, value in source.partition:
            if self._transform is not None or name in self._types:
                kind = partition_type(value) if self._transform is not None else self._types[name]
                column = pyarrow.array([value], kind).take(np.zeros(len(table), np.int64))
                table = table.append_column(name, column)
        if self._transform is not None:
            table = self._transformed(source, table)
        if self._options.where:
            before = len(table)
            schema = arrow_types.without_null_types(table.schema, self._types)
            table = table.cast(schema).filter(expression(self._options.where, {f.name: f.type for f in schema}))
            self.dropped["where"] += before - len(table)
        return table

    def _transformed(self, source: TableSource, table: Any) -> Any:
        pyarrow = arrow()
        assert self._transform is not None
        try:
            result = self._transform(table)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--transform {self._options.transform} raised {type(error).__name__}: {error} (on {source.file.path!r}); fix it"
            ) from error
        if not isinstance(result, pyarrow.Table):
            raise ConfigError(f"--transform gave {type(result).__name__}; expected an Arrow table")
        for name in self._schema.role.needed:
            if name not in result.schema.names:
                raise ConfigError(
                    f"--transform left out column {name!r} (on {source.file.path!r}); it must always give it"
                )
            kind, expected = logical(result.schema.field(name).type), self._types[name]
            if not arrow_types.is_alike(kind, expected):
                raise ConfigError(
                    f"--transform gave column {name!r} as {kind}, but {expected} for a table without rows "
                    f"(on {source.file.path!r}); it must always give one type"
                )
        return result

    def _chunk(self, source: TableSource, first: int, table: Any) -> Chunk:
        table = self._with_times(source, first, table)
        keys = {name: flatten(table.column(name)) for name in (self._options.time, *self._options.entity_columns)}
        missing = null_rows(keys.values())
        if missing is not None:
            row = int(np.flatnonzero(missing)[0])
            if self._options.on_error == "stop":
                name = next(name for name, key in keys.items() if null_rows([key[row : row + 1]]) is not None)
                raise SourceError(
                    f"{source.file.path!r}{self._row_name('row', first + row)}: column {name!r} is null; fix it, or drop such "
                    "rows with --on-error skip", source=source.file.path, row=first + row,
                )  # fmt: skip
            self._skip(NO_KEY, int(missing.sum()), f"{source.file.path!r}{self._row_name('row', first + row)}")
            table = table.filter(arrow().array(~missing))
            keys = {name: flatten(table.column(name)) for name in keys}
        time = keys.pop(self._options.time)
        names, codes = self._entities(source, list(keys.values()))
        return Chunk(names, codes, self._times(source, time), table)

    def _row_name(self, what: str, number: int) -> str:
        """The number of a row for people; after a filter or a function rows have other numbers."""
        return "" if self._options.where or self._transform else f", {what} {number}"

    def _with_times(self, source: TableSource, first: int, table: Any) -> Any:
        """The table with texts parsed as times; rows in another format are refused, or dropped and counted."""
        import pyarrow

        form, name = self._options.time_format, self._options.time
        column = flatten(table.column(name))
        kind = logical(column.type)
        if form is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_integer(kind)):
            return table
        texts = as_texts(column)
        times = parse_times(texts, form)
        if not isinstance(table, pyarrow.Table):
            table = pyarrow.Table.from_batches([table])
        table = table.set_column(table.schema.get_field_index(name), name, times)
        if times.null_count == texts.null_count:
            return table
        is_wrong = times.is_null().to_numpy(False) & texts.is_valid().to_numpy(False)
        row = int(np.flatnonzero(is_wrong)[0])
        place = ("line", first + row + 2) if source.format == "csv" else ("row", first + row)
        where = f"{source.file.path!r}{self._row_name(*place)}"
        if self._options.on_error == "stop":
            others = guess_formats([text for text in texts.to_pylist() if text])
            also = f"give --time-format {others[0]!r}, which fits all times read so far" if others else "fix it"
            raise SourceError(
                f"{where}: --time {name!r} holds {texts[row].as_py()[:80]!r}, which is not in --time-format "
                f"{form!r}; {also}, or drop such rows with --on-error skip", source=source.file.path, row=first + row,
            )  # fmt: skip
        if first == 0:
            check_format_fits(source.file.path, name, texts[:MAX_GUESSED_FROM].to_pylist(), form)
        self._skip(BAD_TIME, int(is_wrong.sum()), where)
        return table.filter(pyarrow.array(~is_wrong))

    def _entities(self, source: TableSource, keys: list[Any]) -> tuple[list[str], Array | None]:
        """The names of entities, and the code of each row; None where each file is one entity."""
        if not keys:
            return [source.stem], None
        if len(keys) == 1:
            return encode_texts(keys[0])
        from pyarrow import compute

        texts = [as_texts(key) for key in keys]
        for name, text in zip(self._options.entity, texts, strict=True):
            if compute.any(compute.match_substring(text, SEPARATOR)).as_py():
                raise SourceError(
                    f"{source.file.path!r}: a value of {name!r} holds {SEPARATOR!r}, which joins the columns of --entity; "
                    "make one column of them with --transform", source=source.file.path,
                )  # fmt: skip
        return encode_texts(compute.binary_join_element_wise(*texts, SEPARATOR))

    def _times(self, source: TableSource, time: Any) -> Array:
        import pyarrow

        unit = self._schema.time_unit
        if not len(time):
            return np.zeros(0, self._schema.time_dtype)
        if self._schema.time_dtype == "float64":
            return time.cast(pyarrow.float64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]
        if unit is not None:  # files that are appended may have another than the store
            wanted = pyarrow.date32() if unit == "D" else pyarrow.timestamp(unit, getattr(time.type, "tz", None))
            time = self._lossless(source, time, wanted)
            time = time.view(pyarrow.int32() if unit == "D" else pyarrow.int64())
        return time.cast(pyarrow.int64()).to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

    def _lossless(self, source: TableSource, time: Any, wanted: Any) -> Any:
        """Times as another type; refuses one that it cannot hold."""
        from pyarrow import compute

        if time.type == wanted:
            return time
        times = time.cast(wanted, safe=False)
        lost = compute.not_equal(times.cast(time.type, safe=False), time)
        if compute.any(lost).as_py():
            what = "dates" if self._schema.time_unit == "D" else f"times in {self._schema.time_unit}"
            value = time.filter(lost)[0].cast("string").as_py()
            raise SourceError(
                f"{source.file.path!r}: {self._options.time!r} has {value}, but the store has {what}, which cannot hold it; "
                "round the times with --transform, or prepare the whole table again", source=source.file.path,
            )  # fmt: skip
        return times
