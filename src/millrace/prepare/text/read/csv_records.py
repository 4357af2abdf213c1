"""Documents that are rows of CSV files, by Python's parser: a wrong row does not affect the others."""

from __future__ import annotations

import csv
import io
import json
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.records import Bad, Record, check_columns, row_record, too_long
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.read.streams import open_source, text_start

LINE_CHARS = 1 << 20  # a line may have, besides the longest document
SHOWN = 1024  # characters of a bad row in quarantine
TOO_LONG = "the line is too long"


def csv_records(source: Source, options: ReadOptions) -> Iterator[Record | Bad]:
    """The text column of a CSV file, row by row; the first row names the columns. Empty lines are skipped."""
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
            yield _record(source, place, cells, names, options)
        except Bad as bad:
            yield bad


def _rows(source: Source, options: ReadOptions) -> Iterator[tuple[int, list[str] | Bad]]:
    """(where it begins, cells) of every row, also of the names; a row that cannot be parsed is Bad."""
    with open_source(source, options) as file:
        lines = _CsvLines(source, file, options)
        parser = csv.reader(lines, strict=True)  # it goes on after an error
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


class _Line(NamedTuple):
    """A line, or the beginning of one that is too long; the rest of that was skipped."""

    text: str
    num_bytes: int
    is_long: bool = False


class _CsvLines:
    """The lines of a file; after a quote that was never closed, its lines are read again."""

    def __init__(self, source: Source, file: io.BufferedReader, options: ReadOptions) -> None:
        start = text_start(source, file.peek(3))
        self._source, self._options, self._limit = source, options, options.max_document + LINE_CHARS
        # Invalid utf-8 passes through: it matters in the text column alone.
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._first = 1  # line at which the current row begins
        self.start = start  # byte at which it begins
        self._row: list[_Line] = []
        self._again: deque[_Line] = deque()

    def __iter__(self) -> _CsvLines:
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else self._read_line()
        self._row.append(line)
        if line.is_long:
            raise csv.Error(TOO_LONG)
        return line.text

    def _read_line(self) -> _Line:
        text = self._text.readline(self._limit)
        if not text:
            raise StopIteration
        num_bytes, is_long, shown = _num_bytes(text), len(text) == self._limit, text[:SHOWN]
        if not is_long:
            return _Line(text, num_bytes)
        while text and not text.endswith("\n"):
            text = self._text.readline(self._limit)
            num_bytes += _num_bytes(text)
        return _Line(shown, num_bytes, is_long)

    def begin_row(self) -> None:
        """The next row begins after the current one."""
        self._first += len(self._row)
        self.start += sum(line.num_bytes for line in self._row)
        self._row.clear()

    def bad(self, error: csv.Error) -> Bad:
        """What is wrong with the current row. An open quote takes other lines into it; these are read again."""
        message, last = str(error), self._first + len(self._row) - 1
        is_open = "unexpected end" in message
        is_long = message == TOO_LONG or "field limit" in message
        if len(self._row) == 1 and not is_open:
            if not is_long:
                return Bad(self.start, f"not CSV: {error}, near line {last} of the file", self._shown(1))
            long = too_long(self._source, self.start, self._shown(1), self._options)
            if isinstance(long, Bad):
                return long
            raise long
        count = self._num_lines_to_quote(len(self._row) if is_open else len(self._row) - 1)
        line = self._first + count - 1
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
        bad = Bad(self.start, f"not CSV: {reason}", self._shown(count))
        self._again.extendleft(reversed(self._row[count:]))
        del self._row[count:]
        return bad

    def _num_lines_to_quote(self, stop: int) -> int:
        """Lines of the current row up to the one with the quote that is open after ``stop`` lines."""
        # Every line but the last ends within quotes: the last line with a quote opened them ("" is a character).
        return next((k for k in range(stop, 1, -1) if '"' in self._row[k - 1].text.replace('""', "")), 1)

    def _shown(self, stop: int) -> bytes:
        return "".join(line.text[:SHOWN] for line in self._row[:stop])[:SHOWN].encode(errors="surrogateescape")


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode(errors="surrogateescape"))


def _record(source: Source, place: int, cells: list[str] | Bad, names: list[str], options: ReadOptions) -> Record:
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
    return row_record(source, place, text, mask, options)
