"""Between the passes, in workers: counts the rows each entity keeps, finds its cuts, and measures its train rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.prepare.table.clean import Cleaner
from millrace.prepare.table.index import Index, Rows, Slice, indexed_dtype, mapped, slice_rows
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.schema import Schema
from millrace.prepare.table.splits import last_rows
from millrace.ragged import Array, Int64s
from millrace.scaling.moments import Moments, merge_all
from millrace.scaling.quantiles import QuantileSearch, Target, histogram, quantiles_of
from millrace.store import platform

GROUP_ROWS = 1 << 19  # rows of the entities measured by one task, about
SEARCHED = 32  # features whose quartiles are searched together: a pass holds up to 3 MiB of counts for each
FIELDS = ("count", "mean", "m2", "low", "high", "rest")


class FitTask(msgspec.Struct, frozen=True):
    """Entities [first, last) of the index."""

    number: int
    first: int
    last: int
    folder: str
    options: TableOptions
    schema: Schema
    cut_times: tuple[Any, ...] | None
    train: bytes  # of each of them, whether its rows may be measured
    after: dict[int, Any] = {}  # the last time the store has of an entity that is appended to

    def __str__(self) -> str:
        return f"entities {self.first} to {self.last - 1}"


class FitDone(msgspec.Struct, frozen=True):
    """What was found: arrays over the entities, as bytes."""

    rows: bytes  # int64
    cuts: bytes  # int64 (entities, cuts)
    moments: bytes  # float64 (6, features): of all train rows
    each: bytes  # float64 (entities, 6, features), where every entity is scaled by its own
    quartiles: bytes  # float64 (entities, features, 3), where these are robust
    seen: bytes  # bool: the codes of all categories, one after the other, that train rows have
    dropped: dict[str, int]


class HistogramTask(msgspec.Struct, frozen=True):
    """One pass of the search for quartiles over some entities."""

    task: FitTask
    first: int  # of the features that are searched together
    targets: tuple[tuple[int, int, tuple[int, ...]], ...]
    fitted: FitDone

    def __str__(self) -> str:
        return f"quartiles of {self.task}"


def save_index(folder: Path, index: Index) -> None:
    """What workers need to know of all parts."""
    with platform.writing(folder):
        platform.make_dir(folder / "index")
        platform.write_file(folder / "index" / "runs.bin", index.runs.tobytes(), mode=0o644)
        platform.write_file(folder / "index" / "offsets.bin", index.offsets.astype("<i8").tobytes(), mode=0o644)
        names = msgspec.json.encode({"names": index.names, "categories": index.categories})
        platform.write_file(folder / "index" / "names.json", names, mode=0o644)


class Opened:
    """The index as a worker sees it."""

    def __init__(self, folder: str, schema: Schema) -> None:
        path = Path(folder) / "index"
        self.runs = mapped(path / "runs.bin", "u1").view(indexed_dtype(schema.time_dtype))
        self.offsets = mapped(path / "offsets.bin", "int64")
        body = msgspec.json.decode((path / "names.json").read_bytes())
        self.names: list[str] = body["names"]
        self.categories = {name: tuple(values) for name, values in body["categories"].items()}
        self._rows = Rows(folder, schema, self.categories)

    def runs_of(self, entity: int) -> Array:
        return self.runs[self.offsets[entity] : self.offsets[entity + 1]]

    def slices(self, entity: int) -> Iterator[Slice]:
        return self._rows.slices(self.runs_of(entity))


@lru_cache(maxsize=1)
def _opened(folder: str, encoded: bytes, version: tuple[int, int]) -> Opened:
    return Opened(folder, msgspec.json.decode(encoded, type=Schema))


def opened(folder: str, schema: Schema) -> Opened:
    """The index of a folder, opened once by each process until another is saved there."""
    status = os.stat(Path(folder) / "index" / "names.json")
    return _opened(folder, msgspec.json.encode(schema), (status.st_ino, status.st_mtime_ns))


def forget() -> None:
    """Lets go of the parts, whose memory maps would keep their space on the disk."""
    _opened.cache_clear()


def groups(rows: Int64s) -> list[tuple[int, int]]:
    """Entities cut into tasks by their rows alone."""
    if not len(rows):
        return []
    numbers = (np.cumsum(rows) - rows) // GROUP_ROWS
    edges = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(rows)]
    return list(pairwise(edges))


def fit_entities(task: FitTask) -> FitDone:
    """Measures some entities; their result is kept, so that a restart need not."""
    path = Path(task.folder) / "fit" / f"{task.number:06d}.bin"
    if path.exists():
        return msgspec.msgpack.decode(path.read_bytes(), type=FitDone)
    done = _Fit(task).run()
    with platform.writing(path):
        platform.write_file(path, msgspec.msgpack.encode(done), mode=0o644)
    return done


class _Fit:
    def __init__(self, task: FitTask) -> None:
        self._task, self._options = task, task.options
        self._index = opened(task.folder, task.schema)
        self._cleaner = Cleaner(task.options, task.schema)
        self._features = len(task.schema.role.features)
        self._train = np.frombuffer(task.train, bool)
        sizes = [len(self._index.categories[name]) + 1 for name in task.schema.role.categorical]
        self._first_codes = np.cumsum([0, *sizes])[:-1]
        self._seen = np.zeros(sum(sizes), bool)

    def run(self) -> FitDone:
        found = [self._entity(entity) for entity in range(self._task.first, self._task.last)]
        moments = [entry[2] for entry in found]
        quartiles = b""
        if self._options.per_entity and self._options.scale == "robust":
            each = [self._quartiles(self._task.first + k, cuts) for k, (_, cuts, _) in enumerate(found)]
            quartiles = np.array(each).tobytes()
        return FitDone(
            np.array([rows for rows, _, _ in found], np.int64).tobytes(),
            np.array([cuts for _, cuts, _ in found], np.int64).tobytes(),
            pack(merge_all(moments)),
            b"".join(map(pack, moments)) if self._options.per_entity else b"",
            quartiles,
            self._seen.tobytes(),
            dict(self._cleaner.dropped),
        )

    def _entity(self, entity: int) -> tuple[int, list[int], Moments]:
        """Rows, cuts and moments of one entity."""
        name, after = self._index.names[entity], self._task.after.get(entity)
        times = self._task.cut_times
        cuts: list[int] | None = None
        if self._options.has_time_split and times is None:  # by shares of the rows, which must be counted first
            counting = Cleaner(self._options, self._task.schema)
            cuts = last_rows(
                sum(len(part.time) for part in counting.rows(name, self._index.slices(entity), after)), self._options
            )
        rows, found, parts, labels = 0, [0] * len(times or ()), [], []
        for part in self._cleaner.rows(name, self._index.slices(entity), after):
            for k, time in enumerate(times or ()):
                found[k] += int(np.searchsorted(part.time, time))
            train = train_rows(part, rows, cuts, times, self._options)
            parts.append(self._measure(part, train))
            labels.append(np.unique(part.categorical[:train] + self._first_codes))
            rows += len(part.time)
        if rows < self._options.min_rows and after is None:
            self._cleaner.dropped["entity with too few rows"] += 1
            self._cleaner.dropped["row of an entity with too few"] += rows
            return 0, [0] * len(cuts or found), Moments.empty(self._features)
        if not self._train[entity - self._task.first] or not parts:
            return rows, cuts or found, Moments.empty(self._features)
        for codes in labels:
            self._seen[codes] = True
        return rows, cuts or found, merge_all(parts)

    def _measure(self, part: Slice, train: int) -> Moments:
        """The moments of the train rows of a slice."""
        values = part.values[:train]
        if part.has_gaps:
            return Moments.of(list(np.ascontiguousarray(values.T)))
        return Moments.of_rows(np.ascontiguousarray(values))

    def _quartiles(self, entity: int, cuts: Sequence[int]) -> Array:
        """Of one entity's train rows: at once where they are few, else in passes."""
        if not self._train[entity - self._task.first]:
            return np.full((self._features, 3), np.nan)
        if int(self._index.runs_of(entity)["rows"].sum()) <= slice_rows(self._features):
            parts = list(self._train_values(entity, cuts))
            values = np.concatenate(parts) if parts else np.zeros((0, self._features))
            return np.array([quantiles_of(values[:, k]) for k in range(self._features)])
        found = []
        for first in range(0, self._features, SEARCHED):
            search = QuantileSearch(min(SEARCHED, self._features - first), dtypes=self._task.schema.raw_dtype)
            while (targets := search.next_pass()) is not None:
                search.update(_counts(self._train_values(entity, cuts), first, targets))
            found.append(search.result())
        return np.concatenate(found)

    def _train_values(self, entity: int, cuts: Sequence[int]) -> Iterator[Array]:
        silent = Cleaner(self._options, self._task.schema)
        first = 0
        limit = cuts[0] if len(cuts) and self._options.fit_on == "train" else None
        for part in silent.rows(self._index.names[entity], self._index.slices(entity), self._task.after.get(entity)):
            last = len(part.time) if limit is None else max(0, min(len(part.time), limit - first))
            yield part.values[:last]
            first += len(part.time)


def train_rows(
    part: Slice, first: int, cuts: Sequence[int] | None, times: Sequence[Any] | None, options: TableOptions
) -> int:
    """How many of a slice's rows statistics may see."""
    if options.fit_on == "all":
        return len(part.time)
    if times:
        return int(np.searchsorted(part.time, times[0]))
    return max(0, min(len(part.time), cuts[0] - first)) if cuts else len(part.time)


def count_values(task: HistogramTask) -> bytes:
    """One pass of the search over some features of some entities."""
    fit = _Fit(task.task)
    rows = np.frombuffer(task.fitted.rows, np.int64)
    cuts = np.frombuffer(task.fitted.cuts, np.int64).reshape(len(rows), -1)
    targets = [Target(*target) for target in task.targets]
    total: list[Int64s] | None = None
    for k, entity in enumerate(range(task.task.first, task.task.last)):
        if not rows[k] or not fit._train[k]:
            continue
        found = _counts(fit._train_values(entity, cuts[k].tolist()), task.first, targets)
        total = found if total is None else [a + b for a, b in zip(total, found, strict=True)]
    if total is None:
        total = [np.zeros((len(target.prefixes), 1 << 16), np.int64) for target in targets]
    return np.concatenate(total).tobytes()


def _counts(parts: Iterator[Array], first: int, targets: Sequence[Target]) -> list[Int64s]:
    total = [np.zeros((len(target.prefixes), 1 << 16), np.int64) for target in targets]
    for values in parts:
        columns = np.ascontiguousarray(values[:, first : first + len(targets)].T)
        for k, target in enumerate(targets):
            total[k] += histogram(columns[k], target)
    return total


def pack(moments: Moments) -> bytes:
    return np.array([getattr(moments, name) for name in FIELDS], np.float64).tobytes()


def unpack(data: bytes, features: int) -> list[Moments]:
    arrays = np.frombuffer(data, np.float64).reshape(-1, len(FIELDS), features)
    return [Moments(array[0].astype(np.int64), *array[1:]) for array in arrays]
