"""Between the passes, in workers: counts the rows of each entity, finds its cuts, and measures its train rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.prepare.spill import read_result, write_result
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.clean import Cleaner
from millrace.prepare.table.settle.index import BLOCK_ROWS, Slice, block_bounds, slice_rows
from millrace.prepare.table.settle.index_files import open_index
from millrace.prepare.table.settle.splits import last_rows
from millrace.prepare.table.settle.time_steps import Steps
from millrace.ragged import Array, Int64s, concatenated_ranges
from millrace.scaling.moments import Moments, merge_all
from millrace.scaling.quantiles import QuantileSearch, Target, histogram, quartiles_of

GROUP_ROWS = 1 << 19  # rows of the entities measured by one task, about
SEARCH_FEATURES = 32  # features whose quartiles are searched together: a pass holds up to 3 MiB of counts for each


class FitTask(msgspec.Struct, frozen=True):
    """Entities [first, last) of the index."""

    number: int
    first: int
    last: int
    folder: str
    options: TableOptions
    schema: Schema
    cut_times: tuple[Any, ...] | None
    train: bytes  # bool: for each of them, whether its rows may be measured
    after: dict[int, Any] = {}  # the last time in the store of an entity that is appended to

    def __str__(self) -> str:
        return f"entities {self.first} to {self.last - 1}"


class FitDone(msgspec.Struct, frozen=True):
    """What was measured: arrays over the entities, as bytes."""

    rows: bytes  # int64
    cuts: bytes  # int64 (entities, cuts)
    moments: bytes  # float64 (6, features): of all train rows
    each: bytes  # float64 (entities, 6, features), where every entity has its own scaling
    quartiles: bytes  # float64 (entities, features, 3), where that scaling is robust
    train_codes: bytes  # bool: for the codes of all categories, one after the other, whether train rows have them
    dropped: dict[str, int]
    steps: dict[int, int] = {}  # how often each step in time occurs; see time_steps.py


class HistogramTask(msgspec.Struct, frozen=True):
    """One pass of the search for quartiles over some entities."""

    task: FitTask
    first: int  # of the features that are searched together
    targets: tuple[tuple[int, int, tuple[int, ...]], ...]
    fitted: FitDone

    def __str__(self) -> str:
        return f"quartiles of {self.task}"


def groups(rows: Int64s) -> list[tuple[int, int]]:
    """Entities [first, last) of each task, by their rows alone."""
    if not len(rows):
        return []
    numbers = (np.cumsum(rows) - rows) // GROUP_ROWS
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    return list(pairwise(edges))


def fit_entities(task: FitTask) -> FitDone:
    """Measures some entities; a restart finds the result on disk."""
    path = Path(task.folder) / "fit" / f"{task.number:06d}.bin"
    with contextlib.suppress(msgspec.DecodeError):  # also of a version that measured something else
        return msgspec.msgpack.decode(read_result(path) or b"", type=FitDone)
    done = _Meter(task).run()
    write_result(path, msgspec.msgpack.encode(done))
    return done


class _Meter:
    """Measures the entities of one task."""

    def __init__(self, task: FitTask) -> None:
        self._task, self._options = task, task.options
        self._index = open_index(task.folder, task.schema)
        self._cleaner = Cleaner(task.options, task.schema)
        self._features = len(task.schema.role.features)
        self._train = np.frombuffer(task.train, bool)
        sizes = [len(self._index.categories[name]) + 1 for name in task.schema.role.categorical]
        self._first_codes = np.cumsum([0, *sizes])[:-1]
        self._train_codes = np.zeros(sum(sizes), bool)
        count = task.last - task.first
        num_cuts = len(task.options.time_splits) - 1 if task.options.has_time_split else 0
        self._cuts = np.zeros((count, num_cuts), np.int64)
        self._rows = np.zeros(count, np.int64)
        # A grid is regular, and floats that are alike are seldom equal.
        self._steps = None if task.options.freq is not None or task.schema.time_dtype != "int64" else Steps()
        self._moments = np.empty((count, 6, self._features))

    def run(self) -> FitDone:
        first, last = self._task.first, self._task.last
        for low, high in block_bounds(self._index.rows[first:last], self._features):
            if high - low == 1 or self._options.freq is not None:
                for k in range(low, high):
                    self._entity(k)
            else:
                self._block(low, high)
        quartiles = b""
        if self._options.per_entity and self._options.scale == "robust":
            each = [self._quartiles(first + k, cuts) for k, cuts in enumerate(self._cuts.tolist())]
            quartiles = np.array(each).tobytes()
        merged = pack(unpack(self._moments.tobytes(), self._features).merged)
        return FitDone(
            self._rows.tobytes(), self._cuts.tobytes(), merged.tobytes(),
            self._moments.tobytes() if self._options.per_entity else b"", quartiles,
            self._train_codes.tobytes(), dict(self._cleaner.dropped), {} if self._steps is None else dict(self._steps.counts),
        )  # fmt: skip

    def _block(self, low: int, high: int) -> None:
        """Rows, cuts and moments of small entities, all at once; those that need cleaning one by one."""
        first, options = self._task.first, self._options
        block = self._index.block(np.arange(first + low, first + high))
        is_plain = self._cleaner.plain(block)
        lengths = np.diff(block.offsets)
        cuts = self._cuts[low:high]
        if self._task.cut_times is not None:
            for k, time in enumerate(self._task.cut_times):
                cuts[:, k] = np.add.reduceat(block.time < time, block.offsets[:-1], dtype=np.int64)
        elif cuts.shape[1]:
            distinct, places = np.unique(lengths, return_inverse=True)
            cuts[:] = np.array([last_rows(rows, options) for rows in distinct.tolist()])[places]
        is_known = np.array([first + k in self._task.after for k in range(low, high)])
        is_short = (lengths < options.min_rows) & ~is_known
        if (is_short & is_plain).any():
            self._drop_entities(lengths[is_short & is_plain])
        self._rows[low:high] = np.where(is_short, 0, lengths)
        cuts[is_short] = 0
        if self._steps is not None:
            inside = np.repeat(is_plain & ~is_short, lengths)[1:]
            inside[block.offsets[1:-1] - 1] = False
            self._steps.add(np.diff(block.time)[inside])
        train = cuts[:, 0] if cuts.shape[1] and options.fit_on == "train" else lengths
        train = np.where(is_plain & ~is_short & self._train[low:high], train, 0)
        starts = block.offsets[:-1]
        self._moments[low:high] = pack(Moments.of_spans(block.values, starts, starts + train))
        if len(self._train_codes):
            self._train_codes[block.categorical[concatenated_ranges(starts, train)] + self._first_codes] = True
        for k in np.flatnonzero(~is_plain).tolist():
            self._entity(low + k)

    def _drop_entities(self, rows: Int64s) -> None:
        """Counts entities that have too few rows."""
        self._cleaner.dropped["entity with too few rows"] += len(rows)
        self._cleaner.dropped["row of an entity with too few"] += int(rows.sum())

    def _entity(self, k: int) -> None:
        """Rows, cuts and moments of one entity."""
        entity = self._task.first + k
        name, after = self._index.names[entity], self._task.after.get(entity)
        times = self._task.cut_times
        cuts: list[int] | None = None
        if self._options.has_time_split and times is None:  # by shares of the rows, which must be counted first
            counting = Cleaner(self._options, self._task.schema)
            rows_of = counting.rows(name, self._index.slices(entity), after)
            cuts = last_rows(sum(len(part.time) for part in rows_of), self._options)
        rows, found, parts, labels = 0, [0] * len(times or ()), [Moments.empty(self._features)], []
        steps, last = Steps(), np.zeros(0, np.int64)
        for part in self._cleaner.rows(name, self._index.slices(entity), after):
            for j, time in enumerate(times or ()):
                found[j] += int(np.searchsorted(part.time, time))
            train = train_rows(part, rows, cuts, times, self._options) if self._train[k] else 0
            parts.append(Moments.of_rows(np.ascontiguousarray(part.values[:train])))
            labels.append(np.unique(part.categorical[:train] + self._first_codes))
            rows += len(part.time)
            if self._steps is not None:
                steps.add(np.diff(np.concatenate((last, part.time))))
                last = part.time[-1:]
        self._rows[k], self._cuts[k] = rows, cuts or found
        if rows < self._options.min_rows and after is None:
            self._drop_entities(np.array([rows]))
            self._rows[k], self._cuts[k], parts, labels = 0, 0, parts[:1], []
        elif self._steps is not None:
            self._steps.merge(steps)
        self._moments[k] = pack(merge_all(parts[1:] or parts))
        for codes in labels:
            self._train_codes[codes] = True

    def _quartiles(self, entity: int, cuts: Sequence[int]) -> Array:
        """Quartiles of one entity's train rows: at once where they are few, else in passes."""
        if not self._train[entity - self._task.first]:
            return np.full((self._features, 3), np.nan)
        if int(self._index.runs_of(entity)["rows"].sum()) <= slice_rows(self._features):
            parts = list(self._train_values(entity, cuts))
            values = np.concatenate(parts) if parts else np.zeros((0, self._features))
            return np.array([quartiles_of(values[:, k]) for k in range(self._features)])
        found = []
        for first in range(0, self._features, SEARCH_FEATURES):
            search = QuantileSearch(min(SEARCH_FEATURES, self._features - first), self._task.schema.raw_dtype)
            while (targets := search.next_pass()) is not None:
                search.update(_counts(self._train_values(entity, cuts), first, targets))
            found.append(search.result())
        return np.concatenate(found)

    def all_train_values(self, rows: Int64s, cuts: Int64s) -> Iterator[Array]:
        """The train rows of all entities that have rows, slice by slice."""
        for k in np.flatnonzero((rows > 0) & self._train).tolist():
            yield from self._train_values(self._task.first + k, cuts[k].tolist())

    def _train_values(self, entity: int, cuts: Sequence[int]) -> Iterator[Array]:
        silent = Cleaner(self._options, self._task.schema)  # its rows are counted already
        first = 0
        limit = cuts[0] if len(cuts) and self._options.fit_on == "train" else None
        for part in silent.rows(self._index.names[entity], self._index.slices(entity), self._task.after.get(entity)):
            last = len(part.time) if limit is None else max(0, min(len(part.time), limit - first))
            yield part.values[:last]
            first += len(part.time)


def train_rows(
    part: Slice, first: int, cuts: Sequence[int] | None, times: Sequence[Any] | None, options: TableOptions
) -> int:
    """How many rows of a slice are train rows, which statistics may see."""
    if options.fit_on == "all":
        return len(part.time)
    if times:
        return int(np.searchsorted(part.time, times[0]))
    return max(0, min(len(part.time), cuts[0] - first)) if cuts else len(part.time)


def count_values(task: HistogramTask) -> bytes:
    """One pass of the search over some features of some entities."""
    rows = np.frombuffer(task.fitted.rows, np.int64)
    cuts = np.frombuffer(task.fitted.cuts, np.int64).reshape(len(rows), -1)
    parts = _Meter(task.task).all_train_values(rows, cuts)
    targets = [Target(*target) for target in task.targets]
    return np.concatenate(_counts(_concatenate_small(parts), task.first, targets)).tobytes()


def _concatenate_small(parts: Iterable[Array]) -> Iterator[Array]:
    """Rows of small entities together: every count starts with 65,536 zeros."""
    waiting: list[Array] = []
    rows = 0
    for part in parts:
        waiting.append(part)
        rows += len(part)
        if rows >= BLOCK_ROWS:
            yield np.concatenate(waiting)
            waiting, rows = [], 0
    if waiting:
        yield np.concatenate(waiting)


def _counts(parts: Iterator[Array], first: int, targets: Sequence[Target]) -> list[Int64s]:
    total = [np.zeros((len(target.prefixes), 1 << 16), np.int64) for target in targets]
    for values in parts:
        columns = np.ascontiguousarray(values[:, first : first + len(targets)].T)
        for k, target in enumerate(targets):
            total[k] += histogram(columns[k], target)
    return total


def pack(moments: Moments) -> Array:
    """float64 (fields, features), or (entities, fields, features) where fields are (features, entities)."""
    fields = np.array(moments.arrays, np.float64)
    return fields if fields.ndim == 2 else np.moveaxis(fields, -1, 0)


def unpack(data: bytes, features: int) -> Moments:
    """Moments whose fields are (features, entities)."""
    count, *others = np.moveaxis(np.frombuffer(data, np.float64).reshape(-1, 6, features), 0, -1)
    return Moments(count.astype(np.int64), *others)
