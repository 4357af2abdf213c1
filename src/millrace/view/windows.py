"""Windows: a lookback and a horizon within one record, made on the fly from the rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError, did_you_mean
from millrace.lazy import cached_property
from millrace.ragged import Int64s, Spans, as_integer
from millrace.view.extras import Places, as_include, extra_fields, meta_names, picked
from millrace.view.view import StoreLike, View, check_store, column_field, row_column, store_spec

MAX_TABLE = 1 << 21  # records of which each has its numbers in memory: 32 MB
RANK_RECORDS = 64  # as in core.h
SAMPLES = 4096  # that are found at a time: the offsets of their blocks take 4 MB


class Windows(View):
    """Every run of ``lookback`` rows (x) and the ``horizon`` rows (y) that follow ``lead`` rows later, in one record.

    Sample ``i`` is the ``i``-th window when records are read left to right. A record shorter than a window
    contributes none. On a split by time a window belongs to the split that holds its whole horizon. Memory is two integers
    per record; over millions of records the offsets stay in their files, and one integer for 64 records lies in the cache.

    ``inputs`` and ``target`` choose the features of x and y, by name or number. The default is what the store's meta
    names, else all. ``include`` adds what the store keeps beside them: ``time`` and ``y_time``, ``mask`` and ``y_mask``
    (1 where a value was observed), ``categorical``, ``known_future`` and ``known_categorical`` (of the horizon),
    ``static`` and ``static_categorical``.

    >>> from millrace import from_arrays
    >>> store = from_arrays({"values": np.arange(12.0)}, offsets=[0, 5, 7, 12])   # records of 5, 2, 5 rows
    >>> view = Windows(store, lookback=2, horizon=1, stride=2, target=["values"])
    >>> len(view)
    4
    >>> view.spans(np.array([3, 0])).starts.tolist()
    [9, 0]
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        lookback: int,
        horizon: int,
        stride: int = 1,
        lead: int = 0,
        target: Sequence[str | int] | None = None,
        column: str | None = None,
        inputs: Sequence[str | int] | None = None,
        include: str | Sequence[str] = (),
    ) -> None:
        check_store(store)
        lookback, horizon = as_integer("lookback", lookback), as_integer("horizon", horizon)
        stride, lead = as_integer("stride", stride), as_integer("lead", lead)
        if lookback < 1 or horizon < 1 or stride < 1 or lead < 0:
            raise ConfigError(
                f"lookback={lookback}, horizon={horizon}, stride={stride}, lead={lead}; expected 1 or more rows each, lead 0 too"
            )
        self.store, self.lookback, self.horizon, self.stride, self.lead = store, lookback, horizon, stride, lead
        self.column = row_column(store, column, "values", "Windows")
        values = column_field(store, self.column, key="x", length=lookback)
        if values.axis is None or len(values.tail) > 1:
            raise ConfigError(
                f"column {self.column!r} has shape {values.tail} per row; Windows needs a row of features"
            )
        values = replace(values, tail=values.tail or (1,), is_single=not values.tail)  # a 1-D column is one feature
        count = values.tail[0]
        self.features = _feature_names(store, self.column, count)
        self.inputs = _feature_numbers("inputs", _or_meta(inputs, store, "inputs", self.features), self.features, count)
        self.target = _feature_numbers("target", _or_meta(target, store, "target", self.features), self.features, count)
        self.include = as_include(include)
        x = picked(values, self.inputs)
        y = picked(replace(values, name="y", first=lookback + lead, length=horizon), self.target)
        extras = extra_fields(store, self.include, Places(x, y, self.features))
        self.fields = (x, y, *(field for field, _ in extras.values()))
        numbered: Sequence[Any] = self.features or range(count)
        both = {"x": self.inputs, "y": self.target}
        #: What stands on the last axis of each field; views that are concatenated must agree on it.
        self.labels = {
            **{name: list(numbered) if some is None else [numbered[k] for k in some] for name, some in both.items()},
            **{name: list(names) for name, (_, names) in extras.items()},
        }

    @property
    def longest(self) -> int:
        """Rows of the longest record, or of what a split by time has of it."""
        return max((int(ends.max(initial=0)) for ends, _ in self._records()), default=0)

    def why_empty(self) -> str:
        """What a view without samples asks for, and what there is."""
        asked = f"lookback={self.lookback:,}, horizon={self.horizon:,} and lead={self.lead:,}"
        return f"{asked} need {self.span:,} rows, and the longest record has {self.longest:,}"

    @property
    def span(self) -> int:
        """Rows from the first of the lookback to the last of the horizon."""
        return self.lookback + self.lead + self.horizon

    @property
    def _firsts(self) -> Int64s | int:
        """The first admissible start within each record."""
        if self.store.cuts is None:
            return 0
        begins, _ = self.store.cuts
        is_first = self.store.time_cuts.splits[0] == self.store.split_name
        gap = 0 if is_first else self.store.time_cuts.gap
        return np.maximum(0, begins + (gap - self.lookback - self.lead))

    def _records(self) -> Iterator[tuple[Int64s, Int64s | int]]:
        """Where each record ends and its windows may begin, in its own rows: some records at a time where that can be."""
        if self.store.time_cuts is not None and self.store.cuts is not None:
            yield self.store.cuts[1], self._firsts
        elif self.store.chosen is not None:
            starts, stops = self.store.record_spans(self.fields[0].axis)
            yield stops - starts, 0
        else:
            for _, offsets in self._index.chunks():
                yield np.diff(offsets), 0

    def _counts(self, ends: Int64s, firsts: Int64s | int) -> Int64s:
        """Windows in each record."""
        counts: Int64s = np.maximum(0, (ends - self.span - firsts) // self.stride + 1)
        return counts

    @property
    def _index(self) -> Any:
        return self.store.whole.axis_index(str(self.fields[0].axis))

    @cached_property
    def _is_ranked(self) -> bool:
        """Whether windows are counted for blocks of records, and the rest is found in the offsets of a block."""
        is_plain = self.store.cuts is None and self.store.chosen is None
        return is_plain and self.store.num_records > MAX_TABLE

    @cached_property
    def _ranks(self) -> Int64s:
        """Windows before each block of records, and in all; for all processes of a machine."""
        shape = f"{self.fields[0].axis} {self.span} {self.stride} {RANK_RECORDS}"
        return self.store.kept_table(f"windows {shape}", self._make_ranks)

    def _make_ranks(self) -> Int64s:
        blocks = [np.zeros(1, np.int64)]
        for ends, firsts in self._records():
            blocks.append(np.add.reduceat(self._counts(ends, firsts), np.arange(0, len(ends), RANK_RECORDS)))
        return np.cumsum(np.concatenate(blocks))

    @cached_property
    def _ends(self) -> Int64s:
        """Windows up to and including each record."""
        counts = [self._counts(ends, firsts) for ends, firsts in self._records()]
        return np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]))

    @cached_property
    def _starts(self) -> Int64s:
        """The first row of the first window of each record."""
        starts, firsts = self.store.record_spans(self.fields[0].axis)[0], self._firsts
        return starts if isinstance(firsts, int) else starts + firsts

    def __len__(self) -> int:
        ends = self._ranks if self._is_ranked else self._ends
        return int(ends[-1]) if len(ends) else 0

    def _record_and_start(self, samples: npt.ArrayLike) -> tuple[Int64s, Int64s]:
        wanted = self._checked(samples)
        if self._is_ranked:
            return self._ranked(wanted)
        records = np.searchsorted(self._ends, wanted, side="right")
        inside = wanted - np.where(records > 0, self._ends[records - 1], 0)
        return records, self._starts[records] + inside * self.stride

    def _ranked(self, samples: Int64s) -> tuple[Int64s, Int64s]:
        """Twin of the core's ``ranked``: each sample among the windows of the records of its block."""
        records, starts = np.empty((2, len(samples)), np.int64)
        for first in range(0, len(samples), SAMPLES):
            some = samples[first : first + SAMPLES]
            blocks = np.searchsorted(self._ranks, some, side="right") - 1
            each = np.minimum(blocks[:, None] * RANK_RECORDS + np.arange(RANK_RECORDS), self.store.num_records - 1)
            begins, ends = (edges.reshape(each.shape) for edges in self._index.spans(each.reshape(-1)))
            up_to = np.cumsum(self._counts(ends - begins, 0), axis=1)
            inside = some - self._ranks[blocks]
            places = np.argmax(up_to > inside[:, None], axis=1)
            rows = np.arange(len(some))
            inside -= np.where(places > 0, up_to[rows, places - 1], 0)
            records[first : first + len(some)] = each[rows, places]
            starts[first : first + len(some)] = begins[rows, places] + inside * self.stride
        return records, starts

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        starts = self._record_and_start(samples)[1]
        return Spans(starts, starts + self.span)

    def records(self, samples: npt.ArrayLike) -> Int64s:
        return self._record_and_start(samples)[0]

    def plan(self) -> list[tuple[Any, ...]] | None:
        # The core numbers records as the windows do: their columns are others where some were chosen.
        has_records = any(field.axis is None for field in self.fields)
        if type(self) is not Windows or (has_records and self.store.chosen is not None):
            return None
        if self._is_ranked:
            return [("ranked", self, self._ranks, self.stride, self.span)]
        return [("locate", self, self._ends, self._starts, self.stride, self.span)]

    def unused_rows(self) -> int:
        """Rows in no lookback and no horizon of their record; in a split by time, of the rows from its first lookback on."""
        again, how_many = self._repeats
        unused = 0
        for ends, firsts in self._records():
            counts = self._counts(ends, firsts)
            # The k-th row of a window is new in every window until one starts early enough to hold it as well.
            covered = sum(int(np.minimum(counts, n).sum()) * m for n, m in zip(again, how_many, strict=True))
            unused += int(np.maximum(ends - firsts, 0).sum()) - covered
        return unused

    @property
    def _repeats(self) -> tuple[list[int], list[int]]:
        """After how many windows a row of one stands in another one, and of how many rows that is so."""
        ahead = self.lookback + self.lead
        rows = np.concatenate((np.arange(self.lookback), np.arange(ahead, self.span)))
        never = np.iinfo(np.int64).max
        to_horizon = -((rows - ahead) // self.stride)  # windows until the row is at or behind the first of the horizon
        meets = rows + to_horizon * self.stride < self.span
        is_next = (rows + self.stride < self.lookback) | ((rows >= ahead) & (rows + self.stride < self.span))
        again = np.where(is_next, 1, np.where((rows < ahead) & meets, to_horizon, never))
        found, how_many = np.unique(again, return_counts=True)
        return found.tolist(), how_many.tolist()

    def spec(self) -> dict[str, Any]:
        options: dict[str, Any] = {key: getattr(self, key) for key in ("lookback", "horizon", "stride", "lead")}
        options["target"] = None if self.target is None else list(self.target)
        if self.inputs is not None:
            options["inputs"] = list(self.inputs)
        if self.include:
            options["include"] = list(self.include)
        return {"view": "windows", **store_spec(self.store), "column": self.column, **options}


def _or_meta(given: Any, store: StoreLike, key: str, features: list[str] | None) -> Any:
    """What was given, else what the store's meta names, where these are features of it."""
    names = meta_names(store, key) if given is None else []
    return names if names and set(names) <= set(features or ()) else given


def _feature_names(store: StoreLike, column: str, count: int) -> list[str] | None:
    """Names of the features of a row, where the store knows them."""
    if not store.layout.columns[column].shape:
        return [column]
    names = store.meta.get("features")
    is_named = isinstance(names, (list, tuple)) and len(names) == count and all(isinstance(n, str) for n in names)
    return list(names or ()) if is_named else None


def _feature_numbers(
    what: str, given: Sequence[str | int] | None, names: list[str] | None, count: int
) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, (str, int, np.integer)):
        given = [given]
    numbers = []
    for wanted in given:
        if isinstance(wanted, str):
            if names is None or wanted not in names:
                known = f"features are {', '.join(names)}" if names else "this store names no features: give numbers"
                raise ConfigError(f"{what} {wanted!r} is unknown{did_you_mean(wanted, names or ())}; {known}")
            numbers.append(names.index(wanted))
        else:
            if not isinstance(wanted, (int, np.integer)) or not 0 <= wanted < count:
                raise ConfigError(f"{what} {wanted!r} is out of range; there are features 0 to {count - 1}")
            numbers.append(int(wanted))
    if not numbers:
        raise ConfigError(f"{what}=[] names no feature; leave it out for every one")
    return tuple(numbers)
