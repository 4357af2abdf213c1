"""Finds documents, or lines, that repeat earlier ones. Hashes are partitioned on disk; memory is one partition.

The first one in source order stays, for any number of workers: units come in that order, also within a partition.
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
PARTITION_ENTRIES = 3_000_000  # 72 MB in memory, and 64 MiB for the core's set
GROUP_ENTRIES = 1 << 16
MASK_UNITS = 16_000_000  # marked at once: 16 MB, and 8 bytes for each repeat among them
MAX_HASHES = 1 << 20  # of a part, kept in memory (64 MiB); later repeats are found when all parts are there
EXACT, NEAR = 1, 2


class Repeats(NamedTuple):
    """Masks over units: those equal to an earlier one, and with ``--dedup near`` those much like one."""

    exact: Array
    near: Array | None = None

    def among(self, units: slice) -> Array:
        """0, EXACT or NEAR for each; EXACT where both hold."""
        exact = self.exact[units].view(np.uint8)
        return exact if self.near is None else np.where(exact, EXACT, self.near[units] * np.uint8(NEAR))

    @property
    def num_others(self) -> int:
        steps = (slice(start, start + MASK_UNITS) for start in range(0, len(self.exact), MASK_UNITS))
        return len(self.exact) - sum(int(np.count_nonzero(self.among(step))) for step in steps)


def find_repeats(keys: Iterable[tuple[Array, Array]], total: int, units: int, folder: Path) -> Array:
    """A mask over units: True where an earlier one had the same key.

    ``keys`` gives groups of (keys of shape (n, 2), numbers of their units), equal keys in the order of
    their units; ``total`` is the most there are. Units of the store that is appended to have negative
    numbers. With several partitions, the mask is a map of a file that has no name any more.
    """
    partitions = max(1, -(-total // PARTITION_ENTRIES))
    if partitions == 1:
        repeats = np.zeros(units, bool)
        for numbers in repeated_numbers(keys, total):
            repeats[numbers] = True
        return repeats
    try:
        found = (
            numbers
            for entries in _partition(keys, partitions, folder)
            for numbers in repeated_numbers(_groups(entries), len(entries))
        )
        return _mask(found, units, folder)
    finally:
        platform.remove(folder)


def _entries(keys: Array, numbers: Array) -> Array:
    entries = np.empty(len(numbers), ENTRY)
    entries["key"], entries["number"] = keys, numbers
    return entries


def _groups(entries: Array) -> Iterator[tuple[Array, Array]]:
    """Entries as keys and numbers, some at a time."""
    for start in range(0, len(entries), GROUP_ENTRIES):
        some = entries[start : start + GROUP_ENTRIES]
        yield some["key"], some["number"]


def repeated_numbers_core(groups: Iterable[tuple[Array, Array]], total: int) -> Iterator[Int64s]:
    known = core.KnownHashes(total)
    for keys, numbers in groups:
        repeats = numbers[~np.frombuffer(known.add(np.ascontiguousarray(keys)), bool)]
        yield repeats[repeats >= 0]


def repeated_numbers_numpy(groups: Iterable[tuple[Array, Array]], total: int) -> Iterator[Int64s]:
    """By sorting; ``total`` is for the core alone."""
    parts = [_entries(*group) for group in groups]
    entries = np.concatenate([np.empty(0, ENTRY), *parts])
    order = np.lexsort((entries["key"][:, 1], entries["key"][:, 0]))  # equal ones stay in their order
    keys = entries["key"][order]
    is_repeat = np.zeros(len(order), bool)
    is_repeat[1:] = np.all(keys[1:] == keys[:-1], axis=1)
    repeats: Int64s = entries["number"][order[is_repeat]]
    yield repeats[repeats >= 0]


repeated_numbers = repeated_numbers_core if core else repeated_numbers_numpy  # numbers whose key came before


def _partition(keys: Iterable[tuple[Array, Array]], partitions: int, folder: Path) -> Iterator[Array]:
    """The entries grouped by the high bits of their key, through one file per group."""
    platform.remove(folder)
    platform.make_dir(folder)
    for entries in _batches(keys):
        group = (entries["key"][:, 0] >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)
        _append(folder, "keys", group.astype(np.int64), entries)
    for k in range(partitions):
        path = folder / f"keys-{k:05d}"
        if path.exists():
            yield np.fromfile(path, ENTRY)
            path.unlink()


def _batches(keys: Iterable[tuple[Array, Array]]) -> Iterator[Array]:
    """Entries by a quarter of a partition or more, so that files are opened less often."""
    waiting, count = [], 0
    for group in keys:
        waiting.append(_entries(*group))
        count += len(waiting[-1])
        if count >= PARTITION_ENTRIES // 4:
            yield np.concatenate(waiting)
            waiting, count = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _append(folder: Path, name: str, group: Int64s, values: Array) -> None:
    """Appends values to the files of their groups, one open at a time: there may be more than descriptors."""
    order = np.argsort(group, kind="stable")
    edges = np.concatenate(([0], np.flatnonzero(np.diff(group[order])) + 1, [len(order)]))
    for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if first < last:
            with open(folder / f"{name}-{int(group[order[first]]):05d}", "ab") as file:
                file.write(values[order[first:last]].tobytes())


def _mask(repeats: Iterable[Int64s], units: int, folder: Path) -> Array:
    """Numbers in any order as a mask in a file, ``MASK_UNITS`` at a time."""
    for numbers in repeats:
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


class HashSet:
    """The twin of ``core.KnownHashes``."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def add(self, keys: bytes) -> bytes:
        """For each hash of 16 bytes, 1 if it is new and 0 if it was added before."""
        are_new = bytearray()
        for start in range(0, len(keys), 16):
            before = len(self._hashes)
            self._hashes.add(keys[start : start + 16])
            are_new.append(len(self._hashes) - before)
        return bytes(are_new)


class KnownHashes:
    """The hashes of the documents in a part, whose repeats are neither tokenised nor stored; ``kind`` is the class of the set."""

    def __init__(self, kind: type = core.KnownHashes if core else HashSet) -> None:
        self._hashes = kind()
        self._count = 0

    def are_new(self, hashes: bytes) -> bytes:
        """1 for each hash that is new and 0 for a repeat; when memory is full, all count as new."""
        if self._count >= MAX_HASHES:
            return bytes([1]) * (len(hashes) // 16)
        are_new: bytes = self._hashes.add(hashes)
        self._count += are_new.count(1)
        return are_new
