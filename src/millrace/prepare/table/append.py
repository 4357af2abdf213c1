"""``prepare table --append``: later rows of entities a store has, and new entities, as a new snapshot.

A shard that holds an entity with new rows is written again under another name: its rows are copied as they are, the new
ones follow. The scaling stays what it was unless ``refit`` is asked for; cuts stay where they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.functions import source_digest
from millrace.prepare.kind import Earlier, Product
from millrace.prepare.table.options import TableOptions, parse_options
from millrace.prepare.table.read.part import PartDone
from millrace.prepare.table.read.sources import Inputs, Survey
from millrace.prepare.table.report import merge_reports, read_run
from millrace.prepare.table.settle.clean import calendar_names
from millrace.prepare.table.settle.index import Index, build_index
from millrace.prepare.table.settle.index_files import save_index
from millrace.prepare.table.settle.measure import Fitted, check_refit, refit_scaling
from millrace.prepare.table.settle.splits import SPLITS
from millrace.prepare.table.table import Table
from millrace.prepare.table.write import shards
from millrace.prepare.table.write.assemble import make_report, shard_tasks
from millrace.prepare.table.write.base import TableBase
from millrace.ragged import Int64s
from millrace.scaling.moments import Moments
from millrace.scaling.scaler import Scaling
from millrace.store.open import open_store
from millrace.store.shard import ShardEntry, shard_name
from millrace.store.snapshot import Base

# These may differ from one append to the next.
FREE = ("on_error", "widen", "strict", "shard_bytes", "delimiter", "encoding", "decimal", "time_format")
NOTED = ("where", "transform")  # these too, with a note: the rows of the store were chosen in another way


def open_append(out: Path, inputs: Inputs, given: Mapping[str, Any]) -> TableAppend:
    """An append to the store at ``out``. Its own options hold; those given (not None) may only repeat them."""
    asked = {name: value for name, value in given.items() if value is not None}
    refit = bool(asked.pop("refit", False))
    if open_store(out).kind != "series":
        raise ConfigError(f"{out} was not made by prepare table; only such a store can be appended to")
    first = read_run(
        out, 0, "an append reads the options of the store there: bring it back, or prepare the table again"
    )
    stored = msgspec.convert(first.plan["options"], TableOptions)
    options, notes = _options(out, stored, asked)
    function = options.transform
    is_same = function is not None and function == stored.transform
    if is_same and source_digest(str(function), "--transform") != first.plan.get("transform"):
        notes.append(f"--transform {function} has changed since the store was made")
    return TableAppend(inputs, options, refit, notes)


def _options(out: Path, stored: TableOptions, given: Mapping[str, Any]) -> tuple[TableOptions, list[str]]:
    """The options of the store, with the free ones that are given; any other that differs is refused."""
    asked = parse_options({**msgspec.structs.asdict(stored), **given})
    notes = []
    for name in given:
        value, before = getattr(asked, name), getattr(stored, name)
        if value == before:
            continue
        if name not in (*FREE, *NOTED):
            raise ConfigError(
                f"{out} was made with {name}={before!r}, which an append cannot change to {value!r}; "
                "leave it out, or prepare another store"
            )
        if name in NOTED:
            notes.append(f"--{name} {value!r} was used here, where the store was made with {before!r}")
    asked.check()
    return asked, notes


class TableAppend(Table):
    """An append, from the survey to the next snapshot."""

    surveys_late = True  # the store says which columns to read

    def __init__(self, inputs: Inputs, options: TableOptions, refit: bool, notes: Sequence[str]) -> None:
        super().__init__(inputs, options)
        self._refit, self._append_notes = refit, notes

    def extend(self, base: Base) -> None:
        self._base, self._store = base, open_store(self.context.out)
        self._existing = TableBase(self._store, self._options)
        if self._refit:
            check_refit(self._old_scaling())
        meta = self._store.meta
        inputs, waves = meta.get("inputs", meta["features"]), len(calendar_names(self._options.calendar))
        self._options = msgspec.structs.replace(self._options, features=tuple(inputs[: len(inputs) - waves]))

    def survey(self) -> None:
        super().survey()
        self._found = self._as_stored(self._found)

    @property
    def plan(self) -> dict[str, Any]:
        return {**super().plan, "append": True, "refit": self._refit}

    @property
    def part_plan(self) -> dict[str, Any]:
        return {**self.plan, "base": self._base.manifest.fingerprint}

    def earlier(self, line: int) -> Earlier:
        with contextlib.suppress(ConfigError):  # what stands there is no append of ours
            return super().earlier(line)
        return Earlier(None, {}, None)

    def _as_stored(self, found: Survey) -> Survey:
        """The survey with times in the unit of the store. Files that do not fit the store are refused."""
        unit, zone = (self._store.meta["time"].get(key) for key in ("unit", "zone"))
        schema = found.schema
        if (schema.time_unit is None) != (unit is None) or (schema.time_zone is None) != (zone is None):
            raise ConfigError(
                f"--time {self._options.time!r} is {schema.types[self._options.time]}; the store has times of unit {unit}, "
                f"zone {zone}: convert it with --transform"
            )
        if len(schema.role.features) + len(calendar_names(self._options.calendar)) != len(self._store.meta["features"]):
            raise ConfigError(
                f"the store has features {', '.join(self._store.meta['features'])}; the files have others"
            )
        return msgspec.structs.replace(found, schema=msgspec.structs.replace(schema, time_unit=unit, time_zone=zone))

    def settle(self, parts: list[PartDone]) -> list[shards.ShardTask]:
        self.is_void = True  # options cannot change: files that are refused now will be refused again
        self._parts, self.columns = parts, self._base.manifest.layout.columns
        index = build_index(self.context.folder, parts, self._found.schema, self._store.meta.get("categories"))
        if not index.names:
            raise SourceError("no rows to append: the files are empty, or all was dropped; nothing was changed")
        save_index(self.context.folder, index)
        self._index, self._records = index, self._existing.records(index)
        self._existing.check_static(index, self._records, self._found.schema.role)
        self._fitted = self._measure(index, self._records)
        if not self._fitted.rows.any():
            gone = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(self._fitted.dropped.items()))
            raise SourceError(f"no rows to append: all were dropped ({gone}); nothing was changed")
        self.is_void = False
        self._replacements = self._rewritten()
        self._tasks = [*self._replacements.values(), *self._fresh()]
        return self._tasks

    def _measure(self, index: Index, records: Int64s) -> Fitted:
        after = {k: self._existing.last_time(int(records[k])).item() for k in np.flatnonzero(records >= 0).tolist()}
        listed = set(index.names)
        options = msgspec.structs.replace(
            self._options,
            val_entities=tuple(name for name in self._options.val_entities if name in listed),
            test_entities=tuple(name for name in self._options.test_entities if name in listed),
        )
        fitted = self._measuring(options).run(index, self._store.meta.get("cut_times"), after, self._scaling)
        fitted.cuts = fitted.cuts.copy()  # as they came they are not writable
        for k, record in enumerate(records.tolist()):
            if record >= 0:
                fitted.cuts[k] = self._existing.cuts(record, fitted.cuts[k])
        return fitted

    def _scaling(self, moments: Moments, rows: int) -> Scaling:
        """The store's, or fitted again on its train rows and the new ones."""
        old = self._old_scaling()
        return refit_scaling(old, moments, rows) if self._refit else old

    def _old_scaling(self) -> Scaling:
        assert self._store.manifest is not None
        return Scaling.from_manifest(self._store.manifest.scaling)

    def product(self, entries: Mapping[str, ShardEntry]) -> Product:
        base, fitted, records = self._base, self._fitted, self._records
        report, row_bytes = make_report(self._settled, self._parts, self._tasks), self._settled.row_bytes
        for old, task in self._replacements.items():
            base.replaced[old] = entries[shard_name(task.split, task.number)]
        rewritten = self._replacements.values()
        copied = sum(self._existing.rows(entity.record) for task in rewritten for entity in task.entities)
        added = {
            "rows": int(fitted.rows.sum()), "entities": int((fitted.rows[records >= 0] > 0).sum()),
            "new entities": int((fitted.rows[records < 0] > 0).sum()),
        }  # fmt: skip
        report |= {
            "added": added,
            "rewritten": {"copied bytes": copied * row_bytes, "new bytes": added["rows"] * row_bytes},
            "notes": [*report["notes"], *self._append_notes],
            "rows": self._existing.rows_after(fitted, records),
            "entities": self._store.num_records + added["new entities"],
            "shards": self._store.num_shards + len(self._tasks) - len(rewritten),
            "bytes": (self._store.num_rows + added["rows"]) * row_bytes,
        }
        meta = dict(base.manifest.meta)
        report, meta["report"] = merge_reports(meta["report"], report)
        if self._index.categories:
            meta["categories"] = {name: list(values) for name, values in self._index.categories.items()}
        fields = {
            "kind": "series", "columns": self.columns, "scaling": fitted.scaling.to_manifest(), "meta": meta,
            "cuts": base.manifest.cuts,
            "splits": tuple(dict.fromkeys((*base.manifest.splits, *(task.split for task in self._tasks)))),
        }  # fmt: skip
        return Product(fields, report, {"rows_kept": self._rows_kept})

    def _rewritten(self) -> dict[tuple[str, int], shards.ShardTask]:
        """The shards to write again, by their old split and number: those with an entity that has new rows, or all of
        them where the scaling changes."""
        base, fitted, records = self._base, self._fitted, self._records
        entity_of = {int(record): k for k, record in enumerate(records.tolist()) if record >= 0 and fitted.rows[k]}
        table = np.frombuffer(base.table, "<u8").reshape(-1, 3 + len(base.manifest.axes)).astype(np.int64)
        ends = np.cumsum(table[:, 2])
        free = {split: base.next_number(split) for split in base.manifest.splits}
        old = base.manifest.scaling if self._refit else None
        tasks: dict[tuple[str, int], shards.ShardTask] = {}
        for row, end in zip(table.tolist(), ends.tolist(), strict=True):
            held = range(end - row[2], end)
            if not self._refit and not any(record in entity_of for record in held):
                continue
            split = base.manifest.splits[row[0]]
            entities = tuple(self._existing.entity(record, entity_of.get(record, -1), fitted) for record in held)
            tasks[split, row[1]] = shards.ShardTask(
                split, free[split], entities, str(self.context.folder), self._options, self._found.schema,
                fitted.scaling.to_manifest(), self.columns, (str(self.context.out), base.manifest.fingerprint), old,
            )  # fmt: skip
            free[split] += 1
        return tasks

    def _fresh(self) -> list[shards.ShardTask]:
        """The shards of new entities, behind those of the store."""
        numbers = {split: self._base.next_number(split) for split in SPLITS}
        for task in self._replacements.values():
            numbers[task.split] = max(numbers[task.split], task.number + 1)
        only_new = msgspec.structs.replace(self._fitted, rows=np.where(self._records < 0, self._fitted.rows, 0))
        static = np.nan_to_num(self._existing.static(self._index, len(self._found.schema.role.static)))
        settled = self._settled._replace(fitted=only_new)
        return shard_tasks(self.context.folder, settled, static.astype(np.float32), numbers)
