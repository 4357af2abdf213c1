"""Offsets: which rows of an axis each record has, where the shards of a store have them.

Views find the rows of any records here. Offsets of few records are one array. Those of many records in several shards stay
in their files, mapped: joined they would take 8 bytes a record in every process, 8 GB for a billion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from millrace.lazy import cached_property
from millrace.ragged import Int64s

MAX_JOINED = 1 << 21  # records whose offsets are one array: 16 MB, and a lookup without a search for the shard
CHUNK = 1 << 18  # records at a time, where all are looked at; a multiple of those of a rank of windows


class Offsets:
    """``pieces`` are those of each shard, from 0 on; ``records`` and ``rows`` say with which record and row each begins.

    >>> offsets = Offsets([np.array([0, 2, 5]), np.array([0, 1])], np.array([0, 2, 3]), np.array([0, 5]))
    >>> len(offsets), offsets.spans(np.array([2, 1])), offsets.joined.tolist()
    (3, (array([5, 2]), array([6, 5])), [0, 2, 5, 6])
    """

    def __init__(self, pieces: Sequence[Int64s], records: Int64s, rows: Int64s) -> None:
        self.pieces, self.records, self.rows = tuple(pieces), records, rows

    @classmethod
    def of(cls, whole: Int64s) -> Offsets:
        """Those of one shard, or of several that were joined."""
        return cls([whole], np.array([0, len(whole) - 1]), np.zeros(1, np.int64))

    def __len__(self) -> int:
        return int(self.records[-1])

    @property
    def is_joined(self) -> bool:
        """Whether they are an array of their own, which no file has."""
        return len(self.pieces) == 1 and self.pieces[0].base is None

    @cached_property
    def joined(self) -> Int64s:
        """All as one array: 8 bytes for each record where they lie in several shards."""
        return self.pieces[0] if len(self.pieces) == 1 else self.slice(0, len(self))

    def slice(self, first: int, last: int) -> Int64s:
        """The offsets of records [first, last), and the end of the last one."""
        if len(self.pieces) == 1:
            return self.pieces[0][first : last + 1]
        found = np.zeros(last - first + 1, np.int64)
        k, last_piece = (int(np.searchsorted(self.records[1:-1], record, side="right")) for record in (first, last))
        for piece in range(k, last_piece + 1):
            begin, end = max(first, int(self.records[piece])), min(last, int(self.records[piece + 1]))
            own = self.pieces[piece][begin - self.records[piece] : end - self.records[piece] + 1]
            np.add(own, self.rows[piece], out=found[begin - first : end - first + 1])
        found.flags.writeable = False
        return found

    def chunks(self) -> Iterator[tuple[int, Int64s]]:
        """The first record and the offsets of some records at a time, for who looks at all of them."""
        for first in range(0, len(self), CHUNK):
            yield first, self.slice(first, min(first + CHUNK, len(self)))

    def spans(self, records: Int64s) -> tuple[Int64s, Int64s]:
        """Where the rows of any records begin and end."""
        if len(self.pieces) == 1:
            return self.pieces[0][records], self.pieces[0][records + 1]
        starts, stops = np.empty((2, len(records)), np.int64)
        for piece, places in _by_piece(np.searchsorted(self.records[1:-1], records, side="right")):
            inside = records[places] - self.records[piece]
            starts[places] = self.pieces[piece][inside] + self.rows[piece]
            stops[places] = self.pieces[piece][inside + 1] + self.rows[piece]
        return starts, stops

    def owners(self, rows: Int64s) -> Int64s:
        """The last record that begins at each row or before it; behind the last row how many there are."""
        if len(self.pieces) == 1:
            return np.searchsorted(self.pieces[0], rows, side="right") - 1
        found = np.empty(len(rows), np.int64)
        for piece, places in _by_piece(np.searchsorted(self.rows[1:], rows, side="right")):
            inside = np.searchsorted(self.pieces[piece], rows[places] - self.rows[piece], side="right") - 1
            found[places] = self.records[piece] + inside
        return found


def _by_piece(pieces: Int64s) -> Iterator[tuple[int, Int64s]]:
    """Each piece that is named, and the places that name it."""
    order = np.argsort(pieces, kind="stable")
    named, firsts = np.unique(pieces[order], return_index=True)
    for piece, first, last in zip(named.tolist(), firsts, [*firsts[1:], len(order)], strict=False):
        yield piece, order[first:last]
