"""``prepare_records``: from images, events and rows with lists, in the formats of others, to a store of records.

Workers read parts. Then records get their splits, and workers write shards.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.identity import digest
from millrace.prepare.advice import in_python
from millrace.prepare.engines.engine import STALL_S
from millrace.prepare.kind import Context, Earlier, Kind, Product
from millrace.prepare.plan import differences, make_plan, show_changes
from millrace.prepare.progress import Progress
from millrace.prepare.quarantine import MAX_SKIPPED, QUARANTINE, Quarantine
from millrace.prepare.reclaim import Reclaim
from millrace.prepare.records.append import Existing, classes_in_meta, options_of_append
from millrace.prepare.records.formats.format import Source
from millrace.prepare.records.formats.known import ITERABLE
from millrace.prepare.records.options import FIXED, READING, RecordOptions, parse_options
from millrace.prepare.records.read.iterable import Spool
from millrace.prepare.records.read.part import PartDone, PartTask, key_column, prepare_part
from millrace.prepare.records.read.parts import column_files, find_part, part_tasks
from millrace.prepare.records.read.sources import Survey, survey
from millrace.prepare.records.report import RecordReport, Tally, read_run, summary
from millrace.prepare.records.shards.shards import SPLIT_FOLDER, ShardTask, plan_shards, write_shard
from millrace.prepare.records.shards.splits import Splits
from millrace.prepare.run import Run, as_list
from millrace.prepare.split_forms import RECORD_FORMS, expand_split, plan_changes
from millrace.store import platform
from millrace.store.layout import Layout
from millrace.store.snapshot import Base

SCRATCH = (SPLIT_FOLDER,)
PLAN_VERSION = 1


@in_python(RecordOptions)
def prepare_records(
    source: Sequence[str] | str | os.PathLike[str] | Iterable[Mapping[str, Any]],
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
) -> RecordReport:
    """Makes a store of records at ``out``, from files or from dicts that Python gives; see ``RecordOptions``.

    An array or list in a record is a run of rows, any other value one item. ``exclude`` holds patterns of files to leave
    out. ``engine`` is local, ray or dask. ``restart`` removes what an interrupted run left and begins afresh. An append
    skips sources that the store has, and refuses those that have changed; ``same_source="skip"`` leaves these out too,
    ``"keep"`` adds them all. All files but ``provenance.json`` are byte-identical for any number of workers and any interruptions.
    """
    given = expand_split({**options, "split": split}, RECORD_FORMS)
    paths = _as_paths(source)
    run = Run(
        out, SCRATCH, append=append, restart=restart, same_source=same_source, max_skipped=max_skipped, workers=workers,
        engine=engine, address=address, stall_s=stall_s, progress=progress,
    )  # fmt: skip
    parsed = parse_options(options_of_append(run.out, given) if append else given)
    kind = Records(paths, None if paths else source, as_list(exclude), parsed)
    return run.make(kind)  # type: ignore[no-any-return]


def _as_paths(source: Any) -> list[str]:
    """The paths that were given; none where records were given."""
    if isinstance(source, (str, os.PathLike)):
        return [os.fspath(source)]
    if isinstance(source, Sequence) and source and all(isinstance(path, (str, os.PathLike)) for path in source):
        return [os.fspath(path) for path in source]
    if isinstance(source, Mapping) or not isinstance(source, Iterable):
        raise ConfigError(
            f"the source is {type(source).__name__}; expected paths, or an iterable of dicts; of a DatasetDict give one split, "
            "or save it to a folder and give --split folder"
        )
    return []


class Records(Kind):
    """The preparation of records."""

    context: Context
    report_type = RecordReport
    find_part = staticmethod(find_part)
    make_part = staticmethod(prepare_part)
    write_shard = staticmethod(write_shard)

    def __init__(self, paths: list[str], given: Any, exclude: list[str], options: RecordOptions) -> None:
        self._paths, self._given, self._exclude, self._options = paths, given, exclude, options
        self._found: Survey | None = None
        self._sources: list[Source] = []
        self._spool: Spool | None = None
        self._existing: Existing | None = None
        self._base: Base | None = None
        self.apart = options.filter is not None
        self.surveys_late = self.parts_are_given = not paths  # what Python gives becomes parts at once

    def survey(self) -> None:
        options, context = self._options, self.context
        if self._paths:
            self._found = found = survey(self._paths, self._exclude, context, options)
            self._sources, self._schema, self._classes = found.sources, found.schema, found.classes
            self._format, self._weights = found.format.name, found.weights
            # Files that are only copied: to start processes would take longer than most jobs.
            is_copy = options.decode is None and not options.check and options.filter is None
            self.in_threads = self._format == "imagefolder" and is_copy
            context.note(*found.notes)
        else:
            is_writing = context.append or not (context.out / "store.json").exists()
            spool = Spool(context.folder if is_writing and context.folder.exists() else None, options)
            self._spool = spool.read(self._given)
            self._sources = context.new_files([spool.source])
            self._schema, self._format, self._weights = spool.schema, ITERABLE, spool.sizes
            self._classes = {spool.schema.names[name]: tuple(names) for name, names in spool.classes.items()}
            context.note(*spool.notes)
        self.columns = self._schema.columns
        self._check_key()

    def _check_key(self) -> None:
        options, columns = self._options, self.columns
        key = key_column(options, columns)
        if key is not None and key not in columns:
            raise ConfigError(f"--key {key!r} is no column; there are {', '.join(columns)}")
        is_single = key is not None and columns[key].per == "record" and not columns[key].shape
        if key is not None and not is_single:
            raise ConfigError(
                f"--key {key!r} has several values in a record; name a column with one text or number each"
            )
        if options.names_keys and key is None:
            raise ConfigError("a split by keys needs a column that holds them; name it with --key")

    @property
    def plan(self) -> dict[str, Any]:
        options = self._options
        is_listed = options.val_list or options.test_list
        lists = {split: digest("\n".join(options.keys_of(split))) for split in ("val", "test") if is_listed}
        more = {"lists": lists} if lists else {}
        return make_plan(PLAN_VERSION, options, self._sources, {"filter": options.filter}, **more)

    def earlier(self, line: int) -> Earlier:
        return read_run(self.context.out, line)

    def nothing_added(self, report: RecordReport) -> RecordReport:
        return msgspec.structs.replace(report, records={}, rows={}, shards={}, bytes=0, dropped={}, notes=[])

    def changes(self, plan: Mapping[str, Any]) -> list[str]:
        return plan_changes(plan, self.plan, "options", RECORD_FORMS)

    def extend(self, base: Base) -> None:
        self._base, self._existing = base, Existing(self.context.out, base)

    def allow(self, old: Any, new: Any) -> Any:
        """Sources may change, and all options but those of reading: each part is known by what it is made of."""
        options = {**new["options"], **{name: old["options"].get(name) for name in READING}}
        allowed = {**old, "options": options, "sources": new["sources"], "order": new["order"]}
        for name in ("filter", "lists"):
            allowed.pop(name, None)
            if name in new:
                allowed[name] = new[name]
        return allowed

    def change(self, old: Any, new: Any) -> Sequence[str]:
        before, now = ({key: plan[key] for key in ("sources", "order")} for plan in (old, new))
        if changes := differences(before, now):
            self.context.note(f"since this was begun, {show_changes(changes)}: what was read of other files is kept")
        return SCRATCH

    def begin(self) -> None:
        if self._existing is not None:
            self._existing.check(self.columns, self._classes)
        with platform.writing(self.context.folder):
            platform.make_dir(self.context.folder / SPLIT_FOLDER)

    def part_tasks(self) -> list[PartTask]:
        folder, options = self.context.folder, self._options
        if self._found is not None:
            self._tasks = part_tasks(folder, options, self._found)
        else:
            assert self._spool is not None
            self._tasks = [
                PartTask(number, key, (), self._schema, b"", options, str(folder))
                for number, key in enumerate(self._spool.keys)
            ]
        return self._tasks

    def estimate(self) -> tuple[int, int]:
        return 2 * sum(self._weights), 0

    def tally(self, tasks: Sequence[PartTask], finished: Mapping[int, PartDone]) -> Tally:
        tally = Tally(self._weights)
        for number, part in finished.items():
            tally.add(number, part)
        return tally

    def settle(self, parts: list[PartDone]) -> list[ShardTask] | None:
        self._parts, options = parts, self._options
        if not any(part.records for part in parts):
            if self._existing is not None:
                self._records: dict[str, int] = {}
                return None
            self.is_void = True
            raise SourceError(
                "no records are left: the files are empty, or all was dropped; look at --filter and --on-error"
            )
        splits = Splits(self.context.folder, parts, options)
        with platform.writing(self.context.folder):
            tasks, self._records = plan_shards(
                self.context.folder, parts, self.columns, splits, options.shard_bytes, self._base
            )
        if self._existing is None:
            splits.check(self._records)
        return tasks

    def begin_shards(self, tasks: list[ShardTask]) -> None:
        self._reclaim = Reclaim(self.context.folder, self._parts, tasks, column_files(Layout(self.columns)))
        if again := self._reclaim.missing():
            self.context.note(f"{len(again):,} parts were read again: the shards made of them are gone")
        for _ in self.context.engine.run(prepare_part, [self._tasks[number] for number in again], apart=self.apart):
            pass

    def end_shard(self, task: ShardTask) -> Mapping[str, Any]:
        with platform.writing(self.context.folder):
            self._reclaim.after(task)
        return {}

    def product(self, entries: Mapping[str, Any]) -> Product:
        layout = Layout(self.columns)
        report = summary(self._format, self._parts, self._records, entries, layout.row_axes)
        known = () if self._base is None else self._base.manifest.splits
        old_bytes = 0 if self._existing is None else self._existing.quarantine_bytes()
        quarantine = Quarantine(self.context.out, self.context.folder, self._parts, old_bytes)
        files = {QUARANTINE: quarantine.blocks()} if quarantine else {}
        fields = {
            "kind": "records", "columns": self.columns, "splits": tuple(dict.fromkeys((*known, *self._records))),
            "meta": self._meta(report),
        }  # fmt: skip
        return Product(fields, report, {}, {"quarantine_bytes": quarantine.num_bytes}, files)

    def _meta(self, report: Mapping[str, Any]) -> dict[str, Any]:
        if self._existing is not None:
            return self._existing.meta(report)
        plain, usual = msgspec.to_builtins(self._options), msgspec.to_builtins(RecordOptions())
        options = {name: plain[name] for name in FIXED if plain[name] != usual[name]}
        classes = classes_in_meta(self._classes)
        named = {"classes": classes} if classes else {}
        return {**named, "options": {**options, "format": self._format}, "report": dict(report)}
