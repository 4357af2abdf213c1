"""``prepare_table``: from Parquet and CSV to a scaled series store, in two passes and constant memory.

Pass 1 decodes every file once and keeps raw rows aside; then the cuts are found and the train rows measured; pass 2
fills, scales and writes. Killed at any time, the same call continues: whole parts, measurements and shards are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.native import num_cores
from millrace.prepare.advice import in_python
from millrace.prepare.engines.local import STALL_S, Workers
from millrace.prepare.engines.threads import Threads
from millrace.prepare.functions import source_digest
from millrace.prepare.plan import MAX_SHOWN, check_plan, differences
from millrace.prepare.progress import default_progress
from millrace.prepare.restart import begin_afresh
from millrace.prepare.room import check_room
from millrace.prepare.split_forms import TABLE_FORMS, expand_split
from millrace.prepare.table.options import READING, TableOptions, make_options
from millrace.prepare.table.read.part import PartDone
from millrace.prepare.table.read.parts import finished_parts, part_tasks, read_parts
from millrace.prepare.table.read.sources import Inputs, Survey, find_tables, survey
from millrace.prepare.table.recipe import check_readable, read_made
from millrace.prepare.table.report import TableReport
from millrace.prepare.table.settle.clean import grid_step, local_times
from millrace.prepare.table.settle.index import Index, build_index
from millrace.prepare.table.settle.index_files import close_index, save_index
from millrace.prepare.table.settle.measure import Engine, Fitted, Measuring, Progress, scale_static, train_first
from millrace.prepare.table.settle.splits import check_splits
from millrace.prepare.table.space import estimate
from millrace.prepare.table.write import shards
from millrace.prepare.table.write.assemble import make_meta, make_report, shard_tasks, split_rows
from millrace.store import platform
from millrace.store.layout import Layout
from millrace.store.manifest import Cuts
from millrace.store.open import open_store
from millrace.store.ownership import is_lease
from millrace.store.publish import Partial
from millrace.store.shard import shard_name

SCRATCH = ("parts", "plan.json", "index", "fit")
PLAN_VERSION = 1


@in_python(TableOptions, refit=False)
def prepare_table(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    append: bool = False,
    restart: bool = False,
    exclude: Sequence[str] | str = (),
    progress: Progress | None = None,
    stall_s: float = STALL_S,
    split: str | None = None,
    **options: Any,
) -> TableReport:
    """Makes a series store at ``out`` from Parquet or CSV files; see ``TableOptions``.

    ``exclude`` holds patterns of files to leave out. ``restart`` removes what an interrupted run left and begins afresh.
    All files but ``provenance.json`` are byte-identical for any number of workers and any interruptions.
    """
    given = Inputs(
        [os.fspath(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)],
        [exclude] if isinstance(exclude, str) else list(exclude),
    )
    options = expand_split({**options, "split": split}, TABLE_FORMS)
    target = Path(os.path.realpath(out))
    running = Running(workers or num_cores(), stall_s, progress or default_progress(), restart)
    if append:
        from millrace.prepare.table.append import append_table

        return append_table(given, target, options, running)
    if options.pop("refit", False):
        raise ConfigError("--refit is for --append; a new store is always fitted on its own rows")
    return Preparation(given, target, make_options(options), running).run()


class Running(NamedTuple):
    """How a preparation runs, which changes nothing in what it makes."""

    workers: int
    stall_s: float
    progress: Progress
    restart: bool


class Preparation:
    """One run, from the survey to the finished store."""

    def __init__(self, inputs: Inputs, out: Path, options: TableOptions, running: Running) -> None:
        self._inputs, self._out, self._options = inputs, out, options
        self._workers, self._stall_s, self._progress, self._restart = running
        self._partial = Partial(out, scratch=SCRATCH)
        self._folder = self._partial.folder
        self._started = time.monotonic()
        self._is_mine = self._is_void = False
        self._rows_kept = 0  # read by an earlier attempt
        self._left_out: list[str] = []  # notes on files that are no sources

    def run(self) -> TableReport:
        try:
            return self._run()
        except MillraceError:
            for note in self._left_out:  # it may be the reason
                self._progress("note", 0, 0, {"note": note})
            raise

    def _survey(self) -> Survey:
        listed = find_tables(self._inputs, (self._out, self._folder))
        self._left_out = listed.notes
        return survey(listed, self._options)

    def _run(self) -> TableReport:
        found = self._survey()
        grid_step(self._options.freq, found.schema)
        if self._options.calendar and found.schema.time_unit is None:
            raise ConfigError("--calendar needs times that are dates; these are plain numbers")
        if self._options.calendar and found.schema.time_unit is not None:
            local_times(np.zeros(1, np.int64), found.schema.time_unit, found.schema.time_zone)  # the zone must be known
        if (self._out / "store.json").exists():
            return self._finished(found)
        self._acquire()
        try:
            if self._partial.complete():
                return self._finished(found)
            return msgspec.structs.replace(self._prepare(found), rows_kept=self._rows_kept)
        except MillraceError as error:
            self._clear(error)
            raise
        finally:
            close_index()
            self._partial.close(remove=False)

    def _acquire(self) -> None:
        self._partial.acquire()
        if self._restart:
            begin_afresh(self._folder)

    def _clear(self, error: MillraceError) -> None:
        """Removes an attempt of which nothing can be continued, so that a fixed call starts afresh."""
        is_void = self._is_void and isinstance(error, (ConfigError, SourceError))
        if self._is_mine and (is_void or not any((self._folder / "parts").glob("*[0-9]/done.json"))):
            self._partial.close(remove=True)

    def _plan(self, found: Survey) -> dict[str, Any]:
        described = {s.file.path: [s.file.size, s.file.mtime_ns, s.file.ends] for s in found.sources}
        plan = {
            "version": PLAN_VERSION, "options": msgspec.to_builtins(self._options), "sources": described,
            "order": list(described),
        }  # fmt: skip
        if self._options.transform is not None:
            plan["transform"] = source_digest(self._options.transform, "--transform")
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    def _finished(self, found: Survey) -> TableReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        remedy = "choose another --out, add rows with --append, or remove it yourself"
        made = read_made(self._out, 0, remedy)
        if changed := differences(made.plan, self._plan(found)):
            more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:MAX_SHOWN])}{more}; {remedy}"
            )
        return msgspec.structs.replace(made.report, fingerprint=store.fingerprint)

    def _prepare(self, found: Survey) -> TableReport:
        check_readable(self._folder / "plan.json")
        check_plan(self._folder / "plan.json", self._plan(found), self._folder, self._changed)
        self._is_mine = True
        with contextlib.closing(self._pool()) as pool:
            done = self._read(pool, found)
            index = build_index(self._folder, done, found.schema)
            if not index.names:
                self._is_void = True
                raise SourceError(
                    "no rows are left: the files are empty, or all was dropped; look at --where and --on-error"
                )
            save_index(self._folder, index)
            fitted = Measuring(self._folder, self._options, found, pool, self._progress).run(index)
            self._check(index, fitted)
            renumbered = train_first(index, fitted, found.schema.role)
            if renumbered.categories != index.categories:
                save_index(self._folder, renumbered)
            return self._write(pool, found, renumbered, done, fitted)

    def _changed(self, old: Any, new: Any) -> Any:
        """The old plan with what may change between two attempts: the sources, and all options but those of reading.

        What was made of the rows goes. The parts stay: each is known by what it is made of.
        """
        options = {**new["options"], **{name: old["options"].get(name) for name in READING}}
        allowed = {**old, "options": options, "sources": new["sources"], "order": new["order"]}
        if options == new["options"] and "transform" in new:
            allowed["transform"] = new["transform"]
        if allowed == new:
            with platform.writing(self._folder, "removing"):
                for name in sorted({*os.listdir(self._folder)} - {"plan.json", "owner.json", "parts"}):
                    if not is_lease(name):
                        platform.remove(self._folder / name)
            self._tell_changes(old, new)
        return allowed

    def _tell_changes(self, old: Any, new: Any) -> None:
        if old.get("transform") != new.get("transform"):
            told = f"--transform {self._options.transform} has changed since this was begun: all rows are read again"
            self._progress("note", 0, 0, {"note": told})
        before, now = ({key: plan[key] for key in ("sources", "order")} for plan in (old, new))
        if changed := differences(before, now):
            more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            told = f"since this was begun, {'; '.join(changed[:MAX_SHOWN])}{more}: what was read of other files is kept"
            self._progress("note", 0, 0, {"note": told})

    def _pool(self) -> Engine:
        """Decoding and arithmetic leave the GIL alone; a user's function gets processes, which it may crash."""
        return Threads(self._workers) if self._options.transform is None else Workers(self._workers, self._stall_s)

    def _read(self, pool: Engine, found: Survey) -> list[PartDone]:
        with platform.writing(self._folder):
            platform.make_dir(self._folder / "parts")
            platform.make_dir(self._folder / "fit")
        tasks = part_tasks(self._folder, self._options, found)
        finished = finished_parts(pool, self._folder, tasks)
        self._rows_kept = sum(part.rows_read for part in finished.values())
        self._progress("room", *check_room(self._folder, *estimate(found, self._options)), {})
        return read_parts(pool, tasks, finished, self._progress)

    def _check(self, index: Index, fitted: Fitted) -> None:
        if not fitted.rows.any():
            gone = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(fitted.dropped.items()))
            raise ConfigError(
                f"no entity has --min-rows {self._options.min_rows} rows left; the longest of {len(index.names)} was read "
                f"with {int(index.rows.max())} (dropped, {gone}): ask for fewer, or fill nulls rather than drop them"
            )
        check_splits(self._options, split_rows(self._options, fitted))

    def _write(
        self, pool: Engine, found: Survey, index: Index, done: Sequence[PartDone], fitted: Fitted
    ) -> TableReport:
        options, schema = self._options, found.schema
        columns = shards.layout_columns(options, schema, has_mask=shards.needs_mask(options, schema))
        static, static_scaling = scale_static(
            index.static[:, : len(schema.role.static)],
            fitted.is_train,
            options.scale,
        )
        tasks = shard_tasks(self._folder, options, found, index, fitted, columns, static, {})
        self._partial.begin({"plan": self._plan(found)}, Layout(columns), None, resume=True)
        self._write_shards(pool, tasks)
        filled = shards.filled_cells(tasks)
        report = make_report(options, found, index, done, fitted, filled, len(tasks), columns)
        fields: dict[str, Any] = {
            "kind": "series", "columns": columns, "splits": tuple(dict.fromkeys(task.split for task in tasks)),
            "scaling": fitted.scaling.to_manifest(), "meta": make_meta(options, found, index, fitted, static_scaling, report),
        }  # fmt: skip
        if options.has_time_split:
            fields["cuts"] = Cuts(options.time_splits, gap=options.gap)
        provenance = {"plan": self._plan(found), "report": report}
        fingerprint = self._partial.publish(fields, None, provenance)
        return TableReport(str(self._out), fingerprint, True, **report, seconds=time.monotonic() - self._started)

    def _write_shards(self, pool: Engine, tasks: Sequence[shards.ShardTask]) -> None:
        missing = [
            task
            for task in tasks
            if shard_name(task.split, task.number) not in self._partial.entries
            or not shards.has_counts(task, self._out)
        ]
        for finished, (number, entry) in enumerate(pool.run(shards.write_shard, missing), start=1):
            self._partial.add(entry)
            rows = sum(entity.rows for entity in missing[number].entities)
            self._progress("write", finished, len(missing), {"rows": rows})
