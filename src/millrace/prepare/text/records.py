"""Documents that are the records of a file: the text field of JSON lines, the text column of CSV and Parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.sources import Source, Unit, arrow
from millrace.prepare.text.streams import open_source

CSV_BLOCK = 8 << 20
BATCH_BYTES, BATCH_ROWS = 16 << 20, 1024  # of Parquet, about
SURROGATE = re.compile("[\ud800-\udfff]")


class Bad(Exception):
    """One document that cannot be used; the policy decides what happens. ``offset`` is within the source."""

    def __init__(self, offset: int, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.offset, self.reason, self.data = offset, reason, data


Document = bytes | Bad


def json_documents(lines: Iterator[tuple[int, bytes]], options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text of each line's object; empty lines are none."""
    key = json.dumps(options.text_field, ensure_ascii=False).encode()
    for offset, line in lines:
        if line.isspace():
            continue
        try:
            yield offset, _json_text(offset, line, options, line.count(key) > 1)
        except Bad as bad:
            yield offset, bad


def _json_text(offset: int, line: bytes, options: ReadOptions, is_suspect: bool) -> bytes:
    field = options.text_field
    record = _parsed(offset, line, options, is_suspect)
    if not isinstance(record, dict):
        raise Bad(offset, f"not a JSON object: a {type(record).__name__}", line)
    if field not in record:
        raise Bad(offset, f"no field {field!r}; it has {sorted(record)[:8]}; choose one with --text-field", line)
    text = record[field]
    if not isinstance(text, str):
        raise Bad(offset, f"field {field!r} is not text: it is {type(text).__name__}", line)
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        if (
            options.on_error == "replace"
        ):  # a byte that is never valid stands for each, to be replaced and counted later
            return SURROGATE.sub("\udcff", text).encode(errors="surrogateescape")
        raise Bad(offset, f"a lone surrogate (U+{ord(text[error.start]):04X}) in field {field!r}", line) from None


def _parsed(offset: int, line: bytes, options: ReadOptions, is_suspect: bool) -> Any:
    """The value of a line; where the field may stand twice in it, it is looked for."""
    objects: list[list[tuple[str, Any]]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        objects[:] = [pairs]  # the outermost object comes last
        return dict(pairs)

    try:
        text = line.decode(errors="surrogateescape" if options.on_error == "replace" else "strict")
        record = json.loads(text, object_pairs_hook=keep if is_suspect else None)
    except UnicodeDecodeError as error:
        bad = line[error.start : error.start + 8]
        raise Bad(offset + error.start, f"invalid utf-8 ({bad.hex(' ')})", line) from None
    except json.JSONDecodeError as error:
        raise Bad(offset, f"not JSON: {error.msg} at character {error.pos} of the line", line) from None
    except (ValueError, RecursionError) as error:  # a number of many digits, objects in objects in objects
        raise Bad(offset, f"not JSON that can be read: {error}", line) from None
    if is_suspect and isinstance(record, dict) and [name for name, _ in objects[0]].count(options.text_field) > 1:
        raise Bad(offset, f"field {options.text_field!r} stands twice in the object", line)
    return record


def csv_documents(source: Source, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text column of a CSV file, row by row; the first row names the columns."""
    pyarrow = arrow(source)
    from pyarrow import csv

    field = options.text_field
    reading = csv.ReadOptions(block_size=CSV_BLOCK)
    parsing = csv.ParseOptions(newlines_in_values=True)
    # As bytes, so that invalid text is found row by row; other columns are not looked at.
    converting = csv.ConvertOptions(column_types={field: pyarrow.binary()}, include_columns=[field])
    try:
        with open_source(source, options) as file:
            head = file.peek(3)
            if head.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise SourceError(
                    f"{source.path!r} looks like UTF-16; convert it: iconv -f utf-16 -t utf-8",
                    source=source.path, offset=0,
                )  # fmt: skip
            if not head:
                return
            row = 0
            for batch in csv.open_csv(file, reading, parsing, converting):
                yield from _texts(source, batch.column(field), row, options)
                row += batch.num_rows
    except KeyError:
        with open_source(source, options) as file:
            _no_column(source, csv.open_csv(file, reading, parsing).schema.names, options)
    except pyarrow.ArrowException as error:
        raise SourceError(f"{source.path!r} is not readable CSV: {error}", source=source.path) from error


def parquet_documents(source: Source, unit: Unit, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text column of one row group."""
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.location, pre_buffer=False, buffer_size=1 << 20) as file:
            if options.text_field not in file.schema_arrow.names:
                _no_column(source, file.schema_arrow.names, options)
            row = sum(file.metadata.row_group(k).num_rows for k in range(unit.start))
            group = file.metadata.row_group(unit.start)
            rows = max(1, min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size)))
            for batch in file.iter_batches(batch_size=rows, row_groups=[unit.start], columns=[options.text_field]):
                yield from _texts(source, batch.column(0), row, options)
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r}, row group {unit.start}: {error}", source=source.path) from error


def _no_column(source: Source, names: list[str], options: ReadOptions) -> NoReturn:
    raise SourceError(
        f"{source.path!r} has no column {options.text_field!r}; it has {', '.join(names[:12])}; choose one with --text-field",
        source=source.path,
    )


def _texts(source: Source, column: Any, first: int, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    import pyarrow

    field = options.text_field
    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind):
        column = column.cast(kind).cast(pyarrow.large_binary())  # as bytes, which may be invalid
    for row, text in enumerate(column.to_pylist(), start=first):
        if text is None:
            yield row, Bad(row, f"{field!r} is null", b"")
        elif not isinstance(text, bytes):
            yield row, Bad(row, f"{field!r} is not text: it is {type(text).__name__}", str(text).encode())
        elif len(text) > options.max_document:
            raise SourceError(
                f"{source.path!r}: row {row} is longer than {options.max_document} bytes; raise --max-document",
                source=source.path, row=row,
            )  # fmt: skip
        else:
            yield row, text
