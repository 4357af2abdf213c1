"""Documents that are the rows of CSV files, by Python's own parser: a row that is wrong does not take others with it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.records import Bad, Document, check_columns, row_document
from millrace.prepare.text.sources import Source
from millrace.prepare.text.streams import open_source

LINE_CHARS = 1 << 20  # of a line, besides the longest document


def csv_documents(source: Source, options: ReadOptions) -> Iterator[tuple[int, Document]]:
    """The text column of a CSV file, row by row; the first row names the columns, empty lines are no rows."""
    csv.field_size_limit(max(csv.field_size_limit(), options.max_document))
    with open_source(source, options) as file:
        if file.peek(3).startswith((b"\xff\xfe", b"\xfe\xff")):
            raise SourceError(
                f"{source.path!r} looks like UTF-16; convert it: iconv -f utf-16 -t utf-8", source=source.path, offset=0
            )
        # Bytes that are no utf-8 pass through, so that they are found in the text column alone.
        text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
        rows = _rows(source, text, options)
        names = next(rows, (0, None))[1]
        if isinstance(names, Bad):
            raise SourceError(f"{source.path!r} is not readable CSV: {names.reason}", source=source.path)
        if names is None:
            return
        check_columns(source, names, options)
        for row, cells in rows:
            try:
                yield row, _document(source, row, cells, names, options)
            except Bad as bad:
                yield row, bad


def _rows(source: Source, text: io.TextIOWrapper, options: ReadOptions) -> Iterator[tuple[int, list[str] | Bad]]:
    """(number, cells), the names being row -1; a row that cannot be parsed is Bad."""
    row = -1
    parser = csv.reader(_lines(source, text, options), strict=True)
    while True:
        try:
            cells: list[str] | Bad = next(parser)
        except StopIteration:
            return
        except csv.Error as error:
            if "field limit" in str(error):
                raise SourceError(
                    f"{source.path!r}: row {row} is longer than {options.max_document} bytes, or a quote in it is not "
                    "closed; raise --max-document",
                    source=source.path, row=row,
                ) from error  # fmt: skip
            cells = Bad(row, f"not CSV: {error}, near line {parser.line_num} of the file", b"")
        if cells or isinstance(cells, Bad):
            yield row, cells
            row += 1


def _lines(source: Source, text: io.TextIOWrapper, options: ReadOptions) -> Iterator[str]:
    limit = options.max_document + LINE_CHARS
    number = 0
    while line := text.readline(limit):
        number += 1
        if len(line) == limit:
            raise SourceError(
                f"{source.path!r}: line {number} is longer than {options.max_document} bytes; raise --max-document",
                source=source.path,
            )
        yield line


def _document(source: Source, row: int, cells: list[str] | Bad, names: list[str], options: ReadOptions) -> bytes:
    if isinstance(cells, Bad):
        raise cells
    if len(cells) != len(names):
        data = ",".join(cells).encode(errors="surrogateescape")
        raise Bad(row, f"{len(cells)} fields where the first row has {len(names)}", data)
    text = cells[names.index(options.text_field)].encode(errors="surrogateescape")
    mask: Any = None
    if options.mask_field is not None:
        cell = cells[names.index(options.mask_field)]
        try:
            mask = json.loads(cell)
        except (ValueError, RecursionError) as error:
            raise Bad(row, f"bad mask ({options.mask_field!r}): not JSON: {error}", text) from None
    return row_document(source, row, text, mask, options)
