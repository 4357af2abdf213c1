"""Hashes of the documents that a part has met, so that what it repeats is neither tokenised nor kept."""

from __future__ import annotations

from millrace.native import core

MAX_SEEN = 1 << 20  # hashes kept in memory (64 MiB); later repeats are found when all parts are there


class Seen:
    """Hashes of 16 bytes; ``core.Seen`` where there is a core, and a set as its twin."""

    def __init__(self) -> None:
        self._hashes = core.Seen() if core else _Seen()
        self._count = 0

    def are_new(self, hashes: bytes) -> bytes:
        """1 for each that was not met before, also among these, and 0 for a repeat; from some number on all are new."""
        if self._count >= MAX_SEEN:
            return bytes([1]) * (len(hashes) // 16)
        found: bytes = self._hashes.add(hashes)
        self._count += found.count(1)
        return found


class _Seen:
    """The twin of the core's."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def add(self, keys: bytes) -> bytes:
        found = bytearray()
        for start in range(0, len(keys), 16):
            before = len(self._hashes)
            self._hashes.add(keys[start : start + 16])
            found.append(len(self._hashes) - before)
        return bytes(found)
