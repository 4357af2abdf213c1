"""Count, mean, spread, smallest and largest value of columns, in one pass and constant memory.

Preparation takes the moments of every chunk of rows and merges them in the order of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.native import core
from millrace.ragged import Array, Int64s

Float64s: TypeAlias = npt.NDArray[np.float64]

BLOCK = 8192  # values of a column summed at once
ROWS = 4096  # rows measured at once


def measure_rows_numpy(rows: Array, width: int, starts: Int64s, stops: Int64s, out: Float64s) -> None:
    """Fills ``out`` (spans, 6, width): count, mean, its rounding rest, squares, low and high of each span.

    This is the twin of the core's ``measure_rows``. Both sum down each column row by row, so that their bytes are equal.
    """
    for k, (first, last) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        wide = rows[first:last].astype(np.float64)
        if width == 1:  # numpy would sum a single column in another order
            wide = np.repeat(wide, 2, axis=1)
        known = ~np.isnan(wide)
        count = known.sum(axis=0, dtype=np.float64)
        divisor = np.maximum(count, 1)
        with np.errstate(over="ignore", invalid="ignore"):
            mean = np.add.reduce(np.where(known, wide, 0.0), axis=0) / divisor
            apart = np.where(known, wide - mean, 0.0)
            rest = np.add.reduce(apart, axis=0) / divisor
            low = np.where(known, wide, np.inf).min(axis=0, initial=np.inf)
            high = np.where(known, wide, -np.inf).max(axis=0, initial=-np.inf)
            fields = (count, mean, rest, np.add.reduce(apart * apart, axis=0), low, high)
        out[k] = np.array(fields)[:, :width]


measure_rows = measure_rows_numpy if core is None else core.measure_rows


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of the values of each column, NaN left out; every field has one item per column.

    ``m2`` is the sum of squared distances from the mean. ``rest`` is what the mean lost by rounding. Without it, merging
    is too coarse where the mean is 1e9 times the spread: the deviation was off by 3e-8, with the rest by 1e-16.
    A column without values has 0 in these, ``low`` of inf and ``high`` of -inf.

    The same cuts, merged in the same order, give the same bits for any number of workers. No BLAS takes part: its sums
    depend on the processor and the number of threads.

    >>> Moments.of([np.array([1.0, 2.0, np.nan, 3.0])]).mean.tolist()
    [2.0]
    """

    count: Int64s
    mean: Float64s
    m2: Float64s
    low: Float64s
    high: Float64s
    rest: Float64s

    @classmethod
    def empty(cls, num_columns: int) -> Moments:
        """Of columns without values."""
        zeros, far = np.zeros(num_columns), np.full(num_columns, np.inf)
        return cls(np.zeros(num_columns, np.int64), zeros, zeros, far, -far, zeros)

    @classmethod
    def of(cls, columns: Sequence[Array]) -> Moments:
        """Of one 1-D array of numbers per column; their lengths may differ."""
        parts = [_of_column(np.asarray(column)) for column in columns]
        return cls(*map(np.concatenate, zip(*(part.arrays for part in parts), strict=True))) if parts else cls.empty(0)

    @classmethod
    def of_rows(cls, rows: Array) -> Moments:
        """Of C-contiguous rows (count, columns) of float32 or float64."""
        return cls.of_spans(rows, np.zeros(1, np.int64), np.full(1, len(rows)))[:, 0]

    @classmethod
    def of_spans(cls, rows: Array, starts: Int64s, stops: Int64s) -> Moments:
        """For each span of rows what ``of_rows`` gives; every field is (columns, spans)."""
        counts = np.maximum(-(-(stops - starts) // ROWS), 1)
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts, counts) + ROWS * places
        last = np.minimum(first + ROWS, np.repeat(stops, counts))
        fields = np.empty((len(first), 6, rows.shape[1]))
        measure_rows(rows, rows.shape[1], first, last, fields)
        return _merge_groups(_from_blocks(np.ascontiguousarray(np.moveaxis(fields, 0, -1))), counts)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The fields in their order."""
        return tuple(vars(self).values())

    @property
    def merged(self) -> Moments:
        """Of the values of all parts, where fields are (columns, parts): as ``merge_all`` of the parts."""
        return _merge_groups(self, np.full(1, self.count.shape[1]))[:, 0]

    @staticmethod
    def merge(a: Moments, b: Moments) -> Moments:
        """Of the values of both (Chan, Golub and LeVeque)."""
        with np.errstate(over="ignore", invalid="ignore"):
            count = a.count + b.count
            share = b.count / np.maximum(count, 1)
            apart = (b.mean - a.mean) + (b.rest - a.rest)
            mean, rest = _exact_sum(a.mean, apart * share + a.rest)
            between = np.where(share * a.count > 0, apart * apart * (share * a.count), 0.0)
            first = a.count == 0
            mean, rest = np.where(first, b.mean, mean), np.where(first, b.rest, rest)
        low, high = np.minimum(a.low, b.low), np.maximum(a.high, b.high)
        return Moments(count, mean, a.m2 + b.m2 + between, low, high, rest)

    @property
    def std(self) -> Float64s:
        """Of the population: the squares are divided by the count, as in scikit-learn's StandardScaler."""
        return np.sqrt(self.m2 / np.maximum(self.count, 1))

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, columns: Any) -> Moments:
        """Of some of the columns."""
        return Moments(*(values[columns] for values in self.arrays))


def merge_all(parts: Sequence[Moments]) -> Moments:
    """Of the values of all, merged two neighbours at a time in a tree that only their number fixes."""
    if not parts:
        raise ConfigError("no moments to merge; give at least Moments.empty(columns)")
    return Moments(*(np.stack(values, axis=-1) for values in zip(*(part.arrays for part in parts), strict=True))).merged


def _of_column(column: Array) -> Moments:
    """Of one column, block by block."""
    if column.ndim != 1 or column.dtype.kind not in "iufb":
        raise ConfigError(f"a column is {column.dtype} of shape {column.shape}; expected one dimension of numbers")
    starts = range(0, max(len(column), 1), BLOCK)
    blocks = np.array([_measure(column[k : k + BLOCK].astype(np.float64)) for k in starts])
    return _merge_groups(_from_blocks(blocks.T[:, None]), np.full(1, len(blocks)))[:, 0]


def _measure(values: Float64s) -> tuple[float, ...]:
    """The fields of one block, as ``measure_rows`` has them."""
    known = values[~np.isnan(values)]
    if not len(known):
        return 0, 0, 0, 0, np.inf, -np.inf
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduce(known) / len(known)
        apart = known - mean
        rest = np.add.reduce(apart) / len(known)
        return len(known), mean, rest, np.add.reduce(apart * apart), known.min(), known.max()


def _merge_groups(left: Moments, counts: Int64s) -> Moments:
    """Of the blocks of each group, (columns, blocks) in all, by a tree that only their number fixes."""
    while counts.max(initial=1) > 1:
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        is_even = places % 2 == 0
        firsts = np.flatnonzero(is_even & (places + 1 < np.repeat(counts, counts)))  # an odd one at the end stays
        merged = Moments.merge(left[:, firsts], left[:, firsts + 1])
        evens = np.flatnonzero(is_even)
        left, at = left[:, evens], np.searchsorted(evens, firsts)
        for old, new in zip(left.arrays, merged.arrays, strict=True):
            old[:, at] = new
        counts = (counts + 1) // 2
    return left


def _from_blocks(fields: Float64s) -> Moments:
    """Moments of measured blocks. Equal values are their own mean exactly, which rounding of the sum would miss."""
    count, mean, rest, m2, low, high = fields
    low, high = low + 0.0, high + 0.0  # which of two zeros is the smaller depends on the processor: both become +0
    is_varied = low < high
    with np.errstate(over="ignore", invalid="ignore"):
        m2 = np.where(is_varied, np.maximum(m2 - count * rest * rest, 0.0), 0.0)
    mean, rest = _exact_sum(np.where(is_varied | (count == 0), mean, low), np.where(is_varied, rest, 0.0))
    return Moments(count.astype(np.int64), mean, m2, low, high, rest)


def _exact_sum(a: Float64s, b: Float64s) -> tuple[Float64s, Float64s]:
    """The sum as rounded, and what rounding took from it (Knuth)."""
    with np.errstate(over="ignore", invalid="ignore"):
        total = a + b
        mine = total - a
        return total, (a - (total - mine)) + (b - mine)
