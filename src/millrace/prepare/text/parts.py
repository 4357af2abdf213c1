"""Reads all parts of a corpus in workers, but those that an earlier run of the command has finished."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.identity import canonical, digest
from millrace.prepare.engines import local
from millrace.prepare.parts import part_folder, read_done
from millrace.prepare.text.dedup.line_scan import scan_part, with_repeats
from millrace.prepare.text.existing import Existing
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.part import PartDone, PartTask, is_intact, prepare_part, renumber
from millrace.prepare.text.read.sources import Part, SliceId, Source, slice_id
from millrace.prepare.text.report import Tally
from millrace.prepare.text.shards import reclaim
from millrace.prepare.text.tokens.vocabulary import check_encoder
from millrace.store import platform
from millrace.text.tokenizer import Tokenizer

Progress = Callable[[str, int, int, Mapping[str, Any]], None]


class _EncoderChanged(Exception):
    """The tokenizer's encoder gave other ids than Hugging Face's on this corpus, and was given up."""


def finished_slices(folder: Path) -> list[tuple[SliceId, ...]]:
    """What each part holds that earlier runs finished, whatever their sources were."""
    names = sorted(path.parent.name for path in (folder / "parts").glob("*/done.json") if not path.parent.suffix)
    found = (read_done(folder, name, PartDone, reclaim.FILES) for name in names)
    return [done.slices for done in found if done is not None and done.slices]


class ReadParts:
    """Makes the parts of ``sources``; ``tasks`` are theirs, by number."""

    def __init__(
        self, folder: Path, options: ReadOptions, workers: local.Workers, progress: Progress, notes: list[str]
    ) -> None:
        self._folder, self._options, self._workers = folder, options, workers
        self._progress, self._notes = progress, notes
        self.tasks: list[PartTask] = []

    def run(
        self, sources: Sequence[Source], parts: Sequence[Part], tokenizer: Tokenizer, existing: Existing | None
    ) -> list[PartDone]:
        with platform.writing(self._folder):
            platform.make_dir(self._folder / "parts")
        encoder = getattr(tokenizer, "encoder", "")
        self.tasks = self._tasks(sources, parts, tokenizer, existing)
        tally = Tally(sources, parts)
        done = self._finished(parts)
        missing = [task for task in self.tasks if task.part.number not in done]
        if done:
            self._notes.append(f"{len(done):,} of {len(parts):,} parts came from an earlier run of this command")
        for number, result in done.items():
            tally.add(parts[number], result)
        self._progress("read", tally.done, tally.total, {**tally.facts, "begins": True})

        def moved(task: int, counts: Mapping[str, int]) -> None:
            tally.move(missing[task].part, counts)
            self._progress("read", tally.done, tally.total, tally.facts)

        def check() -> None:
            check_encoder(tokenizer, sources, parts, self._options)
            if getattr(tokenizer, "encoder", "") != encoder:
                raise _EncoderChanged

        try:
            for number, result in self._run(prepare_part, missing, moved, check):
                done[result.number] = result
                tally.add(missing[number].part, result)
                self._progress("read", tally.done, tally.total, tally.facts)
        except _EncoderChanged:  # these, and those of an earlier life, may have wrong ids
            with platform.writing(self._folder, "removing"):
                platform.remove(self._folder / "parts")
            return self.run(sources, parts, tokenizer, existing)
        return [done[part.number] for part in parts]

    def again(self, numbers: Sequence[int]) -> None:
        """Makes parts whose tokens were given back."""
        for _ in self._run(prepare_part, [self.tasks[number] for number in numbers]):
            pass

    def _finished(self, parts: Sequence[Part]) -> dict[int, PartDone]:
        found = {}
        for part, task in zip(parts, self.tasks, strict=True):
            done = read_done(self._folder, task.key, PartDone, reclaim.FILES)
            if done is not None and done.key == task.key and is_intact(self._folder, done):
                found[part.number] = renumber(done, part)
            elif done is not None:
                with platform.writing(self._folder, "removing"):
                    platform.remove(part_folder(self._folder, task.key))
        return found

    def _tasks(
        self, sources: Sequence[Source], parts: Sequence[Part], tokenizer: Tokenizer, existing: Existing | None
    ) -> list[PartTask]:
        described, encoder = tokenizer.describe(), getattr(tokenizer, "encoder", "")
        tasks = []
        for part in parts:
            mine = tuple(sources[piece.source] for piece in part.slices)
            # Not its number, nor those of its sources: they change when others come and go. Options are the plan's.
            slices = [slice_id(source, piece) for source, piece in zip(mine, part.slices, strict=True)]
            key = digest(canonical([described["hash"], slices]))
            tasks.append(PartTask(part, mine, self._options, str(self._folder), described, key, encoder))
        return self._with_repeats(tasks, existing) if self._options.dedup_unit == "line" else tasks

    def _with_repeats(self, tasks: list[PartTask], existing: Existing | None) -> list[PartTask]:
        """The tasks, told which lines of their parts are repeats; all parts are read for that first."""
        counts = [0] * len(tasks)
        with platform.writing(self._folder):
            platform.make_dir(self._folder / "lines")
        for finished, (number, count) in enumerate(self._run(scan_part, tasks), start=1):
            counts[number] = count
            self._progress("lines", finished, len(tasks), {"lines": sum(counts)})
        with platform.writing(self._folder):
            if existing is None:
                return with_repeats(self._folder, tasks, counts, (), 0, "")
            known, base = existing.lines(), existing.manifest.fingerprint
            return with_repeats(self._folder, tasks, counts, known, existing.num_lines, base)

    def _run(
        self,
        function: Callable[[Any], Any],
        tasks: Sequence[Any],
        moved: local.Moved | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Iterator[tuple[int, Any]]:
        return self._workers.run(
            function, tasks, apart=self._options.filter is not None, moved=moved, meanwhile=meanwhile
        )
