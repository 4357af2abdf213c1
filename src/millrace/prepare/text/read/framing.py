"""Reads the documents of one unit, streaming: (offset, bytes) in source order.

Plain text is framed on bytes, never by ``str.splitlines``, a stretch of many documents at a time. A document belongs
to the slice in which it starts; the slice reads on past its end to finish it.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Generator, Iterator, MutableSequence
from typing import IO, NamedTuple

import msgspec
import numpy as np

from millrace.errors import SourceError
from millrace.native import core
from millrace.prepare.text.clean.cut_documents import Piece
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.csv_records import csv_documents
from millrace.prepare.text.read.records import Bad, Document, json_documents, longer_record, parquet_documents
from millrace.prepare.text.read.sources import Source, Unit
from millrace.prepare.text.read.streams import open_source
from millrace.ragged import Array, Int64s

__all__ = ["Bad", "Stretch", "read_documents", "read_stretches"]

BLOCK = 1 << 19  # with what is made of it, it stays in the second cache: a tenth faster than twice as much
MARK = b"\xef\xbb\xbf"
UTF16 = (b"\xff\xfe", b"\xfe\xff")


class Framing(msgspec.Struct, frozen=True):
    """What ends a document, and what may stand before the next: line ends, possessive so that a run costs no memory."""

    end: re.Pattern[bytes]
    gap: re.Pattern[bytes]


BLANK_LINE = Framing(re.compile(rb"\n\r?\n"), re.compile(rb"\n*+(?:\r\n\n*+)*+"))
LINE = Framing(re.compile(rb"\n"), re.compile(rb"\n*+"))
LONGEST_END = 3
NEWLINE, CARRIAGE_RETURN = 10, 13


class Stretch(NamedTuple):
    """Documents of a plain file one behind the other: document k is ``data[starts[k] : ends[k]]``, between them line ends.

    ``data[0]`` stands at ``base`` in the source.
    """

    data: bytes
    base: int
    starts: Int64s
    ends: Int64s
    document: int = -1  # where a long one began, of which this is a piece

    def offsets(self) -> MutableSequence[int]:
        """Where the documents stand in the source."""
        places = array("q", (self.base + self.starts).tobytes())
        return places if self.document < 0 else [Piece(place, self.document) for place in places]

    def documents(self) -> list[bytes]:
        data = self.data
        if core:
            found: list[bytes] = core.documents(data, self.starts, self.ends)
            return found
        return [data[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]


def read_documents(source: Source, unit: Unit, options: ReadOptions) -> Generator[tuple[int, Document]]:
    """Documents of a unit, or what is wrong with one."""
    if source.problem is not None:
        yield 0, Bad(0, f"the whole file: {source.problem}", b"")
    elif source.format == "parquet":
        yield from parquet_documents(source, unit, options)
    elif source.format == "csv":
        yield from csv_documents(source, options)
    elif source.format == "jsonl":
        with open_source(source, options, unit.seek) as file:
            yield from json_documents(_each(_framed(source, file, unit, LINE, options)), options)
    elif source.is_framed:
        yield from _each(read_stretches(source, unit, options))
    else:
        with open_source(source, options) as file:
            yield from _whole(source, file, options)


def read_stretches(source: Source, unit: Unit, options: ReadOptions) -> Iterator[Stretch]:
    """The same many at a time, of plain text framed by lines or blank lines."""
    framing = BLANK_LINE if source.document == "blank-line" else LINE
    with open_source(source, options, unit.seek) as file:
        yield from _framed(source, file, unit, framing, options)


def _each(stretches: Iterator[Stretch]) -> Iterator[tuple[int, bytes]]:
    for stretch in stretches:
        yield from zip(stretch.offsets(), stretch.documents(), strict=True)


def _whole(source: Source, file: IO[bytes], options: ReadOptions) -> Iterator[tuple[int, bytes]]:
    data = file.read(max(options.max_document + 1, len(MARK)))
    offset = _start(source, data)
    data = data[offset:] + file.read(offset)
    begin, is_cut = offset, False
    while len(data) > options.max_document:
        cut, is_cut = _cut(source, offset, data, 0, options), True
        yield Piece(offset, begin), data[:cut]
        offset += cut
        data = data[cut:] + file.read(options.max_document + 1 - (len(data) - cut))
    yield Piece(offset, begin) if is_cut else offset, data


def _start(source: Source, head: bytes) -> int:
    """Where the text of a file starts: behind its byte order mark."""
    if head.startswith(UTF16):
        raise SourceError(f"{source.path!r} looks like UTF-16; give --encoding utf-16", source=source.path, offset=0)
    return len(MARK) if head.startswith(MARK) else 0


class _Window:
    """The stretch of a file in hand: read on at its end, dropped at its front."""

    def __init__(self, file: IO[bytes], base: int, options: ReadOptions) -> None:
        self._file, self._most = file, options.max_document
        self.base, self.data = base, b""
        if base:
            file.seek(base)

    def read_on(self, keep: int) -> bool:
        """Drops what stands before ``keep`` and reads more; False at the end of the file."""
        kept, self.data = self.data[keep:], b""
        # Twice as much as there is, so that a long document is not copied again and again; no more than the longest may have.
        more = self._file.read(max(BLOCK, min(len(kept), self._most - len(kept))))
        self.base, self.data = self.base + keep, kept + more
        return bool(more)

    def behind(self, framing: Framing, at: int) -> int:
        """Where the next document starts behind the one at ``at``, however long that is; the end where there is none."""
        while (match := framing.end.search(self.data, at)) is None:
            if not self.read_on(max(at, len(self.data) - LONGEST_END)):
                return len(self.data)
            at = 0
        return self.skip(framing.gap, match.end())

    def skip(self, gap: re.Pattern[bytes], at: int) -> int:
        """Where the next document starts, or the end of the data where there is none."""
        while True:
            at = _end(gap, self.data, at)
            if self.data[at : at + 2] not in (b"", b"\r"):
                return at
            if not self.read_on(at):
                return 0
            at = 0


def _end(gap: re.Pattern[bytes], data: bytes, at: int) -> int:
    match = gap.match(data, at)
    assert match is not None
    return match.end()


def _framed(source: Source, file: IO[bytes], unit: Unit, framing: Framing, options: ReadOptions) -> Iterator[Stretch]:
    """Documents that start in [unit.start, unit.stop)."""
    stop = math.inf if unit.stop < 0 else unit.stop
    # What ends the document before is looked for; near its mark the file itself begins one.
    base = unit.start - LONGEST_END if unit.start > LONGEST_END + len(MARK) else 0
    window = _Window(file, base, options)
    at = _first(source, window, unit.start, stop, framing)
    begun = -1  # where a long document began, which is cut, wherever it goes on
    while at < len(window.data) and (begun >= 0 or window.base + at < stop):
        if begun < 0:
            # Documents that are in hand with what follows them, at once; then one that may not be, with care.
            starts, ends, at = _in_hand(window.data, at, framing, stop - window.base, options.max_document)
            if len(starts):
                yield Stretch(window.data, window.base, starts, ends)
            if window.base + at >= stop:
                return
            if len(starts) and len(window.data) - at >= BLOCK:  # enough is in hand
                continue
            if len(starts):
                has_more, at = window.read_on(at), 0
                if has_more:
                    continue
        match, is_last = framing.end.search(window.data, at), False
        while match is None and not is_last and len(window.data) - at <= options.max_document + LONGEST_END:
            seen = max(0, len(window.data) - at - LONGEST_END)
            is_last, at = not window.read_on(at), 0
            match = framing.end.search(window.data, seen)
        end = len(window.data) if match is None else match.start()
        if framing is BLANK_LINE and (match is not None or is_last):
            end = _without_line_end(window.data, at, end, is_last=match is None)
        is_long = end - at > options.max_document
        if is_long and source.format == "jsonl" and options.on_error != "stop":
            # As much as shows that it is too long; the rest of the line is passed over.
            yield Stretch(window.data, window.base, np.array([at]), np.array([at + options.max_document + 1]))
            at = window.behind(framing, at)
            continue
        if is_long:
            begun = window.base + at if begun < 0 else begun
            end = _cut(source, window.base + at, window.data, at, options)
        yield Stretch(window.data, window.base, np.array([at]), np.array([end]), begun)
        if is_long:
            at = end
        elif match is None:
            return
        else:
            at, begun = window.skip(framing.gap, match.end()), -1


def _in_hand(data: bytes, at: int, framing: Framing, stop: float, most: int) -> tuple[Int64s, Int64s, int]:
    """Documents from the one at ``at`` on that the next one follows in the data, and where that starts.

    The first that starts at ``stop`` or later, or is longer than ``most``, is not among them. Looks at no more than a
    block: the places of all line ends need eight times the memory of a text that has nothing else.
    """
    text = np.frombuffer(data, np.uint8)[at : at + BLOCK]
    is_plain = framing is BLANK_LINE and data.find(b"\r", at, at + BLOCK) < 0
    starts, ends = _between_gaps(text) if is_plain else _by_lines(text, framing)
    starts, ends = starts + at, ends + at
    whole = max(0, len(starts) - 1)
    starts, ends, after = starts[:whole], ends[:whole], starts[1:]
    is_other = (starts >= stop) | (ends - starts > most)
    whole = int(np.argmax(is_other)) if is_other.any() else whole
    return starts[:whole], ends[:whole], int(after[whole - 1]) if whole else at


def _by_lines(text: Array, framing: Framing) -> tuple[Int64s, Int64s]:
    """Where documents start, the first at 0, and where they end; of the last the end may not be known."""
    ends = np.flatnonzero(text == NEWLINE)  # of whole lines
    if not len(ends):
        return ends, ends
    starts = np.concatenate(([0], ends[:-1] + 1))
    if framing is LINE:
        is_full = ends > starts
        return starts[is_full], ends[is_full]
    is_full = (ends > starts + 1) | ((ends > starts) & (text[starts] != CARRIAGE_RETURN))
    is_first = is_full & ~np.concatenate(([False], is_full[:-1]))  # of a run of lines that are not empty
    starts, ends = starts[is_first], ends[:-1][is_full[:-1] & ~is_full[1:]]
    return starts, ends - (text[ends - 1] == CARRIAGE_RETURN)


def _between_gaps(text: Array) -> tuple[Int64s, Int64s]:
    """The same of documents between empty lines, where there is no carriage return, in a fraction of the time."""
    if core:
        places = core.between_gaps(text)
        return np.frombuffer(places[0], np.int64), np.frombuffer(places[1], np.int64)
    return _between_pairs(text)


def _between_pairs(text: Array) -> tuple[Int64s, Int64s]:
    """The twin of the core's."""
    pairs = np.flatnonzero((text[1:] == NEWLINE) & (text[:-1] == NEWLINE))
    is_apart = np.diff(pairs) > 1  # from the next; else both are of one gap
    ends = pairs[np.concatenate(([True], is_apart))[: len(pairs)]]
    starts = np.concatenate(([0], pairs[np.concatenate((is_apart, [True]))[: len(pairs)]] + 2))
    return (starts[:-1] if starts[-1] == len(text) else starts), ends


def _without_line_end(data: bytes, at: int, end: int, is_last: bool) -> int:
    """The end of a document less that of its last line, which the last document of a file may have."""
    if is_last and not data.endswith(b"\n", at, end):
        return end
    end -= is_last
    return end - data.endswith(b"\r", at, end)


def _first(source: Source, window: _Window, start: int, stop: float, framing: Framing) -> int:
    """The first document at or after ``start``, as a place in the window; its end where none starts before ``stop``."""
    at = 0
    if window.base == 0:
        while window.read_on(0) and len(window.data) < len(MARK):
            pass
        at = window.skip(framing.gap, _start(source, window.data))
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
    """Where a document that is too long is cut: between characters."""
    if options.long_documents != "split" or source.format != "text" or source.is_page:
        split = (
            "leave the file out: a page is never cut"
            if source.is_page
            else "cut such documents with --long-documents split"
        )
        plain = f"raise --max-document, or {split}"
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
