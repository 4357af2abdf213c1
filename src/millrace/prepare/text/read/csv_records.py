"""Documents that are the rows of CSV files, by Python's own parser: a row that is wrong does not take others with it."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.records import Bad, Document, check_columns, row_document, too_long
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.read.streams import open_source

LINE_CHARS = 1 << 20  # of a line, besides the longest document
SHOWN = 1024  # characters of a row that cannot be read
TOO_LONG = "the line is too long"
MARK = b"\xef\xbb\xbf"


def csv_documents(source: Source, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text column of a CSV file, row by row, each with the byte it begins at; the first row names the columns.

    Empty lines are no rows.
    """
    csv.field_size_limit(max(csv.field_size_limit(), options.max_document))
    rows = _rows(source, options)
    names = next(rows, (0, None))[1]
    if isinstance(names, Bad):
        raise SourceError(f"{source.path!r} is not readable CSV: {names.reason}", source=source.path)
    if names is None:
        return
    check_columns(source, names, options)
    for place, cells in rows:
        try:
            yield place, _document(source, place, cells, names, options)
        except Bad as bad:
            yield place, bad


def _rows(source: Source, options: ReadOptions) -> Iterator[tuple[int, list[str] | Bad]]:
    """(where it begins, cells), that of the names among them; a row that cannot be parsed is Bad."""
    with open_source(source, options) as file:
        lines = _Lines(source, file, options)
        parser = csv.reader(lines, strict=True)  # which begins again after an error
        while True:
            lines.begin_row()
            try:
                cells: list[str] | Bad = next(parser)
            except StopIteration:
                return
            except csv.Error as error:
                cells = lines.bad(error)
            if cells or isinstance(cells, Bad):
                yield lines.start, cells


class _LongLine(str):
    """The beginning of a line that is too long, of which the rest was passed over."""

    num_bytes: int


class _Lines:
    """The lines of a file, of which those behind a quote that was left open are read again."""

    def __init__(self, source: Source, file: io.BufferedReader, options: ReadOptions) -> None:
        head = file.peek(3)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise SourceError(
                f"{source.path!r} looks like UTF-16; give --encoding utf-16", source=source.path, offset=0
            )
        self._source, self._options, self._limit = source, options, options.max_document + LINE_CHARS
        # Bytes that are no utf-8 pass through, so that they are found in the text column alone.
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._first = 1  # line of the row at hand
        self.start = len(MARK) if head.startswith(MARK) else 0  # bytes before it
        self._row: list[str] = []
        self._again: deque[str] = deque()

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._text.readline(self._limit)
        if not line:
            raise StopIteration
        if len(line) == self._limit:
            line = self._passed(line)
        self._row.append(line)
        if isinstance(line, _LongLine):
            raise csv.Error(TOO_LONG)
        return line

    def _passed(self, line: str) -> _LongLine:
        found = _LongLine(line[:SHOWN])
        found.num_bytes = _num_bytes(line)
        while line and not line.endswith("\n"):
            line = self._text.readline(self._limit)
            found.num_bytes += _num_bytes(line)
        return found

    def begin_row(self) -> None:
        """Behind the one at hand."""
        for line in self._row:
            self._first += 1
            self.start += _num_bytes(line)
        self._row.clear()

    def bad(self, error: csv.Error) -> Bad:
        """What is wrong with the row at hand, which ends where the quote was opened that took others into it."""
        said, last = str(error), self._first + len(self._row) - 1
        is_open = "unexpected end" in said
        is_long = said == TOO_LONG or "field limit" in said
        if len(self._row) == 1 and not is_open:
            if not is_long:
                return Bad(self.start, f"not CSV: {error}, near line {last} of the file", self._shown(1))
            long = too_long(self._source, self.start, self._shown(1), self._options)
            if isinstance(long, Bad):
                return long
            raise long
        opened = self._opened(len(self._row) if is_open else len(self._row) - 1)
        line = self._first + opened - 1
        if is_open:
            reason = f"a quote opened in line {line} is never closed"
        elif is_long:
            reason = f"a quote opened in line {line} is not closed within {self._options.max_document:,} bytes"
        else:
            reason = f"{error}, near line {last} of the file, in quotes opened in line {line}"
        if is_long and self._options.on_error == "stop":
            raise SourceError(
                f"{self._source.path!r}: the row at byte {self.start} is longer than {self._options.max_document:,} bytes: "
                f"a quote opened in line {line} is not closed by then; close it, raise --max-document, or go on with "
                "--on-error skip",
                source=self._source.path, offset=self.start,
            )  # fmt: skip
        found = Bad(self.start, f"not CSV: {reason}", self._shown(opened))
        self._again.extendleft(reversed(self._row[opened:]))
        del self._row[opened:]
        return found

    def _opened(self, stop: int) -> int:
        """How many lines of the row at hand end with that in which the quote was opened that is open after ``stop``."""
        # Every line that another follows ends within quotes: its own if it has any, but for two together, a character.
        return next((k for k in range(stop, 1, -1) if '"' in self._row[k - 1].replace('""', "")), 1)

    def _shown(self, stop: int) -> bytes:
        return "".join(line[:SHOWN] for line in self._row[:stop])[:SHOWN].encode(errors="surrogateescape")


def _num_bytes(line: str) -> int:
    if isinstance(line, _LongLine):
        return line.num_bytes
    return len(line) if line.isascii() else len(line.encode(errors="surrogateescape"))


def _document(source: Source, place: int, cells: list[str] | Bad, names: list[str], options: ReadOptions) -> bytes:
    if isinstance(cells, Bad):
        raise cells
    if len(cells) != len(names):
        data = ",".join(cells).encode(errors="surrogateescape")
        raise Bad(place, f"{len(cells)} fields where the first row has {len(names)}", data)
    text = cells[names.index(options.text_field)].encode(errors="surrogateescape")
    mask: Any = None
    if options.mask_field is not None:
        cell = cells[names.index(options.mask_field)]
        try:
            mask = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise Bad(place, f"bad mask ({options.mask_field!r}): not JSON: {error}", text) from None
    return row_document(source, place, text, mask, options)
