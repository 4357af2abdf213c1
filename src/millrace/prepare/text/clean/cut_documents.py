"""Documents that are too long and cut (``--long-documents split``): their pieces are stored as records, and stay one document.

All pieces have the hash of the whole, so that they go to one split, and where near-duplicates are looked for its bands.
Only the first is compared with others; the pieces behind it, which ``goes_on`` marks, stay or go with it. The hash is known
when the last piece is read, and then written into the records of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from millrace.prepare.spill import Spill
from millrace.prepare.text.dedup.lines import HASH_BYTES
from millrace.prepare.text.part_files import COLUMNS
from millrace.ragged import Array


class Piece(int):
    """Where a piece of a document stands in its source; ``document`` is where that begins."""

    document: int

    def __new__(cls, place: int, document: int) -> Piece:
        self = super().__new__(cls, place)
        self.document = document
        return self


class CutDocument:
    """The pieces of one document as they are stored, from record ``first`` on."""

    def __init__(self, key: tuple[int, int], first: int) -> None:
        self.key, self._first, self._hash = key, first, xxhash.xxh3_128()
        self._signature: Array | None = None

    def add(self, texts: Sequence[bytes]) -> bytes:
        """Room for their hashes."""
        for text in texts:
            self._hash.update(text)
        return bytes(HASH_BYTES * len(texts))

    def sign(self, signatures: Array) -> None:
        """The signature of a whole is the least of those of its pieces."""
        least = signatures.min(axis=0)
        self._signature = least if self._signature is None else np.minimum(self._signature, least)

    def finish(self, stop: int, hashes: Spill, goes_on: Spill, signatures: Spill | None) -> int:
        """Tells the records up to ``stop`` what they are pieces of; how many go on with the first."""
        found = np.frombuffer(self._hash.digest(), "<u8")

        def tell(records: Array, first: int) -> None:
            records[:] = found

        def mark(records: Array, first: int) -> None:
            records[:] = np.arange(first, first + len(records)) > self._first

        hashes.revise(self._first, stop, COLUMNS["hash"], tell)
        goes_on.revise(self._first, stop, COLUMNS["goes_on"], mark)
        if signatures is not None and self._signature is not None:
            from millrace.prepare.text.dedup.near import BANDS, bands

            whole = bands(self._signature[None])

            def copy(records: Array, first: int) -> None:
                records[:] = whole

            signatures.revise(self._first, stop, np.dtype(("<u8", BANDS)), copy)
        return stop - self._first - 1


def spread(why: Array, goes_on: Array, before: int) -> Array:
    """Why records go, with that of the first piece for those behind it; ``before`` is that of the record before all."""
    if not goes_on.any():
        return why
    heads = np.maximum.accumulate(np.where(goes_on, -1, np.arange(len(why))))
    return np.where(heads < 0, why.dtype.type(before), why[heads])
