"""Integer hashes that give the same numbers on every machine; orders and the feed's rng are built on them.

The constants are part of the format of training runs: golden vectors in tests/golden hold them fixed, and
docs/architecture.md writes them down.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

UInt64s: TypeAlias = npt.NDArray[np.uint64]
UInt32s: TypeAlias = npt.NDArray[np.uint32]

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the step of splitmix64
_MASK = (1 << 64) - 1


def mix64(value: int) -> int:
    """The finaliser of splitmix64, on a Python integer."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def mix64s(values: Any) -> UInt64s:
    """``mix64`` of every element of a uint64 array."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed  # type: ignore[no-any-return]


def mix32s(values: UInt32s) -> UInt32s:
    """A 32-bit finaliser (lowbias32) of every element, in place."""
    values ^= values >> np.uint32(16)
    values *= np.uint32(0x7FEB352D)
    values ^= values >> np.uint32(15)
    values *= np.uint32(0x846CA68B)
    values ^= values >> np.uint32(16)
    return values


def round_keys(seed: int, lane: int, streams: npt.ArrayLike, rounds: int) -> UInt32s:
    """Keys of a permutation: (streams, rounds) uint32, a hash of seed, lane, stream (epoch) and round together.

    ``lane`` keeps the permutations of one order apart (blocks, windows).
    """
    base = mix64(seed ^ 0x6D696C6C72616365 ^ mix64(lane))
    stream_keys = mix64s(np.asarray(streams, np.uint64) + np.uint64(GOLDEN))
    states = mix64s(stream_keys ^ np.uint64(base))
    steps = np.arange(1, rounds + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    return (mix64s(states[:, None] + steps) >> np.uint64(32)).astype(np.uint32)
