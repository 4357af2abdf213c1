"""Before lines are deduplicated: the hashes of all lines of the corpus, and a mask of those that are repeats.

Each part is read once for the hashes of its lines (``lines/KEY.bin``, 16 bytes per line) and, when all are compared,
once more to be tokenised without its repeats (``lines/repeats-KEY.bin``, one byte per line of the corpus).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from millrace.identity import digest
from millrace.prepare.spill import Spill, mapped
from millrace.prepare.text.dedup.lines import HASH_BYTES, as_keys, line_hashes
from millrace.prepare.text.dedup.repeats import find_repeats
from millrace.prepare.text.part import PartTask
from millrace.prepare.text.read.reader import Reader
from millrace.ragged import Array
from millrace.store import platform

STEP = 1 << 20  # lines looked at in one go


def scan_part(task: PartTask) -> int:
    """Writes the hashes of a part's lines, unless they are there; returns how many there are."""
    path = lines_path(task.folder, task.key)
    if sealed(path) is None:
        aside = platform.attempt_name(path)
        with platform.writing(path):
            with contextlib.closing(Spill(aside)) as spill:
                reader = Reader(task.options, lambda line: None, task.folder)  # the second reading sets aside
                for _, _, texts in reader.chunks(task.part, task.sources):
                    for text in texts:
                        spill.write_bytes(line_hashes(text))
                seal(spill)
            platform.rename(aside, path)
    return path.stat().st_size // HASH_BYTES - 1


def seal(spill: Spill) -> None:
    """Ends a file with the hash of what stands before."""
    spill.write_bytes(spill.hash.encode())
    spill.finish()


def sealed(path: Path) -> Array | None:
    """What stands in a file before its hash; None where it is not whole, or not what was written."""
    if not path.exists() or path.stat().st_size < HASH_BYTES:
        return None
    data = mapped(path, np.uint8)
    found = xxhash.xxh3_64_hexdigest(data[:-HASH_BYTES].data).encode()
    return data[:-HASH_BYTES] if found == data[-HASH_BYTES:].tobytes() else None


def lines_path(folder: str | Path, key: str) -> Path:
    return Path(folder) / "lines" / f"{key}.bin"


def with_repeats(
    folder: Path, tasks: Sequence[PartTask], counts: Sequence[int], known: Iterable[Array], num_known: int, base: str
) -> list[PartTask]:
    """The tasks, told which lines of their parts are repeats, also of those ``known`` from the store ``base``."""
    name = f"lines/repeats-{digest(base, *(task.key for task in tasks))}.bin"
    mark_repeats(folder / name, [lines_path(folder, task.key) for task in tasks], counts, known, num_known)
    repeats, found, end = mapped(folder / name, np.uint8), [], 0
    for task, count in zip(tasks, counts, strict=True):
        first, end = end, end + count
        # A part holds for these repeats alone.
        key = digest(task.key, xxhash.xxh3_128_digest(repeats[first:end].data))
        found.append(msgspec.structs.replace(task, key=key, lines=(name, first, end)))
    return found


def mark_repeats(
    path: Path, paths: Sequence[Path], counts: Sequence[int], known: Iterable[Array], num_known: int
) -> None:
    """Writes the mask over all lines; lines ``known`` from the store that is appended to come before all."""
    if sealed(path) is not None:
        return

    def keys() -> Iterator[tuple[Array, Array]]:
        for piece in known:
            for start in range(0, len(piece), STEP):
                some = piece[start : start + STEP]
                yield some, np.full(len(some), -1, np.int64)
        first = 0
        for place, count in zip(paths, counts, strict=True):
            hashes = as_keys(mapped(place, np.uint8))[:-1]
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
