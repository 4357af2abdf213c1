"""``store.where(...)``: the records of a store for which a condition on its record columns holds.

Names in a condition are record columns of one number or text, and ``n_<name>``: how many rows a record has on the axis of
that name, or on the axis of the row column of that name. A record column of the same name comes first.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from millrace.condition import Condition, Joined, Name, names, parse
from millrace.errors import ConfigError, did_you_mean
from millrace.identity import digest
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s
from millrace.store.offsets import Offsets
from millrace.store.store import Store

CHUNK = 1 << 18  # records whose columns are compared at a time
MAX_SHOWN = 200  # characters of a condition, which may have a million
EXACT = 1 << 53  # floats below it stand for one integer each
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less, "<=": np.less_equal, ">": np.greater, ">=": np.greater_equal, "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


class Selected(Store):
    """Some records of a store, numbered from 0. Rows keep the numbers they have in ``whole``, and ``chosen`` says whose
    records these are.
    """

    def __init__(self, whole: Store, condition: str, chosen: Int64s) -> None:
        self.__dict__.update({key: value for key, value in vars(whole).items() if not _is_cached(key)})
        self._whole, self.condition, self.chosen = whole, condition, chosen
        self.chosen.flags.writeable = False
        self._fingerprint = lambda: digest("where", whole.fingerprint, condition)
        self._reopen = (Selected, (whole, condition, chosen))  # records are not chosen again in a worker

    @property
    def whole(self) -> Store:
        return self._whole

    @property
    def num_records(self) -> int:
        assert self.chosen is not None
        return len(self.chosen)

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """Row columns as those of the whole store, record columns of the chosen records."""
        assert self.chosen is not None
        declared, whole = self.layout.columns, self._whole.columns
        return MappingProxyType(
            {name: whole[name] if declared[name].axis else ChosenColumn(whole[name], self.chosen) for name in declared}
        )

    def axis_index(self, axis: str) -> Offsets:
        raise ConfigError(
            f"the records of where({self.condition!r}) are not neighbours, so that they have no offsets; "
            "store.record_spans(axis) says where each begins and ends"
        )

    def record_spans(self, axis: str | None = None) -> tuple[Int64s, Int64s]:
        assert self.chosen is not None
        return self._whole.axis_index(axis or self.layout.primary).spans(self.chosen)

    @cached_property
    def cuts(self) -> tuple[Int64s, Int64s] | None:
        both = self._whole.cuts
        return None if both is None else (both[0][self.chosen], both[1][self.chosen])

    def split(self, name: str) -> Store:
        return select(self._whole.split(name), str(self.condition))

    def __repr__(self) -> str:
        text = str(self.condition)
        shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
        of = f"{self.num_records:,} of {self._whole.num_records:,} records where {shown}"
        return f"{super().__repr__()[:-1]}; {of}>"


def _is_cached(name: str) -> bool:
    return isinstance(vars(Store).get(name), cached_property)


class ChosenColumn:
    """A record column of the chosen records only, indexed like the column itself."""

    def __init__(self, column: Any, chosen: Int64s) -> None:
        self._column, self._chosen = column, chosen
        self.dtype = column.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self._chosen), *self._column.shape[1:])

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, key: Any) -> Any:
        return self._column[self._chosen[key]]

    def __getattr__(self, name: str) -> Any:
        """``codes`` of a dictionary and ``raw`` of numbers are chosen too; its other attributes are the column's."""
        if name.startswith("_"):
            raise AttributeError(name)
        value = getattr(self._column, name)
        return (
            ChosenColumn(value, self._chosen) if name == "codes" or (name == "raw" and self.dtype != object) else value
        )

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), 4096):
            yield from self[first : first + 4096]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)

    def __repr__(self) -> str:
        return f"<{len(self)} chosen of {self._column!r}>"


def select(store: Store, text: str) -> Store:
    """The records for which a condition holds; of records that were chosen before, those for which both hold."""
    if not isinstance(text, str):
        raise ConfigError(f"where({text!r}); expected a condition as text: store.where('label == 3')")
    before = store.condition
    condition = parse(text)  # on its own: its brackets are not those around it
    if before is not None:
        condition = parse(f"({before}) and ({condition})")
    sources = {name: _Source(store.whole, name, text) for name in sorted(names(condition))}
    _check(condition, sources, text)
    found, members = [], _Members()
    for first in range(0, store.whole.num_records, CHUNK):
        last = min(first + CHUNK, store.whole.num_records)
        arrays = {name: source.values(first, last) for name, source in sources.items()}
        found.append(first + np.flatnonzero(_holds(condition, arrays, members)))
    return Selected(store.whole, str(condition), np.concatenate([np.zeros(0, np.int64), *found]))


class _Source:
    """What a name of a condition stands for: a record column, or the number of rows of each record."""

    def __init__(self, store: Store, name: str, text: str) -> None:
        declared = store.layout.columns
        known = [column for column, own in declared.items() if own.axis is None and not own.shape]
        axes = {f"n_{axis}": axis for axis in store.layout.row_axes}
        axes |= {f"n_{column}": own.axis for column, own in declared.items() if own.axis is not None}
        self.is_text, self.is_bool, self._offsets, self._column = False, False, None, None
        if name in known:
            self._column = store.columns[name]
            self.is_bool = declared[name].dtype == "bool"
            self.is_text = declared[name].dtype in ("string", "dictionary")
        elif name in axes:
            self._offsets = store.axis_index(str(axes[name]))
        else:
            all_known = [*known, *axes]
            why = "is unknown" if name not in declared else "has no single value per record"
            near = did_you_mean(name, all_known)
            raise ConfigError(f"where {text!r}: {name!r} {why}{near}; there are {', '.join(all_known) or 'none'}")

    def values(self, first: int, last: int) -> Array:
        if self._offsets is not None:
            return np.diff(self._offsets.slice(first, last))
        return np.asarray(self._column[first:last])  # type: ignore[index]


def _check(condition: Condition, sources: Mapping[str, _Source], text: str) -> None:
    """Refuses to compare numbers with text, and with true and false: ``n_hits`` alone would mean one hit."""
    if isinstance(condition, Joined):
        for part in condition.parts:
            _check(part, sources, text)
        return
    value = condition.value
    for other in value if isinstance(value, tuple) else (value,):
        is_text = sources[other.column].is_text if isinstance(other, Name) else isinstance(other, str)
        if is_text != sources[condition.column].is_text:
            kinds = ("a number", "text") if is_text else ("text", "a number")
            raise ConfigError(f"where {text!r}: {condition.column} is {kinds[0]}, compared with {other!s}, {kinds[1]}")
        if isinstance(other, bool) and not sources[condition.column].is_bool:
            raise ConfigError(f"where {text!r}: {condition.column} is a number; compare it: {condition.column} > 0")


class _Members:
    """The values of each ``in (...)`` as sorted arrays, made once for all chunks of records."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Array, Array]] = {}

    def hold(self, values: tuple[Any, ...], column: Array) -> Array:
        """Which items of a column are among the values."""
        if column.dtype.kind not in "iuf":
            among = set(values)
            return np.fromiter((item in among for item in column.tolist()), bool, len(column))
        if id(values) not in self._made:
            self._made[id(values)] = _as_column(values, column.dtype)
        numbers, wide = self._made[id(values)]
        is_among = _are_among(column, numbers)
        return is_among | _are_among(column.astype(np.float64), wide) if len(wide) else is_among


def _as_column(values: tuple[Any, ...], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """The numbers that a column of this dtype can hold, and those with which it is compared as float64."""
    numbers: list[Any] = []
    wide: list[float] = []
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        numbers = [value for value in values if abs(value) <= most]
        wide = [math.inf if value > 0 else -math.inf for value in values if abs(value) > sys.float_info.max]
    else:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
        wide = [value for value in values if isinstance(value, float) and abs(value) >= EXACT]
        rest = (value for value in values if not isinstance(value, float) or abs(value) < EXACT)
        numbers = [int(value) for value in rest if low <= value <= high and value == int(value)]
    return np.unique(np.array(numbers, dtype)), np.unique(np.array(wide, np.float64))


def _are_among(column: Array, values: Array) -> Array:
    if not len(values):
        return np.zeros(len(column), bool)
    places = np.minimum(np.searchsorted(values, column), len(values) - 1)
    return np.asarray(values[places] == column)


def _holds(condition: Condition, arrays: Mapping[str, Array], members: _Members) -> Array:
    if isinstance(condition, Joined):
        join = np.logical_and if condition.word == "and" else np.logical_or
        return join.reduce([_holds(part, arrays, members) for part in condition.parts])  # type: ignore[no-any-return]
    left, value = arrays[condition.column], condition.value
    if isinstance(value, tuple):
        is_among = members.hold(value, left)
        if condition.sign == "in":
            return is_among
        return ~is_among & ~np.isnan(left) if left.dtype.kind == "f" else ~is_among  # NaN is missing
    right = arrays[value.column] if isinstance(value, Name) else value
    if left.dtype.kind == "f" and not isinstance(value, Name) and abs(value) > float(np.finfo(left.dtype).max):
        is_larger = abs(value) > sys.float_info.max  # than any float; numpy refuses such an int
        left, right = left.astype(np.float64), (math.inf if value > 0 else -math.inf) if is_larger else value
    found = np.asarray(_COMPARE[condition.sign](left, right), bool)
    if condition.sign == "!=":  # NaN differs from every number, and is missing
        for side in (left, right):
            if getattr(side, "dtype", np.dtype(object)).kind == "f":
                found &= ~np.isnan(side)
    return found
