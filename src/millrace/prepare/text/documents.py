"""Reads the documents of one unit, streaming: (offset, bytes) in source order.

Plain text is framed on bytes, never by ``str.splitlines``. A document belongs to the slice in which it starts;
the slice reads on past its end to finish it.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator
from typing import IO, Any

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.sources import Source, Unit

BLOCK = 1 << 20
BLANK = re.compile(rb"\n\r?\n(?:\r?\n)*")
LINE = re.compile(rb"\n")
UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Bad(Exception):
    """One document that cannot be used; the policy decides what happens. ``offset`` is within the source."""

    def __init__(self, offset: int, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.offset, self.reason, self.data = offset, reason, data


def read_documents(source: Source, unit: Unit, options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    """Documents of a unit, or what is wrong with one."""
    if source.format == "parquet":
        yield from _parquet(source, unit, options)
        return
    with open_source(source, options) as file:
        if source.format == "csv":
            yield from _csv(source, file, options)
        elif source.document == "file":
            yield from _whole(source, file, options)
        else:
            boundary = BLANK if source.document == "blank-line" else LINE
            framed = _framed(source, file, unit, boundary, options)
            yield from _json_lines(framed, options) if source.format == "jsonl" else framed


def open_source(source: Source, options: ReadOptions) -> IO[bytes]:
    if source.compression is None:
        return open(source.path, "rb")
    return io.BufferedReader(_Inflated(source, options), BLOCK)


class _Inflated(io.RawIOBase):
    """A decompressed stream: all members, an error instead of an early end, and a cap on its expansion."""

    def __init__(self, source: Source, options: ReadOptions) -> None:
        super().__init__()
        self._source, self._raw = source, open(source.path, "rb")  # noqa: SIM115 - closed by close()
        self._limit = max(1 << 30, source.size * options.max_ratio)
        self._make = _decompressor(source)
        self._inflate = self._make()
        self._out, self._is_fresh = 0, True

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            if self._inflate.eof:
                rest = self._inflate.unused_data or self._raw.read(64 << 10)
                if not rest:
                    return 0
                self._inflate, self._is_fresh = self._make(), True
                data = self._step(rest, len(buffer))
            elif getattr(self._inflate, "needs_input", True) and not getattr(self._inflate, "unconsumed_tail", b""):
                rest = self._raw.read(64 << 10)
                if not rest:
                    if self._is_fresh and self._out == 0 and self._source.size == 0:
                        return 0
                    raise self._error("it ends in the middle of a compressed member; it was cut short: copy it again")
                data = self._step(rest, len(buffer))
            else:
                data = self._step(getattr(self._inflate, "unconsumed_tail", b""), len(buffer))
        self._out += len(data)
        if self._out > self._limit:
            raise self._error(f"it expands to more than {self._limit} bytes; if that is right, raise --max-ratio")
        buffer[: len(data)] = data
        return len(data)

    def _step(self, data: bytes, limit: int) -> bytes:
        try:
            self._is_fresh = False
            inflated: bytes = self._inflate.decompress(data, limit)
            return inflated
        except (zlib.error, OSError, ValueError, EOFError, RuntimeError) as error:
            raise self._error(f"it is damaged: {error}") from error
        except Exception as error:
            if type(error).__name__ != "ZstdError":
                raise
            raise self._error(f"it is damaged: {error}") from error

    def _error(self, problem: str) -> SourceError:
        where = self._raw.tell()
        return SourceError(
            f"{self._source.path!r}, near compressed byte {where}: {problem}", source=self._source.path, offset=where
        )

    def close(self) -> None:
        self._raw.close()
        super().close()


def _decompressor(source: Source) -> Any:
    if source.compression == "gzip":
        return lambda: zlib.decompressobj(wbits=31)
    try:
        from compression import zstd  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        try:
            from backports import zstd  # type: ignore[no-redef, unused-ignore]
        except ImportError as error:
            raise SourceError(f"{source.path!r} needs zstd; pip install millrace[text]", source=source.path) from error
    return zstd.ZstdDecompressor


def _whole(source: Source, file: IO[bytes], options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    data = file.read(options.max_document + 1)
    if len(data) > options.max_document:
        if options.long_documents == "stop":
            raise _too_long(source, 0, options)
        offset = 0
        while data:
            cut = data[: options.max_document]
            yield offset, cut
            offset += len(cut)
            data = data[len(cut) :] + file.read(options.max_document + 1 - (len(data) - len(cut)))
        return
    yield 0, _without_mark(data, source, 0)


def _without_mark(data: bytes, source: Source, offset: int) -> bytes:
    if offset == 0 and data.startswith(UTF16):
        raise SourceError(
            f"{source.path!r} looks like UTF-16; convert it: iconv -f utf-16 -t utf-8", source=source.path, offset=0
        )
    return data.removeprefix(b"\xef\xbb\xbf") if offset == 0 else data


def _framed(
    source: Source, file: IO[bytes], unit: Unit, boundary: re.Pattern[bytes], options: ReadOptions
) -> Iterator[tuple[int, bytes | Bad]]:
    """Documents between boundaries that start in [unit.start, unit.stop)."""
    stop = source.size + (1 << 62) if unit.stop < 0 else unit.stop
    base = max(0, unit.start - 3)  # a boundary that ends at the start has at most three bytes before it
    if base:
        file.seek(base)
    data = _read_more(file, b"", options)
    start = 0  # of the document in hand, within data
    if unit.start:
        found = None
        while found is None:
            found = next(
                (m for m in boundary.finditer(data) if base + m.end() >= unit.start and m.end() < len(data)), None
            )
            if found is None:
                keep = data[-3:]
                more = _read_more(file, keep, options)
                if len(more) == len(keep):
                    return  # no document starts here
                base, data = base + len(data) - len(keep), more
        start = found.end()
    while base + start < stop:
        match = boundary.search(data, start)
        # A match that touches the end of what was read may go on in what was not.
        while match is None or match.end() == len(data):
            if match is None and len(data) - start > options.max_document:
                break
            seen = max(start, len(data) - 3)
            longer = _read_more(file, data[start:], options)
            base, seen, start, grown = base + start, seen - start, 0, len(longer) > len(data) - start
            data = longer
            if not grown:
                match = boundary.search(data, seen)
                break
            match = boundary.search(data, seen)
        end = len(data) if match is None else match.start()
        if end - start > options.max_document:
            if options.long_documents == "stop":
                raise _too_long(source, base + start, options)
            end = start + options.max_document
            yield base + start, _without_mark(data[start:end], source, base + start)
            start = end
            continue
        if end > start:
            yield base + start, _without_mark(data[start:end], source, base + start)
        if match is None:
            return
        start = match.end()


def _read_more(file: IO[bytes], data: bytes, options: ReadOptions) -> bytes:
    # Twice as much as there is, so that a long document is not copied again and again.
    return data + file.read(max(BLOCK, min(len(data), options.max_document)))


def _too_long(source: Source, offset: int, options: ReadOptions) -> SourceError:
    return SourceError(
        f"{source.path!r}: the document at byte {offset} is longer than {options.max_document} bytes; raise --max-document, "
        "or cut such documents with --long-documents split",
        source=source.path, offset=offset,
    )  # fmt: skip


def _json_lines(lines: Iterator[tuple[int, bytes | Bad]], options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    for offset, line in lines:
        assert isinstance(line, bytes)
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record[options.text_field]
            if not isinstance(text, str):
                raise TypeError(f"{options.text_field!r} is {type(text).__name__}, expected a string")
            yield offset, text.encode()
        except KeyError:
            yield (
                offset,
                Bad(
                    offset,
                    f"no field {options.text_field!r}; it has {sorted(record)[:8]}; choose one with --text-field",
                    line,
                ),
            )
        except (ValueError, TypeError, RecursionError, UnicodeEncodeError) as error:
            yield offset, Bad(offset, f"not a JSON object with text: {error}", line)


def _csv(source: Source, file: IO[bytes], options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    import pyarrow
    from pyarrow import csv

    parsing = csv.ParseOptions(newlines_in_values=True)
    reading = csv.ReadOptions(block_size=8 << 20)
    converting = csv.ConvertOptions(column_types={options.text_field: pyarrow.string()})
    try:
        reader = csv.open_csv(file, read_options=reading, parse_options=parsing, convert_options=converting)
        _check_field(source, reader.schema.names, options)
        row = 0
        for batch in reader:
            yield from _texts(batch.column(options.text_field), row, options)
            row += batch.num_rows
    except pyarrow.ArrowException as error:
        raise SourceError(f"{source.path!r} is not readable CSV: {error}", source=source.path) from error


def _parquet(source: Source, unit: Unit, options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.path) as file:
            _check_field(source, file.schema_arrow.names, options)
            row = sum(file.metadata.row_group(k).num_rows for k in range(unit.start))
            for batch in file.iter_batches(batch_size=1024, row_groups=[unit.start], columns=[options.text_field]):
                yield from _texts(batch.column(0), row, options)
                row += batch.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r}, row group {unit.start}: {error}", source=source.path) from error


def _check_field(source: Source, names: list[str], options: ReadOptions) -> None:
    if options.text_field not in names:
        raise SourceError(
            f"{source.path!r} has no column {options.text_field!r}; it has {', '.join(names[:12])}; choose one with --text-field",
            source=source.path,
        )


def _texts(column: Any, first: int, options: ReadOptions) -> Iterator[tuple[int, bytes | Bad]]:
    for place, text in enumerate(column.to_pylist()):
        if isinstance(text, str):
            yield first + place, text.encode()
        elif text is None:
            yield first + place, Bad(first + place, f"{options.text_field!r} is null", b"")
        else:
            yield (
                first + place,
                Bad(
                    first + place, f"{options.text_field!r} is {type(text).__name__}, expected text", str(text).encode()
                ),
            )
