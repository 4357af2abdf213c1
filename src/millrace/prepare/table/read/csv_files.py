"""CSV files of a table. They state neither types nor how they are written: both are found, or the error says what to give."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import SourceError
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.table_file import TableSource, arrow, native
from millrace.prepare.table.read.time_format import check_format_fits, first_odd, guess_formats

CSV_BLOCK = 1 << 20
ONE_KIND = "If files are written differently, prepare one kind and add the others with --append"
DELIMITERS = {",": ",", ";": ";", "\t": "\\t", "|": "|"}  # and how a shell is given them
_MISFIT = re.compile(
    r"In CSV column #(\d+): Row #(\d+): CSV conversion error to ([^:]+): invalid value '(.*)'", re.DOTALL
)
_UNEVEN = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")
_NOT_DECODED = re.compile(r"In CSV column #(\d+): Row #(\d+): CSV conversion error to [^:]+: invalid UTF8 data")


def _stream(source: TableSource) -> Any:
    stream = native(source)
    for ending, codec in ((".gz", "gzip"), (".zst", "zstd")):
        if source.file.path.lower().endswith(ending):
            stream = arrow().CompressedInputStream(stream, codec)
    return stream


def open_csv(source: TableSource, types: dict[str, Any] | None) -> Any:
    """A streaming reader of a CSV file; without ``types`` they are guessed from its beginning."""
    from pyarrow import csv

    wanted = {"column_types": types, "include_columns": list(types)} if types else {}
    options = csv.ConvertOptions(decimal_point=source.decimal, **wanted)
    reading = csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False, encoding=source.encoding or "utf8")
    parsing = csv.ParseOptions(delimiter=source.delimiter or _usual_delimiter(source), newlines_in_values=True)
    return csv.open_csv(_stream(source), read_options=reading, parse_options=parsing, convert_options=options)


def look_at_csv(source: TableSource, *, is_plain: bool) -> tuple[TableSource, Any, bool]:
    """The file with its delimiter; its columns as guessed from the beginning, None without a header; whether it has rows.

    ``is_plain``: there is no ``--transform``, which could make columns of anything.
    """
    pyarrow = arrow()
    if source.file.size < CSV_BLOCK and Path(source.file.location).read_bytes().isspace():
        return source, None, False
    header = _header(source)
    if is_plain and source.delimiter is None:
        source = _with_delimiter(source, header)
    elif is_plain:
        _check_delimiter(source, header)
    try:
        with open_csv(source, None) as reader:
            return source, reader.schema, bool(next((len(batch) for batch in reader), 0))
    except pyarrow.ArrowInvalid as error:
        if "Empty CSV file" in str(error):
            return source, None, False
        raise


def _usual_delimiter(source: TableSource) -> str:
    return "\t" if ".tsv" in Path(source.file.path).name.lower() else ","


def _header(source: TableSource) -> str:
    """The first line; refuses a file of another encoding."""
    with _stream(source) as stream:
        head = stream.read(1 << 16)
    if source.encoding is None and head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise _encoding_error(source, f"{source.file.path!r} is not UTF-8", "utf-16")
    line = head if source.encoding == "utf-16" else head.lstrip().split(b"\n")[0]
    try:
        return str(line.decode(source.encoding or "utf8", "ignore" if source.encoding else "strict").split("\n")[0])
    except UnicodeDecodeError:
        raise _encoding_error(source, f"{source.file.path!r}: its first line is not UTF-8", _guess(line)) from None


def _with_delimiter(source: TableSource, header: str) -> TableSource:
    """The file with the delimiter that its header shows; refused where the header shows several."""
    usual, path = _usual_delimiter(source), source.file.path
    names = re.sub('"[^"]*"', "", header)
    others = [sign for sign in DELIMITERS if sign in names]
    found = usual if usual in others or not others else others[0]
    if found != usual and len(others) > 1:
        likely = max(others, key=names.count)
        raise SourceError(
            f"{path!r}: the delimiter looks like {likely!r}, but could be {' or '.join(map(repr, others))}; the first line is "
            f"{header.strip()[:80]!r}: give --delimiter '{DELIMITERS[likely]}'", source=path,
        )  # fmt: skip
    if found == source.decimal:
        raise SourceError(
            f"{path!r}: {found!r} is the delimiter of its first line, {header.strip()[:80]!r}, and the decimal sign; name "
            f"another one with --delimiter or --decimal. {ONE_KIND}", source=path,
        )  # fmt: skip
    return source if found == usual else msgspec.structs.replace(source, delimiter=found)


def _check_delimiter(source: TableSource, header: str) -> None:
    """Refuses a file whose header shows another delimiter than the one that was given."""
    names, path = re.sub('"[^"]*"', "", header), source.file.path
    other = max(DELIMITERS, key=names.count)
    if (source.delimiter or "") not in names and other in names:
        raise SourceError(
            f"{path!r} is separated by {other!r}, not by {source.delimiter!r}; its first line is {header.strip()[:80]!r}: leave "
            "--delimiter out, since each file shows its own", source=path,
        )  # fmt: skip


def _guess(data: bytes) -> str:
    return "cp1252" if any(0x80 <= byte < 0xA0 for byte in data) else "latin-1"


def _encoding_error(source: TableSource, what: str, guessed: str) -> SourceError:
    return SourceError(f"{what}; name the encoding of the file, such as --encoding {guessed}", source=source.file.path)


def check_texts(source: TableSource, schema: Any, options: TableOptions) -> None:
    """Refuses columns in use that cannot be read as they are, judged by the beginning of the file."""
    from pyarrow import types

    used = {options.time, *options.named_columns}
    numbers = {*(options.features or ()), *options.target}
    others = {field.name: field.type for field in schema if field.name not in used}
    if any(types.is_integer(kind) or types.is_floating(kind) for kind in others.values()):
        others = {}  # these are the features, and texts are left out
    for field in schema:
        if field.name in used and types.is_binary(field.type):
            values = [value for value in _beginning(source, field.name, "binary") if value and not value.isascii()]
            what = f"{source.file.path!r}: column {field.name!r} is not UTF-8: it holds {values[0][:40]!r}"
            raise _encoding_error(source, what, _guess(b"".join(values)))
        if types.is_string(field.type) and field.name in (numbers or others):
            _check_numbers(source, field.name, is_named=bool(numbers))
        if field.name == options.time and options.time_format is not None:
            check_format_fits(source.file.path, field.name, _beginning(source, field.name), options.time_format)
        elif field.name == options.time and types.is_string(field.type):
            raise _odd_time(source, field.name)


def _check_numbers(source: TableSource, column: str, *, is_named: bool) -> None:
    """Refuses a column of numbers for the first value that is none; a column without a number is text.

    A column that was not named, ``is_named`` false, may hold anything but numbers with a decimal comma.
    """
    from pyarrow import csv

    nulls = {*csv.ConvertOptions().null_values}
    values = [(k, value.strip()) for k, value in enumerate(_beginning(source, column)) if value.strip() not in nulls]
    odd = [(k, value) for k, value in values if not _is_number(value, source.decimal)]
    other = "," if source.decimal == "." else "."
    if odd and all(_is_number(value, other) for _, value in values):
        remedy = f"give --decimal '{other}' if that is the decimal sign. {ONE_KIND}"
    elif is_named and len(odd) < len(values):
        remedy = "fix it, or leave the column or the file out"
    else:
        return
    row, value = odd[0]
    raise SourceError(
        f"{source.file.path!r}, line {row + 2}: column {column!r} holds {value[:80]!r}, which is no number; {remedy}",
        source=source.file.path, row=row,
    )  # fmt: skip


def _is_number(text: str, decimal: str) -> bool:
    """Whether this is a number with this decimal sign, as pyarrow reads one."""
    return (
        re.fullmatch(rf"[+-]?(\d+(\{decimal}\d*)?|\{decimal}\d+)([eE][+-]?\d+)?|[+-]?(inf|nan)", text, re.IGNORECASE)
        is not None
    )


def _beginning(source: TableSource, column: str, kind: str = "string") -> list[Any]:
    with open_csv(source, {column: arrow().type_for_alias(kind)}) as reader:
        return next((batch.column(0).to_pylist() for batch in reader), [])


def _odd_time(source: TableSource, column: str) -> SourceError:
    """The error for a time that is not written as ISO 8601: its value, its line, and the formats that fit."""
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
    """The types to read a CSV file by: names as text, numbers as floats, for the guess knows only the beginning.

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
    """The error for a value that is not of its column's type; None for any other error.

    ``is_guessed``: there is a ``--transform``, so the types are those of the beginning of the file.
    """
    if uneven := _UNEVEN.search(str(error)):
        row, wanted, got = map(int, uneven.groups())
        return SourceError(
            f"{source.file.path!r}, line {row}: it has {got} field{'s' * (got != 1)}, but the header has {wanted}; fix that line",
            source=source.file.path, row=row - 2,
        )  # fmt: skip
    found = _MISFIT.search(str(error)) or _NOT_DECODED.search(str(error))
    if found is None:
        return None
    with open_csv(source, None) as reader:
        column, row = reader.schema.names[int(found[1])], int(found[2])
    where = f"{source.file.path!r}, line {row}: column {column!r}"
    if found.re is _NOT_DECODED:
        return _encoding_error(source, f"{where} is not UTF-8", "latin-1")
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
