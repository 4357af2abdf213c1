"""A keyed permutation of [0, n) computed on the fly: a Feistel network on a x b >= n with cycle walking.

Exact for every n up to 2^63 - 1, in constant memory. ``permute`` chooses the C core where it is there, else
``numpy_permute``: both give the same numbers.
"""

from __future__ import annotations

from math import isqrt

import numpy as np

from millrace.native import core
from millrace.order.hashing import UInt32s, UInt64s, mix32s

CHUNK = 1 << 14  # positions per pass: the dozen temporaries stay in the second-level cache


def num_rounds(n: int) -> int:
    # 8 rounds leave small n far from uniform: chi-square z = +1378 over the 120 orders of 5, -1 at 24 rounds.
    return 24 if n < 1024 else 8


def sides(n: int) -> tuple[int, int]:
    """The rectangle a x b that is walked: b is even where both would be odd, else the parity of orders is biased."""
    a = isqrt(n - 1) + 1 if n > 1 else 1
    b = -(-n // a)
    return a, b + (a % 2 and b % 2)


def permute(values: UInt64s, n: int, keys: UInt32s, *, backward: bool = False) -> UInt64s:
    """Where each value goes, or came from; ``keys`` is (rounds,) for all or (len(values), rounds)."""
    if core is None:
        return numpy_permute(values, n, keys, backward=backward)
    moved = np.array(values, np.uint64)
    core.permute(moved, n, np.ascontiguousarray(keys), backward)
    return moved


def numpy_permute(values: UInt64s, n: int, keys: UInt32s, *, backward: bool = False) -> UInt64s:
    """The twin of the core's ``permute``."""
    out = np.empty(len(values), np.uint64)
    limit = np.uint64(n)
    for first in range(0, len(values), CHUNK):
        part = slice(first, first + CHUNK)
        own = keys if keys.ndim == 1 else keys[part]
        out[part] = _step(values[part], n, own, backward)
        outside = np.flatnonzero(out[part] >= limit)
        while len(outside):  # few: a x b exceeds n by less than a + b
            again = _step(out[part][outside], n, own if own.ndim == 1 else own[outside], backward)
            out[first + outside] = again
            outside = outside[again >= limit]
    return out


def _step(values: UInt64s, n: int, keys: UInt32s, backward: bool) -> UInt64s:
    """All rounds once; the result may lie in [n, a x b)."""
    a, b = sides(n)
    left, right = np.divmod(values, np.uint64(b))
    rounds = range(keys.shape[-1])
    for r in reversed(rounds) if backward else rounds:
        half, other, size = (left, right, np.uint64(a)) if r % 2 == 0 else (right, left, np.uint64(b))
        # A number below `size` from the other half and the round's key: 32-bit hash, multiply, shift.
        hashed = mix32s(other.astype(np.uint32) ^ keys[..., r]).astype(np.uint64)
        hashed *= size
        hashed >>= np.uint64(32)
        half += size - hashed if backward else hashed
        np.subtract(half, size, out=half, where=half >= size)
    left *= np.uint64(b)
    left += right
    return left
