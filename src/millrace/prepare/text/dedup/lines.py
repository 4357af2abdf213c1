"""Lines as the units of deduplication: which lines a document has, and the document without those that are repeats.

A line ends at ``\\n`` or ``\\r\\n``, which is no part of it. Lines of nothing but white space are no units: they
separate paragraphs, and stay.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import xxhash

from millrace.errors import SourceError
from millrace.ragged import Array

HASH_BYTES = 16
EMPTY_LINES = re.compile(rb"\n{3,}")


def is_unit(line: bytes) -> bool:
    return bool(line.strip()) and (line.isascii() or bool(line.decode().strip()))


def line_hashes(text: bytes) -> bytes:
    """The 128-bit hashes of the units of a document, one after the other."""
    return b"".join([_hash(line) for line in text.split(b"\n") if is_unit(line)])


def _hash(line: bytes) -> bytes:
    return xxhash.xxh3_128_digest(line[:-1] if line.endswith(b"\r") else line)


class RepeatedLines:
    """Removes from the documents of a part, in their order, the lines that ``repeats`` marks."""

    def __init__(self, repeats: Array, *, is_clean: bool, dropped: Counter[str]) -> None:
        self._repeats, self._is_clean, self._dropped, self._at = repeats, is_clean, dropped, 0

    def remove(self, offsets: Sequence[int], texts: Sequence[bytes]) -> tuple[list[int], list[bytes], list[bytes]]:
        """Offsets and texts of the documents of which something stays, and the hashes of their lines."""
        kept: list[tuple[int, bytes, bytes]] = []
        for offset, text in zip(offsets, texts, strict=True):
            left, hashes, gone = self._without(text)
            self._dropped["duplicate lines"] += gone
            self._dropped["bytes of duplicate lines"] += len(text) - len(left)
            if gone and not hashes:
                self._dropped["nothing but duplicate lines"] += 1
                self._dropped["bytes of duplicate lines"] += len(left)
            else:
                kept.append((offset, left, hashes))
        return [k[0] for k in kept], [k[1] for k in kept], [k[2] for k in kept]

    def _without(self, text: bytes) -> tuple[bytes, bytes, int]:
        """The text without repeats, the hashes of the lines it has left, and how many went."""
        lines = text.split(b"\n")
        units = [k for k, line in enumerate(lines) if is_unit(line)]
        gone = self._repeats[self._at : self._at + len(units)].tolist()
        self._at += len(units)
        if len(gone) != len(units):
            raise self.changed()
        hashes = b"".join(_hash(lines[k]) for k, repeat in zip(units, gone, strict=True) if not repeat)
        if not any(gone):
            return text, hashes, 0
        doomed = {k for k, repeat in zip(units, gone, strict=True) if repeat}
        left = b"\n".join([line for k, line in enumerate(lines) if k not in doomed])
        if self._is_clean:  # stays so: at most one empty line, none at the ends
            left = EMPTY_LINES.sub(b"\n\n", left).strip(b"\n")
        return left, hashes, len(doomed)

    def finish(self) -> None:
        if self._at != len(self._repeats):
            raise self.changed()

    def changed(self) -> SourceError:
        return SourceError(
            f"lines were compared, but there are not {len(self._repeats)} of them any more: "
            "--filter must answer alike for the same text"
        )


def as_keys(data: Array) -> Array:
    """Hashes as they lie in files, as keys of shape (lines, 2)."""
    return np.asarray(data).view("<u8").reshape(-1, 2)
