"""Reads a unit of a table in batches: decoded, filtered, behind the user's function, as arrays of numbers."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.functions import load_function
from millrace.prepare.table.options import FILE_NAME, TableOptions
from millrace.prepare.table.read.arrays import as_texts, encode_texts, flatten, is_alike, null_rows, without_empty_texts
from millrace.prepare.table.read.csv_files import misfit_error, open_csv
from millrace.prepare.table.read.schema import Schema, logical, type_of, without_null_types
from millrace.prepare.table.read.sources import RowGroups
from millrace.prepare.table.read.table_file import TableSource, arrow, native, partition_type
from millrace.prepare.table.read.time_format import guess_formats, parse_times
from millrace.prepare.table.read.where import expression
from millrace.ragged import Array

CHUNK_BYTES = 8 << 20  # decoded at once, about, as long as these are so many rows:
CHUNK_ROWS = (1 << 12, 1 << 16)
NO_KEY = "null time or entity"  # why rows are dropped by --on-error skip
SEPARATOR = "|"  # between the columns of an entity's name


class Chunk:
    """Rows of one source: which entity each is of, its time, and the columns to take from it."""

    def __init__(self, names: list[str], codes: Array | None, time: Array, table: Any) -> None:
        self.names, self.codes, self.time = names, codes, time  # codes None: all rows are of names[0]
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
        used[codes] = True  # the dictionary of a file also has the values of rows that were left out
        if used[:-1].all():
            return texts, codes
        numbers = np.where(used, np.cumsum(used) - 1, -1).astype(np.int32)
        numbers[-1] = -1
        return [text for text, is_used in zip(texts, used[:-1], strict=True) if is_used], numbers[codes]


class Reader:
    """Reads units of a table; counts what is left out and why."""

    def __init__(self, options: TableOptions, schema: Schema) -> None:
        self._options, self._schema = options, schema
        self._transform = load_function(options.transform, "--transform")
        self._types = {name: type_of(text) for name, text in schema.types.items()}
        self.dropped: Counter[str] = Counter()
        self.rows_read = 0

    def read(self, source: TableSource, unit: RowGroups) -> Iterator[Chunk]:
        pyarrow = arrow()
        path = source.file.path
        try:
            for first, table in self._tables(source, unit):
                self.rows_read += len(table)
                batch = self._batch(source, first, self._selected(source, table))
                if len(batch.time):
                    yield batch
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            told = (
                misfit_error(source, error, is_guessed=self._transform is not None) if source.format == "csv" else None
            )
            if told is not None:
                raise told from error
            message = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise SourceError(
                f"{path!r}{self._place(source, unit)} cannot be read: {message}; write the file again, or leave it out",
                source=path,
            ) from error

    def _place(self, source: TableSource, unit: RowGroups) -> str:
        """Where in a unit the damage lies, found by reading its columns one by one."""
        from pyarrow import ArrowException, parquet

        if not unit.groups:
            return ""
        place = whole = f" (row groups {unit.groups[0]} to {unit.groups[-1]})"
        with contextlib.suppress(ArrowException, OSError, UnicodeDecodeError), native(source) as raw:
            with parquet.ParquetFile(raw, page_checksum_verification=True) as file:
                names = file.schema_arrow.names if self._transform is not None else self._file_columns(source)
                for group, name in itertools.product(unit.groups, names):
                    place = f" (row group {group}, column {name!r})"
                    for _ in file.iter_batches(CHUNK_ROWS[1], row_groups=[group], columns=[name], use_threads=False):
                        pass
            place = whole  # all can be read, one by one
        return place

    def _tables(self, source: TableSource, unit: RowGroups) -> Iterator[tuple[int, Any]]:
        """(number of its first row in the file, rows) for each batch."""
        pyarrow = arrow()
        wanted = None if self._transform is not None else self._file_columns(source)
        first = 0
        if source.format == "csv":
            with open_csv(
                source, None if wanted is None else {name: self._csv_type(name) for name in wanted}
            ) as reader:
                for batch in reader:
                    yield first, without_empty_texts(pyarrow.Table.from_batches([batch]))
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
            for group in unit.groups:
                first = sum(file.metadata.row_group(k).num_rows for k in range(group))
                for batch in file.iter_batches(rows, row_groups=[group], columns=wanted, use_threads=False):
                    yield first, batch
                    first += len(batch)

    def _file_columns(self, source: TableSource) -> list[str]:
        in_path = {name for name, _ in source.partition}
        return [name for name in self._schema.role.needed if name not in in_path]

    def _csv_type(self, name: str) -> Any:
        """Numbers are read as floats: a column that begins with whole numbers may go on with others."""
        import pyarrow

        role = self._schema.role
        if name in (*role.features, *role.static) and self._types[name] != pyarrow.bool_():
            return pyarrow.float64()
        if name in (*self._options.entity, *role.categorical, *role.static_categorical):
            return pyarrow.string()
        return self._types[name]

    def _selected(self, source: TableSource, table: Any) -> Any:
        """The rows asked for, with the columns of the path."""
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
            schema = without_null_types(table.schema, self._types)
            types = {field.name: field.type for field in schema}
            table = table.cast(schema).filter(expression(self._options.where, types))
            self.dropped["where"] += before - len(table)
        return table

    def _transformed(self, source: TableSource, table: Any) -> Any:
        pyarrow = arrow()
        assert self._transform is not None
        try:
            made = self._transform(table)
        except (Exception, SystemExit) as error:
            raise ConfigError(
                f"--transform {self._options.transform} raised {type(error).__name__}: {error} (on {source.file.path!r}); fix it"
            ) from error
        if not isinstance(made, pyarrow.Table):
            raise ConfigError(f"--transform gave {type(made).__name__}; expected an Arrow table")
        for name in self._schema.role.needed:
            if name not in made.schema.names:
                raise ConfigError(
                    f"--transform left out column {name!r} (on {source.file.path!r}); it must always give it"
                )
            found, expected = logical(made.schema.field(name).type), self._types[name]
            if not is_alike(found, expected):
                raise ConfigError(
                    f"--transform gave column {name!r} as {found}, but {expected} for a table without rows "
                    f"(on {source.file.path!r}); it must always give one type"
                )
        return made

    def _batch(self, source: TableSource, first: int, table: Any) -> Chunk:
        pyarrow = arrow()
        table = self._with_times(source, first, table)
        time = flatten(table.column(self._options.time))
        keys = (
            [] if FILE_NAME in self._options.entity else [flatten(table.column(name)) for name in self._options.entity]
        )
        checked = {self._options.time: time, **dict(zip(self._options.entity, keys, strict=False))}
        missing = null_rows(checked)
        if missing is not None:
            if self._options.on_error == "stop":
                row = int(np.flatnonzero(missing)[0])
                name = next(name for name, array in checked.items() if null_rows({name: array}, row))
                where = "" if self._options.where or self._transform else f", row {first + row}"
                raise SourceError(
                    f"{source.file.path!r}{where}: column {name!r} is null; fix it, or drop such rows with --on-error skip",
                    source=source.file.path, row=first + row,
                )  # fmt: skip
            self.dropped[NO_KEY] += int(missing.sum())
            table = table.filter(pyarrow.array(~missing))
            time = flatten(table.column(self._options.time))
            keys = [flatten(table.column(name)) for name in self._options.entity] if keys else []
        names, codes = self._entities(source, keys, len(time))
        return Chunk(names, codes, self._times(source, time), table)

    def _with_times(self, source: TableSource, first: int, table: Any) -> Any:
        """The table with its times as such, where they are written as text; those in another format are null, or refused."""
        import pyarrow

        form, name = self._options.time_format, self._options.time
        found = flatten(table.column(name))
        kind = logical(found.type)
        if form is None or not (pyarrow.types.is_string(kind) or pyarrow.types.is_integer(kind)):
            return table
        texts = as_texts(found)
        times = parse_times(texts, form)
        if self._options.on_error == "stop" and times.null_count > texts.null_count:
            row = int(np.flatnonzero(times.is_null().to_numpy(False) & texts.is_valid().to_numpy(False))[0])
            line = first + row + (2 if source.format == "csv" else 0)
            where = (
                ""
                if self._options.where or self._transform
                else f", {'line' if source.format == 'csv' else 'row'} {line}"
            )
            others = guess_formats([text for text in texts.to_pylist() if text])
            also = f"give --time-format {others[0]!r}, which fits all times read so far" if others else "fix it"
            raise SourceError(
                f"{source.file.path!r}{where}: --time {name!r} holds {texts[row].as_py()[:80]!r}, which is not in --time-format "
                f"{form!r}; {also}, or drop such rows with --on-error skip", source=source.file.path, row=first + row,
            )  # fmt: skip
        if not isinstance(table, pyarrow.Table):
            table = pyarrow.Table.from_batches([table])
        return table.set_column(table.schema.get_field_index(name), name, times)

    def _entities(self, source: TableSource, keys: list[Any], rows: int) -> tuple[list[str], Array | None]:
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
        """Times as another type; one that it cannot hold is refused."""
        from pyarrow import compute

        if time.type == wanted:
            return time
        kept = time.cast(wanted, safe=False)
        lost = compute.not_equal(kept.cast(time.type, safe=False), time)
        if compute.any(lost).as_py():
            what = "dates" if self._schema.time_unit == "D" else f"times in {self._schema.time_unit}"
            value = time.filter(lost)[0].cast("string").as_py()
            raise SourceError(
                f"{source.file.path!r}: {self._options.time!r} has {value}, but the store has {what}, which cannot hold it; "
                "round the times with --transform, or prepare the whole table again", source=source.file.path,
            )  # fmt: skip
        return kept
