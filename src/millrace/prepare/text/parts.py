"""The parts of a corpus: which there are, and which an earlier run of the command has finished."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from millrace.identity import canonical, digest
from millrace.prepare.kind import Context
from millrace.prepare.parts import part_folder, read_done
from millrace.prepare.spill import file_hash
from millrace.prepare.text.dedup.line_scan import scan_part, with_repeats
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.part import PartDone, PartTask
from millrace.prepare.text.part_files import RECLAIMED
from millrace.prepare.text.read.sources import Part, SliceId, Source, slice_id
from millrace.prepare.text.recipe import TextBase
from millrace.store import platform
from millrace.text.tokenizer import Tokenizer


def finished_slices(folder: Path) -> list[tuple[SliceId, ...]]:
    """What each finished part holds, whatever the sources of its run were."""
    names = sorted(path.parent.name for path in (folder / "parts").glob("*/done.json") if not path.parent.suffix)
    found = (read_done(folder, name, PartDone, RECLAIMED) for name in names)
    return [done.slices for done in found if done is not None and done.slices]


def find_part(task: PartTask) -> PartDone | None:
    """A part that an earlier run finished, as it stands in the plan of this one; None where it is damaged."""
    done = read_done(task.folder, task.key, PartDone, RECLAIMED)
    if done is None or done.key != task.key:
        return None
    files = {part_folder(task.folder, done.key) / name: expected for name, expected in done.hashes.items()}
    if any(path.stat().st_size and file_hash(path) != expected for path, expected in files.items()):
        return None  # only files that were reclaimed are empty
    return msgspec.structs.replace(done, number=task.part.number, first_source=task.part.first_source)


def part_tasks(
    folder: Path, options: ReadOptions, sources: Sequence[Source], parts: Sequence[Part], tokenizer: Tokenizer
) -> list[PartTask]:
    described, encoder = tokenizer.describe(), getattr(tokenizer, "encoder", "")
    tasks = []
    for part in parts:
        mine = tuple(sources[piece.source] for piece in part.slices)
        # Not its number, nor those of its sources: they change when others come and go. Options are the plan's.
        slices = [slice_id(source, piece) for source, piece in zip(mine, part.slices, strict=True)]
        key = digest(canonical([described["hash"], slices]))
        tasks.append(PartTask(part, mine, options, str(folder), described, key, encoder))
    return tasks


def without_repeats(
    context: Context, tasks: list[PartTask], existing: TextBase | None, *, apart: bool
) -> list[PartTask]:
    """The tasks, each with the lines of its part that are repeats. This reads all parts once."""
    counts = [0] * len(tasks)
    with platform.writing(context.folder):
        platform.make_dir(context.folder / "lines")
    scans: Iterator[tuple[int, int]] = context.engine.run(scan_part, tasks, apart=apart)
    for finished, (number, count) in enumerate(scans, start=1):
        counts[number] = count
        context.progress("lines", finished, len(tasks), {"lines": sum(counts)})
    with platform.writing(context.folder):
        return with_repeats(context.folder, tasks, counts, existing)
