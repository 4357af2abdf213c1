"""Ragged arrays and spans of rows: the two shapes every layer passes to the next.

Both are half-open with n + 1 offsets: item ``i`` is ``values[offsets[i]:offsets[i + 1]]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import index
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.padding import cropped, fits, item_of_rows, padded

Array: TypeAlias = npt.NDArray[Any]
Int64s: TypeAlias = npt.NDArray[np.int64]
MAX_INT32 = (1 << 31) - 1


def as_integer(name: str, value: Any) -> int:
    """A Python integer, also of numpy's: those are no JSON, and overflow where ours do not."""
    try:
        return index(value)
    except TypeError as error:
        raise ConfigError(f"{name}={value!r}; expected an integer") from error


def as_int64s(numbers: npt.ArrayLike) -> Int64s:
    """As int64, one after the other and at addresses that the core reads; without a copy where they are so already."""
    array = np.ascontiguousarray(numbers, np.int64)
    return array if array.flags.aligned else array.copy()


def as_indices(numbers: Any, length: int, what: str, of: str, expected: str) -> Int64s:
    """Which of the ``length`` rows or samples, as int64; negative ones count from the end."""
    array = np.asarray(numbers)
    if array.shape == (0,):
        return np.zeros(0, np.int64)  # an empty list has no type of its own
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise IndexError(f"{what}s are {array.dtype} of shape {array.shape}; expected {expected}")
    low, high = int(array.min()), int(array.max())  # before the cast, which wraps large uint64
    if low < -length or high >= length:
        raise IndexError(f"{what} {low if low < -length else high} is out of range; {of} has {length}")
    array = array.astype(np.int64)
    return np.where(array < 0, array + length, array) if low < 0 else array


def as_offsets(offsets: npt.ArrayLike, num_rows: int | None = None) -> Int64s:
    """Checked offsets as int64: from 0, never falling, ending at ``num_rows`` where that is given."""
    array = np.asarray(offsets)
    if array.dtype.kind not in "iu" or array.ndim != 1 or len(array) == 0:
        raise ConfigError(f"offsets are {array.dtype} of shape {array.shape}; expected 1-D integers [0, ..., rows]")
    array = as_int64s(array)
    if array[0] != 0:
        raise ConfigError(f"offsets start at {array[0]}; expected 0, with one more offset than records")
    if np.any(array[1:] < array[:-1]):
        at = int(np.argmax(array[1:] < array[:-1]))
        raise ConfigError(f"offsets fall from {array[at]} to {array[at + 1]} at record {at}; they must never fall")
    if num_rows is not None and array[-1] != num_rows:
        raise ConfigError(f"offsets end at {array[-1]} but there are {num_rows} rows; they must end at the last row")
    return array


@dataclass(eq=False)
class Ragged:
    """Items of different lengths in one array: ``values`` and ``offsets`` (cu_seqlens); numpy arrays, or tensors.

    >>> hits = Ragged(np.arange(5.0), np.array([0, 2, 2, 5]))
    >>> len(hits), hits[2].tolist(), hits.lengths.tolist()
    (3, [2.0, 3.0, 4.0], [2, 0, 3])
    >>> hits.pad(value=-1).tolist()
    [[0.0, 1.0, -1.0], [-1.0, -1.0, -1.0], [2.0, 3.0, 4.0]]
    """

    values: Array
    offsets: Int64s

    def __post_init__(self) -> None:
        self.values = np.asarray(self.values)
        self.offsets = as_offsets(self.offsets, len(self.values))

    @classmethod
    def trusted(cls, values: Any, offsets: Any) -> Ragged:
        """Without the checks, for offsets that were just computed."""
        made = object.__new__(cls)
        made.values, made.offsets = values, offsets
        return made

    @classmethod
    def one(cls, rows: Any) -> Ragged:
        """A ragged array of one item: what ``decode`` returns for a column whose length varies."""
        return cls(rows, np.array([0, len(rows)]))

    def map(self, function: Callable[[Array], Any]) -> Ragged:
        """The same items with ``function`` applied to values and offsets, e.g. ``torch.from_numpy``."""
        return Ragged.trusted(function(self.values), function(self.offsets))

    def to(self, device: Any, non_blocking: bool = False) -> Ragged:
        """The same items as tensors on a device, as ``torch.Tensor.to`` moves one."""
        return self.map(lambda array: moved(array, device, non_blocking))

    def pin_memory(self) -> Ragged:
        """The same items as tensors in pinned memory."""
        return self.map(pinned)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key: int | slice) -> Any:
        """One item, or with a slice of step 1 the ragged array of those items; views, no copy."""
        if isinstance(key, slice):
            items = range(len(self))[key]
            if items.step != 1:
                raise IndexError(f"step {items.step}; a slice of a Ragged has step 1")
            stop = max(items.start, items.stop)
            rows = self.values[self.offsets[items.start] : self.offsets[stop]]
            offsets = self.offsets[items.start : stop + 1] - self.offsets[items.start]
            return Ragged.trusted(rows, offsets)
        item = range(len(self))[key]
        return self.values[self.offsets[item] : self.offsets[item + 1]]

    def __iter__(self) -> Iterator[Array]:
        return (self[item] for item in range(len(self)))

    @property
    def lengths(self) -> Int64s:
        """Rows of each item."""
        return self.offsets[1:] - self.offsets[:-1]

    # Ways out: values are never copied, except where it says so.

    def with_values(self, values: Any) -> Ragged:
        """The same items around other values, one for each row: what a model made of them, say."""
        if len(values) != len(self.values):
            raise ConfigError(f"{len(values)} values for {len(self.values)} rows; give one for each row")
        return Ragged.trusted(values, self.offsets)

    @property
    def cu_seqlens(self) -> Any:
        """The offsets as int32, as attention kernels for sequences of varying length take them."""
        if len(self.values) > MAX_INT32:
            raise ConfigError(f"{len(self.values):,} rows are more than int32 offsets can count; take smaller batches")
        return self.offsets.astype(np.int32) if isinstance(self.offsets, np.ndarray) else self.offsets.int()

    @property
    def batch_vector(self) -> Any:
        """The number of the item that each row is of, as PyTorch Geometric and scatter operations take it."""
        return item_of_rows(self.values, self.offsets)[0]

    def nested(self) -> Any:
        """A nested tensor of torch (jagged layout) over the same memory."""
        import torch

        tensors: Any = self.map(tensor_maker()) if isinstance(self.values, np.ndarray) else self
        return torch.nested.nested_tensor_from_jagged(tensors.values, tensors.offsets)

    def awkward(self) -> Any:
        """An array of Awkward over the same memory; tensors must be on the host."""
        import awkward

        if getattr(self.values, "is_cuda", False):
            raise ConfigError(f"these rows are on {self.values.device}; give awkward those of .to('cpu')")
        values, offsets = np.asarray(self.values), np.asarray(self.offsets)
        content = awkward.contents.NumpyArray(values)
        return awkward.Array(awkward.contents.ListOffsetArray(awkward.index.Index64(offsets), content))

    def pad(self, value: Any = 0, length: int | None = None) -> Any:
        """A dense (items, length, ...) copy, on the device of the values; items longer than ``length`` are cut.

        Without a ``length`` it is that of the longest item. Gradients go back to the values.
        """
        if length is not None and as_integer("length", length) < 0:
            raise ConfigError(f"length={length}; expected 0 or more rows")
        if not fits(value, self.values):
            raise ConfigError(f"value={value!r}; expected what {self.values.dtype} holds: convert the values first")
        return padded(self.values, self.offsets, value, length)

    def crop(self, length: int, at: Any = 0.0) -> Ragged:
        """At most ``length`` rows of each item, as a copy: the first, the last with ``at=1``, or between.

        ``at`` may have a number for each item, so that ``rng.uniform()`` in a transform crops at random, and exactly so
        again after a resume.

        >>> Ragged(np.arange(5), np.array([0, 4, 5])).crop(2, at=1).values.tolist()
        [2, 3, 4]
        """
        if as_integer("length", length) < 0:
            raise ConfigError(f"length={length}; expected 0 or more rows")
        self._check_places(at)
        return Ragged.trusted(*cropped(self.values, self.offsets, length, at))

    def _check_places(self, at: Any) -> None:
        """Refuses places that are no shares. Those on a GPU are not waited for."""
        if getattr(at, "is_cuda", False):
            return
        try:
            shares = np.asarray(at, np.float64)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"at={at!r}; expected a number from 0 to 1, or one for each item") from error
        if shares.shape not in ((), (len(self),)) or not np.all((shares >= 0) & (shares <= 1)):
            raise ConfigError(
                f"at={at!r}; expected a number from 0 (the first rows) to 1 (the last), or one for each of {len(self):,} items"
            )


def shared(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``function``, called once for each object: ragged columns of one axis keep one array of offsets between them."""
    done: dict[int, tuple[Any, Any]] = {}

    def once(value: Any) -> Any:
        if id(value) not in done:
            done[id(value)] = value, function(value)  # the value too: its id is then nobody else's
        return done[id(value)][1]

    return once


def tensor_maker() -> Callable[[Array], Any]:
    """What makes tensors of arrays, in the same memory where torch can have it."""
    from torch import from_numpy

    def tensor(array: Array) -> Any:
        # torch takes no negative strides (a flip in a transform) and warns of read-only memory.
        is_plain = array.flags.writeable and (array.flags.c_contiguous or min(array.strides, default=0) >= 0)
        return from_numpy(array if is_plain else array.copy())

    return tensor


def is_numeric(value: Any) -> bool:
    """Whether it is an array that torch can take: text stays as it is."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "biufc"


def moved(value: Any, device: Any, non_blocking: bool = False) -> Any:
    """A column on a device: arrays become tensors, text stays as it is."""
    value = tensor_maker()(value) if is_numeric(value) else value
    return value.to(device, non_blocking=non_blocking) if hasattr(value, "to") else value


def pinned(value: Any) -> Any:
    """A column in pinned memory; text stays as it is."""
    value = tensor_maker()(value) if is_numeric(value) else value
    return value.pin_memory() if hasattr(value, "pin_memory") else value


@dataclass(frozen=True, eq=False)
class Spans:
    """Which rows each sample covers: pieces ``[starts[j], stops[j])`` of the rows of a store.

    With ``offsets`` sample ``i`` is the pieces ``offsets[i]:offsets[i + 1]`` one after the other; without,
    one piece each, which is the fast path.

    >>> spans = Spans(np.array([4, 0, 9]), np.array([6, 3, 9]), offsets=np.array([0, 2, 3]))
    >>> len(spans), spans.lengths.tolist(), spans.rows(0).tolist()
    (2, [5, 0], [4, 5, 0, 1, 2])
    """

    starts: Int64s
    stops: Int64s
    offsets: Int64s | None = None

    def __post_init__(self) -> None:
        starts, stops = np.asarray(self.starts, np.int64), np.asarray(self.stops, np.int64)
        if starts.ndim != 1 or starts.shape != stops.shape:
            raise ConfigError(f"starts have shape {starts.shape} and stops {stops.shape}; expected equal 1-D arrays")
        if len(starts) and (starts.min() < 0 or np.any(stops < starts)):
            at = int(np.argmax((starts < 0) | (stops < starts)))
            raise ConfigError(f"piece {at} is [{starts[at]}, {stops[at]}); expected 0 <= start <= stop")
        object.__setattr__(self, "starts", as_int64s(starts))
        object.__setattr__(self, "stops", as_int64s(stops))
        if self.offsets is not None:
            object.__setattr__(self, "offsets", as_offsets(self.offsets, len(starts)))

    def __len__(self) -> int:
        return len(self.starts) if self.offsets is None else len(self.offsets) - 1

    @property
    def lengths(self) -> Int64s:
        """Rows per sample."""
        per_piece = self.stops - self.starts
        if self.offsets is None:
            return per_piece
        return np.diff(np.concatenate(([0], np.cumsum(per_piece)))[self.offsets])

    def rows(self, sample: int) -> Int64s:
        """The row numbers of one sample, for people."""
        sample = range(len(self))[sample]
        first, last = (sample, sample + 1) if self.offsets is None else self.offsets[sample : sample + 2]
        return concatenated_ranges(self.starts[first:last], (self.stops - self.starts)[first:last])


def concatenated_ranges(starts: Int64s, lengths: Int64s) -> Int64s:
    """``[starts[0], starts[0] + 1, ... lengths[0] of them, starts[1], ...]`` without a Python loop."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows: Int64s = np.arange(total, dtype=np.int64) + np.repeat(starts - (ends - lengths), lengths)
    return rows
