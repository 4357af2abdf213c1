"""Randomness that follows the position: the same position gets the same numbers, with any world size, batch or thread.

Every draw is a hash of (seed, position, call number, index), so there is nothing to save for a resume.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.order.hashing import GOLDEN, UInt64s, mix64, mix64s
from millrace.ragged import Array, Int64s

_DECODE, _GROUP = 0x6465636F6465, 0x67726F7570  # whose numbers are others than those of a transform's samples


class Rng:
    """Random numbers for the samples of a batch: row ``i`` belongs to the sample at ``positions[i]``.

    Each call of ``uniform``, ``integers`` or ``normal`` is a new draw. ``generator(i)`` always starts at its beginning.
    """

    def __init__(self, seed: int, positions: Int64s) -> None:
        self._seed, self._calls = mix64(seed ^ 0x72616E646F6D), 0
        self._positions = positions

    @cached_property
    def _rows(self) -> UInt64s:
        """When first drawn from: many transforms draw nothing."""
        return mix64s(self._positions.astype(np.uint64) + np.uint64(GOLDEN))

    @classmethod
    def of_records(cls, seed: int, positions: Int64s) -> Rng:
        """The numbers that ``RecordRng`` gives, for many records at once."""
        return cls(seed ^ _DECODE, positions)

    def of_group(self, groups: Int64s) -> Rng:
        """Numbers that samples of one group share: row ``i`` belongs to ``groups[i]``."""
        return Rng(self._seed ^ _GROUP, groups)

    @property
    def positions(self) -> Int64s:
        """Of the samples; -1 where a row is padding."""
        return self._positions

    def _bits(self, tail: tuple[int, ...]) -> UInt64s:
        self._calls += 1
        key = np.uint64(mix64(self._seed ^ mix64(self._calls)))
        states = mix64s(self._rows ^ key)
        indices = np.arange(1, int(np.prod(tail, dtype=np.int64)) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        return mix64s(states[:, None] + indices).reshape(len(states), *tail)

    def uniform(self, *tail: int) -> Array:
        """float64 in [0, 1), (n, *tail)."""
        return (self._bits(tail) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, low: int, high: int, *tail: int) -> Array:
        """int64 in [low, high), (n, *tail)."""
        size = high - low
        if not 1 <= size < 1 << 63 or not low >= -(1 << 63) or high > 1 << 63:
            raise ConfigError(f"integers({low}, {high}); expected low < high within int64")
        # The remainder of 64 bits is biased by at most size / 2^64.
        return (self._bits(tail) % np.uint64(size)).astype(np.int64) + np.int64(low)

    def normal(self, *tail: int) -> Array:
        """Standard normal float64, (n, *tail), by the inverse distribution: equal bits on every CPU."""
        # Half a step inside (0, 1), so that neither end is infinite.
        return normal_quantile(((self._bits(tail) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52)

    def generator(self, row: int) -> np.random.Generator:
        """A numpy generator for the sample in this row."""
        key = np.array([self._seed, int(self._rows[row])], np.uint64)
        return np.random.Generator(np.random.Philox(key=key))


class RecordRng:
    """Random numbers for the one record that ``decode`` gets: as ``Rng``, without the first axis.

    They follow the position too, and are other numbers than a transform draws for the same sample.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._seed, self._position = seed ^ _DECODE, position
        self._rng: Rng | None = None  # made at the first draw: most records need none

    @property
    def _one(self) -> Rng:
        if self._rng is None:
            self._rng = Rng(self._seed, np.array([self._position], np.int64))
        return self._rng

    def uniform(self, *tail: int) -> Any:
        """float64 in [0, 1): a number, or an array of shape ``tail``."""
        return self._one.uniform(*tail)[0]

    def integers(self, low: int, high: int, *tail: int) -> Any:
        """int64 in [low, high)."""
        return self._one.integers(low, high, *tail)[0]

    def normal(self, *tail: int) -> Any:
        """Standard normal float64."""
        return self._one.normal(*tail)[0]

    def generator(self) -> np.random.Generator:
        """A numpy generator for this record; it always starts at its beginning."""
        return self._one.generator(0)


# Wichura's AS 241 (PPND16): rational functions of degree 7, relative error about 1e-16.
_CENTRE = (
    (2509.0809287301226727, 33430.575583588128105, 67265.770927008700853, 45921.953931549871457, 13731.693765509461125,
     1971.5909503065514427, 133.14166789178437745, 3.387132872796366608),
    (5226.495278852545925, 28729.085735721942674, 39307.89580009271061, 21213.794301586595867, 5394.1960214247511077,
     687.1870074920579083, 42.313330701600911252, 1.0),
)  # fmt: skip
_NEAR = (
    (7.7454501427834140764e-4, 0.0227238449892691845833, 0.24178072517745061177, 1.27045825245236838258,
     3.64784832476320460504, 5.7694972214606914055, 4.6303378461565452959, 1.42343711074968357734),
    (1.05075007164441684324e-9, 5.475938084995344946e-4, 0.0151986665636164571966, 0.14810397642748007459,
     0.68976733498510000455, 1.6763848301838038494, 2.05319162663775882187, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 0.0012426609473880784386, 0.026532189526576123093,
     0.29656057182850489123, 1.7848265399172913358, 5.4637849111641143699, 6.6579046435011037772),
    (2.04426310338993978564e-15, 1.4215117583164458887e-7, 1.8463183175100546818e-5, 7.868691311456132591e-4,
     0.0148753612908506148525, 0.13692988092273580531, 0.59983220655588793769, 1.0),
)  # fmt: skip


def normal_quantile(uniform: Array) -> Array:
    """The inverse of the normal distribution, with + - * / and sqrt only."""
    q = uniform - 0.5
    out = q * _rational(_CENTRE, 0.180625 - q * q)
    tails = np.abs(q) > 0.425
    p = np.minimum(uniform[tails], 1.0 - uniform[tails])
    r = np.sqrt(-_log(p))
    near = r <= 5.0
    size = np.where(near, _rational(_NEAR, r - 1.6), _rational(_FAR, r - 5.0))
    out[tails] = np.where(q[tails] < 0, -size, size)
    return out


def _rational(coefficients: Any, x: Array) -> Array:
    top, bottom = np.zeros_like(x), np.zeros_like(x)
    for above, below in zip(*coefficients, strict=True):
        top = top * x + above
        bottom = bottom * x + below
    return top / bottom


def _log(x: Array) -> Array:
    """The natural logarithm by its series: libm's last bit differs between machines."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.70710678118654752
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    exponent = exponent - small
    t = (mantissa - 1.0) / (mantissa + 1.0)
    square, series = t * t, np.zeros_like(t)
    for k in range(23, -1, -2):
        series = series * square + 1.0 / k
    return 2.0 * t * series + exponent * 0.6931471805599453094
