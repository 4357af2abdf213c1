"""Writes one shard: its column files, their block hashes, and the line that says it is whole.

A shard is written aside (``train-00000.<attempt>.tmp``), synced, made read-only and renamed; only then does its
``ShardEntry`` exist. Where two attempts write one shard, the first rename wins. Writers of different shards share
nothing, so they may run in threads or processes.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from millrace.errors import ConfigError, StoreCorrupt, StoreError
from millrace.ragged import Array, Int64s, as_offsets
from millrace.store import platform
from millrace.store.layout import BLOCK_BYTES, Column, File, Layout, num_blocks
from millrace.store.plain_file import open_file

BUFFER_BYTES = 1 << 20  # small appends are joined to writes of about this size
SYNC_AHEAD_BYTES = 16 << 20  # ask the kernel to start writing after this many, so that fsync finds little to do
_local = threading.local()


class ShardEntry(msgspec.Struct, frozen=True):
    """What the manifest needs to know of a finished shard."""

    split: str
    number: int
    records: int
    rows: tuple[int, ...]  # by axis
    hashes: tuple[str, ...]  # xxh3 of each 4 MiB block, 16 hex digits, file after file


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}"


def is_whole(shards: Path, entry: ShardEntry, layout: Layout) -> bool:
    """Whether a finished shard still holds the bytes it was written with: every block is read and hashed again."""
    sizes = layout.file_bytes(np.array([[entry.records, *entry.rows]], np.int64))[0]
    if len(entry.hashes) != num_blocks(sizes).sum():
        return False
    hashes = iter(int(block, 16) for block in entry.hashes)
    folder = shards / shard_name(entry.split, entry.number)
    try:
        for file, size in zip(layout.files, sizes.tolist(), strict=True):
            with open_file(str(folder / file.name)) as (fd, found):
                own = islice(hashes, num_blocks(size))
                if found != size or any(problem for *_, problem in check_blocks(fd, size, own)):
                    return False
    except StoreError:
        return False
    return True


def check_blocks(
    file: int | Callable[[memoryview, int], int], num_bytes: int, hashes: Iterable[int]
) -> Iterator[tuple[int, int, str | None]]:
    """Reads a file again, block by block: the bytes [first, last) of each, and what is wrong with them.

    ``file`` is a descriptor, or fills a buffer from an offset.
    """
    for block, expected in enumerate(hashes):
        first = block * BLOCK_BYTES
        yield first, min(first + BLOCK_BYTES, num_bytes), check_block(file, num_bytes, block, expected)


def check_block(file: int | Callable[[memoryview, int], int], num_bytes: int, block: int, expected: int) -> str | None:
    """Reads one block again; what is wrong with it."""
    read = partial(platform.pread_into, file) if isinstance(file, int) else file
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BLOCK_BYTES))  # one for each thread
    first = block * BLOCK_BYTES
    return _problem(read, _local.buffer[: min(BLOCK_BYTES, num_bytes - first)], first, expected)


def _problem(read: Callable[[memoryview, int], int], buffer: memoryview, first: int, expected: int) -> str | None:
    try:
        length = read(buffer, first)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    except StoreCorrupt as error:
        return str(error)
    if length != len(buffer):
        return f"ends after {first + length:,} bytes"
    if xxhash.xxh3_64_intdigest(buffer) != expected:
        return "changed since it was written; copy this shard again or prepare the store again"
    return None


class ShardWriter:
    """Appends whole records to one shard of a store that is being written.

    ``columns`` in ``write`` hold storage dtypes and bytes for strings, as ``Normaliser`` (values.py) makes them.
    """

    def __init__(self, shards: Path, split: str, number: int, columns: Mapping[str, Column]) -> None:
        self.split, self.number, self.num_records = split, number, 0
        self.num_bytes = 0  # kept by StoreWriter, which ends the shard at its limit
        self._layout = Layout(columns)
        self._final = shards / shard_name(split, number)
        self._aside = self._final  # until the first write: each attempt has a name of its own
        self._rows = [0] * len(self._layout.axes)
        self._open_rows = 0  # of the record that write_rows has begun
        self._files: list[ColumnFile] = []
        self._is_finished = False

    def _open(self) -> None:
        self._aside = platform.make_attempt(self._final)
        for file in self._layout.files:
            self._files.append(ColumnFile(self._aside / file.name, file))
        for k in range(len(self._layout.axes)):
            self._files[k].append(np.zeros(1, "<i8"))

    def write(self, columns: Mapping[str, Array], offsets: Mapping[str, Int64s], before: int = 0) -> None:
        """Appends records: each axis' offsets start at 0 and count the rows given here.

        ``before`` rows of the first record are written already (``end_record`` says so, nobody else).
        """
        self._check(columns, offsets)
        with platform.writing(self._aside):
            if not self._files:
                self._open()
            self._rows[0] += before
            for k, axis in enumerate(self._layout.axes):
                local = offsets[axis]
                self._files[k].append((local[1:] + self._rows[k]).astype("<i8", copy=False))
                self._rows[k] += int(local[-1])
            for name, array in columns.items():
                self._files[self._layout.file_of[name]].append(array)
        self.num_records += len(offsets[self._layout.primary]) - 1

    def write_rows(self, columns: Mapping[str, Array]) -> None:
        """Some rows of a record that is too large to be given at once; ``end_record`` ends it.

        All row columns, of equal length, on the primary axis: records with several axes are given whole.
        """
        expected = [name for name, column in self._layout.columns.items() if column.axis is not None]
        is_whole = sorted(columns) == sorted(expected) and len({len(array) for array in columns.values()}) == 1
        if self._is_finished or not is_whole:
            raise ConfigError(f"rows of {sorted(columns)}; expected {sorted(expected)}, equally long, in an open shard")
        with platform.writing(self._aside):
            if not self._files:
                self._open()
            for name, array in columns.items():
                self._files[self._layout.file_of[name]].append(array)
        self._open_rows += len(next(iter(columns.values())))

    def end_record(self, columns: Mapping[str, Array], offsets: Mapping[str, Int64s]) -> None:
        """Ends the record whose rows were written, with its record columns and the offsets of its texts."""
        own = {name: column for name, column in self._layout.columns.items() if column.axis is not None}
        rows = {name: np.zeros((0, *column.shape), column.storage) for name, column in own.items()}
        open_rows, self._open_rows = self._open_rows, 0
        self.write({**rows, **columns}, {**offsets, self._layout.primary: np.array([0, 0], np.int64)}, open_rows)

    def _check(self, columns: Mapping[str, Array], offsets: Mapping[str, Int64s]) -> None:
        """What is written must make whole records: a shard that does not open is found out too late."""
        if self._is_finished:
            raise ConfigError(f"shard {self._final.name} is finished; take another number for more records")
        if set(columns) != set(self._layout.columns) or set(offsets) != set(self._layout.axes):
            raise ConfigError(
                f"columns {sorted(columns)} with offsets for {sorted(offsets)}; expected {sorted(self._layout.columns)} "
                f"with offsets for {sorted(self._layout.axes)}"
            )
        records = {axis: len(as_offsets(array)) - 1 for axis, array in offsets.items()}
        if len(set(records.values())) != 1:
            raise ConfigError(f"the axes have different numbers of records: {records}")
        for name, array in columns.items():
            axis = self._layout.column_axis(name)
            expected = records[self._layout.primary] if axis is None else int(offsets[axis][-1])
            if not isinstance(array, np.ndarray) or len(array) != expected:
                found = len(array) if isinstance(array, np.ndarray) else type(array).__name__
                raise ConfigError(f"column {name!r} has {found} items; the offsets make {expected}, as a numpy array")

    def finish(self) -> ShardEntry:
        """Syncs, renames into place and says what was written."""
        if self._is_finished:
            raise ConfigError(f"shard {self._final.name} is finished already")
        if self._open_rows:
            raise ConfigError(f"shard {self._final.name} has {self._open_rows} rows of a record that was not ended")
        self._is_finished = True
        with platform.writing(self._final):
            try:
                if not self._files:
                    self._open()
                hashes = [digest for file in self._files for digest in file.finish()]
            finally:
                self._close()
            platform.sync_dir(self._aside)
            platform.place(self._aside, self._final)
        return ShardEntry(self.split, self.number, self.num_records, tuple(self._rows), tuple(hashes))

    def abandon(self) -> None:
        """Removes what was written."""
        self._close()
        if self._aside != self._final:
            with platform.writing(self._aside, "removing"):
                platform.remove(self._aside)

    def _close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is not None:
            self.abandon()


class ColumnFile:
    """One file of a shard, hashed block by block as it is written."""

    def __init__(self, path: Path, file: File) -> None:
        self._path, self._file = path, file
        self._fd = platform.create(path)
        self._pending: list[Array] = []
        self._pending_bytes = 0
        self._block, self._block_bytes = xxhash.xxh3_64(), 0
        self._hashes: list[str] = []
        self._written = self._flushed = 0

    def append(self, array: Array) -> None:
        if array.dtype != self._file.dtype or array.shape[1:] != self._file.tail:
            expected = f"{self._file.dtype} x {self._file.tail}"
            raise ConfigError(f"{self._path.name}: {array.dtype} x {array.shape[1:]}; expected {expected}")
        self._pending.append(array)
        self._pending_bytes += array.nbytes
        if self._pending_bytes >= BUFFER_BYTES:
            self._flush()

    def _flush(self) -> None:
        joined = self._pending[0] if len(self._pending) == 1 else np.concatenate(self._pending)
        self._pending, self._pending_bytes = [], 0
        data = np.ascontiguousarray(joined).reshape(-1).view(np.uint8).data
        while len(data):
            part = data[: min(len(data), BLOCK_BYTES - self._block_bytes)]
            platform.write(self._fd, part, self._path)
            self._hash(part)
            data = data[len(part) :]

    def _hash(self, part: memoryview) -> None:
        self._block.update(part)
        self._block_bytes += len(part)
        self._written += len(part)
        if self._block_bytes == BLOCK_BYTES:
            self._close_block()
        if self._written - self._flushed >= SYNC_AHEAD_BYTES:
            with contextlib.suppress(OSError, AttributeError):  # a hint, so that the disk works meanwhile; fsync counts
                os.posix_fadvise(self._fd, self._flushed, self._written - self._flushed, os.POSIX_FADV_DONTNEED)
            self._flushed = self._written

    def _close_block(self) -> None:
        self._hashes.append(self._block.hexdigest())
        self._block, self._block_bytes = xxhash.xxh3_64(), 0

    def finish(self) -> list[str]:
        if self._pending:
            self._flush()
        if self._block_bytes:
            self._close_block()
        try:
            with contextlib.suppress(AttributeError):
                os.fchmod(self._fd, 0o444)
            platform.sync(self._fd, self._path)
        finally:
            self.close()
        return self._hashes

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
