"""The hashes of the documents in a part: what the part repeats is neither tokenised nor stored."""

from __future__ import annotations

from millrace.native import core

MAX_HASHES = 1 << 20  # kept in memory (64 MiB); later repeats are found when all parts are there


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
    """Hashes of 16 bytes, as many as memory should hold, in a set of the class ``kind``."""

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
