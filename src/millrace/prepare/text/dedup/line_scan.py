"""The first pass of deduplication by lines: hashes of all lines of the corpus, and a mask of the repeats.

Each part is read once for the hashes of its lines (``lines/KEY.bin``, 16 bytes per line). When all are
compared, it is read again and tokenised without its repeats (``lines/repeats-KEY.bin``, one byte per line).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from millrace.identity import digest
from millrace.prepare.spill import Spill, map_array
from millrace.prepare.text.dedup.lines import HASH_BYTES, as_keys, line_hashes
from millrace.prepare.text.dedup.repeats import find_repeats
from millrace.prepare.text.part import PartTask
from millrace.prepare.text.read.reader import DocumentReader
from millrace.prepare.text.recipe import TextBase
from millrace.prepare.text.shards.columns import LINES
from millrace.ragged import Array
from millrace.store import platform

STEP = 1 << 20  # lines at a time


def scan_part(task: PartTask) -> int:
    """Writes the hashes of a part's lines, unless they are there; returns their number."""
    path = lines_path(task.folder, task.key)
    if read_sealed(path) is None:
        aside = platform.attempt_name(path)
        with platform.writing(path):
            with contextlib.closing(Spill(aside)) as spill:
                reader = DocumentReader(task.options, lambda line: None, task.folder)  # the second pass quarantines
                for _, documents in reader.chunks(task.part, task.sources):
                    for text in documents:
                        spill.write_bytes(line_hashes(text))
                seal(spill)
            platform.rename(aside, path)
    return path.stat().st_size // HASH_BYTES - 1


def seal(spill: Spill) -> None:
    """Ends a file with the hash of its contents."""
    spill.write_bytes(spill.hash.encode())
    spill.finish()


def read_sealed(path: Path) -> Array | None:
    """The contents of a file before its hash; None where the file is not whole or was changed."""
    if not path.exists() or path.stat().st_size < HASH_BYTES:
        return None
    data = map_array(path, np.uint8)
    found = xxhash.xxh3_64_hexdigest(data[:-HASH_BYTES].data).encode()
    return data[:-HASH_BYTES] if found == data[-HASH_BYTES:].tobytes() else None


def lines_path(folder: str | Path, key: str) -> Path:
    return Path(folder) / "lines" / f"{key}.bin"


def with_repeats(
    folder: Path, tasks: Sequence[PartTask], counts: Sequence[int], existing: TextBase | None
) -> list[PartTask]:
    """The tasks with the repeated lines of their parts, also repeats of lines that the store has."""
    known: Iterable[Array] = () if existing is None else existing.documents("line")
    num_known = 0 if existing is None else existing.manifest.totals.rows.get(LINES, 0)
    base = "" if existing is None else existing.manifest.fingerprint
    name = f"lines/repeats-{digest(base, *(task.key for task in tasks))}.bin"
    mark_repeats(folder / name, [lines_path(folder, task.key) for task in tasks], counts, known, num_known)
    repeats, found, end = map_array(folder / name, np.uint8), [], 0
    for task, count in zip(tasks, counts, strict=True):
        first, end = end, end + count
        # With other repeats it would be another part.
        key = digest(task.key, xxhash.xxh3_128_digest(repeats[first:end].data))
        found.append(msgspec.structs.replace(task, key=key, lines=(name, first, end)))
    return found


def mark_repeats(
    path: Path, paths: Sequence[Path], counts: Sequence[int], known: Iterable[Array], num_known: int
) -> None:
    """Writes the mask over all lines; lines ``known`` from the store that is appended to come first."""
    if read_sealed(path) is not None:
        return

    def keys() -> Iterator[tuple[Array, Array]]:
        for hashes in known:
            for start in range(0, len(hashes), STEP):
                some = hashes[start : start + STEP]
                yield some, np.full(len(some), -1, np.int64)
        first = 0
        for place, count in zip(paths, counts, strict=True):
            hashes = as_keys(map_array(place, np.uint8))[:-1]
            for start in range(0, count, STEP):
                some = hashes[start : start + STEP]
                yield some, np.arange(first + start, first + start + len(some))
            first += count

    repeats = find_repeats(keys(), sum(counts) + num_known, sum(counts), path.parent.parent / "partitions")
    aside = path.with_name(path.name + ".tmp")
    platform.remove(aside)
    with contextlib.closing(Spill(aside)) as spill:
        for start in range(0, len(repeats), 16 * STEP):
            spill.write(repeats[start : start + 16 * STEP])
        seal(spill)
    platform.rename(aside, path)
    platform.sync_dir(path.parent)
