"""Block hashes: every file has one xxh3 for each 4 MiB, so that damage is found and located."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

import xxhash

from millrace.store import platform
from millrace.store.layout import BLOCK_BYTES

_local = threading.local()


def check_blocks(fd: int, num_bytes: int, hashes: Iterable[int]) -> Iterator[tuple[int, int, str | None]]:
    """Reads a file again, block by block: the bytes [first, last) of each, and what is wrong with them."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(BLOCK_BYTES))  # one for each thread
    for block, expected in enumerate(hashes):
        first = block * BLOCK_BYTES
        part = _local.buffer[: min(BLOCK_BYTES, num_bytes - first)]
        yield first, first + len(part), _problem(fd, part, first, expected)


def _problem(fd: int, buffer: memoryview, first: int, expected: int) -> str | None:
    try:
        length = platform.pread_into(fd, buffer, first)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if length != len(buffer):
        return f"ends after {first + length:,} bytes"
    if xxhash.xxh3_64_intdigest(buffer) != expected:
        return "changed since it was written; copy this shard again or prepare the store again"
    return None
