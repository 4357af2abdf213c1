"""Exact quantiles of columns of any length, in passes that only count.

Floats sort like the integers that their bits make. Each pass counts the next 16 bits of the values that share the bits
found so far. So 4 passes find any float64 and 2 any float32. Counts of chunks add up in any order: preparation counts
them in parallel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s
from millrace.scaling.moments import Float64s

QUARTILES = (0.25, 0.5, 0.75)
DIGIT = 16
_CHUNK = 1 << 15  # values whose keys are made at once, so that they stay in cache


@dataclass(frozen=True)
class Target:
    """What one pass counts in one column: the digit at ``shift`` of keys whose bits above it are one of ``prefixes``.

    A column without prefixes is finished.
    """

    bits: int
    shift: int
    prefixes: tuple[int, ...]


class QuantileSearch:
    """Finds the quartiles of several columns of one dtype; ``next_pass`` says what the caller counts.

    A pass keeps (columns, prefixes, 65,536) counts of 8 bytes: one prefix in the first pass, later at most six. Many
    columns at once cost memory: search some of them at a time.

    >>> search, column = QuantileSearch(1, "float32"), np.array([1, 2, 4, 8, 16], np.float32)
    >>> while (targets := search.next_pass()) is not None:
    ...     search.update([histogram(column, targets[0])])
    >>> search.result().tolist()
    [[2.0, 4.0, 8.0]]
    """

    def __init__(self, num_columns: int, dtype: str = "float64") -> None:
        self._columns = [_Column(8 * np.dtype(dtype).itemsize) for _ in range(num_columns)]

    def next_pass(self) -> list[Target] | None:
        """What to count in each column now, or None when all is known."""
        targets = [column.target() for column in self._columns]
        return targets if any(target.prefixes for target in targets) else None

    def update(self, histograms: Sequence[Int64s]) -> None:
        """Takes the counts of a pass: for each column the sum over its chunks."""
        for column, counts in zip(self._columns, histograms, strict=True):
            column.update(np.asarray(counts))

    def result(self) -> Float64s:
        """(columns, 3): what ``np.quantile(..., method="linear")`` gives; NaN for a column without values."""
        if self.next_pass() is not None:
            raise ConfigError("the search is not over; call next_pass until it returns None")
        return np.array([column.result() for column in self._columns]).reshape(-1, len(QUARTILES))


class _Column:
    """The search in one column: the upper bits of the values at some ranks."""

    def __init__(self, bits: int) -> None:
        self._bits, self._shift = bits, bits - DIGIT
        self._counts_all = True  # the first pass also counts the values
        self._known: list[int] = []  # the bits found so far of each rank's key
        self._left: list[int] = []  # its rank among the values that share them

    def target(self) -> Target:
        prefixes = (0,) if self._counts_all else tuple(sorted(set(self._known)))
        return Target(self._bits, self._shift, prefixes if self._shift >= 0 else ())

    def update(self, counts: Int64s) -> None:
        prefixes = self.target().prefixes
        if not prefixes:
            return
        if self._counts_all:
            self._counts_all = False
            below, above, self._between = _ranks(int(counts.sum()))
            self._left = [*below, *above]
            self._known = [0] * len(self._left)
        running = np.cumsum(counts, axis=1)
        for k, (prefix, rank) in enumerate(zip(self._known, self._left, strict=True)):
            mine = running[prefixes.index(prefix)]
            digit = int(np.searchsorted(mine, rank, side="right"))
            self._known[k] = prefix << DIGIT | digit
            self._left[k] = rank - (int(mine[digit - 1]) if digit else 0)
        self._shift -= DIGIT

    def result(self) -> Float64s:
        if not self._left:
            return np.full(len(QUARTILES), np.nan)
        values = _values(np.array(self._known, np.uint64), self._bits)
        below, above = np.split(values, 2)
        return _interpolate(below, above, self._between)


def histogram(column: Array, target: Target) -> Int64s:
    """(prefixes, 65,536) counts of one chunk of a column, NaN left out; add those of all chunks."""
    column = np.asarray(column)
    counts = np.zeros((len(target.prefixes), 1 << DIGIT), np.int64)
    if target.bits == 32 and column.dtype != np.float32:
        raise ConfigError(f"a chunk is {column.dtype}, but the search is for float32")
    if target.bits == 64:
        column = column.astype(np.float64, copy=False)
    if not target.prefixes:
        return counts
    mask = (1 << DIGIT) - 1
    for first in range(0, len(column), _CHUNK):
        keys = _keys(column[first : first + _CHUNK])
        digits = keys >> keys.dtype.type(target.shift)
        if target.shift + DIGIT == target.bits:
            np.add.at(counts[0], digits.astype(np.int64), 1)
            continue
        uppers = digits >> keys.dtype.type(DIGIT)
        for k, prefix in enumerate(target.prefixes):
            mine = digits[uppers == prefix] & mask
            np.add.at(counts[k], mine.astype(np.int64), 1)
    return counts


def quartiles_of(column: Array) -> Float64s:
    """The quartiles of one column that fits in memory, by the same rule; NaN where it has no values."""
    values = np.asarray(column).astype(np.float64)
    values = values[~np.isnan(values)] + 0.0
    if not len(values):
        return np.full(len(QUARTILES), np.nan)
    below, above, between = _ranks(len(values))
    values.partition(sorted({*below, *above}))
    return _interpolate(values[below], values[above], between)


def _ranks(count: int) -> tuple[list[int], list[int], Float64s]:
    """The two ranks each quartile lies between and how far, as numpy has it; no ranks where there are no values."""
    if count == 0:
        return [], [], np.zeros(0)
    places = (count - 1) * np.array(QUARTILES)
    below = np.floor(places)
    above = np.minimum(below + 1, count - 1)
    return below.astype(np.int64).tolist(), above.astype(np.int64).tolist(), places - below


def _interpolate(low: Float64s, high: Float64s, between: Float64s) -> Float64s:
    """From the nearer end, as numpy does: so equal ends give that value, and the result stays between them.

    Ends further apart than the largest float give a result that is not finite, which the scaling refuses.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        apart = high - low
        return np.where(between >= 0.5, high - apart * (1 - between), low + apart * between)


def _keys(values: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Unsigned integers in the order of the values; NaN is left out and -0.0 is 0.0."""
    values = values[~np.isnan(values)] + values.dtype.type(0)
    signed: npt.NDArray[np.signedinteger[Any]] = values.view(f"i{values.dtype.itemsize}")
    last = signed.dtype.itemsize * 8 - 1
    # A positive float gets its sign bit set; a negative one has all bits flipped, so that larger sizes come first.
    flip = (signed >> last) | np.array(-1 << last, signed.dtype)
    keys: npt.NDArray[np.unsignedinteger[Any]] = (signed ^ flip).view(f"u{signed.dtype.itemsize}")
    return keys


def _values(keys: npt.NDArray[np.uint64], bits: int) -> Float64s:
    """The floats of keys."""
    unsigned = keys.astype(f"u{bits // 8}")
    top = unsigned.dtype.type(1 << bits - 1)
    raw = np.where(unsigned & top, unsigned ^ top, ~unsigned)
    return raw.astype(unsigned.dtype).view(f"f{bits // 8}").astype(np.float64)
