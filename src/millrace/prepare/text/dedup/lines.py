"""Deduplication by lines: the lines of a document, and the document without repeated ones.

A line ends at ``\\n`` or ``\\r\\n``, which is not part of it. Lines of white space alone are not compared:
they separate paragraphs, and stay.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import xxhash

from millrace.errors import SourceError
from millrace.ragged import Array
from millrace.text.documents import Documents

HASH_BYTES = 16
EMPTY_LINES = re.compile(rb"\n{3,}")


def is_unit(line: bytes) -> bool:
    return bool(line.strip()) and (line.isascii() or bool(line.decode().strip()))


def line_hashes(text: bytes) -> bytes:
    """The 128-bit hashes of the lines of a document, one after the other."""
    return b"".join([_hash(line) for line in text.split(b"\n") if is_unit(line)])


def _hash(line: bytes) -> bytes:
    return xxhash.xxh3_128_digest(line[:-1] if line.endswith(b"\r") else line)


class RepeatedLines:
    """Removes the lines that ``repeats`` marks from the documents of a part, which come in order."""

    def __init__(self, repeats: Array, *, is_clean: bool, dropped: Counter[str]) -> None:
        self._repeats, self._is_clean, self._dropped, self._at = repeats, is_clean, dropped, 0

    def remove(self, documents: Documents) -> tuple[Documents, list[bytes]]:
        """The documents that still have text, and the hashes of their lines."""
        offsets, texts, line_hashes = [], [], []
        for offset, text in zip(documents.offsets.tolist(), documents, strict=True):
            rest, hashes, num_removed = self._without(text)
            self._dropped["duplicate lines"] += num_removed
            self._dropped["bytes of duplicate lines"] += len(text) - len(rest)
            if num_removed and not hashes:
                self._dropped["nothing but duplicate lines"] += 1
                self._dropped["bytes of duplicate lines"] += len(rest)
            else:
                offsets.append(offset)
                texts.append(rest)
                line_hashes.append(hashes)
        return Documents.of(texts, offsets, None, documents.piece_of), line_hashes

    def _without(self, text: bytes) -> tuple[bytes, bytes, int]:
        """The text without repeats, the hashes of the lines that are left, and how many were removed."""
        lines = text.split(b"\n")
        units = [k for k, line in enumerate(lines) if is_unit(line)]
        are_repeats = self._repeats[self._at : self._at + len(units)].tolist()
        self._at += len(units)
        if len(are_repeats) != len(units):
            raise self._changed()
        hashes = b"".join(_hash(lines[k]) for k, repeat in zip(units, are_repeats, strict=True) if not repeat)
        if not any(are_repeats):
            return text, hashes, 0
        removed = {k for k, repeat in zip(units, are_repeats, strict=True) if repeat}
        rest = b"\n".join([line for k, line in enumerate(lines) if k not in removed])
        if self._is_clean:  # and stays clean: at most one empty line, none at the ends
            rest = EMPTY_LINES.sub(b"\n\n", rest).strip(b"\n")
        return rest, hashes, len(removed)

    def finish(self) -> None:
        if self._at != len(self._repeats):
            raise self._changed()

    def _changed(self) -> SourceError:
        return SourceError(
            f"the sources no longer have {len(self._repeats)} lines, as when they were compared; "
            "--filter must give the same answer for the same text"
        )


def as_keys(data: Array) -> Array:
    """Hashes from a file as keys of shape (lines, 2)."""
    return np.asarray(data).view("<u8").reshape(-1, 2)
