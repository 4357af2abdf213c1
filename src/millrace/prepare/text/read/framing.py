"""Reads the documents of one slice of a source, streaming, in source order.

Plain text is split into documents by its bytes, never by ``str.splitlines``, many documents at a time. A
document belongs to the slice in which it starts; the slice reads on past its end to finish it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Iterator
from typing import IO

import msgspec
import numpy as np

from millrace.errors import SourceError
from millrace.native import core
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.csv_records import csv_records
from millrace.prepare.text.read.records import Bad, Record, json_records, longer_record, parquet_records
from millrace.prepare.text.read.sources import Source, SourceSlice
from millrace.prepare.text.read.streams import MARK, open_source, text_start
from millrace.ragged import Array, Int64s
from millrace.text.documents import Documents

BLOCK = 1 << 19  # stays in the second cache with what is made of it: a tenth faster than twice as much


class Framing(msgspec.Struct, frozen=True):
    """What ends a document, and the gap before the next: line ends, possessive so that a run costs no memory."""

    end: re.Pattern[bytes]
    gap: re.Pattern[bytes]


BLANK_LINE = Framing(re.compile(rb"\n\r?\n"), re.compile(rb"\n*+(?:\r\n\n*+)*+"))
LINE = Framing(re.compile(rb"\n"), re.compile(rb"\n*+"))
LONGEST_END = 3
NEWLINE, CARRIAGE_RETURN = 10, 13


def read_documents(source: Source, piece: SourceSlice, options: ReadOptions) -> Generator[Record | Bad]:
    """Documents of a slice one by one, or what is wrong with one."""
    if source.format == "text":
        for offset, text in _each(read_chunks(source, piece, options)):
            yield Record(offset, text)
    else:
        yield from read_records(source, piece, options)


def read_records(source: Source, piece: SourceSlice, options: ReadOptions) -> Iterator[Record | Bad]:
    """The same of a file of records."""
    if source.problem is not None:
        yield Bad(0, f"the whole file: {source.problem}", b"")
    elif source.format == "parquet":
        yield from parquet_records(source, piece, options)
    elif source.format == "csv":
        yield from csv_records(source, options)
    else:
        with open_source(source, options, piece.seek) as file:
            yield from json_records(_each(_frame(source, file, piece, LINE, options)), options)


def read_chunks(source: Source, piece: SourceSlice, options: ReadOptions) -> Iterator[Documents]:
    """The documents of plain text, many at a time where they are short; a cut document comes piece by piece."""
    framing = BLANK_LINE if source.document == "blank-line" else LINE
    with open_source(source, options, piece.seek) as file:
        if source.document == "file":
            yield from _read_whole(source, file, options)
        else:
            yield from _frame(source, file, piece, framing, options)


def _each(chunks: Iterator[Documents]) -> Iterator[tuple[int, bytes]]:
    for chunk in chunks:
        yield from zip(chunk.offsets.tolist(), chunk, strict=True)


def _read_whole(source: Source, file: IO[bytes], options: ReadOptions) -> Iterator[Documents]:
    """A file as one document, or as pieces of one."""
    data = file.read(max(options.max_document + 1, len(MARK)))
    offset = text_start(source, data)
    data = data[offset:] + file.read(offset)
    begin, is_cut = offset, False
    while len(data) > options.max_document:
        cut, is_cut = _cut(source, offset, data, 0, options), True
        yield Documents.of([data[:cut]], [offset], None, begin)
        offset += cut
        data = data[cut:] + file.read(options.max_document + 1 - (len(data) - cut))
    yield Documents.of([data], [offset], None, begin if is_cut else None)


class _Window:
    """The part of a file in memory: read on at its end, dropped at its front."""

    def __init__(self, file: IO[bytes], base: int, options: ReadOptions) -> None:
        self._file, self._most = file, options.max_document
        self.base, self.data = base, b""
        if base:
            file.seek(base)

    def read_on(self, keep: int) -> bool:
        """Drops the bytes before ``keep`` and reads more; False at the end of the file."""
        rest, self.data = self.data[keep:], b""
        # Doubled, so that a long document is not copied again and again; at most as the longest may be.
        more = self._file.read(max(BLOCK, min(len(rest), self._most - len(rest))))
        self.base, self.data = self.base + keep, rest + more
        return bool(more)

    def next_start(self, framing: Framing, at: int) -> int:
        """Where the document after the one at ``at`` starts, however long that is; the end if there is none."""
        while (match := framing.end.search(self.data, at)) is None:
            if not self.read_on(max(at, len(self.data) - LONGEST_END)):
                return len(self.data)
            at = 0
        return self.skip(framing.gap, match.end())

    def skip(self, gap: re.Pattern[bytes], at: int) -> int:
        """Where the next document starts, or the end of the data if there is none."""
        while True:
            match = gap.match(self.data, at)
            assert match is not None  # a gap may be empty
            at = match.end()
            if self.data[at : at + 2] not in (b"", b"\r"):
                return at
            if not self.read_on(at):
                return 0
            at = 0


def _frame(
    source: Source, file: IO[bytes], piece: SourceSlice, framing: Framing, options: ReadOptions
) -> Iterator[Documents]:
    """Documents that start in [piece.start, piece.stop)."""
    stop = math.inf if piece.stop < 0 else piece.stop
    # The end of the document before is searched; a document also begins at the start of the file.
    base = piece.start - LONGEST_END if piece.start > LONGEST_END + len(MARK) else 0
    window = _Window(file, base, options)
    at = _first(source, window, piece.start, stop, framing)
    begin = None  # of a long document that is being cut
    while at < len(window.data) and (begin is not None or window.base + at < stop):
        if begin is None:
            # First all documents that are whole in memory; then, with care, one that may not be.
            starts, ends, at = _whole_documents(window.data, at, framing, stop - window.base, options.max_document)
            if len(starts):
                yield Documents(window.data, starts, ends, starts + window.base)
            if window.base + at >= stop:
                return
            if len(starts) and len(window.data) - at >= BLOCK:  # enough is in memory
                continue
            if len(starts):
                has_more, at = window.read_on(at), 0
                if has_more:
                    continue
        match, is_last = framing.end.search(window.data, at), False
        while match is None and not is_last and len(window.data) - at <= options.max_document + LONGEST_END:
            searched = max(0, len(window.data) - at - LONGEST_END)
            is_last, at = not window.read_on(at), 0
            match = framing.end.search(window.data, searched)
        end = len(window.data) if match is None else match.start()
        if framing is BLANK_LINE and (match is not None or is_last):
            end = _without_line_end(window.data, at, end, is_last=match is None)
        is_long = end - at > options.max_document
        if is_long and source.format == "jsonl" and options.on_error != "stop":
            # One byte too many shows that it is too long; the rest of the line is skipped.
            yield _one(window, at, at + options.max_document + 1)
            at = window.next_start(framing, at)
            continue
        if is_long:
            begin = window.base + at if begin is None else begin
            end = _cut(source, window.base + at, window.data, at, options)
        yield _one(window, at, end, begin)
        if is_long:
            at = end
        elif match is None:
            return
        else:
            at, begin = window.skip(framing.gap, match.end()), None


def _one(window: _Window, start: int, end: int, piece_of: int | None = None) -> Documents:
    return Documents.of([window.data[start:end]], [window.base + start], None, piece_of)


def _whole_documents(data: bytes, at: int, framing: Framing, stop: float, most: int) -> tuple[Int64s, Int64s, int]:
    """Documents from ``at`` on that another one follows in the data, and where that starts.

    They end before the first that starts at ``stop`` or later, or is longer than ``most``. Looks at one
    block at most: the places of line ends may need eight times the memory of the text.
    """
    text = np.frombuffer(data, np.uint8)[at : at + BLOCK]
    is_plain = framing is BLANK_LINE and data.find(b"\r", at, at + BLOCK) < 0
    starts, ends = between_gaps(text) if is_plain else _by_lines(text, framing)
    starts, ends = starts + at, ends + at
    whole = max(0, len(starts) - 1)
    starts, ends, after = starts[:whole], ends[:whole], starts[1:]
    is_other = (starts >= stop) | (ends - starts > most)
    whole = int(np.argmax(is_other)) if is_other.any() else whole
    return starts[:whole], ends[:whole], int(after[whole - 1]) if whole else at


def _by_lines(text: Array, framing: Framing) -> tuple[Int64s, Int64s]:
    """Where documents start, the first at 0, and where they end; the end of the last may be unknown."""
    ends = np.flatnonzero(text == NEWLINE)  # of whole lines
    if not len(ends):
        return ends, ends
    starts = np.concatenate(([0], ends[:-1] + 1))
    if framing is LINE:
        is_full = ends > starts
        return starts[is_full], ends[is_full]
    is_full = (ends > starts + 1) | ((ends > starts) & (text[starts] != CARRIAGE_RETURN))
    is_first = is_full & ~np.concatenate(([False], is_full[:-1]))  # of lines that are not empty
    starts, ends = starts[is_first], ends[:-1][is_full[:-1] & ~is_full[1:]]
    return starts, ends - (text[ends - 1] == CARRIAGE_RETURN)


def between_gaps_core(text: Array) -> tuple[Int64s, Int64s]:
    starts, ends = core.between_gaps(text)
    return np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64)


def between_gaps_numpy(text: Array) -> tuple[Int64s, Int64s]:
    pairs = np.flatnonzero((text[1:] == NEWLINE) & (text[:-1] == NEWLINE))
    is_apart = np.diff(pairs) > 1  # from the next; else both are in one gap
    ends = pairs[np.concatenate(([True], is_apart))[: len(pairs)]]
    starts = np.concatenate(([0], pairs[np.concatenate((is_apart, [True]))[: len(pairs)]] + 2))
    return (starts[:-1] if starts[-1] == len(text) else starts), ends


# The same of documents between empty lines without carriage returns, in a fraction of the time.
between_gaps = between_gaps_core if core else between_gaps_numpy


def _without_line_end(data: bytes, at: int, end: int, is_last: bool) -> int:
    """The end of a document without its last line end, which the last document of a file may have."""
    if is_last and not data.endswith(b"\n", at, end):
        return end
    end -= is_last
    return end - data.endswith(b"\r", at, end)


def _first(source: Source, window: _Window, start: int, stop: float, framing: Framing) -> int:
    """The place in the window of the first document from ``start`` on; its end if none starts before ``stop``."""
    at = 0
    if window.base == 0:
        while window.read_on(0) and len(window.data) < len(MARK):
            pass
        at = window.skip(framing.gap, text_start(source, window.data))
        if window.base + at >= start:
            return at
    while window.base + at < stop:
        match = framing.end.search(window.data, at)
        if match is not None:
            at = window.skip(framing.gap, match.end())
            if window.base + at >= start:
                return at
        elif window.read_on(max(at, len(window.data) - LONGEST_END)):
            at = 0
        else:
            break
    return len(window.data)


def _cut(source: Source, offset: int, data: bytes, at: int, options: ReadOptions) -> int:
    """Where to cut a document that is too long: between characters."""
    if options.long_documents != "split" or source.format != "text" or source.is_page:
        cut_such = "cut such documents with --long-documents split"
        plain = f"raise --max-document, or {'leave the file out: a page is never cut' if source.is_page else cut_such}"
        raise SourceError(
            f"{source.path!r}: the document at byte {offset} is longer than {options.max_document:,} bytes; "
            f"{plain if source.format == 'text' else longer_record(options)}",
            source=source.path, offset=offset,
        )  # fmt: skip
    cut = at + options.max_document
    for earlier in range(cut, max(at, cut - 4), -1):
        if data[earlier] & 0xC0 != 0x80:  # not the inside of a character
            return earlier
    return cut
