"""Count, mean, spread, smallest and largest value of columns, in one pass and constant memory.

Preparation asks for the moments of each chunk of rows, wherever it is read, and merges them in the order of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.native import core
from millrace.ragged import Array, Int64s

Float64s: TypeAlias = npt.NDArray[np.float64]

# Values summed at once. Four blocks as float64 are 256 KiB, which stay in a core's cache through the five passes over
# them; more would save little and fewer spend the time on calls.
BLOCK = 8192
_BLOCKS = 4
ROWS = 4096  # rows measured at once


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of the values of each column, NaN left out; every field has one item per column.

    ``m2`` is the sum of squared distances from the mean, and ``rest`` what the mean lost by rounding: where a mean is 1e9
    times the spread, means rounded to float64 are too coarse to be merged (the deviation was off by 3e-8, with the
    rest by 1e-16). A column without values has 0 in these, ``low`` of inf and ``high`` of -inf.

    The result is a function of the values and of how they were cut into calls of ``of`` and merged, of nothing else:
    no BLAS takes part, whose sums depend on the processor and the number of threads. So whoever always cuts the
    same chunks and merges them in the same order gets equal bits for any number of workers.

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
        arrays = [_as_column(column) for column in columns]
        if len({len(array) for array in arrays}) == 1:
            return _of_equal(arrays)
        return _joined([_of_equal([array]) for array in arrays])

    @classmethod
    def of_rows(cls, rows: Array) -> Moments:
        """Of rows (count, columns): float32 or float64, one after the other in memory."""
        return cls.of_spans(rows, np.zeros(1, np.int64), np.full(1, len(rows)))[:, 0]

    @classmethod
    def of_spans(cls, rows: Array, starts: Int64s, stops: Int64s) -> Moments:
        """Of each span of rows what ``of_rows`` gives; every field is (columns, spans)."""
        counts = np.maximum(-(-(stops - starts) // ROWS), 1)
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        first = np.repeat(starts, counts) + ROWS * places
        last = np.minimum(first + ROWS, np.repeat(stops, counts))
        found = np.empty((len(first), 6, rows.shape[1]))
        (core.measure_rows if core is not None else _measure_rows)(rows, rows.shape[1], first, last, found)
        return _merged(_settled(np.ascontiguousarray(np.moveaxis(found, 0, -1))), counts)

    @property
    def merged(self) -> Moments:
        """Of the values of all, where fields are (columns, parts): as ``merge_all`` of the parts."""
        return _merged(self, np.full(1, self.count.shape[1]))[:, 0]

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
        """Of the population (the squares are divided by the count, as scikit-learn's StandardScaler does)."""
        return np.sqrt(self.m2 / np.maximum(self.count, 1))

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, columns: Any) -> Moments:
        """Of some of the columns."""
        return self._each(lambda values: values[columns])

    def _each(self, function: Callable[[Any], Any]) -> Moments:
        return Moments(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def to_json(self) -> dict[str, list[Any]]:
        """Lists of numbers that JSON keeps exactly; null for what a column without values has not."""
        lists = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        for name in ("low", "high"):
            lists[name] = [value if count else None for value, count in zip(lists[name], lists["count"], strict=True)]
        for name in ("mean", "m2", "rest"):  # beyond float64, which JSON cannot say either
            lists[name] = [value if math.isfinite(value) else None for value in lists[name]]
        return lists

    @classmethod
    def from_json(cls, lists: Mapping[str, Any]) -> Moments:
        """What ``to_json`` gave."""
        try:
            count = np.array(lists["count"], np.int64)
            absent = {"mean": np.nan, "m2": np.nan, "low": np.inf, "high": -np.inf, "rest": np.nan}
            floats = {
                name: np.array([value if item is None else item for item in lists[name]], np.float64)
                for name, value in absent.items()
            }
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"these are no moments of columns: {error!r}; give what to_json made") from error
        if any(values.shape != (len(count),) for values in floats.values()):
            raise ConfigError("the lists of moments differ in length; give what to_json made")
        return cls(count, **floats)


def merge_all(parts: Sequence[Moments]) -> Moments:
    """Of the values of all, merged two neighbours at a time in a tree that only their number fixes."""
    if not parts:
        raise ConfigError("no moments to merge; give at least Moments.empty(columns)")
    return Moments(
        **{field.name: np.stack([getattr(part, field.name) for part in parts], axis=-1) for field in fields(Moments)}
    ).merged


def _joined(parts: Sequence[Moments]) -> Moments:
    """Those of several columns side by side."""
    if not parts:
        return Moments.empty(0)
    return Moments(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Moments)}
    )


def _as_column(values: Any) -> Array:
    column = np.asarray(values)
    if column.ndim != 1 or column.dtype.kind not in "iufb":
        raise ConfigError(f"a column is {column.dtype} of shape {column.shape}; expected one dimension of numbers")
    return column


def _of_equal(columns: Sequence[Array]) -> Moments:
    """Of columns of one length: every block by itself, then merged by the same tree in all columns at once."""
    size = len(columns[0])
    if size == 0:
        return Moments.empty(len(columns))
    work = np.empty(2 * _BLOCKS * BLOCK)
    found = np.empty((6, len(columns), -(-size // BLOCK)))
    whole = size // BLOCK
    for k, column in enumerate(columns):
        for first in range(0, whole, _BLOCKS):
            last = min(first + _BLOCKS, whole)
            _measure(column[first * BLOCK : last * BLOCK].reshape(-1, BLOCK), found[:, k, first:last], work)
    if short := size - whole * BLOCK:
        together = _BLOCKS * BLOCK // short  # the ends of so many columns are one call
        for first in range(0, len(columns), together):
            ends = np.stack(
                [column[whole * BLOCK :].astype(np.float64) for column in columns[first : first + together]]
            )
            _measure(ends, found[:, first : first + together, -1], work)
    return _merged(_settled(found), np.full(1, found.shape[2]))[:, 0]


def _measure_rows(rows: Array, width: int, starts: Int64s, stops: Int64s, found: Float64s) -> None:
    """What the core does, in the same order: sums over the first axis run down each column row by row."""
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
            both = (count, mean, rest, np.add.reduce(apart * apart, axis=0), low, high)
        found[k] = np.array(both)[:, :width]


def _merged(left: Moments, counts: Int64s) -> Moments:
    """Of the blocks of each group, (columns, blocks) in all, by a tree that only their number fixes."""
    while counts.max(initial=1) > 1:
        places = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        is_even = places % 2 == 0
        firsts = np.flatnonzero(is_even & (places + 1 < np.repeat(counts, counts)))  # an odd one at the end stays
        merged = Moments.merge(left[:, firsts], left[:, firsts + 1])
        kept = np.flatnonzero(is_even)
        left, at = left[:, kept], np.searchsorted(kept, firsts)
        for name, values in vars(merged).items():
            getattr(left, name)[:, at] = values
        counts = (counts + 1) // 2
    return left


def _measure(blocks: Array, found: Float64s, work: Float64s) -> None:
    """Of each row its count, mean, what the mean lost, squares around it, smallest and largest value."""
    if blocks.dtype.kind != "f" or blocks.dtype.itemsize < 4 or not blocks.dtype.isnative:
        blocks = blocks.astype(np.float64)
    apart, wide = work[: 2 * blocks.size].reshape(2, *blocks.shape)
    if blocks.dtype == np.float64:
        wide = blocks
    else:
        np.copyto(wide, blocks)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduce(wide, axis=1) / blocks.shape[1]
        np.subtract(wide, mean[:, None], out=apart)
        rest = np.add.reduce(apart, axis=1) / blocks.shape[1]
        np.multiply(apart, apart, out=apart)
        found[:] = (
            np.full(len(mean), blocks.shape[1]), mean, rest, np.add.reduce(apart, axis=1),
            np.minimum.reduce(blocks, axis=1), np.maximum.reduce(blocks, axis=1),
        )  # fmt: skip
    for row in np.flatnonzero(~np.isfinite(mean)).tolist():  # NaN in a block makes its sum NaN
        known = wide[row][~np.isnan(wide[row])]
        if len(known) == 0:
            found[:, row] = (0, 0, 0, 0, np.inf, -np.inf)
        elif len(known) < blocks.shape[1]:
            _measure(known[None], found[:, row : row + 1], np.empty(2 * len(known)))


def _settled(found: Float64s) -> Moments:
    """Blocks as measured; equal values are their own mean exactly, which rounding of the sum would miss."""
    count, mean, rest, m2, low, high = found
    low, high = low + 0.0, high + 0.0  # which of two zeros is the smaller depends on the processor: both are made +0
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
