"""``prepare_text``: from files to a token store, restartable at every point.

Parts are read, cleaned and tokenised in workers; then repeats are found, documents assigned to splits, and shards
written in workers again. Killed at any time, the same call continues: whole parts and shards are kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, MillraceError
from millrace.prepare.engines import local
from millrace.prepare.files import InputFile
from millrace.prepare.functions import source_digest
from millrace.prepare.plan import check_plan, differences
from millrace.prepare.room import check_room
from millrace.prepare.text import shards as sharding
from millrace.prepare.text.columns import store_columns, write_names
from millrace.prepare.text.existing import Existing, as_made, runs
from millrace.prepare.text.options import ReadOptions, ShardOptions, loosened, parted
from millrace.prepare.text.part import PartDone, PartTask, load_early, prepare_part
from millrace.prepare.text.quarantine import Quarantine
from millrace.prepare.text.report import Tally, TextReport, joined, summary
from millrace.prepare.text.room import estimate
from millrace.prepare.text.scan import mark_repeats, scan_part
from millrace.prepare.text.sources import STDIN, Part, Source, code_note, cut_parts, find_sources
from millrace.prepare.text.spool import read_through, spool
from millrace.prepare.text.vocabulary import check_engine, choose_tokenizer, file_identity
from millrace.store import gc, platform
from millrace.store.layout import Column, Layout
from millrace.store.open import open_store
from millrace.store.publish import Partial
from millrace.store.snapshot import Base
from millrace.text.tokenizer import Tokenizer

SCRATCH = (
    *("parts", "lines", "repeats.bin", "plan.json", "cut.json", "stdin.txt", "partitions", "vocabulary.json"),
    *("names.bin", "name_ends.bin", "alone"),
)
PLAN_VERSION = 2  # of what parts hold: another one does not continue them
Progress = Callable[[str, int, int, Mapping[str, Any]], None]


def prepare_text(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    append: bool = False,
    progress: Progress | None = None,
    stall_s: float = local.STALL_S,
    **options: Any,
) -> TextReport:
    """Makes a token store at ``out`` from text, JSONL, CSV or Parquet files; see ``ReadOptions`` and ``ShardOptions``.

    Everything but ``provenance.json`` is byte-identical for any number of workers and any interruptions.
    """
    reading, cutting = parted(as_made(Path(os.path.realpath(out)), options) if append else options)
    return _Preparation([paths] if isinstance(paths, str) else list(paths), Path(os.path.realpath(out)), reading, cutting,
                        workers or os.cpu_count() or 1, append, progress or (lambda *_: None), stall_s).run()  # fmt: skip


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
    ) -> None:
        self._paths, self._out, self._reading, self._cutting = paths, out, reading, cutting
        self._workers, self._append, self._progress = local.Workers(workers, stall_s), append, progress
        self._partial = Partial(out, append=append, scratch=SCRATCH)
        self._started = time.monotonic()
        self._notes: list[str] = []
        self._is_mine = False  # what lies in the folder was begun with this plan

    def run(self) -> TextReport:
        if not self._append and (self._out / "store.json").exists():
            return self._finished()
        stdin = STDIN in self._paths
        sources = [] if stdin else self._find()
        self._partial.acquire()
        try:
            if self._partial.complete():
                return self._finished()
            return self._prepare(self._find(spool(self._partial.folder)) if stdin else sources)
        except MillraceError:
            is_mine = self._is_mine or not (self._partial.folder / "plan.json").exists()
            if is_mine and not any((self._partial.folder / "parts").glob("*[0-9]/done.json")):
                self._partial.close(remove=True)  # nothing to continue: a mended call starts afresh
            raise
        finally:
            self._workers.close()
            self._partial.close(remove=False)

    def _find(self, stdin: InputFile | None = None) -> list[Source]:
        given, avoid = {} if stdin is None else {STDIN: stdin}, (self._out, self._partial.folder)
        sources, self._notes = find_sources(
            self._paths, self._reading.document, self._reading.format, avoid=avoid, given=given
        )
        without = next((source for source in sources if source.format == "text"), None)
        if self._reading.mask_field is not None and without is not None:
            raise ConfigError(f"--mask-field: {without.path!r} is plain text; only JSONL, CSV and Parquet have fields")
        return sources

    def _plan(self, sources: Sequence[Source]) -> dict[str, Any]:
        described = {source.path: [source.size, source.mtime_ns, source.ends] for source in sources}
        plan = {
            "version": PLAN_VERSION, "options": msgspec.to_builtins(self._reading), "sources": described,
            "order": list(described), "tokenizer": file_identity(self._reading.tokenizer),
        }  # fmt: skip
        if self._reading.filter is not None:
            plan["filter"] = source_digest(self._reading.filter, "--filter")
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    def _whole_plan(self, sources: Sequence[Source]) -> dict[str, Any]:
        return {**self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}

    def _already(self, existing: Existing, report: Mapping[str, Any]) -> TextReport:
        """All there is to append is in the store."""
        self._partial.close(remove=True)
        return TextReport(str(self._out), existing.manifest.fingerprint, False, **report, seconds=0.0)

    def _finished(self) -> TextReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        made = next(iter(runs(self._out)), {})
        before = made.get("plan") or {}
        stdin = read_through(before.get("sources", {}).get(STDIN)) if STDIN in self._paths else None
        plan = {**self._whole_plan(self._find(stdin)), "version": before.get("version")}  # of parts, which are no more
        changed = differences(before, plan)
        if changed:
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:6])}; "
                "choose another --out, add files with --append, or remove it yourself"
            )
        return TextReport(str(self._out), store.fingerprint, False, **made["report"], seconds=0.0)

    def _prepare(self, sources: list[Source]) -> TextReport:
        folder = self._partial.folder
        existing = Existing(self._out, self._reading) if self._append else None
        if existing is not None:
            made = next(iter(runs(self._out)[::-1]), {})
            is_current = made.get("fingerprint") == existing.manifest.fingerprint
            if is_current and not differences(made.get("plan") or {}, self._whole_plan(sources)):
                return self._already(existing, made["report"])  # also where it was killed at its very end
        check_plan(folder / "plan.json", self._plan_on(sources, existing), folder, self._loosened(sources))
        self._is_mine = True
        if self._reading.normalize and (note := code_note(sources)):
            self._progress("note", 0, 0, {"note": note})  # now, since the work may take hours, and when it is done
            self._notes.append(note)
        parts = cut_parts(sources, self._reading.part_bytes)
        # While the vocabulary loads.
        self._workers.start(prepare_part, len(parts), apart=self._reading.filter is not None)
        tokenizer = self._tokenizer(sources, parts, existing)
        known = None if existing is None else existing.sources
        columns = store_columns([source.path for source in sources], tokenizer, self._reading, known)
        self._progress("room", *check_room(folder, *estimate(sources, tokenizer, self._reading)), {})
        done = self._read(sources, parts, tokenizer, existing)
        assignment = sharding.Assignment(folder, done, self._cutting)
        documents = iter(()) if existing is None else existing.documents()
        num_documents = 0 if existing is None else existing.manifest.totals.records
        with platform.writing(folder):
            assignment.make(sharding.repeated(folder, done, self._reading, documents, num_documents))
        if not self._append:
            assignment.check()
        return self._publish(sources, done, assignment, tokenizer, columns, existing)

    def _plan_on(self, sources: Sequence[Source], existing: Existing | None) -> dict[str, Any]:
        """The plan of parts; where lines of the store are compared, they hold for that snapshot alone."""
        if existing is None or self._reading.dedup_unit != "line":
            return self._plan(sources)
        return {**self._plan(sources), "appended to": existing.manifest.fingerprint}

    def _loosened(self, sources: Sequence[Source]) -> Callable[[Any, Any], Any]:
        has_records = any(source.format != "text" for source in sources)

        def allow(old: Any, new: Any) -> Any:
            if old.get("version") != PLAN_VERSION:
                return old
            return {**old, "options": loosened(old["options"], new["options"], has_records=has_records)}

        return allow

    def _tokenizer(self, sources: list[Source], parts: Sequence[Part], existing: Existing | None) -> Tokenizer:
        """The tokenizer of this corpus, beside its parts; an append takes that of the store."""
        path = self._partial.folder / "vocabulary.json"
        if existing is not None:
            tokenizer = existing.tokenizer()
        else:
            tokenizer = choose_tokenizer(path, sources, parts, self._reading)
        with platform.writing(path):
            platform.write_file(path, tokenizer.to_file(), mode=0o644)
        self._workers.warm(load_early, (str(self._partial.folder), tokenizer.describe()))
        check_engine(tokenizer, sources, parts, self._reading)
        return tokenizer

    def _read(
        self, sources: list[Source], parts: Sequence[Part], tokenizer: Tokenizer, existing: Existing | None
    ) -> list[PartDone]:
        folder = self._partial.folder
        with platform.writing(folder):
            platform.make_dir(folder / "parts")
        engine = getattr(tokenizer, "engine", "")
        tasks = [
            PartTask(part, tuple(sources[unit.source] for unit in part.units), self._reading, str(folder),
                     tokenizer.describe(), engine)
            for part in parts
        ]  # fmt: skip
        if self._reading.dedup_unit == "line":
            tasks = self._with_repeats(tasks, existing)
        tally = Tally(sources, parts)
        done: dict[int, PartDone] = {}

        def moved(number: int, counts: Mapping[str, int]) -> None:
            tally.move(parts[number], counts)
            self._progress("read", tally.done, tally.total, tally.facts)

        for number, result in self._run(prepare_part, tasks, moved):
            done[number] = result
            tally.add(parts[number], result)
            self._progress("read", tally.done, tally.total, tally.facts)
        return [done[number] for number in range(len(tasks))]

    def _with_repeats(self, tasks: list[PartTask], existing: Existing | None) -> list[PartTask]:
        """The tasks, told which lines of their parts are repeats; all parts are read for that first."""
        folder, counts = self._partial.folder, [0] * len(tasks)
        with platform.writing(folder):
            platform.make_dir(folder / "lines")
        for finished, (number, count) in enumerate(self._run(scan_part, tasks), start=1):
            counts[number] = count
            self._progress("lines", finished, len(tasks), {"lines": sum(counts)})
        with platform.writing(folder):
            if existing is None:
                mark_repeats(folder, counts, (), 0)
            else:
                mark_repeats(folder, counts, existing.lines(), existing.num_lines)
        ends = list(accumulate(counts))
        return [
            msgspec.structs.replace(task, lines=(end - count, end))
            for task, count, end in zip(tasks, counts, ends, strict=True)
        ]

    def _run(
        self, function: Callable[[Any], Any], tasks: Sequence[Any], moved: local.Moved | None = None
    ) -> Iterator[tuple[int, Any]]:
        return self._workers.run(function, tasks, apart=self._reading.filter is not None, moved=moved)

    def _publish(
        self,
        sources: list[Source],
        done: list[PartDone],
        assignment: sharding.Assignment,
        tokenizer: Tokenizer,
        columns: Mapping[str, Column],
        existing: Existing | None,
    ) -> TextReport:
        if existing is not None and not any(assignment.documents.values()):
            return self._already(existing, summary(done, assignment, {}, tokenizer))
        base = None if existing is None else existing.base
        plan = {"read": self._plan_on(sources, existing), "shards": msgspec.to_builtins(self._cutting)}
        check_plan(self._partial.folder / "cut.json", plan["shards"], self._partial.folder)
        self._partial.begin(plan, Layout(columns), base, resume=True)
        if base is not None:
            gc.sweep(self._out, spare=self._partial.entries)
        planned = sharding.cut_shards(assignment, self._partial.folder, done, self._cutting)
        tasks = self._shard_tasks(planned, columns, tokenizer, base, [source.path for source in sources])
        missing = [task for task in tasks if f"{task.split}-{task.number:05d}" not in self._partial.entries]
        for finished, (_, entry) in enumerate(self._run(sharding.write_shard, missing), start=1):
            self._partial.add(entry)
            self._progress("write", finished, len(missing), {})
        self._workers.stop()
        report = summary(done, assignment, planned, tokenizer)
        splits = tuple(split for split in sharding.SPLITS if assignment.documents[split])
        known, before = ((), {}) if base is None else (base.manifest.splits, base.manifest.meta.get("report", {}))
        fields = {
            "kind": "text", "columns": columns, "splits": tuple(dict.fromkeys((*known, *splits))),
            "tokenizer": tokenizer.describe(), "meta": {"report": joined(before, report)},
        }  # fmt: skip
        quarantine = Quarantine(self._out, self._partial.folder, done, {} if existing is None else existing.made())
        provenance = {
            "plan": self._whole_plan(sources), "report": report, "quarantine_bytes": quarantine.num_bytes
        }  # fmt: skip
        files: dict[str, bytes | Iterable[bytes]] = {"tokenizer.json": tokenizer.to_file()} if base is None else {}
        if quarantine:
            files["quarantine.jsonl"] = quarantine.blocks()
        fingerprint = self._partial.publish(fields, base, provenance, files)
        seconds = time.monotonic() - self._started
        return TextReport(str(self._out), fingerprint, True, **report, seconds=seconds, notes=self._notes)

    def _shard_tasks(
        self,
        planned: Mapping[str, Any],
        columns: Mapping[str, Column],
        tokenizer: Tokenizer,
        base: Base | None,
        names: list[str],
    ) -> list[sharding.ShardTask]:
        # The sources of an append are numbered behind those of the store.
        if columns["source"].dtype == "string":
            with platform.writing(self._partial.folder):
                write_names(self._partial.folder, names)
        places = {} if base is None else {name: k for k, name in enumerate(columns["source"].values or ())}
        codes = tuple(places[name] for name in names) if places else ()
        plain = {name: (c.dtype, c.shape, c.per, c.axis, c.values) for name, c in columns.items()}
        tasks = []
        for split, shards in planned.items():
            first = 0 if base is None else base.next_number(split)
            tasks += [
                sharding.ShardTask(
                    split,
                    first + k,
                    tuple(pieces),
                    str(self._partial.folder),
                    plain,
                    tokenizer.spaced_dtype.itemsize,
                    tokenizer.end,
                    codes,
                )
                for k, pieces in enumerate(shards)
            ]
        return tasks
