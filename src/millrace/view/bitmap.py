"""Bitmap: which of many samples are chosen, a bit for each, and which is the i-th of them.

A billion samples take 133 MB, where their numbers would take 8 GB. The C core finds samples in it too (program.c).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from millrace.ragged import Array, Int64s

BLOCK = 1024  # bits for each number of ``ranks``, as in core.h
PACKED = np.dtype([("bits", "u1")])  # how bitmaps are given and saved: eight samples a byte, the lowest bit first
_CHUNK = 1 << 18  # bytes that are counted at a time
_SAMPLES = 4096  # that are found at a time: their blocks take 8 MB
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1).astype(np.uint16)


class Bitmap:
    """``words`` holds the bits, ``ranks`` how many are set before each block of 1,024, and in all.

    >>> chosen = Bitmap.of(np.array([True, False, True, True]))
    >>> len(chosen), chosen.select(np.array([0, 2])).tolist(), chosen.ids().tolist()
    (3, [0, 3], [0, 2, 3])
    """

    def __init__(self, bits: Array, length: int) -> None:
        """From a mask, or bytes of eight samples each; bits behind the last sample are ignored."""
        self.length, num_bytes = length, -(-length // 8)
        # With one bit of room at least, so that there always is a last block.
        padded = np.zeros((length // BLOCK + 1) * BLOCK // 8, np.uint8)
        if bits.dtype == bool:  # packed some at a time: beside it there is no second copy
            for at in range(0, num_bytes, _CHUNK):
                some = np.packbits(bits[8 * at : 8 * (at + _CHUNK)], bitorder="little")
                padded[at : at + len(some)] = some
        else:
            padded[:num_bytes] = bits[:num_bytes].view(np.uint8)
        if length % 8:
            padded[num_bytes - 1] &= (1 << length % 8) - 1
        blocks = padded.reshape(-1, BLOCK // 8)
        self.ranks: Int64s = np.zeros(len(blocks) + 1, np.int64)
        step = _CHUNK * 8 // BLOCK
        for first in range(0, len(blocks), step):
            self.ranks[1 + first : 1 + first + step] = _ONES[blocks[first : first + step]].sum(axis=1)
        np.cumsum(self.ranks, out=self.ranks)
        self.words = padded.view(np.int64)
        for array in (self.words, self.ranks):
            array.flags.writeable = False

    @classmethod
    def of(cls, mask: Array) -> Bitmap:
        return cls(mask, len(mask))

    def __len__(self) -> int:
        return int(self.ranks[-1])

    @property
    def packed(self) -> Array:
        return self.words.view(np.uint8)[: -(-self.length // 8)].view(PACKED)

    def select(self, places: Int64s) -> Int64s:
        """The number of the sample that is the ``places``-th of those chosen, counted from 0."""
        found = np.empty(len(places), np.int64)
        blocks = self.words.view(np.uint8).reshape(-1, BLOCK // 8)
        for first in range(0, len(places), _SAMPLES):
            some = places[first : first + _SAMPLES]
            owners = np.searchsorted(self.ranks, some, side="right") - 1
            bits = np.unpackbits(blocks[owners], axis=1, bitorder="little")
            wanted = (some - self.ranks[owners] + 1)[:, None]
            inside = np.argmax(np.cumsum(bits, axis=1, dtype=np.int16) == wanted, axis=1)
            found[first : first + len(some)] = owners * BLOCK + inside
        return found

    def chunks(self) -> Iterator[Int64s]:
        """The numbers of all chosen samples, rising, some at a time."""
        data = self.words.view(np.uint8)
        for first in range(0, len(data), _CHUNK // 8):
            bits = np.unpackbits(data[first : first + _CHUNK // 8], bitorder="little")
            yield np.flatnonzero(bits) + first * 8

    def ids(self) -> Int64s:
        """The numbers of all chosen samples: 8 bytes for each."""
        return np.concatenate(list(self.chunks()))
