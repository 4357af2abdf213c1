"""Which documents, or lines, are repeats of earlier ones: hashes partitioned on disk, so that memory is one partition.

The first occurrence in source order stays, whatever the number of workers: units come in that order, and within a
partition too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s
from millrace.store import platform

ENTRY = np.dtype([("key", "<u8", 2), ("number", "<i8")])
PARTITION_ENTRIES = 3_000_000  # 72 MB in memory, and 64 MiB for the core to find them by
PIECE_ENTRIES = 1 << 16
MASK_UNITS = 16_000_000  # numbers that are marked in one go: 16 MB, and 8 bytes for each repeat among them


EXACT, NEAR = 1, 2


class Repeats(NamedTuple):
    """Masks over units: those that are equal to an earlier one, and those that are much like one, where that is asked."""

    exact: Array
    near: Array | None = None

    def among(self, units: slice) -> Array:
        """For each 0, EXACT or NEAR; what is both is the first."""
        exact = self.exact[units].view(np.uint8)
        return exact if self.near is None else np.where(exact, EXACT, self.near[units] * np.uint8(NEAR))

    @property
    def num_others(self) -> int:
        steps = (slice(start, start + MASK_UNITS) for start in range(0, len(self.exact), MASK_UNITS))
        return len(self.exact) - sum(int(np.count_nonzero(self.among(step))) for step in steps)


def find_repeats(keys: Iterable[tuple[Array, Array]], total: int, units: int, folder: Path) -> Array:
    """A mask over units: True where an earlier one had the same key.

    ``keys`` gives (keys of shape (n, 2), numbers of their units) piece by piece, equal keys in the order of their units;
    ``total`` says how many there are at most. Negative numbers are units of the store that is appended to. Beyond one
    partition the mask is a map of a file that has no name any more.
    """
    partitions = max(1, -(-total // PARTITION_ENTRIES))
    if partitions == 1:
        repeats = np.zeros(units, bool)
        for numbers in _repeated(keys, total):
            repeats[numbers] = True
        return repeats
    try:
        groups = _partitioned(keys, partitions, folder)
        found = (numbers for entries in groups for numbers in _repeated(_pieces(entries), len(entries)))
        return _mask(found, units, folder)
    finally:
        platform.remove(folder)


def _entries(keys: Array, numbers: Array) -> Array:
    entries = np.empty(len(numbers), ENTRY)
    entries["key"], entries["number"] = keys, numbers
    return entries


def _pieces(entries: Array) -> Iterator[tuple[Array, Array]]:
    """As they were given."""
    for start in range(0, len(entries), PIECE_ENTRIES):
        some = entries[start : start + PIECE_ENTRIES]
        yield some["key"], some["number"]


def _repeated(pieces: Iterable[tuple[Array, Array]], total: int) -> Iterator[Int64s]:
    """The numbers whose key came before."""
    if not core:
        entries = [_entries(*piece) for piece in pieces]
        yield _repeated_by_sorting(np.concatenate(entries) if entries else np.empty(0, ENTRY))
        return
    seen = core.Seen(total)
    for keys, numbers in pieces:
        again = numbers[~np.frombuffer(seen.add(np.ascontiguousarray(keys)), bool)]
        yield again[again >= 0]


def _repeated_by_sorting(entries: Array) -> Int64s:
    """The twin of the core's."""
    entries = _shared(entries)
    order = np.lexsort((entries["key"][:, 1], entries["key"][:, 0]))  # equal ones stay in their order
    keys = entries["key"][order]
    again = np.zeros(len(order), bool)
    again[1:] = np.all(keys[1:] == keys[:-1], axis=1)
    found: Int64s = entries["number"][order[again]]
    return found[found >= 0]


def _shared(entries: Array) -> Array:
    """Those whose first half of the key another has too: few, and found by sorting numbers alone, which is fastest."""
    half = np.ascontiguousarray(entries["key"][:, 0])
    in_order = np.sort(half)
    again = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(again):
        return entries[:0]
    found: Array = entries[again[np.minimum(np.searchsorted(again, half), len(again) - 1)] == half]
    return found


def _partitioned(keys: Iterable[tuple[Array, Array]], partitions: int, folder: Path) -> Iterator[Array]:
    """The entries grouped by the high bits of their key, by way of one file per group."""
    platform.remove(folder)
    platform.make_dir(folder)
    for entries in _joined(keys):
        group = (entries["key"][:, 0] >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)
        _append(folder, "keys", group.astype(np.int64), entries)
    for k in range(partitions):
        path = folder / f"keys-{k:05d}"
        if path.exists():
            yield np.fromfile(path, ENTRY)
            path.unlink()


def _joined(keys: Iterable[tuple[Array, Array]]) -> Iterator[Array]:
    """Entries by a quarter of a partition or more: files are opened that much less often."""
    waiting, count = [], 0
    for piece in keys:
        waiting.append(_entries(*piece))
        count += len(waiting[-1])
        if count >= PARTITION_ENTRIES // 4:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _append(folder: Path, name: str, group: Int64s, values: Array) -> None:
    """Values to the files of their groups; one is open at a time, since there may be more than descriptors."""
    order = np.argsort(group, kind="stable")
    edges = np.concatenate(([0], np.flatnonzero(np.diff(group[order])) + 1, [len(order)]))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if first < last:
            with open(folder / f"{name}-{int(group[order[first]]):05d}", "ab") as file:
                file.write(values[order[first:last]].tobytes())


def _mask(found: Iterable[Int64s], units: int, folder: Path) -> Array:
    """Numbers in any order as a mask in a file, made a stretch at a time."""
    for numbers in found:
        _append(folder, "numbers", numbers // MASK_UNITS, numbers)
    with open(folder / "mask", "w+b") as file:
        for start in range(0, units, MASK_UNITS):
            mask = np.zeros(min(MASK_UNITS, units - start), bool)
            path = folder / f"numbers-{start // MASK_UNITS:05d}"
            if path.exists():
                mask[np.fromfile(path, np.int64) - start] = True
            file.write(mask.tobytes())
        file.flush()
        return platform.map_file(file.fileno(), units).view(bool)
