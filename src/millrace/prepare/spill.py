"""Files of an unfinished store: those of a part, written as they come and mapped when read; and small results."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from millrace.ragged import Array
from millrace.store import platform

BUFFER_BYTES = 1 << 20
REVISED = 1 << 14  # items that are changed in one go
SMALL_BYTES = 1 << 16  # from here on a copy costs more than a call
DIGEST_BYTES = 16  # before each small result


class Spill:
    """A file of arrays and bytes one after the other, written by the megabyte; ``size`` is their bytes so far.

    If it is not ``durable``, it need not survive a crash of the machine.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path, self._fd, self._waiting, self._is_durable = path, -1, bytearray(), durable
        self._hash = xxhash.xxh3_64()
        self._is_revised = False
        self.size = 0

    @property
    def hash(self) -> str:
        """The hash of the finished file."""
        return file_hash(self._path) if self._is_revised else self._hash.hexdigest()

    def write(self, array: Array) -> None:
        self.write_bytes(array.reshape(-1).view(np.uint8).data)

    def write_bytes(self, data: bytes | memoryview) -> None:
        self.size += len(data)
        self._hash.update(data)
        if len(data) < SMALL_BYTES:
            self._waiting += data
            if len(self._waiting) >= BUFFER_BYTES:
                self._flush()
        else:
            self._flush()
            platform.write(self._fd, data, self._path)

    def _flush(self) -> None:
        if self._fd < 0:
            self._fd = platform.create(self._path)
        if self._waiting:
            platform.write(self._fd, bytes(self._waiting), self._path)
            self._waiting.clear()

    def revise(self, start: int, stop: int, dtype: np.dtype[Any], values: Callable[[int, int], Any]) -> None:
        """Replaces items [start, stop) that were written, some at a time, by ``values(number of the first, count)``."""
        self._flush()
        self._is_revised = True
        with open(self._path, "r+b", buffering=0) as file:
            for first in range(start, stop, REVISED):
                count = min(stop, first + REVISED) - first
                items = np.empty(count, dtype)
                items[:] = values(first, count)
                file.seek(first * dtype.itemsize)
                platform.write(file.fileno(), items.data, self._path)

    def finish(self) -> int:
        self._flush()
        if self._is_durable:
            platform.sync(self._fd, self._path)
        self.close()
        return self.size

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def file_hash(path: Path, kind: Any = xxhash.xxh3_64) -> str:
    """The hash of a file, as ``Spill.hash``, or another ``kind``."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def map_array(path: Path, dtype: Any) -> Array:
    """A whole file as an array; mapped, since a part may be larger than memory."""
    fd = os.open(path, os.O_RDONLY | platform.O_BINARY)
    try:
        return platform.map_file(fd, os.fstat(fd).st_size).view(dtype)
    finally:
        os.close(fd)


def write_result(path: Path, data: bytes) -> None:
    """Keeps a small result for a later attempt, behind its digest: a damaged one counts as absent."""
    with platform.writing(path):
        if path.is_dir():
            platform.remove(path)
        aside = platform.attempt_name(path)
        platform.write_file(aside, xxhash.xxh3_128_digest(data) + data, mode=0o644)
        platform.rename(aside, path)


def read_result(path: Path) -> bytes | None:
    try:
        both = path.read_bytes()
    except OSError:
        return None
    digest, data = both[:DIGEST_BYTES], both[DIGEST_BYTES:]
    return data if xxhash.xxh3_128_digest(data) == digest else None
