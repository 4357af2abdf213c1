"""Documents that are records: the text field of JSON lines, the text column of Parquet (``csv_records.py``: CSV)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from millrace.errors import SourceError
from millrace.prepare.inflate import max_bytes
from millrace.prepare.runs import parquet_footer
from millrace.prepare.text.clean.masks import parse_mask
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Source, SourceSlice, arrow
from millrace.ragged import Int64s

BATCH_BYTES, BATCH_ROWS = 16 << 20, 1024  # of Parquet, about
FREE_GROUP = 256 << 20  # bytes that any row group may expand to: a page of it is decompressed at once
SURROGATE = re.compile("[\ud800-\udfff]")


class Bad(Exception):
    """A document that cannot be used; ``--on-error`` decides what happens. ``offset`` is within the source."""

    def __init__(self, offset: int, reason: str, data: bytes, *, names: Sequence[str] | None = None) -> None:
        super().__init__(reason)
        self.offset, self.reason, self.data = offset, reason, data
        self.names = names  # the fields of a record that lacks the text


class MissingText(SourceError):
    """A file of records does not have the text field that is asked for, but ``names``."""

    names: Sequence[str] = ()


class Record(NamedTuple):
    """The text of one document, where it begins in its source, and with a mask the bytes that count."""

    offset: int
    text: bytes
    spans: Int64s | None = None


def too_long(source: Source, place: int, data: bytes, options: ReadOptions) -> Exception:
    """A row that is too long, as an error with its remedies or as a document to set aside."""
    if options.on_error != "stop":
        return Bad(place, f"longer than {options.max_document:,} bytes", data)
    unit, name = source.place
    row = f"row {place}" if unit == "row" else f"the row at {unit} {place}"
    return SourceError(
        f"{source.path!r}: {row} is longer than {options.max_document:,} bytes; {longer_record(options)}",
        source=source.path, **{name: place},
    )  # fmt: skip


def longer_record(options: ReadOptions) -> str:
    """The remedies for a record that is too long."""
    why = " (--long-documents split cuts plain text, not records)" if options.long_documents == "split" else ""
    return f"raise --max-document, or go on with --on-error skip{why}"


def json_records(lines: Iterator[tuple[int, bytes]], options: ReadOptions) -> Iterator[Record | Bad]:
    """The text of each line's object; empty lines are skipped."""
    parser = _Parser()
    for offset, line in lines:
        if not line or line.isspace():
            continue
        try:
            if len(line) > options.max_document:
                raise Bad(offset, f"longer than {options.max_document:,} bytes", line)
            yield _json_record(offset, line, options, parser)
        except Bad as bad:
            yield bad


def _json_record(offset: int, line: bytes, options: ReadOptions, parser: _Parser) -> Record:
    field, mask = options.text_field, options.mask_field
    value = _parse(offset, line, options, parser)
    if not isinstance(value, dict):
        raise Bad(offset, f"not a JSON object: a {type(value).__name__}", line)
    if field not in value or (mask is not None and mask not in value):
        lacks_text = field not in value
        name, flag = (field, "--text-field") if lacks_text else (mask, "--mask-field")
        reason = f"no field {name!r}; it has {sorted(value)[:8]}; choose one with {flag}"
        raise Bad(offset, reason, line, names=[*value] if lacks_text else None)
    text = value[field]
    if not isinstance(text, str):
        raise Bad(offset, f"field {field!r} is not text: it is {type(text).__name__}", line)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        if options.on_error == "replace":  # by a byte that is never valid; it is replaced and counted later
            return Record(offset, SURROGATE.sub("\udcff", text).encode(errors="surrogateescape"))
        raise Bad(offset, f"a lone surrogate (U+{ord(text[error.start]):04X}) in field {field!r}", line) from None
    return Record(offset, encoded, None if mask is None else _spans(offset, text, value[mask], line, options))


def _spans(place: int, text: str, value: Any, data: bytes, options: ReadOptions) -> Int64s:
    try:
        return parse_mask(text, value)
    except ValueError as error:
        raise Bad(place, f"bad mask ({options.mask_field!r}): {error}", data) from None


class _Parser:
    """Parses JSON and reports the fields of the outermost object, also those that are there twice."""

    def __init__(self) -> None:
        self._decode = json.JSONDecoder(object_pairs_hook=self._keep).decode
        self._pairs: list[tuple[str, Any]] = []

    def _keep(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._pairs = pairs  # the outermost object comes last
        return dict(pairs)

    def parse(self, text: str) -> tuple[Any, list[str]]:
        """The value, and the names of its fields."""
        if text.startswith("\ufeff"):  # which nobody would see
            raise json.JSONDecodeError("a byte order mark", text, 0)
        value = self._decode(text)
        pairs, self._pairs = self._pairs, []
        return value, [name for name, _ in pairs]


def _parse(offset: int, line: bytes, options: ReadOptions, parser: _Parser) -> Any:
    """The value of a line; Bad if an object has a field that is asked for twice."""
    try:
        text = line.decode(errors="surrogateescape" if options.on_error == "replace" else "strict")
        record, names = parser.parse(text)
    except UnicodeDecodeError as error:
        bad = line[error.start : error.start + 8]
        raise Bad(offset + error.start, f"invalid utf-8 ({bad.hex(' ')})", line) from None
    except json.JSONDecodeError as error:
        raise Bad(offset, f"not JSON: {error.msg} at character {error.pos} of the line", line) from None
    except (ValueError, RecursionError) as error:  # a number of many digits, objects in objects in objects
        raise Bad(offset, f"not JSON that can be read: {error}", line) from None
    for field in (options.text_field, options.mask_field):
        if field is not None and isinstance(record, dict) and names.count(field) > 1:
            raise Bad(offset, f"field {field!r} is twice in the object", line)
    return record


def parquet_records(source: Source, piece: SourceSlice, options: ReadOptions) -> Iterator[Record | Bad]:
    """The text column of one row group."""
    pyarrow = arrow(source)
    from pyarrow import parquet

    columns = [options.text_field, *([] if options.mask_field is None else [options.mask_field])]
    try:
        footer, starts = parquet_footer(source)
        with parquet.ParquetFile(source.location, metadata=footer, pre_buffer=False, buffer_size=1 << 20) as file:
            check_columns(source, file.schema_arrow.names, options)
            row = int(starts[piece.start])
            most, num_bytes = max_bytes(source, options.max_ratio), 0
            rows = _batch_rows(source, file, piece.start, options)
            for batch in file.iter_batches(batch_size=rows, row_groups=[piece.start], columns=columns):
                masks = None if options.mask_field is None else batch.column(options.mask_field).to_pylist()
                texts = _values(batch.column(options.text_field))
                del batch  # so that a long text is not in memory twice
                while texts:
                    num_bytes += len(texts[-1]) if isinstance(texts[-1], bytes) else 0
                    if num_bytes > most:
                        raise _too_large(source, piece.start, most)
                    mask = masks and masks[-len(texts)]
                    try:
                        yield row_record(source, row, texts.pop(), mask, options)
                    except Bad as bad:
                        yield bad
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r}, row group {piece.start}: {error}", source=source.path) from error
    finally:
        pyarrow.default_memory_pool().release_unused()  # else it keeps 370 MB after three rows of 55 MB


def check_parquet(source: Source, options: ReadOptions) -> None:
    """Refuses a file without the columns that are asked for, and one that is compressed as a whole."""
    if source.compression is not None:  # it is read from its end, which a stream does not have
        tool = "gunzip" if source.compression == "gzip" else "unzstd"
        raise SourceError(
            f"{source.path!r} is Parquet inside {source.compression}; unpack it first ({tool}): Parquet is compressed inside",
            source=source.path,
        )
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        names = parquet.read_schema(source.location).names
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r} is not readable Parquet: {error}", source=source.path) from error
    check_columns(source, names, options)


def _batch_rows(source: Source, file: Any, number: int, options: ReadOptions) -> int:
    """How many rows to read at once: those of about 16 MiB, also if a few long values fill all rows."""
    import pyarrow.compute
    from pyarrow import parquet

    group = file.metadata.row_group(number)
    if group.total_byte_size > max(FREE_GROUP, source.size * options.max_ratio):
        raise _too_large(source, number, max(FREE_GROUP, source.size * options.max_ratio))
    rows: int = min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
    chunks = [group.column(k) for k in range(group.num_columns)]
    chunk = next((chunk for chunk in chunks if chunk.path_in_schema == options.text_field), None)
    if chunk is not None and chunk.has_dictionary_page and rows > 1:
        # The file holds a value of many rows once, so its size says nothing about theirs.
        how: Any = {"metadata": file.metadata, "pre_buffer": False, "read_dictionary": [options.text_field]}
        with parquet.ParquetFile(source.location, **how) as again:
            first = next(again.iter_batches(1, [number], [options.text_field]), None)
        column = None if first is None else first.column(options.text_field)
        if isinstance(column, pyarrow.DictionaryArray):
            longest = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py()
            rows = min(rows, BATCH_BYTES // max(1, longest or 0))
    return max(1, rows)


def _too_large(source: Source, number: int, most: int) -> SourceError:
    return SourceError(
        f"{source.path!r}, row group {number}: it expands to more than {most:,} bytes; if that is right, raise --max-ratio",
        source=source.path,
    )


def check_columns(source: Source, names: Sequence[str], options: ReadOptions) -> None:
    """Refuses a file that does not have each of the columns that are asked for exactly once."""
    for flag, name in (("--text-field", options.text_field), ("--mask-field", options.mask_field)):
        if name is not None and list(names).count(name) != 1:
            is_missing = name not in names
            what = "no column" if is_missing else "more than one column"
            message = f"{source.path!r} has {what} {name!r}; it has {', '.join(names[:12])}; choose one with {flag}"
            if is_missing and flag == "--text-field":
                raise MissingText(message, source=source.path, names=list(names))
            raise SourceError(message, source=source.path)


def _values(column: Any) -> list[Any]:
    """The values of a column, last first; text as bytes, which may be invalid."""
    import pyarrow

    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind):
        column = column.cast(kind).cast(pyarrow.large_binary())
    values: list[Any] = column.to_pylist()
    return values[::-1]


def row_record(source: Source, place: int, text: Any, mask: Any, options: ReadOptions) -> Record:
    """The record of a row: its text as bytes, which may be invalid, and its mask where masks are asked for."""
    field = options.text_field
    if text is None:
        raise Bad(place, f"{field!r} is null", b"")
    if not isinstance(text, bytes):
        raise Bad(place, f"{field!r} is not text: it is {type(text).__name__}", str(text).encode())
    if len(text) > options.max_document:
        raise too_long(source, place, text, options)
    if options.mask_field is None:
        return Record(place, text)
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise Bad(place, f"invalid utf-8 ({text[error.start : error.start + 8].hex(' ')})", text) from None
    return Record(place, text, _spans(place, decoded, mask, text, options))
