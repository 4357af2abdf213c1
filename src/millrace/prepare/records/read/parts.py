"""The parts of all sources: their tasks, and those that an earlier run finished."""

from __future__ import annotations

from pathlib import Path

import msgspec

from millrace.identity import canonical, digest
from millrace.prepare.functions import source_digest
from millrace.prepare.parts import part_folder, read_done
from millrace.prepare.records.options import READING, RecordOptions
from millrace.prepare.records.read.part import UNREADABLE, PartDone, PartTask
from millrace.prepare.records.read.sources import Survey, slice_identity
from millrace.prepare.spill import file_hash
from millrace.store.layout import Layout


def part_tasks(folder: Path, options: RecordOptions, found: Survey) -> list[PartTask]:
    """A task for each part. Its key covers what it is made of: sources, schema and the options of reading."""
    plain = msgspec.to_builtins(options)
    how = [
        {name: plain[name] for name in READING if name != "part_bytes"},
        options.filter and source_digest(options.filter, "--filter"),
        repr(found.schema),
        digest(found.detail),
    ]
    tasks = []
    for number, slices in enumerate(found.parts):
        key = digest(canonical([how, [slice_identity(piece) for piece in slices]]))
        tasks.append(PartTask(number, key, slices, found.schema, found.detail, options, str(folder)))
    return tasks


def find_part(task: PartTask) -> PartDone | None:
    """A part that an earlier run finished; None where it is damaged, or skipped records that must now stop the run."""
    done = read_done(task.folder, task.key, PartDone, reclaimed(task))
    if done is None or done.key != task.key:
        return None
    if task.options.on_error == "stop" and UNREADABLE in done.dropped:
        return None
    files = {part_folder(task.folder, done.key) / name: expected for name, expected in done.hashes.items()}
    if any(path.stat().st_size and file_hash(path) != expected for path, expected in files.items()):
        return None  # only files that were reclaimed are empty
    return msgspec.structs.replace(done, number=task.number)


def reclaimed(task: PartTask) -> list[str]:
    """The files of a part that only shards need. The offsets say how long records are."""
    return column_files(Layout(task.schema.columns))


def column_files(layout: Layout) -> list[str]:
    return [file.name for file in layout.files if file.column is not None]
