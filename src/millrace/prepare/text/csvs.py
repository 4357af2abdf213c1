"""Documents that are the rows of CSV files, by Python's own parser: a row that is wrong does not take others with it."""

from __future__ import annotations

import contextlib
import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.records import Bad, Document, check_columns, row_document, too_long
from millrace.prepare.text.sources import Source
from millrace.prepare.text.streams import open_source

LINE_CHARS = 1 << 20  # of a line, besides the longest document
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
    after = 0
    while after >= 0:
        with open_source(source, options) as file:
            lines = _Lines(source, file, options, after)
            parser, after = csv.reader(lines, strict=True), -1
            while after < 0:
                lines.begin_row()
                try:
                    cells: list[str] | Bad = next(parser)
                except StopIteration:
                    break
                except csv.Error as error:
                    cells = lines.bad(error)
                    if lines.is_open(error):
                        after = lines.opened  # it took the rest of the file with it, which is read again from there
                if cells or isinstance(cells, Bad):
                    yield lines.start, cells


class _Lines:
    """The lines of a file behind the first ``after``, and where in the row at hand a quote was last left open."""

    def __init__(self, source: Source, file: io.BufferedReader, options: ReadOptions, after: int) -> None:
        head = file.peek(3)
        if head.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise SourceError(
                f"{source.path!r} looks like UTF-16; convert it: iconv -f utf-16 -t utf-8", source=source.path, offset=0
            )
        self._source, self._options, self._limit = source, options, options.max_document + LINE_CHARS
        # Bytes that are no utf-8 pass through, so that they are found in the text column alone.
        self._text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        self._number = self._first = self.opened = 0
        self._at = self.start = (
            len(MARK) if head.startswith(MARK) else 0
        )  # bytes read, and those before the row at hand
        self._opening = ""
        while self._number < after:
            with contextlib.suppress(csv.Error):  # a long line, told already
                next(self)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = self._text.readline(self._limit)
        if not line:
            raise StopIteration
        self._number += 1
        self._pass(line)
        if line.count('"') & 1 or self._number == self._first:
            self.opened, self._opening = self._number, line
        if len(line) == self._limit:
            while line and not line.endswith("\n"):
                line = self._text.readline(self._limit)
                self._pass(line)
            raise csv.Error(TOO_LONG)
        return line

    def _pass(self, line: str) -> None:
        self._at += len(line) if line.isascii() else len(line.encode(errors="surrogateescape"))

    def begin_row(self) -> None:
        self._first, self.start = self._number + 1, self._at

    def is_open(self, error: csv.Error) -> bool:
        """Whether the file ended within quotes."""
        return "unexpected end" in str(error)

    def bad(self, error: csv.Error) -> Bad:
        data = self._opening[:1024].encode(errors="surrogateescape")
        if self.is_open(error):
            return Bad(self.start, f"not CSV: a quote opened in line {self.opened} is never closed", data)
        if "field limit" not in str(error) and str(error) != TOO_LONG:
            return Bad(self.start, f"not CSV: {error}, near line {self._number} of the file", data)
        if self._number > self._first:  # where the row would go on nobody knows
            raise SourceError(
                f"{self._source.path!r}: the row at byte {self.start} is longer than {self._options.max_document:,} bytes: a quote "
                f"opened in line {self.opened} is not closed by then; close it, or raise --max-document",
                source=self._source.path, offset=self.start,
            )  # fmt: skip
        long = too_long(self._source, self.start, data, self._options)
        if isinstance(long, Bad):
            return long
        raise long


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
