"""Parquet: row groups are read on their own."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from millrace.errors import SourceError
from millrace.prepare.inflate import max_bytes
from millrace.prepare.records.formats.arrow_columns import (
    arrow,
    arrow_errors,
    asked_schema,
    batch_chunks,
    free_lengths,
    outline_columns,
    top_names,
)  # fmt: skip
from millrace.prepare.records.formats.arrow_files import class_labels, plain_batch, plain_schema
from millrace.prepare.records.formats.format import (
    CHUNK_BYTES,
    SAMPLE,
    Chunk,
    Format,
    Outline,
    Reading,
    Source,
    need,
    unreadable,
)
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import parquet_footer

FREE_GROUP = 256 << 20  # bytes that any row group may grow to, however small it is


class Parquet(Format):
    """Tables with list columns, in Parquet."""

    name = "parquet"
    endings = (".parquet", ".pq")
    expected = "Parquet"

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        with _opened(source) as file:
            metadata, schema = file.metadata, file.schema_arrow
            groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
            for k, group in enumerate(groups):
                if group.total_byte_size > max(FREE_GROUP, max_bytes(source, options.max_ratio)):
                    raise SourceError(
                        f"{source.path!r}: row group {k} expands to {group.total_byte_size:,} bytes; if that is right, raise "
                        "--max-ratio",
                        source=source.path,
                    )
            pieces = [(k, k + 1, group.total_byte_size) for k, group in enumerate(groups) if group.num_rows]
            schema = plain_schema(asked_schema(schema, options.columns))
            lists = [field.name for field in schema if "list" in str(field.type)]
            batches = file.iter_batches(SAMPLE, columns=lists) if pieces and lists else iter(())
            head = next(_named(batches, file, range(len(groups)), lists, source), None)
            lengths = {} if head is None else free_lengths(head)
        return Outline(outline_columns(schema, options.columns), pieces, lengths, class_labels(schema))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        with _opened(source, is_known=True) as file:
            first = int(parquet_footer(source)[1][start])
            groups = [file.metadata.row_group(k) for k in range(start, stop)]
            each = max(1, sum(group.total_byte_size for group in groups) // max(1, sum(g.num_rows for g in groups)))
            names = top_names(file.schema_arrow.names, reading.wanted)
            rows = max(1, min(CHUNK_BYTES // each, 1 << 20))
            batches = file.iter_batches(rows, row_groups=list(range(start, stop)), columns=names)
            plain = map(plain_batch, _named(batches, file, range(start, stop), names, source))
            yield from batch_chunks(plain, first, source.path, reading)


def _named(
    batches: Iterator[Any], file: Any, groups: Sequence[int], names: Sequence[str], source: Source
) -> Iterator[Any]:
    """Batches, with the file, the row group and the column in errors that come while they are read."""
    problems = (arrow().ArrowException, OSError)  # named before: a reader may be closed as Python ends
    try:
        yield from batches
    except problems as error:
        places = ((group, name) for group in groups for name in names)
        found = next((place for place in places if _is_damaged(file, *place)), None)
        where = "" if found is None else f" in row group {found[0]}, column {found[1]!r}"
        raise unreadable(source, f"Parquet{where}", error) from error


def _is_damaged(file: Any, group: int, name: str) -> bool:
    """Whether a column alone cannot be read; batch by batch, since a page may claim any number of rows."""
    try:
        for _ in file.iter_batches(1 << 14, row_groups=[group], columns=[name]):
            pass
    except (arrow().ArrowException, OSError):
        return True
    return False


@contextmanager
def _opened(source: Source, *, is_known: bool = False) -> Iterator[Any]:
    """``is_known``: it was outlined, so its footer may be one of an earlier slice."""
    parquet, pyarrow = need("pyarrow.parquet", "table", "Parquet"), arrow()
    location = os.fsencode(source.location)
    with arrow_errors(source, "Parquet"):
        footer = parquet_footer(source)[0] if is_known else None
        with (
            pyarrow.OSFile(location) as native,
            parquet.ParquetFile(native, metadata=footer, page_checksum_verification=True) as file,
        ):
            yield file
