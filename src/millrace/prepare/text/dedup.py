"""Which documents are repeats of earlier ones: hashes partitioned on disk, so that memory is one partition.

The first occurrence in source order stays, whatever the number of workers: documents are numbered in that order,
and within a partition the smallest number of each hash is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from millrace.ragged import Array
from millrace.store import platform

ENTRY = np.dtype([("key", "<u8", 2), ("number", "<i8")])
PARTITION_ENTRIES = 4_000_000  # 96 MB in memory, and as much again while it is sorted


def find_repeats(keys: Iterable[tuple[Array, Array]], total: int, documents: int, folder: Path) -> Array:
    """A mask over documents: True where an earlier number had the same key.

    ``keys`` gives (keys of shape (n, 2), numbers) piece by piece, ``total`` how many there are at most. Negative
    numbers are documents of the store that is appended to: they are earlier than all others.
    """
    partitions = max(1, -(-total // PARTITION_ENTRIES))
    repeats = np.zeros(documents, bool)
    if partitions == 1:
        pieces = [_entries(*piece) for piece in keys]
        if pieces:
            _mark(np.concatenate(pieces), repeats)
        return repeats
    for entries in _partitioned(keys, partitions, folder):
        _mark(entries, repeats)
    return repeats


def _entries(keys: Array, numbers: Array) -> Array:
    entries = np.empty(len(numbers), ENTRY)
    entries["key"], entries["number"] = keys, numbers
    return entries


def _mark(entries: Array, repeats: Array) -> None:
    order = np.lexsort((entries["number"], entries["key"][:, 1], entries["key"][:, 0]))
    keys, numbers = entries["key"][order], entries["number"][order]
    again = np.zeros(len(order), bool)
    again[1:] = np.all(keys[1:] == keys[:-1], axis=1)
    # A later band of one document may meet the same key again: that is no repeat of another document.
    first = np.maximum.accumulate(np.where(again, 0, np.arange(len(order))))
    repeated = again & (numbers != numbers[first])
    found = numbers[repeated]
    repeats[found[found >= 0]] = True


def _partitioned(keys: Iterable[tuple[Array, Array]], partitions: int, folder: Path) -> Iterator[Array]:
    """The entries grouped by the high bits of their key, by way of one file per group."""
    platform.remove(folder)
    platform.make_dir(folder)
    files = [open(folder / f"{k:05d}", "wb") for k in range(partitions)]  # noqa: SIM115 - closed below
    try:
        for piece in keys:
            entries = _entries(*piece)
            group = (entries["key"][:, 0] >> np.uint64(32)) * np.uint64(partitions) >> np.uint64(32)
            by_group = np.argsort(group, kind="stable")
            edges = np.searchsorted(group[by_group], np.arange(partitions + 1))
            for k, file in enumerate(files):
                part = entries[by_group[edges[k] : edges[k + 1]]]
                if len(part):
                    file.write(part.tobytes())
    finally:
        for file in files:
            file.close()
    for k in range(partitions):
        yield np.fromfile(folder / f"{k:05d}", ENTRY)
    platform.remove(folder)
