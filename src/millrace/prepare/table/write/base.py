"""The records of a store that is appended to, and what they mean for new rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.errors import SourceError
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.schema import Role
from millrace.prepare.table.settle.clean import show_time
from millrace.prepare.table.settle.index import Index
from millrace.prepare.table.settle.measure import Fitted
from millrace.prepare.table.settle.splits import SPLITS, rows_by_split
from millrace.prepare.table.write import shards
from millrace.ragged import Array, Int64s
from millrace.store.store import Store


class TableBase:
    """The records of a store; its entities and those of an index are matched by name."""

    def __init__(self, store: Store, options: TableOptions) -> None:
        self._store = store
        self._splits = options.time_splits if options.has_time_split else None

    def records(self, index: Index) -> Int64s:
        """The store's record of each entity, -1 for a new one; new rows must be later than those it has."""
        known = {name: k for k, name in enumerate(self._store.columns["name"][:].tolist())}
        records = np.array([known.get(name, -1) for name in index.names], np.int64)
        firsts = np.minimum.reduceat(index.runs["first"], index.offsets[:-1])
        unit = self._store.meta["time"]["unit"]
        for k in np.flatnonzero(records >= 0).tolist():
            last = self.last_time(int(records[k]))
            if firsts[k] <= last:
                raise SourceError(
                    f"entity {index.names[k]!r} has rows from {show_time(firsts[k], unit)} on, but the store has it up to "
                    f"{show_time(last, unit)}; leave those out with --where, or prepare the whole table again"
                )
        return records

    def last_time(self, record: int) -> Any:
        return self._store.columns["time"][int(self._store.offsets[record + 1]) - 1]

    def rows(self, record: int) -> int:
        return int(self._store.offsets[record + 1] - self._store.offsets[record]) if record >= 0 else 0

    def cuts(self, record: int, new: Int64s) -> Int64s:
        """The cuts of a longer record: a split that had begun keeps its first row."""
        if self._splits is None:
            return new
        rows, old = self.rows(record), np.asarray(self._store.columns["cuts"][record])
        return old if "cut_times" not in self._store.meta else np.where(old < rows, old, rows + new)

    def rows_after(self, fitted: Fitted, records: Int64s) -> dict[str, int]:
        """Rows of each split of the whole store."""
        fresh, known = records < 0, records[records >= 0]
        if self._splits is None:
            splits = self._store.splits or ("train",)
            total = {split: self._store.split(split).num_rows for split in splits}
            names = np.concatenate([np.full(self._store.split(split).num_records, split, object) for split in splits])
            for split, rows in zip(names[known], fitted.rows[~fresh].tolist(), strict=True):
                total[split] += rows
            for k, split in enumerate(SPLITS):
                if added := int(fitted.rows[fresh & (fitted.splits == k)].sum()):
                    total[split] = total.get(split, 0) + added
            return total
        rows, cuts = np.diff(self._store.offsets), np.array(self._store.columns["cuts"][:])
        rows[known] += fitted.rows[~fresh]
        cuts[known] = fitted.cuts[~fresh]
        both = np.concatenate((cuts, fitted.cuts[fresh])), np.concatenate((rows, fitted.rows[fresh]))
        return rows_by_split(*both, self._splits)

    def entity(self, record: int, number: int, fitted: Fitted) -> shards.Entity:
        """A record of the store, with what its record columns will hold."""
        stored = self._store.columns

        def values(name: str) -> tuple[Any, ...]:
            return tuple(np.asarray(stored[name][record]).tolist()) if name in self._store.layout.columns else ()

        new_rows = 0 if number < 0 else int(fitted.rows[number])
        cuts = values("cuts") if number < 0 else tuple(fitted.cuts[number].tolist())
        own = np.asarray(stored["scaling"][record]).tobytes() if "scaling" in self._store.layout.columns else b""
        static, codes = values("static"), values("static_categorical")
        return shards.Entity(number, str(stored["name"][record]), new_rows, cuts, static, codes, own, record)

    def static(self, index: Index, count: int) -> Array:
        """Static numbers in the store's scaling, NaN where there is none."""
        if not count:
            return np.zeros((len(index.names), 0))
        own = self._store.meta["static_scaling"]
        scaled: Array = (index.static[:, :count] - np.array(own["center"])) / np.array(own["scale"])
        return scaled

    def check_static(self, index: Index, records: Int64s, role: Role) -> None:
        """Refuses static values of a known entity that differ from those in the store."""
        count = len(role.static)
        numbers, codes = self.static(index, count).astype(np.float32), index.static[:, count:]
        for column, values in (("static", numbers), ("static_categorical", codes)):
            for k in np.flatnonzero(records >= 0).tolist() if values.shape[1] else ():
                stored = np.asarray(self._store.columns[column][int(records[k])])
                differ = np.flatnonzero(~np.isnan(values[k]) & (values[k] != stored))
                if len(differ):
                    name = self._store.meta[column][int(differ[0])]
                    raise SourceError(
                        f"static column {name!r} of entity {index.names[k]!r} is not what the store has; fix the files"
                    )
