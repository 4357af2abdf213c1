"""``prepare_text``: from files to a token store, restartable at every point.

Parts are read, cleaned and tokenised in workers; then repeats are found, documents assigned to splits, and shards
written in workers again. Killed at any time, the same call continues: whole parts and shards are kept.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.prepare.engines import local
from millrace.prepare.plan import check_plan, differences
from millrace.prepare.text import shards as sharding
from millrace.prepare.text.options import ReadOptions, ShardOptions
from millrace.prepare.text.part import PartDone, PartTask, prepare_part
from millrace.prepare.text.sources import Source, cut_parts, find_sources
from millrace.prepare.text.vocabulary import check_engine, choose_tokenizer
from millrace.ragged import Array
from millrace.store import gc, platform
from millrace.store.layout import MAX_DICTIONARY, Column, Layout
from millrace.store.open import open_store
from millrace.store.publish import Partial
from millrace.store.reader import read_base
from millrace.text.load import load_tokenizer
from millrace.text.tokenizer import Tokenizer

SCRATCH = ("parts", "plan.json", "stdin.txt", "partitions", "vocabulary.json")
Progress = Callable[[str, int, int, Mapping[str, Any]], None]


class TextReport(msgspec.Struct):
    """What a preparation did."""

    path: str
    fingerprint: str
    is_new: bool
    documents: dict[str, int]  # by split
    tokens: dict[str, int]
    shards: dict[str, int]
    dropped: dict[str, int]
    bytes_read: int
    characters: int
    seconds: float
    tokenizer: str
    engine: str


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

    def run(self) -> TextReport:
        stdin = "-" in self._paths
        sources = [] if stdin else find_sources(self._paths, self._reading.document)
        if not self._append and not stdin and (self._out / "store.json").exists():
            return self._finished(sources)
        self._partial.acquire()
        try:
            if self._partial.complete():
                return self._finished(sources)
            if stdin:
                self._paths = [str(_spool(self._partial.folder)) if path == "-" else path for path in self._paths]
                sources = find_sources(self._paths, self._reading.document)
            return self._prepare(sources)
        finally:
            self._partial.close(remove=False)

    def _plan(self, sources: Sequence[Source]) -> dict[str, Any]:
        described = {source.path: [source.size, source.mtime_ns, source.ends] for source in sources}
        return {"options": msgspec.to_builtins(self._reading), "sources": described}

    def _finished(self, sources: Sequence[Source]) -> TextReport:
        """An output that is there: the same call is done at once, any other is refused."""
        store = open_store(self._out)
        lines = (
            (self._out / "provenance.json").read_bytes().splitlines()
            if (self._out / "provenance.json").exists()
            else []
        )
        made = msgspec.json.decode(lines[0]) if lines else {}
        plan = {**self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}
        changed = differences(made.get("plan") or {}, msgspec.json.decode(msgspec.json.encode(plan)))
        if changed:
            raise ConfigError(
                f"{self._out} is finished, but with other sources or options: {'; '.join(changed[:6])}; "
                "choose another --out, add files with --append, or remove it yourself"
            )
        return TextReport(str(self._out), store.fingerprint, False, **made["report"], seconds=0.0)

    def _prepare(self, sources: list[Source]) -> TextReport:
        folder, base = self._partial.folder, read_base(self._out) if self._append else None
        check_plan(folder / "plan.json", self._plan(sources), folder)
        parts = cut_parts(sources, self._reading.part_bytes)
        tokenizer = self._tokenizer(sources, parts, base)
        done = self._read(sources, parts, tokenizer)
        known = None if base is None or self._reading.dedup == "none" else _known_hashes(self._out)
        repeats = sharding.repeated(folder, done, self._reading.dedup, known)
        assignment = sharding.Assignment(folder, done, self._cutting)
        assignment.make(repeats)
        if not self._append:
            assignment.check()
        return self._publish(sources, done, assignment, tokenizer, base)

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
        total = sum(source.size for source in sources)
        done: dict[int, PartDone] = {}
        for number, result in local.run(prepare_part, tasks, self._workers, apart=self._reading.filter is not None):
            done[number] = result
            read = sum(part.bytes_read for part in done.values())
            self._progress("read", read, total, {
                "tokens": sum(part.tokens for part in done.values()), "documents": sum(part.documents for part in done.values()),
                "repeats": sum(part.dropped.get("duplicate", 0) for part in done.values()),
            })  # fmt: skip
        return [done[number] for number in range(len(tasks))]

    def _publish(
        self,
        sources: list[Source],
        done: list[PartDone],
        assignment: sharding.Assignment,
        tokenizer: Tokenizer,
        base: Any,
    ) -> TextReport:
        columns = _columns(sources, tokenizer, base)
        sources_of = _source_codes(sources, columns["source"])
        if sources_of is not None:
            raise ConfigError(sources_of)
        plan = {"read": self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}
        self._partial.begin(plan, Layout(columns), base, resume=True)
        if base is not None:
            gc.sweep(self._out, spare=self._partial.entries)
        planned = sharding.cut_shards(assignment, self._partial.folder, done, self._cutting)
        tasks = self._shard_tasks(planned, columns, tokenizer, base)
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
        provenance = {"plan": {**self._plan(sources), "shards": msgspec.to_builtins(self._cutting)}, "report": report}
        files = {"tokenizer.json": tokenizer.to_file()} if base is None else {}
        quarantine = _quarantine(self._partial.folder, done)
        if quarantine:
            files["quarantine.jsonl"] = quarantine
        fingerprint = self._partial.publish(fields, base, provenance, files)
        return TextReport(str(self._out), fingerprint, True, **report, seconds=time.monotonic() - self._started)

    def _shard_tasks(
        self, planned: Mapping[str, Any], columns: Mapping[str, Column], tokenizer: Tokenizer, base: Any
    ) -> list[sharding.ShardTask]:
        plain = {name: (c.dtype, c.shape, c.per, c.values) for name, c in columns.items()}
        tasks = []
        for split, shards in planned.items():
            first = 0 if base is None else base.next_number(split)
            tasks += [
                sharding.ShardTask(
                    split, first + k, tuple(pieces), str(self._partial.folder), plain, tokenizer.dtype.itemsize
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
        return {
            "documents": {split: count for split, count in assignment.documents.items() if count},
            "tokens": {split: count for split, count in assignment.tokens.items() if count},
            "shards": {split: len(shards) for split, shards in planned.items()},
            "dropped": dict(sorted(dropped.items())),
            "bytes_read": sum(part.bytes_read for part in done),
            "characters": sum(part.characters for part in done),
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


def _columns(sources: Sequence[Source], tokenizer: Tokenizer, base: Any) -> dict[str, Column]:
    known: tuple[str, ...] = () if base is None else tuple(base.manifest.columns["source"].values or ())
    values = tuple(dict.fromkeys((*known, *(source.path for source in sources))))
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
