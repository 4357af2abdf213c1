"""Documents that are the records of a file: the text field of JSON lines, the text column of Parquet (CSV: csvs.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.text.clean.masks import Masked, masked
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Source, Unit, arrow
from millrace.prepare.text.read.streams import FREE_EXPANSION

BATCH_BYTES, BATCH_ROWS = 16 << 20, 1024  # of Parquet, about
FREE_GROUP = 256 << 20  # bytes any row group may expand to, however small it is: a page of it is decompressed at once
SURROGATE = re.compile("[\ud800-\udfff]")


class Bad(Exception):
    """One document that cannot be used; the policy decides what happens. ``offset`` is within the source."""

    def __init__(self, offset: int, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.offset, self.reason, self.data = offset, reason, data


Document = bytes | Bad


def too_long(source: Source, place: int, data: bytes, options: ReadOptions) -> Exception:
    """Of a row: an error with its remedies, or what the policy sets aside."""
    if options.on_error != "stop":
        return Bad(place, f"longer than {options.max_document:,} bytes", data)
    unit, name = source.place
    row = f"row {place}" if unit == "row" else f"the row at {unit} {place}"
    return SourceError(
        f"{source.path!r}: {row} is longer than {options.max_document:,} bytes; {longer_record(options)}",
        source=source.path, **{name: place},
    )  # fmt: skip


def longer_record(options: ReadOptions) -> str:
    """What to do about a record that is too long."""
    why = " (--long-documents split cuts plain text, not records)" if options.long_documents == "split" else ""
    return f"raise --max-document, or go on with --on-error skip{why}"


def json_documents(lines: Iterator[tuple[int, bytes]], options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text of each line's object; empty lines are none."""
    parser = _Parser()
    for offset, line in lines:
        if not line or line.isspace():
            continue
        try:
            if len(line) > options.max_document:
                raise Bad(offset, f"longer than {options.max_document:,} bytes", line)
            yield offset, _json_document(offset, line, options, parser)
        except Bad as bad:
            yield offset, bad


def _json_document(offset: int, line: bytes, options: ReadOptions, parser: _Parser) -> bytes:
    field, mask = options.text_field, options.mask_field
    record = _parsed(offset, line, options, parser)
    if not isinstance(record, dict):
        raise Bad(offset, f"not a JSON object: a {type(record).__name__}", line)
    if field not in record:
        raise Bad(offset, f"no field {field!r}; it has {sorted(record)[:8]}; choose one with --text-field", line)
    if mask is not None and mask not in record:
        raise Bad(offset, f"no field {mask!r}; it has {sorted(record)[:8]}; choose one with --mask-field", line)
    text = record[field]
    if not isinstance(text, str):
        raise Bad(offset, f"field {field!r} is not text: it is {type(text).__name__}", line)
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        if options.on_error == "replace":  # a byte that is never valid stands for each, replaced and counted later
            return SURROGATE.sub("\udcff", text).encode(errors="surrogateescape")
        raise Bad(offset, f"a lone surrogate (U+{ord(text[error.start]):04X}) in field {field!r}", line) from None
    return encoded if mask is None else with_mask(offset, text, record[mask], line, options)


def with_mask(place: int, text: str, value: Any, data: bytes, options: ReadOptions) -> Masked:
    try:
        return masked(text, value)
    except ValueError as error:
        raise Bad(place, f"bad mask ({options.mask_field!r}): {error}", data) from None


class _Parser:
    """JSON, of which it is known what stands twice in an object."""

    def __init__(self) -> None:
        self._decode = json.JSONDecoder(object_pairs_hook=self._keep).decode
        self._pairs: list[tuple[str, Any]] = []

    def _keep(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        self._pairs = pairs  # the outermost object comes last
        return dict(pairs)

    def parse(self, text: str) -> tuple[Any, list[str]]:
        """The value, and the names of its fields."""
        if text.startswith("\ufeff"):  # nobody would see it
            raise json.JSONDecodeError("a byte order mark", text, 0)
        value = self._decode(text)
        pairs, self._pairs = self._pairs, []
        return value, [name for name, _ in pairs]


def _parsed(offset: int, line: bytes, options: ReadOptions, parser: _Parser) -> Any:
    """The value of a line, an object only where no field that is asked for stands twice in it."""
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
            raise Bad(offset, f"field {field!r} stands twice in the object", line)
    return record


def parquet_documents(source: Source, unit: Unit, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text column of one row group."""
    pyarrow = arrow(source)
    from pyarrow import parquet

    columns = [options.text_field, *([] if options.mask_field is None else [options.mask_field])]
    try:
        with parquet.ParquetFile(source.readable, pre_buffer=False, buffer_size=1 << 20) as file:
            check_columns(source, file.schema_arrow.names, options)
            row = sum(file.metadata.row_group(k).num_rows for k in range(unit.start))
            most, found = max(FREE_EXPANSION, source.size * options.max_ratio), 0
            rows = _batch_rows(source, file, unit.start, options)
            for batch in file.iter_batches(batch_size=rows, row_groups=[unit.start], columns=columns):
                masks = None if options.mask_field is None else batch.column(options.mask_field).to_pylist()
                texts = _values(batch.column(options.text_field))
                del batch  # a long text is not there twice while it is prepared
                while texts:
                    found += len(texts[-1]) if isinstance(texts[-1], bytes) else 0
                    if found > most:
                        raise _expands(source, unit.start, most)
                    mask = masks and masks[-len(texts)]
                    try:
                        yield row, row_document(source, row, texts.pop(), mask, options)
                    except Bad as bad:
                        yield row, bad
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r}, row group {unit.start}: {error}", source=source.path) from error
    finally:
        pyarrow.default_memory_pool().release_unused()  # which it keeps for itself: 370 MB after three rows of 55


def check_parquet(source: Source, options: ReadOptions) -> None:
    """The schema of a file must have the columns that are asked for."""
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        names = parquet.read_schema(source.readable).names
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r} is not readable Parquet: {error}", source=source.path) from error
    check_columns(source, names, options)


def _batch_rows(source: Source, file: Any, number: int, options: ReadOptions) -> int:
    """How many rows are read at once: those of about 16 MiB, also if a few long values stand in all of them."""
    import pyarrow.compute
    from pyarrow import parquet

    group = file.metadata.row_group(number)
    if group.total_byte_size > max(FREE_GROUP, source.size * options.max_ratio):
        raise _expands(source, number, max(FREE_GROUP, source.size * options.max_ratio))
    rows: int = min(BATCH_ROWS, BATCH_BYTES * group.num_rows // max(1, group.total_byte_size))
    chunks = [group.column(k) for k in range(group.num_columns)]
    chunk = next((chunk for chunk in chunks if chunk.path_in_schema == options.text_field), None)
    if chunk is not None and chunk.has_dictionary_page and rows > 1:
        # Sizes are those of the file, where a value that many rows have stands once.
        with parquet.ParquetFile(source.readable, pre_buffer=False, read_dictionary=[options.text_field]) as again:
            first = next(again.iter_batches(1, [number], [options.text_field]), None)
        column = None if first is None else first.column(options.text_field)
        if isinstance(column, pyarrow.DictionaryArray):
            longest = pyarrow.compute.max(pyarrow.compute.binary_length(column.dictionary)).as_py()
            rows = min(rows, BATCH_BYTES // max(1, longest or 0))
    return max(1, rows)


def _expands(source: Source, number: int, most: int) -> SourceError:
    return SourceError(
        f"{source.path!r}, row group {number}: it expands to more than {most:,} bytes; if that is right, raise --max-ratio",
        source=source.path,
    )


def check_columns(source: Source, names: Sequence[str], options: ReadOptions) -> None:
    """The columns that are asked for must be there, once."""
    for flag, name in (("--text-field", options.text_field), ("--mask-field", options.mask_field)):
        if name is not None and list(names).count(name) != 1:
            what = "no column" if name not in names else "more than one column"
            raise SourceError(
                f"{source.path!r} has {what} {name!r}; it has {', '.join(names[:12])}; choose one with {flag}",
                source=source.path,
            )


def _values(column: Any) -> list[Any]:
    """The values of a column, the last first: text as bytes, which may be invalid."""
    import pyarrow

    kind = column.type.value_type if pyarrow.types.is_dictionary(column.type) else column.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or pyarrow.types.is_string_view(kind):
        column = column.cast(kind).cast(pyarrow.large_binary())
    values: list[Any] = column.to_pylist()
    return values[::-1]


def row_document(source: Source, place: int, text: Any, mask: Any, options: ReadOptions) -> bytes:
    """The document of a row: its text as bytes, which may be invalid, with its mask where masks are asked for."""
    field = options.text_field
    if text is None:
        raise Bad(place, f"{field!r} is null", b"")
    if not isinstance(text, bytes):
        raise Bad(place, f"{field!r} is not text: it is {type(text).__name__}", str(text).encode())
    if len(text) > options.max_document:
        raise too_long(source, place, text, options)
    if options.mask_field is None:
        return text
    try:
        decoded = text.decode()
    except UnicodeDecodeError as error:
        raise Bad(place, f"invalid utf-8 ({text[error.start : error.start + 8].hex(' ')})", text) from None
    return with_mask(place, decoded, mask, text, options)
