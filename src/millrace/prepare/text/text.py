"""``prepare_text``: from files to a token store, restartable at every point.

Parts are read, cleaned and tokenised in workers; then repeats are found, documents assigned to splits, and shards
written in workers again. Killed at any time, the same call continues: whole parts and shards are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, MillraceError
from millrace.identity import digest
from millrace.native import num_cores
from millrace.prepare.advice import in_python
from millrace.prepare.engines import local
from millrace.prepare.files import InputFile
from millrace.prepare.plan import MAX_SHOWN, check_plan
from millrace.prepare.progress import default_progress
from millrace.prepare.restart import begin_afresh
from millrace.prepare.room import check_room
from millrace.prepare.text.existing import Existing
from millrace.prepare.text.notes import notes_after, notes_before
from millrace.prepare.text.options import ReadOptions, ShardOptions, split_options
from millrace.prepare.text.part import QUARANTINE, PartDone, prepare_part
from millrace.prepare.text.parts import ReadParts, finished_slices
from millrace.prepare.text.plan import TextPlan
from millrace.prepare.text.read.headers import check_headers
from millrace.prepare.text.read.names import names_in_store
from millrace.prepare.text.read.sources import STDIN, Part, Source, cut_parts, find_sources
from millrace.prepare.text.read.spool import read_through, spool
from millrace.prepare.text.recipe import changed_filter, described, options_of_append, runs
from millrace.prepare.text.report import TextReport, add_reports, existing_report, summary
from millrace.prepare.text.shards import reclaim
from millrace.prepare.text.shards import shards as sharding
from millrace.prepare.text.shards.assignment import SPLITS, Assignment
from millrace.prepare.text.shards.columns import store_columns
from millrace.prepare.text.shards.quarantine import Quarantine
from millrace.prepare.text.space import estimate
from millrace.prepare.text.tokens.vocabulary import SEAL, choose_tokenizer, is_whole, seal_of, vocabulary_note
from millrace.prepare.text.tokens.worker_tokenizer import load_early, set_tokenizer, write_outline
from millrace.store import gc, platform
from millrace.store.layout import Column, Layout
from millrace.store.open import open_store
from millrace.store.publish import Partial
from millrace.text.tokenizer import Tokenizer

SCRATCH = (
    *("parts", "splits", "lines", "plan.json", "cut.json", "stdin.txt", "partitions", "vocabulary.json"),
    SEAL,
    *("merges.bin", "names.bin", "name_ends.bin", "alone"),
)
Progress = Callable[[str, int, int, Mapping[str, Any]], None]


@in_python(ReadOptions, ShardOptions)
def prepare_text(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    append: bool = False,
    restart: bool = False,
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
    stall_s: float = local.STALL_S,
    **options: Any,
) -> TextReport:
    """Makes a token store at ``out`` from text, JSONL, CSV or Parquet files; see ``ReadOptions`` and ``ShardOptions``.

    ``exclude`` holds patterns of files to leave out. ``restart`` removes what an interrupted run left and begins afresh.
    All files but ``provenance.json`` are byte-identical for any number of workers and any interruptions.
    """
    reading, cutting = split_options(options_of_append(Path(os.path.realpath(out)), options) if append else options)
    return _Preparation([paths] if isinstance(paths, str) else list(paths), Path(os.path.realpath(out)), reading, cutting,
                        workers or num_cores(), append, progress or default_progress(), stall_s,
                        [exclude] if isinstance(exclude, str) else exclude).run(restart=restart)  # fmt: skip


class _Preparation:
    def __init__(
        self,
        paths: list[str],
        out: Path,
        reading: ReadOptions,
        cutting: ShardOptions,
        workers: int,
        append: bool,
        progress: Progress,
        stall_s: float,
        exclude: Sequence[str],
    ) -> None:
        self._paths, self._out, self._reading, self._cutting = paths, out, reading, cutting
        self._plan = TextPlan(reading, cutting)
        self._workers, self._append, self._progress = local.Workers(workers, stall_s), append, progress
        self._partial = Partial(out, append=append, scratch=SCRATCH)
        self._exclude = exclude
        self._started = time.monotonic()
        self._notes: list[str] = []
        self._left_out: list[str] = []  # of them, those on files that were not taken
        self._names: list[str] = []  # of the sources in the store, and the folder that they count from
        self._root: str | None = None
        self._is_mine = False  # what lies in the folder was begun with this plan

    def run(self, *, restart: bool) -> TextReport:
        if not self._append and (self._out / "store.json").exists():
            return self._finished()
        stdin = STDIN in self._paths
        sources = [] if stdin else self._find()
        self._partial.acquire()
        try:
            if restart:
                begin_afresh(self._partial.folder)
            if self._partial.complete():
                return self._finished()
            return self._prepare(self._find(spool(self._partial.folder)) if stdin else sources)
        except MillraceError:
            for note in self._left_out:  # what was not read may be why it failed
                self._progress("note", 0, 0, {"note": note})
            is_mine = self._is_mine or not (self._partial.folder / "plan.json").exists()
            if is_mine and not self._partial.entries and not finished_slices(self._partial.folder):
                self._partial.close(remove=True)  # nothing to continue: a fixed call starts afresh
            raise
        finally:
            self._workers.close()
            self._partial.close(remove=False)

    def _find(self, stdin: InputFile | None = None) -> list[Source]:
        given, avoid = {} if stdin is None else {STDIN: stdin}, (self._out, self._partial.folder)
        sources, self._notes = find_sources(
            self._paths,
            self._reading.document,
            self._reading.format,
            avoid=avoid,
            given=given,
            exclude=self._exclude,
            codec=self._reading.codec,
            html=self._reading.html,
        )
        without = next((source for source in sources if source.format == "text"), None)
        if self._reading.mask_field is not None and without is not None:
            raise ConfigError(f"--mask-field: {without.path!r} is plain text; only JSONL, CSV and Parquet have fields")
        self._left_out = list(self._notes)
        return sources

    def _already(self, existing: Existing, report: Mapping[str, Any]) -> TextReport:
        """All there is to append is in the store."""
        self._partial.close(remove=True)
        return existing_report(self._out, existing.manifest.fingerprint, report, self._notes)

    def _finished(self) -> TextReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        made = next(iter(runs(self._out)), {})
        before = made.get("plan") or {}
        stdin = read_through(before.get("sources", {}).get(STDIN)) if STDIN in self._paths else None
        changed = self._plan.changed(before, self._find(stdin))
        if changed:
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:6])}; "
                "choose another --out, add files with --append, or remove it yourself"
            )
        return existing_report(self._out, store.fingerprint, made.get("report", {}))

    def _prepare(self, sources: list[Source]) -> TextReport:
        folder = self._partial.folder
        existing = Existing(self._out, self._reading) if self._append else None
        if existing is not None:
            made = next(iter(runs(self._out)[::-1]), {})
            is_current = made.get("fingerprint") == existing.manifest.fingerprint
            if is_current and not self._plan.changed(made.get("plan") or {}, sources):
                return self._already(existing, made.get("report", {}))  # also where it was killed at its very end
        planned = self._plan.of_parts(sources, existing)
        self._names, self._root = names_in_store(sources, existing)
        sources = check_headers(sources, self._reading)
        check_plan(folder / "plan.json", planned, folder, self._plan.allowed(sources), self._begin_again)
        self._is_mine = True
        changed = [] if existing is None else changed_filter(existing.manifest, self._reading)
        for note in changed + notes_before(sources, self._reading, self._cutting):
            self._progress("note", 0, 0, {"note": note})  # now, and again when it is done
            self._notes.append(note)
        parts = cut_parts(sources, self._reading.part_bytes, finished_slices(folder))
        self._workers.limit(len(parts))  # also for shards, which are less work
        # While the vocabulary loads.
        is_apart = self._workers.start(prepare_part, len(parts), apart=self._reading.filter is not None)
        tokenizer = self._tokenizer(sources, parts, existing)
        if not is_apart:
            set_tokenizer(str(folder), tokenizer)
        known = None if existing is None else existing.sources
        columns = store_columns(self._names, tokenizer, self._reading, known)
        self._progress("room", *check_room(folder, *estimate(sources, tokenizer, self._reading, self._cutting)), {})
        reading = ReadParts(folder, self._reading, self._workers, self._progress, self._notes)
        done = reading.run(sources, parts, tokenizer, existing)
        self._notes += notes_after(sources, parts, done)
        assignment = Assignment(folder, done, self._cutting)
        compared = () if existing is None else (existing.documents, existing.manifest.totals.records)
        with platform.writing(folder):
            assignment.make(sharding.document_repeats(folder, done, self._reading, *compared))
        if not self._append:
            assignment.check()
        return self._publish(sources, reading, done, assignment, tokenizer, columns, existing)

    def _begin_again(self, changed: list[str]) -> None:
        """What was made of all parts together goes, before another plan is written; the parts stay."""
        note = f"what is asked for has changed since this was begun: {'; '.join(changed[:MAX_SHOWN])}"
        if len(changed) > MAX_SHOWN:
            note += f" and {len(changed) - MAX_SHOWN:,} more"
        names = ["journal.jsonl", "shards", "cut.json"]
        if self._append or vocabulary_note(self._reading.tokenizer) is None:
            note += "; finished parts of unchanged files are used again"
        else:
            names.append("vocabulary.json")
            note += f"; the tokenizer {self._reading.tokenizer} is made of all files, so they may all be read again"
        with platform.writing(self._partial.folder, "removing"):
            for name in names:
                platform.remove(self._partial.folder / name)
        self._progress("note", 0, 0, {"note": note})
        self._notes.append(note)

    def _tokenizer(self, sources: list[Source], parts: Sequence[Part], existing: Existing | None) -> Tokenizer:
        """The tokenizer of this corpus, beside its parts; an append takes that of the store."""
        path = self._partial.folder / "vocabulary.json"
        if existing is not None:
            tokenizer = existing.tokenizer()
        else:
            if not is_whole(path) and (first := vocabulary_note(self._reading.tokenizer)):
                self._progress("note", 0, 0, {"note": first})
            tokenizer = choose_tokenizer(path, sources, parts, self._reading)
        with platform.writing(path):
            data = tokenizer.to_file()
            platform.write_file(path, data, mode=0o644)
            platform.write_file(seal_of(path), digest(data).encode(), mode=0o644)
            self._workers.warm(
                load_early, (str(path.parent), tokenizer.describe(), write_outline(path.parent, tokenizer))
            )
        return tokenizer

    def _run(self, function: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        return self._workers.run(function, tasks, apart=self._reading.filter is not None)

    def _publish(
        self,
        sources: list[Source],
        reading: ReadParts,
        done: list[PartDone],
        assignment: Assignment,
        tokenizer: Tokenizer,
        columns: Mapping[str, Column],
        existing: Existing | None,
    ) -> TextReport:
        if existing is not None and not any(assignment.documents.values()):
            return self._already(existing, summary(done, assignment, {}, tokenizer))
        base = None if existing is None else existing.base
        plan = {"read": self._plan.of_parts(sources, existing), "shards": self._plan.of_shards}
        check_plan(self._partial.folder / "cut.json", plan["shards"], self._partial.folder)
        self._partial.begin(plan, Layout(columns), base, resume=True)
        if base is not None:
            gc.sweep(self._out, spare=self._partial.entries)
        planned = sharding.cut_shards(self._partial.folder, done, self._cutting)
        with platform.writing(self._partial.folder):
            tasks = sharding.shard_tasks(planned, self._partial.folder, self._names, done, columns, tokenizer, base)
        missing = [task for task in tasks if f"{task.split}-{task.number:05d}" not in self._partial.entries]
        missing.sort(key=lambda task: -len(task.ranges))  # those of many parts take longest: nobody waits for them last
        spending = reclaim.Reclaim(self._partial.folder, done, missing)
        if again := spending.missing():
            self._notes.append(f"{len(again):,} parts were read again: the shards made of them are gone")
            self._progress("note", 0, 0, {"note": self._notes[-1]})
        reading.again(again)
        for finished, (number, entry) in enumerate(self._run(sharding.write_shard, missing), start=1):
            self._partial.add(entry)
            with platform.writing(self._partial.folder):
                spending.after(missing[number])
            self._progress("write", finished, len(missing), {})
        self._workers.stop()
        report = summary(done, assignment, planned, tokenizer)
        splits = tuple(split for split in SPLITS if assignment.documents[split])
        known, before = ((), {}) if base is None else (base.manifest.splits, base.manifest.meta.get("report", {}))
        meta = described(self._reading, self._cutting) if existing is None else existing.meta(self._reading)
        fields = {
            "kind": "text", "columns": columns, "splits": tuple(dict.fromkeys((*known, *splits))),
            "tokenizer": tokenizer.describe(), "meta": {"report": add_reports(before, report), **meta},
        }  # fmt: skip
        quarantine = Quarantine(
            self._out, self._partial.folder, done, 0 if existing is None else existing.quarantine_bytes()
        )
        provenance = {
            "plan": self._plan.whole(sources), "report": report, "quarantine_bytes": quarantine.num_bytes,
            "root": self._root,
        }  # fmt: skip
        files: dict[str, bytes | Iterable[bytes]] = {"tokenizer.json": tokenizer.to_file()} if base is None else {}
        if quarantine:
            files[QUARANTINE] = quarantine.blocks()
        fingerprint = self._partial.publish(fields, base, provenance, files)
        seconds = time.monotonic() - self._started
        return TextReport(str(self._out), fingerprint, True, **report, seconds=seconds, notes=self._notes)
