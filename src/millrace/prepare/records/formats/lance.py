"""Lance tables, read as Arrow batches."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import xxhash

from millrace.prepare.records.formats.arrow_columns import batch_chunks, free_lengths, outline_columns, top_names
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Format, Outline, Reading, Source, need, unreadable
from millrace.prepare.records.options import RecordOptions


class Lance(Format):
    """Tables of Lance, the newest version."""

    name = "lance"
    endings = (".lance",)
    expected = "Lance tables"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """The tables that the data files belong to."""
        groups: dict[str, list[Source]] = {}
        for file in files:
            if os.path.basename(os.path.dirname(file.location)) != "data":
                continue  # of an index
            groups.setdefault(os.path.dirname(os.path.dirname(file.location)), []).append(file)
        found = []
        for table, mine in groups.items():
            identity = xxhash.xxh3_128("".join(file.ends for file in mine).encode())
            for version in sorted(os.listdir(os.path.join(table, "_versions"))):
                identity.update(os.fsencode(version))
            first = mine[0]
            path = os.path.dirname(os.path.dirname(first.path))
            status = os.stat(table)
            found.append(
                msgspec.structs.replace(
                    first,
                    path=path,
                    location=table,
                    ends=identity.hexdigest(),
                    size=status.st_size,
                    mtime_ns=status.st_mtime_ns,
                )
            )
        return found, []

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        table = _open(source)
        count = table.count_rows()
        if not count:
            return Outline({}, [])
        names = table.schema.names
        if options.columns is not None:
            names = [
                name for name in names if any(own == name or own.startswith(f"{name}.") for own in options.columns)
            ]
        head = table.to_table(columns=names, limit=SAMPLE).combine_chunks().to_batches()[0]
        total = head.nbytes * count // len(head)
        num_pieces = min(count, max(1, -(-total // options.part_bytes)))
        edges = [k * count // num_pieces for k in range(num_pieces + 1)]
        pieces = [(a, b, max(1, total * (b - a) // count)) for a, b in pairwise(edges)]
        return Outline(outline_columns(head.schema, options.columns), pieces, free_lengths(head))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        table = _open(source)
        names = top_names(table.schema.names, reading.wanted)
        batches = table.to_batches(columns=names, offset=start, limit=stop - start, batch_size=8192)
        yield from batch_chunks(_named(batches, source), start, source.path, reading)


def _open(source: Source) -> Any:
    lance = need("lance", "lance", "Lance")
    try:
        return lance.dataset(source.location)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreadable(source, "Lance", error) from error


def _named(batches: Iterator[Any], source: Source) -> Iterator[Any]:
    try:
        yield from batches
    except (OSError, ValueError, RuntimeError) as error:
        raise unreadable(source, "Lance", error) from error
