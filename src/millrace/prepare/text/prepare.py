"""``prepare_text``: from files to a token store, restartable at every point.

Parts are read, cleaned and tokenised in workers; then repeats are found, documents assigned to splits, and shards
written in workers again. Killed at any time, the same call continues: whole parts and shards are kept.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, MillraceError
from millrace.prepare.engines import local
from millrace.prepare.plan import check_plan, differences
from millrace.prepare.text import shards as sharding
from millrace.prepare.text.options import ReadOptions, ShardOptions, loosened
from millrace.prepare.text.part import PartDone, PartTask, prepare_part
from millrace.prepare.text.report import Tally, TextReport
from millrace.prepare.text.sources import Source, cut_parts, find_sources
from millrace.prepare.text.vocabulary import check_engine, choose_tokenizer, file_identity
from millrace.ragged import Array
from millrace.store import gc, platform
from millrace.store.layout import MAX_DICTIONARY, Column, Layout
from millrace.store.open import open_store
from millrace.store.publish import Partial
from millrace.store.reader import read_base
from millrace.text.load import load_tokenizer
from millrace.text.tokenizer import Tokenizer

SCRATCH = ("parts", "plan.json", "cut.json", "stdin.txt", "partitions", "vocabulary.json")
PLAN_VERSION = 1  # of what parts hold: another one does not continue them
STDIN = "-"
Progress = Callable[[str, int, int, Mapping[str, Any]], None]


def prepare_text(
    paths: Sequence[str] | str,
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    append: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> TextReport:
    """Makes a token store at ``out`` from text, JSONL, CSV or Parquet files; see ``ReadOptions`` and ``ShardOptions``.

    Everything but ``provenance.json`` is byte-identical for any number of workers and any interruptions.
    """
    reading, cutting = _options(options)
    return _Preparation([paths] if isinstance(paths, str) else list(paths), Path(os.path.realpath(out)), reading, cutting,
                        workers or os.cpu_count() or 1, append, progress or (lambda *_: None)).run()  # fmt: skip


def _options(given: Mapping[str, Any]) -> tuple[ReadOptions, ShardOptions]:
    kinds = (ReadOptions, ShardOptions)
    names = [set(kind.__struct_fields__) for kind in kinds]
    unknown = set(given) - names[0] - names[1]
    if unknown:
        raise ConfigError(f"unknown options {sorted(unknown)}; expected {', '.join(sorted(names[0] | names[1]))}")
    reading = ReadOptions(**{key: value for key, value in given.items() if key in names[0]})
    cutting = ShardOptions(**{key: value for key, value in given.items() if key in names[1]})
    reading.check()
    cutting.check()
    return reading, cutting


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
    ) -> None:
        self._paths, self._out, self._reading, self._cutting = paths, out, reading, cutting
        self._workers, self._append, self._progress = workers, append, progress
        self._partial = Partial(out, append=append, scratch=SCRATCH)
        self._started = time.monotonic()
        self._spooled: str | None = None
        self._is_mine = False  # what lies in the folder was begun with this plan

    def run(self) -> TextReport:
        stdin = STDIN in self._paths
        sources = [] if stdin else find_sources(self._paths, self._reading.document)
        if not self._append and not stdin and (self._out / "store.json").exists():
            return self._finished(sources)
        self._partial.acquire()
        try:
            if self._partial.complete():
                return self._finished(None if stdin else sources)
            if stdin:
                self._spooled = str(_spool(self._partial.folder))
                self._paths = [self._spooled if path == STDIN else path for path in self._paths]
                sources = find_sources(self._paths, self._reading.document)
            return self._prepare(sources)
        except MillraceError:
            if self._is_mine and not any((self._partial.folder / "parts").glob("*[0-9]/done.json")):
                self._partial.close(remove=True)  # nothing to continue: a mended call starts afresh
            raise
        finally:
            self._partial.close(remove=False)

    def _name(self, source: Source) -> str:
        """What a source is called in the store: standard input is not the file it was spooled to."""
        return STDIN if source.path == self._spooled else source.path

    def _plan(self, sources: Sequence[Source]) -> dict[str, Any]:
        described = {self._name(source): [source.size, source.mtime_ns, source.ends] for source in sources}
        plan = {
            "version": PLAN_VERSION, "options": msgspec.to_builtins(self._reading), "sources": described,
            "order": list(described), "tokenizer": file_identity(self._reading.tokenizer),
        }  # fmt: skip
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    def _whole_plan(self, sources: Sequence[Source]) -> dict[str, Any]:
        return {**self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}

    def _already(self, base: Any, report: Mapping[str, Any]) -> TextReport:
        """All there is to append is in the store."""
        self._partial.close(remove=True)
        return TextReport(str(self._out), base.manifest.fingerprint, False, **report, seconds=0.0)

    def _finished(self, sources: Sequence[Source] | None) -> TextReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        made = self._made(first=True)
        plan = self._whole_plan(sources or ())
        before = made.get("plan") or {}
        if sources is None:
            before = {**before, "sources": plan["sources"], "order": plan["order"]}
        changed = differences(before, plan)
        if changed:
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:6])}; "
                "choose another --out, add files with --append, or remove it yourself"
            )
        return TextReport(str(self._out), store.fingerprint, False, **made["report"], seconds=0.0)

    def _made(self, *, first: bool) -> dict[str, Any]:
        """What the first run, or the last append, said of itself."""
        path = self._out / "provenance.json"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return json.loads(lines[0 if first else -1]) if lines else {}

    def _prepare(self, sources: list[Source]) -> TextReport:
        folder, base = self._partial.folder, read_base(self._out) if self._append else None

        def allow(old: Any, new: Any) -> Any:
            return (
                {**old, "options": loosened(old["options"], new["options"])}
                if old.get("version") == PLAN_VERSION
                else old
            )

        made = self._made(first=False)
        is_current = base is not None and made.get("fingerprint") == base.manifest.fingerprint
        if is_current and not differences(made.get("plan") or {}, self._whole_plan(sources)):
            return self._already(base, made["report"])  # also where it was killed at its very end
        check_plan(folder / "plan.json", self._plan(sources), folder, allow)
        self._is_mine = True
        parts = cut_parts(sources, self._reading.part_bytes)
        tokenizer = self._tokenizer(sources, parts, base)
        done = self._read(sources, parts, tokenizer)
        assignment = sharding.Assignment(folder, done, self._cutting)
        with platform.writing(folder):
            assignment.make(self._repeats(done, base))
        if not self._append:
            assignment.check()
        return self._publish(sources, done, assignment, tokenizer, base)

    def _repeats(self, done: Sequence[PartDone], base: Any) -> Array:
        folder, dedup = self._partial.folder, self._reading.dedup
        if base is None:
            return sharding.repeated(folder, done, dedup)
        return sharding.repeated(folder, done, dedup, _known_hashes(self._out), base.manifest.totals.records)

    def _tokenizer(self, sources: list[Source], parts: Sequence[Any], base: Any) -> Tokenizer:
        """The tokenizer of this corpus, beside its parts; an append takes that of the store."""
        path = self._partial.folder / "vocabulary.json"
        if base is not None:
            described = base.manifest.tokenizer
            if described is None:
                raise ConfigError(f"{self._out} was not made by prepare text; only such a store can be appended to")
            data = (self._out / "tokenizer.json").read_bytes()
            tokenizer = load_tokenizer(described, data, str(self._out / "tokenizer.json"))
        else:
            tokenizer = choose_tokenizer(path, sources, parts, self._reading)
        check_engine(tokenizer, sources, parts, self._reading)
        with platform.writing(path):
            platform.write_file(path, tokenizer.to_file(), mode=0o644)
        return tokenizer

    def _read(self, sources: list[Source], parts: Sequence[Any], tokenizer: Tokenizer) -> list[PartDone]:
        with platform.writing(self._partial.folder):
            platform.make_dir(self._partial.folder / "parts")
        tasks = [
            PartTask(
                part,
                tuple(sources[unit.source] for unit in part.units),
                self._reading,
                str(self._partial.folder),
                tokenizer.describe(),
                getattr(tokenizer, "engine", ""),
            )
            for part in parts
        ]
        tally = Tally(sources, parts)
        done: dict[int, PartDone] = {}
        for number, result in local.run(prepare_part, tasks, self._workers, apart=self._reading.filter is not None):
            done[number] = result
            tally.add(parts[number], result)
            self._progress("read", tally.done, tally.total, tally.facts)
        return [done[number] for number in range(len(tasks))]

    def _publish(
        self,
        sources: list[Source],
        done: list[PartDone],
        assignment: sharding.Assignment,
        tokenizer: Tokenizer,
        base: Any,
    ) -> TextReport:
        if base is not None and not any(assignment.documents.values()):
            return self._already(base, self._report(done, assignment, {}, tokenizer))
        names = [self._name(source) for source in sources]
        columns = _columns(names, tokenizer, base)
        sources_of = _source_codes(sources, columns["source"])
        if sources_of is not None:
            raise ConfigError(sources_of)
        plan = {"read": self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}
        check_plan(self._partial.folder / "cut.json", plan["shards"], self._partial.folder)
        self._partial.begin(plan, Layout(columns), base, resume=True)
        if base is not None:
            gc.sweep(self._out, spare=self._partial.entries)
        planned = sharding.cut_shards(assignment, self._partial.folder, done, self._cutting)
        tasks = self._shard_tasks(planned, columns, tokenizer, base, names)
        missing = [task for task in tasks if f"{task.split}-{task.number:05d}" not in self._partial.entries]
        for finished, (_, entry) in enumerate(local.run(sharding.write_shard, missing, self._workers), start=1):
            self._partial.add(entry)
            self._progress("write", finished, len(missing), {})
        report = self._report(done, assignment, planned, tokenizer)
        splits = tuple(split for split in sharding.SPLITS if assignment.documents[split])
        known = () if base is None else base.manifest.splits
        fields = {
            "kind": "text", "columns": columns, "splits": tuple(dict.fromkeys((*known, *splits))),
            "tokenizer": tokenizer.describe(), "meta": {"report": report} if base is None else base.manifest.meta,
        }  # fmt: skip
        provenance = {"plan": self._whole_plan(sources), "report": report}
        files = {"tokenizer.json": tokenizer.to_file()} if base is None else {}
        quarantine = _quarantine(self._partial.folder, done)
        if quarantine:
            files["quarantine.jsonl"] = quarantine
        fingerprint = self._partial.publish(fields, base, provenance, files)
        return TextReport(str(self._out), fingerprint, True, **report, seconds=time.monotonic() - self._started)

    def _shard_tasks(
        self,
        planned: Mapping[str, Any],
        columns: Mapping[str, Column],
        tokenizer: Tokenizer,
        base: Any,
        names: list[str],
    ) -> list[sharding.ShardTask]:
        # The sources of an append are numbered behind those of the store.
        places = {} if base is None else {name: k for k, name in enumerate(columns["source"].values or ())}
        codes = tuple(places[name] for name in names) if places else ()
        plain = {name: (c.dtype, c.shape, c.per, c.values) for name, c in columns.items()}
        tasks = []
        for split, shards in planned.items():
            first = 0 if base is None else base.next_number(split)
            tasks += [
                sharding.ShardTask(
                    split, first + k, tuple(pieces), str(self._partial.folder), plain, tokenizer.dtype.itemsize, codes
                )
                for k, pieces in enumerate(shards)
            ]
        return tasks

    def _report(
        self,
        done: Sequence[PartDone],
        assignment: sharding.Assignment,
        planned: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> dict[str, Any]:
        dropped: dict[str, int] = {}
        for part in done:
            for reason, count in part.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        if assignment.dropped["documents"]:
            dropped["duplicate"] = dropped.get("duplicate", 0) + assignment.dropped["documents"]
            dropped["duplicate bytes"] = dropped.get("duplicate bytes", 0) + assignment.dropped["bytes"]
        return {
            "documents": {split: count for split, count in assignment.documents.items() if count},
            "tokens": {split: count for split, count in assignment.tokens.items() if count},
            "shards": {split: len(shards) for split, shards in planned.items()},
            "dropped": dict(sorted(dropped.items())),
            "bytes_read": sum(part.bytes_read for part in done),
            "characters": assignment.characters,
            "tokenizer": tokenizer.name,
            "engine": getattr(tokenizer, "engine", tokenizer.kind),
        }


def _spool(folder: Path) -> Path:
    """Standard input as a file, since a restart could not read it again."""
    path = folder / "stdin.txt"
    if not path.exists():
        with platform.writing(path), open(f"{path}.tmp", "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            os.fsync(file.fileno())
        platform.rename(f"{path}.tmp", path)
    return path


def _columns(names: Sequence[str], tokenizer: Tokenizer, base: Any) -> dict[str, Column]:
    known: tuple[str, ...] = () if base is None else tuple(base.manifest.columns["source"].values or ())
    values = tuple(dict.fromkeys((*known, *names)))
    return {
        "tokens": Column(tokenizer.dtype),
        "source": Column("dictionary", per="record", values=values),
        "offset": Column("int64", per="record"),
        "hash": Column("uint64", (2,), per="record"),
    }


def _source_codes(sources: Sequence[Source], column: Column) -> str | None:
    if len(column.values or ()) > MAX_DICTIONARY:
        return f"{len(column.values or ())} source files; at most {MAX_DICTIONARY} in one store: join small files first"
    return None


def _known_hashes(out: Path) -> Iterator[Array]:
    column: Any = open_store(out).columns["hash"]
    for _, piece in column.pieces():
        yield piece


def _quarantine(folder: Path, done: Sequence[PartDone]) -> bytes:
    paths = [
        folder / "parts" / f"{part.number:06d}" / "quarantine.jsonl"
        for part in done
        if "quarantine.jsonl" in part.sizes
    ]
    return b"".join(path.read_bytes() for path in paths)
