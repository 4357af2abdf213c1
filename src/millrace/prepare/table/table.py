"""``prepare_table``: from Parquet and CSV to a scaled series store, in two passes and constant memory.

Pass 1 decodes every file once and keeps its rows aside. Then the cuts are found and the train rows measured. Pass 2
fills, scales and writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.advice import in_python
from millrace.prepare.engines.engine import STALL_S
from millrace.prepare.kind import Context, Earlier, Kind, Product
from millrace.prepare.plan import differences, make_plan, show_changes
from millrace.prepare.progress import Progress
from millrace.prepare.quarantine import MAX_SKIPPED, Skips
from millrace.prepare.run import Run, as_list
from millrace.prepare.split_forms import TABLE_FORMS, expand_split, plan_changes
from millrace.prepare.table.options import READING, TableOptions, parse_options
from millrace.prepare.table.read.part import PartDone, PartTask, prepare_part
from millrace.prepare.table.read.parts import finished_part, part_tasks
from millrace.prepare.table.read.sources import Inputs, Survey, find_tables, survey
from millrace.prepare.table.report import TableReport, read_run
from millrace.prepare.table.settle.clean import grid_step, local_times
from millrace.prepare.table.settle.index import Index, build_index
from millrace.prepare.table.settle.index_files import close_index, save_index
from millrace.prepare.table.settle.measure import Fitted, Measuring, scale_static, train_first
from millrace.prepare.table.settle.splits import REMEDIES
from millrace.prepare.table.write import shards
from millrace.prepare.table.write.assemble import Settled, make_meta, make_report, shard_tasks, split_rows
from millrace.store import platform
from millrace.store.manifest import Cuts
from millrace.store.shard import ShardEntry

SCRATCH = ("index", "fit")
PLAN_VERSION = 1
CELL_BYTES = 8  # of a number in a CSV file with its separator, about
EXPANSION = 4  # of compressed CSV files, about


@in_python(TableOptions, refit=False)
def prepare_table(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    engine: str = "local",
    address: str | None = None,
    append: bool = False,
    restart: bool = False,
    same_source: str | None = None,
    max_skipped: float = MAX_SKIPPED,
    exclude: Sequence[str] | str = (),
    progress: Progress | None = None,
    stall_s: float = STALL_S,
    split: str | None = None,
    **options: Any,
) -> TableReport:
    """Makes a series store at ``out`` from Parquet or CSV files; see ``TableOptions``.

    ``engine`` is local, ray or dask; ``address`` is that of a cluster, else one of this machine is started.
    ``exclude`` holds patterns of files to leave out. ``restart`` removes what an interrupted run left and begins afresh.
    An append skips sources that the store has, and refuses those that have changed; ``same_source="skip"`` leaves these
    out too, ``"keep"`` adds them all. All files but ``provenance.json`` are byte-identical for any engine, any number of
    workers and any interruptions.
    """
    options = expand_split({**options, "split": split}, TABLE_FORMS)
    inputs = Inputs(as_list(paths), as_list(exclude))
    run = Run(
        out, SCRATCH, append=append, restart=restart, same_source=same_source, max_skipped=max_skipped, workers=workers,
        engine=engine, address=address, stall_s=stall_s, progress=progress,
    )  # fmt: skip
    if append:
        from millrace.prepare.table.append import open_append

        return run.make(open_append(run.out, inputs, options))  # type: ignore[no-any-return]
    if options.pop("refit", False):
        raise ConfigError("--refit is for --append; a new store is always fitted on its own rows")
    parsed = parse_options(options)
    parsed.check()
    return run.make(Table(inputs, parsed))  # type: ignore[no-any-return]


class RowTally:
    """Counts the parts and rows that this run reads."""

    def __init__(self, total: int) -> None:
        self.done, self.total, self.facts = 0, total, dict[str, int]()

    def move(self, number: int, counts: Mapping[str, int]) -> None:
        """Parts of a table report no counts."""

    def add(self, number: int, part: PartDone) -> None:
        self.done += 1
        self.facts["rows"] = self.facts.get("rows", 0) + part.rows_read


class Table(Kind):
    """The preparation of a table."""

    context: Context
    report_type = TableReport
    find_part = staticmethod(finished_part)
    make_part = staticmethod(prepare_part)
    write_shard = staticmethod(shards.write_shard)
    apart = True

    def __init__(self, inputs: Inputs, options: TableOptions) -> None:
        self._inputs, self._options = inputs, options
        # Decoding and arithmetic release the GIL. A user's function gets processes, which it may crash.
        self.in_threads = options.transform is None
        self.functions = {} if options.transform is None else {"transform": options.transform}
        self._rows_kept = 0  # rows that an earlier run has read

    def survey(self) -> None:
        options, listed = self._options, find_tables(self._inputs, self.context)
        self.context.note(*listed.notes)
        self._found = survey(listed._replace(files=self.context.new_files(listed.files)), options, self.context.watched)
        schema = self._found.schema
        grid_step(options.freq, schema)
        if options.calendar and schema.time_unit is None:
            raise ConfigError("--calendar needs times that are dates; these are plain numbers")
        if options.calendar and schema.time_unit is not None:
            local_times(np.zeros(1, np.int64), schema.time_unit, schema.time_zone)  # the zone must be known

    @property
    def plan(self) -> dict[str, Any]:
        files, functions = [source.file for source in self._found.sources], {"transform": self._options.transform}
        return make_plan(PLAN_VERSION, self._options, files, functions)

    def earlier(self, line: int) -> Earlier:
        return read_run(self.context.out, line, "choose another --out, add rows with --append, or remove it yourself")

    def allow(self, old: Any, new: Any) -> Any:
        """Sources may change, and all options but those of reading: each part is known by what it is made of."""
        options = {**new["options"], **{name: old["options"].get(name) for name in READING}}
        allowed = {**old, "options": options, "sources": new["sources"], "order": new["order"]}
        if options == new["options"] and "transform" in new:
            allowed["transform"] = new["transform"]
        return allowed

    def changes(self, plan: Mapping[str, Any]) -> list[str]:
        return plan_changes(plan, self.plan, "options", TABLE_FORMS)

    def change(self, old: Any, new: Any) -> Sequence[str]:
        before, now = ({key: plan[key] for key in ("sources", "order")} for plan in (old, new))
        if changes := differences(before, now):
            self.context.note(f"since this was begun, {show_changes(changes)}: what was read of other files is kept")
        if old.get("transform") == new.get("transform"):
            return SCRATCH
        self.context.note(
            f"--transform {self._options.transform} has changed since this was begun: all rows are read again"
        )
        return (*SCRATCH, "parts")

    def begin(self) -> None:
        self.context.note(*self._found.notes)
        with platform.writing(self.context.folder):
            platform.make_dir(self.context.folder / "fit")

    def estimate(self) -> tuple[int, int]:
        return estimate(self._found, self._options)

    def part_tasks(self) -> list[PartTask]:
        return part_tasks(self.context.folder, self._options, self._found)

    def tally(self, tasks: Sequence[PartTask], finished: Mapping[int, PartDone]) -> RowTally:
        self._rows_kept = sum(part.rows_read for part in finished.values())
        return RowTally(len(tasks) - len(finished))

    def settle(self, parts: list[PartDone]) -> list[shards.ShardTask]:
        options, schema = self._options, self._found.schema
        self._parts = parts
        index = build_index(self.context.folder, parts, schema)
        if not index.names:
            self.is_void = True
            raise SourceError(
                "no rows are left: the files are empty, or all was dropped; look at --where and --on-error"
            )
        save_index(self.context.folder, index)
        self._fitted = self._measuring(options).run(index)
        self._check(index, self._fitted)
        self._index = train_first(index, self._fitted, schema.role)
        if self._index.categories != index.categories:
            save_index(self.context.folder, self._index)
        self.columns = shards.layout_columns(options, schema)
        numbers = self._index.static[:, : len(schema.role.static)]
        static, self._static_scaling = scale_static(numbers, self._fitted.is_train, options.scale)
        self._tasks = shard_tasks(self.context.folder, self._settled, static, {})
        return self._tasks

    @property
    def _settled(self) -> Settled:
        return Settled(self._options, self._found, self._index, self._fitted, self.columns)

    def _measuring(self, options: TableOptions) -> Measuring:
        return Measuring(self.context.folder, options, self._found, self.context.engine, self.context.progress)

    def _check(self, index: Index, fitted: Fitted) -> None:
        if not fitted.rows.any():
            gone = ", ".join(f"{reason}: {count:,}" for reason, count in sorted(fitted.dropped.items()))
            raise ConfigError(
                f"no entity has --min-rows {self._options.min_rows} rows left; the longest of {len(index.names)} was read "
                f"with {int(index.rows.max())} (dropped, {gone}): ask for fewer, or fill nulls rather than drop them"
            )
        for split, rows in split_rows(self._options, fitted).items():
            if rows == 0:
                remedy = REMEDIES[self._options.split_by]
                raise ConfigError(f"split {split!r} would be empty; {remedy}; what was read is kept")

    @property
    def file_skips(self) -> Skips:
        return self._found.skips

    def has_shard(self, task: shards.ShardTask) -> bool:
        return shards.has_counts(task, self.context.out)

    def end_shard(self, task: shards.ShardTask) -> Mapping[str, Any]:
        return {"rows": sum(entity.rows for entity in task.entities)}

    def product(self, entries: Mapping[str, ShardEntry]) -> Product:
        options, fitted = self._options, self._fitted
        report = make_report(self._settled, self._parts, self._tasks)
        fields: dict[str, Any] = {
            "kind": "series", "columns": self.columns, "splits": tuple(dict.fromkeys(task.split for task in self._tasks)),
            "scaling": fitted.scaling.to_manifest(),
            "meta": make_meta(self._settled, self._static_scaling, report),
        }  # fmt: skip
        if options.has_time_split:
            fields["cuts"] = Cuts(options.time_splits, gap=options.gap)
        return Product(fields, report, {"rows_kept": self._rows_kept})

    def close(self) -> None:
        close_index()


def estimate(found: Survey, options: TableOptions) -> tuple[int, int]:
    """Bytes of disk that are likely needed, and that are needed for certain: every row as it was read, and as it is stored."""
    schema, role = found.schema, found.schema.role
    columns = shards.layout_columns(options, schema)
    stored = sum(column.item_bytes for column in columns.values() if column.axis is not None)
    read = np.dtype(schema.raw_dtype).itemsize * len(role.features) + 8 + 4 * len(role.categorical)
    used = [found.sources[number] for number in sorted({unit.source for part in found.parts for unit in part})]
    texts = [source.file for source in used if source.format == "csv"]
    text = sum(file.size * (EXPANSION if file.path.lower().endswith((".gz", ".zst")) else 1) for file in texts)
    likely = (found.num_rows + text // (CELL_BYTES * len(role.needed))) * (read + stored)
    keeps_all = (
        not options.where and options.transform is None and options.on_error == "stop" and options.min_rows == 1
        and options.duplicates == "error" and not any(options.policy(name)[0] == "drop" for name in role.features)
    )  # fmt: skip
    return likely, found.num_rows * (read + stored) if keeps_all else 0
