"""A keyed permutation of [0, n) computed on the fly: a Feistel network on a x b >= n with cycle walking.

Exact for every n up to 2^63 - 1, in constant memory; ``unpermute`` is its inverse. The numpy twin of the C
core's version: both give the same numbers.
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


def permute(values: UInt64s, n: int, keys: UInt32s) -> UInt64s:
    """Where each value goes; ``keys`` is (rounds,) for all or (len(values), rounds)."""
    return _walk(values, n, keys, _forward)


def unpermute(values: UInt64s, n: int, keys: UInt32s) -> UInt64s:
    """Where each value came from."""
    return _walk(values, n, keys, _backward)


def _walk(values: UInt64s, n: int, keys: UInt32s, step) -> UInt64s:  # type: ignore[no-untyped-def]
    if core is not None and n < 1 << 63:
        moved = np.array(values, np.uint64)
        core.permute(moved, n, np.ascontiguousarray(keys), step is _backward)
        return moved
    out = np.empty(len(values), np.uint64)
    limit = np.uint64(n)
    for first in range(0, len(values), CHUNK):
        part = slice(first, first + CHUNK)
        own = keys if keys.ndim == 1 else keys[part]
        out[part] = step(values[part], n, own)
        outside = np.flatnonzero(out[part] >= limit)
        while len(outside):  # few: a x b exceeds n by less than a + b
            again = step(out[part][outside], n, own if own.ndim == 1 else own[outside])
            out[first + outside] = again
            outside = outside[again >= limit]
    return out


def _forward(values: UInt64s, n: int, keys: UInt32s) -> UInt64s:
    a, b = sides(n)
    left, right = np.divmod(values, np.uint64(b))
    for r in range(keys.shape[-1]):
        if r % 2 == 0:
            left += _hash(right, keys[..., r], a)
            np.subtract(left, np.uint64(a), out=left, where=left >= np.uint64(a))
        else:
            right += _hash(left, keys[..., r], b)
            np.subtract(right, np.uint64(b), out=right, where=right >= np.uint64(b))
    left *= np.uint64(b)
    left += right
    return left


def _backward(values: UInt64s, n: int, keys: UInt32s) -> UInt64s:
    a, b = sides(n)
    left, right = np.divmod(values, np.uint64(b))
    for r in reversed(range(keys.shape[-1])):
        if r % 2 == 0:
            left += np.uint64(a) - _hash(right, keys[..., r], a)
            np.subtract(left, np.uint64(a), out=left, where=left >= np.uint64(a))
        else:
            right += np.uint64(b) - _hash(left, keys[..., r], b)
            np.subtract(right, np.uint64(b), out=right, where=right >= np.uint64(b))
    left *= np.uint64(b)
    left += right
    return left


def _hash(half: UInt64s, key: UInt32s, size: int) -> UInt64s:
    """A number below ``size`` from the other half and the round's key: 32-bit hash, multiply, shift."""
    hashed = mix32s(half.astype(np.uint32) ^ key).astype(np.uint64)
    hashed *= np.uint64(size)
    hashed >>= np.uint64(32)
    return hashed
