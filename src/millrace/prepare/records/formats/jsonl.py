"""JSON lines: an object per line, read by Arrow a block at a time.

The types come from the first lines of every file. A line that does not fit is found by halving its block.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import IO, Any

import msgspec
import numpy as np

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import ending
from millrace.prepare.inflate import COMPRESSED, InflatedFile
from millrace.prepare.records.formats.arrow_columns import (
    BatchReader,
    arrow,
    free_lengths,
    outline_columns,
    with_parents,
)
from millrace.prepare.records.formats.format import CHUNK_BYTES, Chunk, Format, Outline, Reading, Source, need
from millrace.prepare.records.options import RecordOptions

HEAD_BYTES = 1 << 20  # of a file, from which types are taken
MAX_LINE = 1 << 30
MARK = b"\xef\xbb\xbf"
_syntax = msgspec.json.Decoder(msgspec.Raw)


class JsonLines(Format):
    """An object per line, with numbers, texts and lists."""

    name = "jsonl"
    endings = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz", ".jsonl.zst", ".ndjson.zst")
    expected = "JSON lines"
    is_loose = True

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        with _opened(source, options) as file:
            head = file.read(HEAD_BYTES).removeprefix(MARK)
            if len(head) == HEAD_BYTES and b"\n" not in head:
                head += file.readline(MAX_LINE)
        if len(head) >= HEAD_BYTES:
            head = head[: head.rfind(b"\n") + 1] or head
        if not head.strip():
            return Outline({}, [])
        lines = head.splitlines(keepends=True)
        table = _first_table(source, lines, options)
        schema = _storable(table, lines, options)
        if options.columns is not None:
            above = with_parents(options.columns)
            asked = [name for name in schema.names if name in above]
            schema, table = arrow().schema([schema.field(name) for name in asked]), table.select(asked)
        pieces = [(0, -1, source.size)]
        if ending(source.path) not in _PACKED:
            count = -(-source.size // options.part_bytes)
            edges = [k * source.size // count for k in range(count + 1)]
            pieces = [(a, b, b - a) for a, b in pairwise(edges)]
        batch = table.combine_chunks().to_batches()[0]
        return Outline(
            outline_columns(schema, options.columns), pieces, free_lengths(batch), {}, schema.serialize().to_pybytes()
        )

    def unify(self, details: Sequence[bytes]) -> bytes:
        """One schema for all files: what is null or empty in one has the type of another."""
        pyarrow, ipc = arrow(), need("pyarrow.ipc", "table", "JSON lines")
        schemas = [ipc.read_schema(pyarrow.BufferReader(detail)) for detail in dict.fromkeys(details)]
        try:
            unified = pyarrow.unify_schemas(schemas, promote_options="permissive")
        except pyarrow.ArrowException:
            return details[0]  # columns differ: the comparison of columns names them
        return bytes(unified.serialize().to_pybytes())

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        ipc = need("pyarrow.ipc", "table", "JSON lines")
        schema = ipc.read_schema(arrow().BufferReader(reading.detail))
        lines = _Lines(source, schema, reading)
        for place, data in _blocks(source, start, stop, reading.options):
            yield from lines.read(place, data)
            alive(bytes=len(data))


_PACKED = {f"{plain}{packed}" for plain in (".jsonl", ".ndjson") for packed in (".gz", ".zst")}


def _opened(source: Source, options: RecordOptions) -> IO[bytes]:
    compression = COMPRESSED.get(os.path.splitext(source.path)[1].lower())
    if compression is None:
        return open(source.location, "rb")
    return io.BufferedReader(InflatedFile(source, compression, options.max_ratio), 1 << 20)


def _blocks(source: Source, start: int, stop: int, options: RecordOptions) -> Iterator[tuple[int, bytes]]:
    """Whole lines that begin in [start, stop), with the place of the first byte of each block."""
    with _opened(source, options) as file:
        place = start
        if start:
            file.seek(start - 1)
            place = start - 1 + len(file.readline(MAX_LINE))
        while stop < 0 or place < stop:
            data = file.read(CHUNK_BYTES if stop < 0 else min(CHUNK_BYTES, stop - place))
            if data and not data.endswith(b"\n"):
                data += file.readline(MAX_LINE)
            if not data:
                return
            if place == 0 and data.startswith(MARK):
                place, data = len(MARK), data[len(MARK) :]
            if len(data) > MAX_LINE:
                raise SourceError(
                    f"{source.path!r}, byte {place}: a line has more than {MAX_LINE:,} bytes; cut it, or store the data otherwise",
                    source=source.path, offset=place,
                )  # fmt: skip
            yield place, data
            place += len(data)


class _Lines:
    """Reads blocks of lines with one schema."""

    def __init__(self, source: Source, schema: Any, reading: Reading) -> None:
        self._source, self._schema, self._reading = source, schema, reading
        self._reader = BatchReader(reading.wanted)

    def read(self, place: int, data: bytes) -> Iterator[Chunk]:
        if not data.strip():
            return
        try:
            table = _parse(data, self._schema, is_strict=self._reading.options.columns is None)
        except _bad() as error:
            lines = data.splitlines(keepends=True)
            if len(lines) == 1:
                self._reading.refuse(self._source.path, f"byte {place}", f"the line cannot be read: {_said(error)}")
                return
            half = len(lines) // 2
            first = b"".join(lines[:half])
            yield from self.read(place, first)
            yield from self.read(place + len(first), b"".join(lines[half:]))
            return
        batch = table.combine_chunks().to_batches()[0]
        starts: list[int] = []  # found once a record is refused; all may be

        def where(record: int) -> str:
            if not starts:
                starts.extend(_line_starts(data))
            return f"byte {place + starts[record]}"

        yield self._reader.read(batch, where, self._source.path, self._reading)


def _bad() -> tuple[type[BaseException], ...]:
    """What a block that cannot be read raises."""
    return (arrow().ArrowException, OSError, msgspec.DecodeError, RecursionError)


def _said(error: BaseException) -> str:
    said = str(error).partition("\n")[0]
    if "JSON to int64" not in said:
        return said
    is_whole = said.rpartition(":")[2].strip().isdecimal()
    remedy = "--cast NAME=uint64 takes larger ones" if is_whole else "--cast NAME=float64 takes both"
    return f"{said}; the first lines have whole numbers there, {remedy}"


def _line_starts(data: bytes) -> list[int]:
    """Where the line of each record begins; lines without an object do not count."""
    lines = data.splitlines(keepends=True)
    starts = np.cumsum([0, *map(len, lines)]).tolist()
    return [start for start, line in zip(starts[:-1], lines, strict=True) if line.strip()]


def _parse(data: bytes, schema: Any, *, is_strict: bool) -> Any:
    json = need("pyarrow.json", "table", "JSON lines")
    # Arrow crashes on deep nesting, and takes NaN for a number: what is no JSON does not get there.
    _syntax.decode_lines(data)
    how = (
        {}
        if schema is None
        else {"explicit_schema": schema, "unexpected_field_behavior": "error" if is_strict else "ignore"}
    )
    reading = json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    return json.read_json(io.BytesIO(data), read_options=reading, parse_options=json.ParseOptions(**how))


def _first_table(source: Source, lines: Sequence[bytes], options: RecordOptions) -> Any:
    """The first lines as a table, from which the types come. Where a line is bad, the others are taken one by one."""
    try:
        return _parse(b"".join(lines), None, is_strict=False)
    except _bad():
        pyarrow, place, tables, schema = arrow(), 0, list[Any](), None
    for line in lines:
        try:
            if line.strip():
                table = _parse(line, None, is_strict=False)
                both = [table.schema] if schema is None else [schema, table.schema]
                schema = pyarrow.unify_schemas(both, promote_options="permissive")
                tables.append(table)
        except _bad() as problem:
            if options.on_error == "stop":
                raise SourceError(
                    f"{source.path!r}, byte {place}: the line cannot be read: {_said(problem)}; fix it, or go on with --on-error "
                    "skip",
                    source=source.path, offset=place,
                ) from problem  # fmt: skip
        place += len(line)
    if not tables:
        raise SourceError(
            f"{source.path!r}: none of its first lines can be read; is it JSON lines?", source=source.path
        )
    return pyarrow.concat_tables(tables, promote_options="permissive")


def _storable(table: Any, lines: Sequence[bytes], options: RecordOptions) -> Any:
    """Types as JSON has them: Arrow takes some texts for times; what is null or empty in all lines is a float."""
    pyarrow = arrow()
    types = pyarrow.types

    def plain(name: str, kind: Any) -> Any:
        if types.is_temporal(kind):
            return pyarrow.string()
        if types.is_null(kind):
            return pyarrow.float64()
        if types.is_list(kind):
            return pyarrow.list_(plain(name, kind.value_type))
        if types.is_struct(kind):
            return pyarrow.struct([(field.name, plain(f"{name}.{field.name}", field.type)) for field in kind])
        cast = options.cast.get(options.rename.get(name, name), "") if types.is_integer(kind) else ""
        return pyarrow.float64() if "float" in cast else pyarrow.uint64() if "uint64" in cast else kind

    schema = pyarrow.schema([(field.name, plain(field.name, field.type)) for field in table.schema])
    for k, name in enumerate(schema.names):  # Arrow takes whole numbers from 2^63 for floats, and so would round them
        values = table.column(k)
        if (
            types.is_floating(values.type)
            and (need("pyarrow.compute", "table", "JSON lines").max(values).as_py() or 0) >= 1 << 63
        ):
            wide = schema.set(k, pyarrow.field(name, pyarrow.uint64()))
            with contextlib.suppress(*_bad()):
                _parse(b"".join(lines), wide, is_strict=False)
                schema = wide
    return schema
