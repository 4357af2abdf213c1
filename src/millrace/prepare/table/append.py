"""``prepare table --append``: later rows of entities a store has, and new entities, as a new snapshot.

A shard that holds an entity with new rows is written again under another name: its rows are copied as they are, the new
ones follow. The scaling stays what it was unless ``refit`` is asked for; cuts stay where they are.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.functions import source_digest
from millrace.prepare.plan import check_plan, differences
from millrace.prepare.table.options import TableOptions, parse_options
from millrace.prepare.table.read.part import PartDone
from millrace.prepare.table.read.sources import Inputs, Survey
from millrace.prepare.table.recipe import Made, check_readable, read_made
from millrace.prepare.table.report import TableReport, merge_reports
from millrace.prepare.table.settle.clean import calendar_names
from millrace.prepare.table.settle.index import Index, build_index
from millrace.prepare.table.settle.index_files import close_index, save_index
from millrace.prepare.table.settle.measure import Engine, Fitted, Measuring
from millrace.prepare.table.settle.refit import check_refit, refit_scaling
from millrace.prepare.table.settle.splits import SPLITS
from millrace.prepare.table.table import SCRATCH, Preparation, Running
from millrace.prepare.table.write import shards
from millrace.prepare.table.write.assemble import make_report, shard_tasks
from millrace.prepare.table.write.existing import Existing
from millrace.ragged import Int64s
from millrace.scaling.moments import Moments
from millrace.scaling.scaler import Scaling
from millrace.store import gc
from millrace.store.layout import Column
from millrace.store.open import open_store
from millrace.store.publish import Partial
from millrace.store.reader import read_base
from millrace.store.shard import shard_name
from millrace.store.snapshot import Base

# These may differ from one append to the next.
FREE = (
    "on_error",
    "widen",
    "strict",
    "shard_bytes",
    "where",
    "transform",
    "delimiter",
    "encoding",
    "decimal",
    "time_format",
)
TOLD = ("where", "transform")  # a difference is told: rows of the store were taken another way


def append_table(inputs: Inputs, out: Path, given: Mapping[str, Any], running: Running) -> TableReport:
    """Adds rows to the store at ``out``; its own options hold, those given (not None) may only repeat them."""
    asked = {name: value for name, value in given.items() if value is not None}
    refit = bool(asked.pop("refit", False))
    made = _made(out)
    options, notes = _options(out, made.options, asked)
    function = options.transform
    is_same = function is not None and function == made.options.transform
    if is_same and source_digest(str(function), "--transform") != made.plan.get("transform"):
        notes.append(f"--transform {function} has changed since the store was made")
    return Appending(inputs, out, options, running, refit, notes).run()


def _made(out: Path) -> Made:
    """What the first preparation of a store said of itself."""
    if open_store(out).kind != "series":
        raise ConfigError(f"{out} was not made by prepare table; only such a store can be appended to")
    return read_made(
        out, 0, "an append reads the options of the store there: bring it back, or prepare the table again"
    )


def _options(out: Path, kept: TableOptions, given: Mapping[str, Any]) -> tuple[TableOptions, list[str]]:
    """The options of the store, but for the free ones that are given; any other that says something else is refused."""
    asked = parse_options({**msgspec.structs.asdict(kept), **given})
    notes = []
    for name in given:
        value, before = getattr(asked, name), getattr(kept, name)
        if value == before:
            continue
        if name not in FREE:
            raise ConfigError(
                f"{out} was made with {name}={before!r}, which an append cannot change to {value!r}; "
                "leave it out, or prepare another store"
            )
        if name in TOLD:
            notes.append(f"--{name} {value!r} was used here, where the store was made with {before!r}")
    asked.check()
    return asked, notes


class Appending(Preparation):
    """One append, from the survey to the next snapshot."""

    def __init__(
        self, inputs: Inputs, out: Path, options: TableOptions, running: Running, refit: bool, notes: Sequence[str]
    ) -> None:
        super().__init__(inputs, out, options, running)
        self._refit, self._notes = refit, notes
        self._partial = Partial(out, append=True, scratch=SCRATCH)

    def _run(self) -> TableReport:
        self._acquire()
        self._is_mine = not (self._folder / "plan.json").exists()
        try:
            base = read_base(self._out)
            self._store = open_store(self._out)
            self._stored = Existing(self._store, self._options)
            if self._refit:
                check_refit(self._old_scaling())
            meta = self._store.meta
            waves = len(calendar_names(self._options.calendar))
            inputs = meta.get("inputs", meta["features"])
            self._options = msgspec.structs.replace(self._options, features=tuple(inputs[: len(inputs) - waves]))
            found = self._as_stored(self._survey())
            if done := self._done_before(found, base):
                self._partial.close(remove=True)  # also where it was killed at its very end
                return done
            return msgspec.structs.replace(self._append(found, base), rows_kept=self._rows_kept)
        except MillraceError as error:
            self._clear(error)
            raise
        finally:
            close_index()
            self._partial.close(remove=False)

    def _done_before(self, found: Survey, base: Base) -> TableReport | None:
        """The report of this append, where it was the last one."""
        with contextlib.suppress(ConfigError):  # whatever else stands there is of another
            last = read_made(self._out, -1, "")
            is_current = last.report.fingerprint == base.manifest.fingerprint
            return last.report if is_current and not differences(last.plan, self._plan(found)) else None
        return None

    def _plan(self, found: Survey) -> dict[str, Any]:
        return {**super()._plan(found), "append": True, "refit": self._refit}

    def _as_stored(self, found: Survey) -> Survey:
        """The survey with the times in the store's unit; what the store cannot take is refused."""
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

    def _append(self, found: Survey, base: Base) -> TableReport:
        check_readable(self._folder / "plan.json")
        check_plan(
            self._folder / "plan.json",
            {**self._plan(found), "base": base.manifest.fingerprint},
            self._folder,
            self._changed,
        )
        self._is_mine = True
        with contextlib.closing(self._pool()) as pool:
            done = self._read(pool, found)
            self._is_void = True  # options cannot change: files that are refused now will be so again
            index = build_index(self._folder, done, found.schema, self._store.meta.get("categories"))
            if not index.names:
                raise SourceError("no rows to append: the files are empty, or all was dropped; nothing was changed")
            save_index(self._folder, index)
            records = self._stored.records(index)
            self._stored.check_static(index, records, found.schema.role)
            fitted = self._measure(pool, found, index, records)
            self._is_void = False
            return self._publish(pool, found, base, index, done, fitted, records)

    def _measure(self, pool: Engine, found: Survey, index: Index, records: Int64s) -> Fitted:
        after = {k: self._stored.last_time(int(records[k])).item() for k in np.flatnonzero(records >= 0).tolist()}
        listed = set(index.names)
        options = msgspec.structs.replace(
            self._options,
            val_entities=tuple(name for name in self._options.val_entities if name in listed),
            test_entities=tuple(name for name in self._options.test_entities if name in listed),
        )
        measuring = Measuring(self._folder, options, found, pool, self._progress)
        fitted = measuring.run(index, self._store.meta.get("cut_times"), after, self._scaling)
        fitted.cuts = fitted.cuts.copy()  # as they came they are not writable
        for k, record in enumerate(records.tolist()):
            if record >= 0:
                fitted.cuts[k] = self._stored.cuts(record, fitted.cuts[k])
        return fitted

    def _scaling(self, moments: Moments, rows: int) -> Scaling:
        """The store's, or fitted again on its train rows and the new ones."""
        old = self._old_scaling()
        return refit_scaling(old, moments, rows) if self._refit else old

    def _old_scaling(self) -> Scaling:
        assert self._store.manifest is not None
        return Scaling.from_manifest(self._store.manifest.scaling)

    def _publish(
        self,
        pool: Engine,
        found: Survey,
        base: Base,
        index: Index,
        done: Sequence[PartDone],
        fitted: Fitted,
        records: Int64s,
    ) -> TableReport:
        columns = base.manifest.layout.columns
        rewritten = self._rewritten(found, base, index, fitted, records, columns)
        tasks = [*rewritten, *self._fresh(found, base, index, fitted, records, columns, rewritten)]
        self._partial.begin({"plan": self._plan(found)}, base.manifest.layout, base, resume=True)
        gc.sweep(self._out, spare=self._partial.entries)
        self._write_shards(pool, tasks)
        for old, task in self._replaced.items():
            base.replaced[old] = self._partial.entries[shard_name(task.split, task.number)]
        report = make_report(self._options, found, index, done, fitted, shards.filled_cells(tasks), len(tasks), columns)
        row_bytes = sum(column.item_bytes for column in columns.values() if column.axis is not None)
        copied = sum(self._stored.rows(entity.record) for task in rewritten for entity in task.entities)
        report["added"] = {
            "rows": int(fitted.rows.sum()), "entities": int((fitted.rows[records >= 0] > 0).sum()),
            "new entities": int((fitted.rows[records < 0] > 0).sum()),
        }  # fmt: skip
        report["rewritten"] = {"copied bytes": copied * row_bytes, "new bytes": report["added"]["rows"] * row_bytes}
        report["notes"] += self._notes
        report |= {
            "rows": self._stored.rows_after(fitted, records),
            "entities": self._store.num_records + report["added"]["new entities"],
            "shards": self._store.num_shards + len(tasks) - len(rewritten),
            "bytes": (self._store.num_rows + report["added"]["rows"]) * row_bytes,
        }
        meta = dict(base.manifest.meta)
        report, meta["report"] = merge_reports(meta["report"], report)
        if index.categories:
            meta["categories"] = {name: list(values) for name, values in index.categories.items()}
        fields = {
            "kind": "series", "columns": columns, "scaling": fitted.scaling.to_manifest(), "meta": meta, "cuts": base.manifest.cuts,
            "splits": tuple(dict.fromkeys((*base.manifest.splits, *(task.split for task in tasks)))),
        }  # fmt: skip
        fingerprint = self._partial.publish(fields, base, {"plan": self._plan(found), "report": report})
        return TableReport(str(self._out), fingerprint, True, **report, seconds=time.monotonic() - self._started)

    def _rewritten(
        self, found: Survey, base: Base, index: Index, fitted: Fitted, records: Int64s, columns: Mapping[str, Column]
    ) -> list[shards.ShardTask]:
        """The shards to write again: those with an entity that has new rows, or all of them where the scaling changes."""
        entity_of = {int(record): k for k, record in enumerate(records.tolist()) if record >= 0 and fitted.rows[k]}
        table = np.frombuffer(base.table, "<u8").reshape(-1, 3 + len(base.manifest.axes)).astype(np.int64)
        ends = np.cumsum(table[:, 2])
        free = {split: base.next_number(split) for split in base.manifest.splits}
        old = base.manifest.scaling if self._refit else None
        self._replaced: dict[tuple[str, int], shards.ShardTask] = {}
        for row, end in zip(table.tolist(), ends.tolist(), strict=True):
            held = range(end - row[2], end)
            if not self._refit and not any(record in entity_of for record in held):
                continue
            split = base.manifest.splits[row[0]]
            entities = tuple(self._stored.entity(record, entity_of.get(record, -1), fitted) for record in held)
            task = shards.ShardTask(
                split, free[split], entities, str(self._folder), self._options, found.schema, fitted.scaling.to_manifest(),
                {name: (column.dtype, column.shape, column.per) for name, column in columns.items()},
                (str(self._out), base.manifest.fingerprint), old,
            )  # fmt: skip
            free[split] += 1
            self._replaced[split, row[1]] = task
        return list(self._replaced.values())

    def _fresh(
        self,
        found: Survey,
        base: Base,
        index: Index,
        fitted: Fitted,
        records: Int64s,
        columns: Mapping[str, Column],
        rewritten: Sequence[shards.ShardTask],
    ) -> list[shards.ShardTask]:
        """The shards of new entities, behind those of the store."""
        numbers = {split: base.next_number(split) for split in SPLITS}
        for task in rewritten:
            numbers[task.split] = max(numbers[task.split], task.number + 1)
        only_new = msgspec.structs.replace(fitted, rows=np.where(records < 0, fitted.rows, 0))
        static = np.nan_to_num(self._stored.static(index, len(found.schema.role.static))).astype(np.float32)
        return shard_tasks(self._folder, self._options, found, index, only_new, columns, static, numbers)
