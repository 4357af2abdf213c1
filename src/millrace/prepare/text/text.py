"""``prepare_text``: from files to a token store.

Workers read, clean and tokenise parts. Then repeats are found, documents get their splits, and workers write shards.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.identity import digest
from millrace.prepare.advice import in_python
from millrace.prepare.engines.engine import STALL_S
from millrace.prepare.kind import Context, Earlier, Kind, PartsVoid, Product
from millrace.prepare.parts import part_folder
from millrace.prepare.plan import check_plan, differences, show_changes
from millrace.prepare.progress import Progress
from millrace.prepare.quarantine import MAX_SKIPPED, QUARANTINE, Quarantine
from millrace.prepare.reclaim import Reclaim
from millrace.prepare.run import Run, as_list
from millrace.prepare.split_forms import TEXT_FORMS, expand_split, plan_changes
from millrace.prepare.text import recipe
from millrace.prepare.text.notes import notes_after, notes_before
from millrace.prepare.text.options import ReadOptions, ShardOptions, split_options
from millrace.prepare.text.part import PartDone, PartTask, prepare_part
from millrace.prepare.text.part_files import RECLAIMED
from millrace.prepare.text.parts import find_part, finished_slices, part_tasks, without_repeats
from millrace.prepare.text.read.headers import check_headers
from millrace.prepare.text.read.names import names_in_store
from millrace.prepare.text.read.sources import STDIN, Source, cut_parts, find_sources
from millrace.prepare.text.read.spool import read_through, spool
from millrace.prepare.text.recipe import TextBase
from millrace.prepare.text.report import ByteTally, TextReport, add_reports, existing_report, summary
from millrace.prepare.text.shards import shards as sharding
from millrace.prepare.text.shards.assignment import SPLITS, Assignment
from millrace.prepare.text.shards.columns import store_columns
from millrace.prepare.text.tokens import vocabulary
from millrace.prepare.text.tokens.worker_tokenizer import load_early, set_tokenizer, write_outline
from millrace.store import platform
from millrace.store.shard import ShardEntry
from millrace.store.snapshot import Base
from millrace.text.tokenizer import Tokenizer

SCRATCH = (
    *("splits", "lines", "cut.json", "stdin.txt", "partitions", "vocabulary.json", vocabulary.SEAL),
    *("merges.bin", "names.bin", "name_ends.bin", "alone", sharding.CODES),
)
IN_HAND = 4  # shards that are written while their parts are still there
EXPANSION = 3  # of a compressed file, about
TOKEN_BYTES = 3  # of text for a token of a vocabulary, at least on most corpora
LINE_BYTES = 50  # of text in a line, about; 16 bytes of hash are kept of each, in three places


@in_python(ReadOptions, ShardOptions)
def prepare_text(
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
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
    stall_s: float = STALL_S,
    split: str | None = None,
    **options: Any,
) -> TextReport:
    """Makes a token store at ``out`` from text, JSONL, CSV or Parquet files; see ``ReadOptions`` and ``ShardOptions``.

    ``engine`` is local, ray or dask; ``address`` is that of a cluster, else one of this machine is started.
    ``exclude`` holds patterns of files to leave out. ``restart`` removes what an interrupted run left and begins afresh.
    An append skips sources that the store has, and refuses those that have changed; ``same_source="skip"`` leaves these
    out too, ``"keep"`` adds them all. All files but ``provenance.json`` are byte-identical for any engine, any number of
    workers and any interruptions.
    """
    options = expand_split({**options, "split": split}, TEXT_FORMS)
    run = Run(
        out, SCRATCH, append=append, restart=restart, same_source=same_source, max_skipped=max_skipped, workers=workers,
        engine=engine, address=address, stall_s=stall_s, progress=progress,
    )  # fmt: skip
    reading, cutting = split_options(recipe.options_of_append(run.out, options) if append else options)
    return run.make(Text(as_list(paths), as_list(exclude), reading, cutting))  # type: ignore[no-any-return]


class Text(Kind):
    """The preparation of text."""

    context: Context
    report_type = TextReport
    find_part = staticmethod(find_part)
    make_part = staticmethod(prepare_part)
    write_shard = staticmethod(sharding.write_shard)

    def __init__(self, paths: list[str], exclude: list[str], reading: ReadOptions, cutting: ShardOptions) -> None:
        self._paths, self._exclude, self._reading, self._cutting = paths, exclude, reading, cutting
        self._base: Base | None = None
        self._existing: TextBase | None = None
        self.apart = reading.filter is not None
        self.functions = {} if reading.filter is None else {"filter": reading.filter}
        self.surveys_late = STDIN in paths  # what it holds is kept in the folder

    def survey(self) -> None:
        given = {STDIN: self._stdin()} if STDIN in self._paths else {}
        context = self.context
        sources, notes = find_sources(
            self._paths,
            self._reading,
            avoid=context.own_folders,
            stage=context.sources,
            given=given,
            exclude=self._exclude,
            count_found=context.count_found,
        )
        self.context.note(*notes)
        sources = context.new_files(sources)
        without = next((source for source in sources if source.format == "text"), None)
        if self._reading.mask_field is not None and without is not None:
            raise ConfigError(f"--mask-field: {without.path!r} is plain text; only JSONL, CSV and Parquet have fields")
        self._sources = check_headers(sources, self._reading, context.watched)

    def _stdin(self) -> Any:
        if self.context.append or not (self.context.out / "store.json").exists():
            return spool(self.context.folder)
        return read_through(self.earlier(0).plan.get("sources", {}).get(STDIN))

    @property
    def plan(self) -> dict[str, Any]:
        return {**recipe.part_plan(self._reading, self._sources), "shards": msgspec.to_builtins(self._cutting)}

    @property
    def part_plan(self) -> dict[str, Any]:
        base = None if self._existing is None else self._existing.manifest.fingerprint
        return recipe.part_plan(self._reading, self._sources, base)

    def earlier(self, line: int) -> Earlier:
        found = recipe.read_runs(self.context.out)
        if not found:
            return Earlier(None, {}, None)
        made, fingerprint = found[line], found[line].get("fingerprint")
        report = existing_report(self.context.out, fingerprint or "", made.get("report", {}))
        return Earlier(fingerprint, made.get("plan") or {}, report)

    def nothing_added(self, report: TextReport) -> TextReport:
        return TextReport(
            report.path, report.fingerprint, False, {}, {}, {}, {}, 0, 0, 0.0, report.tokenizer, report.encoder
        )

    def changes(self, plan: Mapping[str, Any]) -> list[str]:
        return plan_changes(recipe.store_plan(plan), recipe.store_plan(self.plan), "shards", TEXT_FORMS)

    def extend(self, base: Base) -> None:
        self._base, self._existing = base, TextBase(self.context.out, base, self._reading)

    def allow(self, old: Any, new: Any) -> Any:
        return recipe.allow_changes(old, new, self._sources)

    def change(self, old: Any, new: Any) -> Sequence[str]:
        note = f"what is asked for has changed since this was begun: {show_changes(differences(old, new))}"
        if self._existing is not None or vocabulary.vocabulary_note(self._reading.tokenizer) is None:
            self.context.note(f"{note}; finished parts of unchanged files are used again")
            return ("cut.json",)
        name = self._reading.tokenizer
        self.context.note(f"{note}; the tokenizer {name} is made of all files, so they may all be read again")
        return ("cut.json", "vocabulary.json")

    def begin(self) -> None:
        context, reading = self.context, self._reading
        self._names, self._root = names_in_store(self._sources, self._existing)
        if self._existing is not None:
            context.note(*recipe.changed_filter(self._existing.manifest, reading))
        context.note(*notes_before(self._sources, reading, self._cutting))
        self._parts = cut_parts(self._sources, reading.part_bytes, finished_slices(self.context.folder))
        # Workers start while the vocabulary loads.
        is_apart = context.engine.start(prepare_part, len(self._parts), apart=self.apart)
        self._tokenizer = self._load_tokenizer()
        if not is_apart:
            set_tokenizer(str(self.context.folder), self._tokenizer)
        known = None if self._existing is None else self._existing.sources
        self.columns = store_columns(self._names, self._tokenizer, reading, known)

    def estimate(self) -> tuple[int, int]:
        return estimate(self._sources, self._tokenizer, self._reading, self._cutting)

    def _load_tokenizer(self) -> Tokenizer:
        """The tokenizer of this corpus, which is kept beside its parts; an append takes that of the store."""
        path = self.context.folder / "vocabulary.json"
        if self._existing is not None:
            tokenizer = self._existing.tokenizer()
        else:
            if not vocabulary.is_whole(path) and (first := vocabulary.vocabulary_note(self._reading.tokenizer)):
                self.context.note(first)
            tokenizer = vocabulary.choose_tokenizer(path, self._sources, self._parts, self._reading)
        with platform.writing(path):
            data = tokenizer.to_file()
            platform.write_file(path, data, mode=0o644)
            platform.write_file(vocabulary.seal_of(path), digest(data).encode(), mode=0o644)
            what = (str(self.context.folder), tokenizer.describe(), write_outline(self.context.folder, tokenizer))
            self.context.engine.warm(load_early, what)
        return tokenizer

    def part_tasks(self) -> list[PartTask]:
        tasks = part_tasks(self.context.folder, self._reading, self._sources, self._parts, self._tokenizer)
        is_by_line = self._reading.dedup_unit == "line"
        self._tasks = without_repeats(self.context, tasks, self._existing, apart=self.apart) if is_by_line else tasks
        return self._tasks

    def tally(self, tasks: Sequence[PartTask], finished: Mapping[int, PartDone]) -> ByteTally:
        tally = ByteTally(self._sources, self._parts)
        for number, part in finished.items():
            tally.add(number, part)
        return tally

    def meanwhile(self) -> Callable[[], None]:
        encoder = getattr(self._tokenizer, "encoder", "")

        def check() -> None:
            vocabulary.check_encoder(self._tokenizer, self._sources, self._parts, self._reading)
            if getattr(self._tokenizer, "encoder", "") != encoder:
                raise PartsVoid  # also those of an earlier run may have wrong ids

        return check

    def settle(self, parts: list[PartDone]) -> list[sharding.ShardTask] | None:
        existing, folder, base = self._existing, self.context.folder, self._base
        self._done = parts
        self.context.note(*notes_after(self._sources, self._parts, parts))
        self._assignment = Assignment(folder, parts, self._cutting)
        with platform.writing(folder):
            self._assignment.make(sharding.document_repeats(folder, parts, self._reading, existing))
        self._planned: dict[str, Any] = {}
        if existing is None:
            self._assignment.check()
        elif not any(self._assignment.documents.values()):
            return None
        check_plan(folder / "cut.json", msgspec.to_builtins(self._cutting))
        self._planned = sharding.cut_shards(folder, parts, self._cutting)
        with platform.writing(folder):
            return sharding.shard_tasks(
                self._planned, folder, self._names, parts, self.columns, self._tokenizer, base
            )  # fmt: skip

    def begin_shards(self, tasks: list[sharding.ShardTask]) -> None:
        tasks.sort(key=lambda task: -len(task.ranges))  # those of many parts take longest: nobody waits for them last
        self._reclaim = Reclaim(self.context.folder, self._done, tasks, RECLAIMED)
        if again := self._reclaim.missing():
            self.context.note(f"{len(again):,} parts were read again: the shards made of them are gone")
        with platform.writing(self.context.folder):
            for number in again:
                platform.remove(part_folder(self.context.folder, self._tasks[number].key))
        for _ in self.context.engine.run(prepare_part, [self._tasks[number] for number in again], apart=self.apart):
            pass

    def end_shard(self, task: sharding.ShardTask) -> Mapping[str, Any]:
        with platform.writing(self.context.folder):
            self._reclaim.after(task)
        return {}

    def product(self, entries: Mapping[str, ShardEntry]) -> Product:
        existing, base, assignment, tokenizer = self._existing, self._base, self._assignment, self._tokenizer
        report = summary(self._done, assignment, self._planned, tokenizer)
        splits = tuple(split for split in SPLITS if assignment.documents[split])
        known, before = ((), {}) if base is None else (base.manifest.splits, base.manifest.meta.get("report", {}))
        meta = (
            recipe.options_for_meta(self._reading, self._cutting) if existing is None else existing.meta(self._reading)
        )
        fields = {
            "kind": "text", "columns": self.columns, "splits": tuple(dict.fromkeys((*known, *splits))),
            "tokenizer": tokenizer.describe(), "meta": {"report": add_reports(before, report), **meta},
        }  # fmt: skip
        stored_bytes = 0 if existing is None else existing.quarantine_bytes()
        quarantine = Quarantine(self.context.out, self.context.folder, self._done, stored_bytes)
        provenance = {"quarantine_bytes": quarantine.num_bytes, "root": self._root}
        files: dict[str, bytes | Iterable[bytes]] = {"tokenizer.json": tokenizer.to_file()} if base is None else {}
        if quarantine:
            files[QUARANTINE] = quarantine.blocks()
        return Product(fields, report, {}, provenance, files)


def estimate(
    sources: Sequence[Source], tokenizer: Tokenizer, options: ReadOptions, cutting: ShardOptions
) -> tuple[int, int]:
    """Bytes of disk that are likely needed, and bytes that are needed for certain."""
    text = sum(source.size * (EXPANSION if source.compression else 1) for source in sources)
    each = 1 if tokenizer.kind in ("bytes", "char") else TOKEN_BYTES
    size = tokenizer.dtype.itemsize + (options.mask_field is not None)
    likely = text * size // each
    # Some tokens lie on disk twice: those of shards in hand, and of shards made of many parts.
    likely += min(likely, IN_HAND * cutting.shard_tokens * size + int(likely * (cutting.val + cutting.test)))
    if options.dedup_unit == "line":
        likely += text // LINE_BYTES * 16 * 3
    # Certain are only bytes that nothing can drop: whole files, neither cleaned, compared nor filtered.
    keeps_all = not options.normalize and options.dedup == "none" and options.filter is None and options.min_chars <= 1
    if tokenizer.kind != "bytes" or not keeps_all or options.on_error == "skip":
        return likely, 0
    kept = (source for source in sources if source.document == "file" and not source.is_page)
    whole = sum(source.size for source in kept if source.compression is None)
    return likely, whole * size
