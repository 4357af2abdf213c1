"""One preparation, whatever its kind: from the lock on the output to the finished store.

``Run`` has the life that all kinds share; kind.py says what a kind adds. Killed at any time, the same call continues:
finished parts and shards are used again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, MillraceError, SourceError, StoreWriteFailed
from millrace.native import PRIVATE
from millrace.prepare.elsewhere import target_of
from millrace.prepare.engines.choice import open_engine
from millrace.prepare.engines.engine import STALL_S
from millrace.prepare.kind import Context, Kind, NothingNew, PartsVoid, Product
from millrace.prepare.parts import part_folder
from millrace.prepare.plan import PlanForm, check_plan, show_changes
from millrace.prepare.progress import Progress, default_progress
from millrace.prepare.quarantine import MAX_SKIPPED, Skips, check_max_skipped, check_skips
from millrace.prepare.stored_sources import StoredSources, check_same_source, describe_sources
from millrace.store import gc, platform
from millrace.store.layout import Layout
from millrace.store.open import open_store
from millrace.store.ownership import OWNER, is_lease
from millrace.store.publish import Partial
from millrace.store.reader import read_base
from millrace.store.shard import ShardEntry, shard_name
from millrace.store.snapshot import Base


class Run:
    """One run of a preparation into ``out``; ``make(kind)`` does it.

    ``scratch`` names what the kind keeps in the folder of the unfinished store, besides the parts.
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        scratch: Sequence[str],
        *,
        append: bool = False,
        restart: bool = False,
        same_source: str | None = None,
        max_skipped: float = MAX_SKIPPED,
        workers: int | None = None,
        engine: str = "local",
        address: str | None = None,
        stall_s: float = STALL_S,
        progress: Progress | None = None,
    ) -> None:
        check_same_source(same_source, append=append)
        check_max_skipped(max_skipped)
        self.target = target_of(out, append=append)
        self.out = Path(os.path.realpath(out if self.target is None else self.target.out))
        self.append = append
        self.partial = Partial(self.out, append=append, scratch=("attempts", "parts", "plan.json", *scratch))
        self.folder = self.partial.folder
        self.progress = progress or default_progress()
        self.base: Base | None = None  # of the store that is appended to
        self._restart, self._same_source, self._max_skipped = restart, same_source, max_skipped
        self._place = engine, address, workers, stall_s  # where tasks run
        self._is_ours = False  # the folder was begun with our plan
        self._began_s = time.monotonic()

    def make(self, kind: Kind) -> Any:
        """Makes the store and returns the report, of type ``kind.report_type``."""
        if self.target is None:
            report = self._make_in(self.out, kind)
            if self.context.sources.exists():
                platform.remove(self.context.sources)
            return report
        sent = self.target.finished_store()
        report = self._make_in(sent or self.out, kind)
        if sent is None:
            self.target.send(self.progress)
        self.target.clear()
        return msgspec.structs.replace(report, path=self.target.url)

    def _make_in(self, out: Path, kind: Kind) -> Any:
        self.kind = kind
        self.engine = open_engine(*self._place, in_threads=kind.in_threads)
        self.context = Context(out, self.folder, self.append, self.engine, self.progress)
        kind.context = self.context
        if self.target is not None and out == self.out:
            with platform.writing(self.target.folder, "creating"):
                platform.make_dir(self.target.folder, PRIVATE)
            self.context.note(f"the store is made in {self.target.folder}, then sent to {self.target.url}")
        self._surveys_late = (
            kind.surveys_late or self.append
        )  # under the lock: the sources of a store may grow until then
        if not self._surveys_late:
            self._survey()
        if not self.append and (out / "store.json").exists():
            return self._finished()
        self.partial.acquire()
        try:
            if self._restart:
                self._remove({*os.listdir(self.folder)} - {OWNER})
                platform.sync_dir(self.folder)
            if self.partial.complete():
                return self._finished()
            return self._make()
        except MillraceError as error:
            if self._has_nothing(error):
                self.partial.close(remove=True)  # a corrected call starts afresh
            raise
        finally:
            kind.close()
            self.engine.close()
            self.partial.close(remove=False)

    def _survey(self) -> None:
        kind = self.kind
        was_in_threads = kind.in_threads
        kind.survey()
        if kind.in_threads != was_in_threads:  # nothing was asked of the engine yet
            self.engine = open_engine(*self._place, in_threads=kind.in_threads)
            self.context = kind.context = dataclasses.replace(self.context, engine=self.engine)

    def _finished(self) -> Any:
        """The output is there: the same call has nothing to do, any other is refused."""
        if self._surveys_late:
            self._survey()
        place = self.out if self.target is None or self.context.out == self.out else self.target.url
        store, earlier = open_store(place), self.kind.earlier(0)
        if changes := self.kind.changes(earlier.plan):
            raise ConfigError(
                f"{place} is finished, but with other sources or options: {show_changes(changes)}; "
                "choose another --out, add to it with --append, or remove it yourself"
            )
        return self._unchanged(store.fingerprint, earlier.report)

    def _unchanged(self, fingerprint: str, report: Any) -> Any:
        notes = list(dict.fromkeys((*report.notes, *self.context.notes)))
        return msgspec.structs.replace(report, fingerprint=fingerprint, notes=notes)

    def _has_nothing(self, error: MillraceError) -> bool:
        """Whether nothing in the folder could be continued."""
        is_of_others = not self._is_ours and (self.folder / "plan.json").exists()
        if is_of_others or self.partial.entries or (self.folder / "store.json").exists():
            return False
        is_void = self.kind.is_void and isinstance(error, (ConfigError, SourceError))
        return is_void or all(path.parent.suffix for path in (self.folder / "parts").glob("*/done.json"))

    def _remove(self, names: Iterable[str]) -> None:
        with platform.writing(self.folder, "removing"):
            for name in sorted(names):
                if not is_lease(name):
                    platform.remove(self.folder / name)

    def _end_attempts(self) -> None:
        """Tasks on a cluster may go on after their run: from here on they cannot end, nor can others begin."""
        for path in sorted((self.folder / "attempts").glob("*")):
            with platform.writing(self.folder, "removing"):
                gone = path.with_suffix(".gone")
                if path != gone:
                    platform.rename(path, gone)
            with contextlib.suppress(OSError):  # one is just writing there; the folder goes at the end
                platform.remove(gone)

    def _make(self) -> Any:
        kind = self.kind
        if self.append:
            self.base = read_base(self.out)
            kind.extend(self.base)
            stored = StoredSources(self.out, self.base.manifest, self._same_source)
            self.context = kind.context = dataclasses.replace(self.context, stored=stored)
        if self._surveys_late:
            try:
                self._survey()
            except NothingNew:
                return self._nothing_new()
        if self.base is not None:
            fingerprint, last = self.base.manifest.fingerprint, kind.earlier(-1)
            is_kept_again = (self._same_source == "keep") == stored.was_kept
            if last.fingerprint == fingerprint and is_kept_again and not kind.changes(last.plan):
                self.partial.close(remove=True)  # the last append was this one; it may have been killed at its very end
                return self._unchanged(fingerprint, last.report)
        self._end_attempts()
        check_plan(self.folder / "plan.json", kind.part_plan, kind.allow, self._change, PlanForm)
        self._is_ours = True
        self._remove(str(path.relative_to(self.folder)) for path in self.folder.glob("*/*.tmp"))  # of workers that died
        kind.begin()
        parts = self._make_parts()
        check_skips(Skips.total((kind.file_skips, *(part.skips for part in parts))), self._max_skipped)
        tasks = kind.settle(parts)
        if tasks is None and self.base is not None:
            report = self._report(kind.product(self.partial.entries), self.base.manifest.fingerprint, is_new=False)
            self.partial.close(remove=True)
            return report
        self._write_shards(tasks or ())
        self.engine.stop()
        self._end_attempts()
        product = kind.product(self.partial.entries)
        self.context.note(*product.report.get("notes", ()))
        plan = kind.plan
        provenance = {
            "plan": plan, "report": product.report, "notes": self.context.notes, **self._described_sources(plan),
            **product.provenance,
        }  # fmt: skip
        fingerprint = self.partial.publish(product.fields, self.base, provenance, product.files)
        return self._report(product, fingerprint, is_new=True)

    def _described_sources(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        described = describe_sources(self.context.files, plan["sources"])
        if self.base is None:
            return described
        choice = {} if self._same_source is None else {"same_source": self._same_source}
        return {**described, "parent": self.base.manifest.fingerprint, **choice}

    def _nothing_new(self) -> Any:
        """All sources are in the store; what an append of other sources left stays."""
        assert self.base is not None
        last = self.kind.earlier(-1)
        try:
            begun = msgspec.json.decode((self.folder / "plan.json").read_bytes(), type=dict[str, Any])
        except (OSError, ValueError):
            begun = {"sources": last.plan.get("sources")}
        self.partial.close(remove=begun.get("sources") == last.plan.get("sources"))
        report = self.kind.nothing_added(last.report or self.kind.earlier(0).report)
        return self._unchanged(self.base.manifest.fingerprint, report)

    def _report(self, product: Product, fingerprint: str, *, is_new: bool) -> Any:
        counts = {**product.report, **product.details, "notes": self.context.notes}
        seconds = time.monotonic() - self._began_s
        return self.kind.report_type(str(self.out), fingerprint, is_new, **counts, seconds=seconds)

    def _change(self, old: Any, new: Any) -> None:
        """Another plan for the same parts: what was made of all of them together is void."""
        void = self.kind.change(old, new)
        self._remove(("journal.jsonl",))  # first: without it, no shard counts
        self._remove(("shards", *void))

    def _make_parts(self) -> list[Any]:
        """All parts in order; those that an earlier run finished are used again."""
        kind = self.kind
        with platform.writing(self.folder):
            platform.make_dir(self.folder / "parts")
            self.engine.settle_in(self.folder / "attempts", kind.functions)
        tasks = kind.part_tasks()
        parts = self._finished_parts(tasks)
        written = [part_folder(self.folder, tasks[number].key) for number in parts]
        self.progress("room", *check_room(self.folder, *kind.estimate(), written), {})
        if parts and not kind.parts_are_given:
            self.context.note(f"{len(parts):,} of {len(tasks):,} parts came from an earlier run for this --out")
        missing = [number for number in range(len(tasks)) if number not in parts]
        tally = kind.tally(tasks, parts)
        self.progress("read", tally.done, tally.total, {**tally.facts, "begins": True})

        def moved(number: int, counts: Mapping[str, int]) -> None:
            tally.move(missing[number], counts)
            self.progress("read", tally.done, tally.total, tally.facts)

        results = self.engine.run(
            kind.make_part, [tasks[number] for number in missing], apart=kind.apart, moved=moved, meanwhile=kind.meanwhile()
        )  # fmt: skip
        try:
            with contextlib.closing(results):  # an error here ends the tasks before the lock is released
                for number, part in results:
                    parts[missing[number]] = part
                    tally.add(missing[number], part)
                    self.progress("read", tally.done, tally.total, tally.facts)
        except PartsVoid:
            self._end_attempts()
            self._remove(("parts",))
            return self._make_parts()
        return [parts[number] for number in range(len(tasks))]

    def _finished_parts(self, tasks: Sequence[Any]) -> dict[int, Any]:
        """By number. Damaged parts are removed; parts of other sources stay, which may be asked for again."""
        there = [number for number, task in enumerate(tasks) if part_folder(self.folder, task.key).exists()]
        parts = dict(self.engine.run(self.kind.find_part, [tasks[number] for number in there]))
        self._remove(str(part_folder("", tasks[there[k]].key)) for k, part in parts.items() if part is None)
        return {there[k]: part for k, part in parts.items() if part is not None}

    def _write_shards(self, tasks: Sequence[Any]) -> None:
        kind, partial = self.kind, self.partial
        partial.begin(kind.part_plan, Layout(kind.columns), self.base, resume=True)
        if self.base is not None:
            gc.sweep(self.out, spare=partial.entries)
        entries = partial.entries
        missing = [
            task for task in tasks if shard_name(task.split, task.number) not in entries or not kind.has_shard(task)
        ]
        kind.begin_shards(missing)
        entry: ShardEntry
        with contextlib.closing(self.engine.run(kind.write_shard, missing)) as results:
            for count, (number, entry) in enumerate(results, start=1):
                partial.add(entry)
                self.progress("write", count, len(missing), kind.end_shard(missing[number]))


def as_list(values: Sequence[Any] | str | os.PathLike[str]) -> list[str]:
    """Paths or patterns, of which a caller may give one or many."""
    given = [values] if isinstance(values, (str, os.PathLike)) else values
    return [os.fspath(value) for value in given]


def check_room(folder: Path, likely: int, certain: int, parts: Iterable[Path]) -> tuple[int, int]:
    """Bytes (still needed, free), less what these parts and the shards of an earlier run hold.

    Raises where the disk cannot have enough.
    """
    files = [path for place in (*parts, folder / "shards") for path in place.rglob("*")]
    written = sum(path.stat().st_size for path in files if path.is_file())
    free = shutil.disk_usage(folder).free
    if certain - written > free:
        raise StoreWriteFailed(
            f"{folder} needs at least {certain - written:,} bytes, {free:,} are free; free space or choose another disk, "
            "then run the same command again",
            path=str(folder), errno=errno.ENOSPC,
        )  # fmt: skip
    return max(0, likely - written), free
