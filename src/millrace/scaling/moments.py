"""Count, mean, spread, smallest and largest value of columns, in one pass and constant memory.

Preparation asks for the moments of each chunk of rows, wherever it is read, and merges them in the order of chunks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s

Float64s: TypeAlias = npt.NDArray[np.float64]

# Values summed at once. Four blocks as float64 are 256 KiB, which stay in a core's cache through the five passes over
# them; more would save little and fewer spend the time on calls.
BLOCK = 8192
_BLOCKS = 4


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known of the values of each column, NaN left out; every field has one item per column.

    ``m2`` is the sum of squared distances from the mean. A column without values has count, mean and m2 of 0,
    ``low`` of inf and ``high`` of -inf.

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

    @classmethod
    def empty(cls, num_columns: int) -> Moments:
        """Of columns without values."""
        zeros, far = np.zeros(num_columns), np.full(num_columns, np.inf)
        return cls(np.zeros(num_columns, np.int64), zeros, zeros, far, -far)

    @classmethod
    def of(cls, columns: Sequence[Array]) -> Moments:
        """Of one 1-D array of numbers per column; their lengths may differ."""
        work = np.empty((2, _BLOCKS, BLOCK))
        return _joined([_of_column(np.asarray(column), work) for column in columns])

    @staticmethod
    def merge(a: Moments, b: Moments) -> Moments:
        """Of the values of both (Chan, Golub and LeVeque)."""
        with np.errstate(over="ignore", invalid="ignore"):
            count = a.count + b.count
            share = b.count / np.maximum(count, 1)
            apart = b.mean - a.mean
            mean = np.where(a.count == 0, b.mean, a.mean + apart * share)
            between = np.where((a.count == 0) | (b.count == 0), 0.0, apart * apart * (a.count * share))
        return Moments(count, mean, a.m2 + b.m2 + between, np.minimum(a.low, b.low), np.maximum(a.high, b.high))

    @property
    def std(self) -> Float64s:
        """Of the population (the squares are divided by the count, as scikit-learn's StandardScaler does)."""
        return np.sqrt(self.m2 / np.maximum(self.count, 1))

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, columns: slice | Array) -> Moments:
        """Of some of the columns."""
        return self._each(lambda values: values[columns])

    def _each(self, function: Callable[[Any], Any]) -> Moments:
        return Moments(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def to_json(self) -> dict[str, list[Any]]:
        """Lists of numbers that JSON keeps exactly; null for what a column without values has not."""
        lists = {field.name: getattr(self, field.name).tolist() for field in fields(self)}
        for name in ("low", "high"):
            lists[name] = [value if count else None for value, count in zip(lists[name], lists["count"], strict=True)]
        for name in ("mean", "m2"):  # beyond float64, which JSON cannot say either
            lists[name] = [value if math.isfinite(value) else None for value in lists[name]]
        return lists

    @classmethod
    def from_json(cls, lists: Mapping[str, Any]) -> Moments:
        """What ``to_json`` gave."""
        try:
            count = np.array(lists["count"], np.int64)
            absent = {"mean": np.inf, "m2": np.inf, "low": np.inf, "high": -np.inf}
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
    left = list(parts)
    while len(left) > 1:
        merged = [Moments.merge(a, b) for a, b in zip(left[::2], left[1::2], strict=False)]
        left = merged + left[len(merged) * 2 :]
    return left[0]


def _joined(parts: Sequence[Moments]) -> Moments:
    """Those of several columns (or blocks) side by side."""
    if not parts:
        return Moments.empty(0)
    return Moments(
        **{field.name: np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Moments)}
    )


def _of_column(values: Array, work: Float64s) -> Moments:
    """Of one column: the blocks of it merged by the same tree, many pairs at once."""
    if values.ndim != 1 or values.dtype.kind not in "iufb":
        raise ConfigError(f"a column is {values.dtype} of shape {values.shape}; expected one dimension of numbers")
    if not len(values):
        return Moments.empty(1)
    left = _joined([_of_blocks(blocks, work) for blocks in _blocks(values)])
    while len(left) > 1:
        pairs = len(left) // 2
        merged = Moments.merge(left[: 2 * pairs : 2], left[1 : 2 * pairs : 2])
        left = _joined([merged, left[2 * pairs :]]) if len(left) % 2 else merged
    return left


def _blocks(values: Array) -> Iterator[Array]:
    """The values as (blocks, BLOCK), a few blocks at a time; the short one at the end alone."""
    whole = len(values) // BLOCK * BLOCK
    step = _BLOCKS * BLOCK
    for first in range(0, whole, step):
        yield values[first : min(first + step, whole)].reshape(-1, BLOCK)
    if whole < len(values):
        yield values[whole:].reshape(1, -1)


def _of_blocks(blocks: Array, work: Float64s) -> Moments:
    """Of each row: its mean, then the squares around it."""
    if blocks.dtype.kind not in "f" or blocks.dtype.itemsize < 4 or not blocks.dtype.isnative:
        blocks = blocks.astype(np.float64)
    num_blocks, size = blocks.shape
    apart = work[0, :num_blocks, :size]
    wide: Float64s = blocks
    if blocks.dtype != np.float64:
        wide = work[1, :num_blocks, :size]
        np.copyto(wide, blocks)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduce(wide, axis=1) / size
        if not np.isfinite(mean).all():  # NaN in a block makes its sum NaN
            return _joined([_of_some(row, work) for row in wide])
        np.subtract(wide, mean[:, None], out=apart)
        np.multiply(apart, apart, out=apart)
        m2 = np.add.reduce(apart, axis=1)
    return _settled(np.full(num_blocks, size), mean, m2, blocks)


def _of_some(row: Float64s, work: Float64s) -> Moments:
    """Of one block whose NaN are left out first."""
    values = row[~np.isnan(row)]
    if not len(values):
        return Moments.empty(1)
    with np.errstate(over="ignore", invalid="ignore"):
        mean = np.add.reduce(values) / len(values)
        apart = np.subtract(values, mean, out=work[0].reshape(-1)[: len(values)])
        m2 = np.add.reduce(np.multiply(apart, apart, out=apart))
    return _settled(np.array([len(values)]), np.array([mean]), np.array([m2]), values[None])


def _settled(count: Int64s, mean: Float64s, m2: Float64s, blocks: Array) -> Moments:
    """With the range; equal values are their own mean exactly, which rounding of the sum would miss."""
    low = np.minimum.reduce(blocks, axis=1).astype(np.float64) + 0.0  # which zero is smaller depends on the processor
    high = np.maximum.reduce(blocks, axis=1).astype(np.float64) + 0.0
    is_constant = low == high
    return Moments(count.astype(np.int64), np.where(is_constant, low, mean), np.where(is_constant, 0.0, m2), low, high)
