"""CSV files of a table, which state neither types nor how they are written: what is read, and what does not fit is told."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.table_file import TableSource, arrow, native
from millrace.prepare.table.read.time_format import first_odd, guess_formats

CSV_BLOCK = 1 << 20
DELIMITERS = {",": ",", ";": ";", "\t": "\\t", "|": "|"}  # and how a shell is given them
_MISFIT = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to ([^:]+): invalid value '(.*)'", re.DOTALL
)
_NOT_DECODED = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to [^:]+: invalid UTF8 data")


def delimiter_of(source: TableSource) -> str:
    return source.delimiter or ("\t" if ".tsv" in Path(source.file.path).name.lower() else ",")


def _stream(source: TableSource) -> Any:
    stream = native(source)
    for ending, codec in ((".gz", "gzip"), (".zst", "zstd")):
        if source.file.path.lower().endswith(ending):
            stream = arrow().CompressedInputStream(stream, codec)
    return stream


def open_csv(source: TableSource, types: dict[str, Any] | None) -> Any:
    """A streaming reader of a CSV file; ``types`` are those agreed on, else they are guessed from its beginning."""
    from pyarrow import csv

    wanted = {"column_types": types, "include_columns": list(types)} if types else {}
    options = csv.ConvertOptions(decimal_point=source.decimal, **wanted)
    reading = csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False, encoding=source.encoding or "utf8")
    parsing = csv.ParseOptions(delimiter=delimiter_of(source), newlines_in_values=True)
    return csv.open_csv(_stream(source), read_options=reading, parse_options=parsing, convert_options=options)


def look_at_csv(source: TableSource, *, is_plain: bool) -> tuple[Any, bool]:
    """The columns as guessed from the beginning (None: there are not even names), and whether there are rows.

    ``is_plain``: there is no ``--transform``, which could make columns of anything.
    """
    pyarrow = arrow()
    if source.file.size < CSV_BLOCK and Path(source.file.location).read_bytes().isspace():
        return None, False
    _check_header(source, is_plain)
    try:
        with open_csv(source, None) as reader:
            return reader.schema, bool(next((len(batch) for batch in reader), 0))
    except pyarrow.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return None, False
        raise


def _check_header(source: TableSource, is_plain: bool) -> None:
    """Refuses a file of another encoding or with another delimiter, as far as its first line tells."""
    with _stream(source) as stream:
        head = stream.read(1 << 16)
    if source.encoding is None and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _encoded_otherwise(source, f"{source.file.path!r} is not UTF-8", "utf-16")
    line = head if source.encoding == "utf-16" else head.lstrip().split(b"\n")[0]
    try:
        names = line.decode(source.encoding or "utf8", "ignore" if source.encoding else "strict").split("\n")[0]
    except UnicodeDecodeError:
        raise _encoded_otherwise(source, f"{source.file.path!r}: its first line is not UTF-8", _guess(line)) from None
    here = delimiter_of(source)
    other = max(DELIMITERS, key=names.count)
    if is_plain and here not in names and other in names:
        raise SourceError(
            f"{source.file.path!r}: the delimiter looks like {other!r}, but is taken to be {here!r}; the first line is "
            f"{names.strip()[:80]!r}: give --delimiter '{DELIMITERS[other]}'", source=source.file.path,
        )  # fmt: skip


def _guess(data: bytes) -> str:
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in data) else "latin-1"


def _encoded_otherwise(source: TableSource, what: str, guessed: str) -> SourceError:
    return SourceError(f"{what}; name the encoding of the file, such as --encoding {guessed}", source=source.file.path)


def check_texts(source: TableSource, schema: Any, options: TableOptions) -> None:
    """Refuses columns that are used and whose beginning says that they cannot be read as they are."""
    from pyarrow import types

    used = {
        *options.entity,
        options.time,
        *options.categorical,
        *options.static,
        *(options.features or ()),
        *options.target,
    }
    for field in schema:
        if field.name in used and types.is_binary(field.type):
            values = [value for value in _beginning(source, field.name, "binary") if value and not value.isascii()]
            what = f"{source.file.path!r}: column {field.name!r} is not UTF-8: it holds {values[0][:40]!r}"
            raise _encoded_otherwise(source, what, _guess(b"".join(values)))
        if field.name == options.time and types.is_string(field.type) and options.time_format is None:
            raise _odd_time(source, field.name)


def _beginning(source: TableSource, column: str, kind: str = "string") -> list[Any]:
    with open_csv(source, {column: arrow().type_for_alias(kind)}) as reader:
        return next((batch.column(0).to_pylist() for batch in reader), [])


def _odd_time(source: TableSource, column: str) -> SourceError:
    """The error for times that are not written as ISO has them: which one, where, and in what format it may be."""
    texts = [text or None for text in _beginning(source, column)]
    at = first_odd(texts) or 0
    value, before = texts[at], next(((k, text) for k, text in enumerate(texts[:at]) if text), None)
    forms = guess_formats([text for text in texts if text])
    if before is not None and not forms:
        what = f"but line {before[0] + 2} holds {before[1]!r}"
        remedy = (
            "write all in one format, or name that of most with --time-format and drop the rest with --on-error skip"
        )
    else:
        what = "which is no time such as 2020-12-31 or 2020-12-31 23:59:59"
        also = f" (or {', '.join(map(repr, forms[1:3]))}: both fit what was read)" if len(forms) > 1 else ""
        remedy = (
            f"name its format: --time-format {forms[0]!r}{also}" if forms
            else "name another column, or its format with --time-format, such as '%d/%m/%Y %H:%M'"
        )  # fmt: skip
    return SourceError(
        f"{source.file.path!r}, line {at + 2}: --time {column!r} holds {value!r}, {what}; {remedy}",
        source=source.file.path, row=at,
    )  # fmt: skip


def csv_schema(schema: Any, options: TableOptions, whole: Mapping[str, Any]) -> Any:
    """Types guessed from the beginning of a file are no types: names are read as text, numbers as floats.

    ``whole`` are the integer columns of Parquet files beside it.
    """
    pyarrow = arrow()

    def kind(field: Any) -> Any:
        if field.name == options.time and options.time_format is not None:
            return pyarrow.string()
        if pyarrow.types.is_null(field.type) or field.name == options.time:
            return field.type
        if field.name in (*options.entity, *options.categorical):
            return pyarrow.string()
        if not pyarrow.types.is_integer(field.type):
            return field.type
        return whole.get(field.name, pyarrow.float64())

    return pyarrow.schema([pyarrow.field(field.name, kind(field)) for field in schema])


def misfit_error(source: TableSource, error: Exception, *, is_guessed: bool) -> SourceError | None:
    """The error for a value that is not of its column's type; None where it says something else.

    ``is_guessed``: the types are those of the beginning of the file, since only a ``--transform`` knows its columns.
    """
    found = _MISFIT.search(str(error)) or _NOT_DECODED.search(str(error))
    if found is None:
        return None
    with open_csv(source, None) as reader:
        column, row = reader.schema.names[int(found[1])], int(found[2])
    where = f"{source.file.path!r}, line {row}: column {column!r}"
    if found.re is _NOT_DECODED:
        return _encoded_otherwise(source, f"{where} is not UTF-8", "latin-1")
    kind, value = found[3], found[4]
    what = "empty" if kind == "null" else f"of type {kind}"
    remedy = "fix it, or leave the column or the file out"
    if is_guessed:
        remedy = (
            f"before --transform a CSV column has the type of its values in the first {CSV_BLOCK >> 20} MiB of the file: write "
            "the file as Parquet, which states types, or fix the value"
        )
    elif kind.startswith(("timestamp", "date")):
        remedy = (
            "write all times in one format, and name it with --time-format if it is not such as 2020-12-31 23:59:59"
        )
    return SourceError(f"{where} holds {value[:80]!r}, but is {what}; {remedy}", source=source.file.path, row=row)
