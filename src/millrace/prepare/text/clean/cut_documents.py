"""Long documents that are cut (``--long-documents split``): each piece is a record, and they stay one document.

All pieces have the hash of the whole, so they go to one split; with ``--dedup near`` they have its bands too.
Only the first is compared with other documents. ``goes_on`` marks the other pieces, which stay or go with
it. The hash is known after the last piece, and is then written into the records of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from millrace.prepare.spill import Spill
from millrace.prepare.text.dedup.lines import HASH_BYTES
from millrace.prepare.text.part_files import COLUMNS
from millrace.ragged import Array


class CutDocument:
    """The pieces of one document, stored from record ``first`` on."""

    def __init__(self, key: tuple[int, int], first: int) -> None:
        self.key, self._first, self._hash = key, first, xxhash.xxh3_128()
        self._signature: Array | None = None

    def add(self, pieces: Sequence[bytes]) -> bytes:
        """Adds pieces to the hash of the document; returns zeros in place of their hashes."""
        for piece in pieces:
            self._hash.update(piece)
        return bytes(HASH_BYTES * len(pieces))

    def add_signatures(self, signatures: Array) -> None:
        """The signature of the document is the least of those of its pieces."""
        least = signatures.min(axis=0)
        self._signature = least if self._signature is None else np.minimum(self._signature, least)

    def finish(self, stop: int, hashes: Spill, goes_on: Spill, signatures: Spill | None) -> int:
        """Writes hash, mark and bands into the records up to ``stop``; returns how many go on with the first."""
        begin, whole_hash = self._first, np.frombuffer(self._hash.digest(), "<u8")
        hashes.revise(begin, stop, COLUMNS["hash"], lambda first, count: whole_hash)
        goes_on.revise(begin, stop, COLUMNS["goes_on"], lambda first, count: np.arange(first, first + count) > begin)
        if signatures is not None and self._signature is not None:
            from millrace.prepare.text.dedup.near import BANDS, bands

            whole_bands = bands(self._signature[None])
            signatures.revise(begin, stop, np.dtype(("<u8", BANDS)), lambda first, count: whole_bands)
        return stop - begin - 1


def spread(why: Array, goes_on: Array, before: int) -> Array:
    """Why records go; other pieces go for the reason of the first. ``before`` is that of the record before all."""
    if not goes_on.any():
        return why
    heads = np.maximum.accumulate(np.where(goes_on, -1, np.arange(len(why))))
    return np.where(heads < 0, why.dtype.type(before), why[heads])
