"""Pass 1, in the parent: which parts there are, which of them an earlier attempt finished, and the rest to be read.

A part is known by what it is made of: its files (path, size, time of change, hash of both ends), the row groups of
them, the schema and how rows are read. So an attempt with other files finds the parts of those that stayed the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from millrace.prepare.functions import source_digest
from millrace.prepare.parts import part_folder, read_done
from millrace.prepare.table.options import READING, TableOptions
from millrace.prepare.table.read.chunks import NO_KEY
from millrace.prepare.table.read.part import PartDone, PartTask, with_seal
from millrace.prepare.table.read.sources import RowGroups, Survey
from millrace.prepare.table.settle.results import digest_of


def part_tasks(folder: Path, options: TableOptions, found: Survey) -> list[PartTask]:
    """The parts of all sources, in their order."""
    schema = found.schema
    how = {
        "options": {name: getattr(options, name) for name in (*READING, "time_format")},
        "transform": options.transform and source_digest(options.transform, "--transform"),
        "schema": msgspec.structs.replace(schema, role=msgspec.structs.replace(schema.role, known_future=())),
    }
    return [
        PartTask(
            number, _key(how, found, units), units, tuple(found.sources[unit.source] for unit in units), options, schema,
            str(folder),
        )
        for number, units in enumerate(found.parts)
    ]  # fmt: skip


def _key(how: Mapping[str, object], found: Survey, units: Sequence[RowGroups]) -> int:
    sources = [found.sources[unit.source] for unit in units]
    # Not by its location: that may hold bytes that are no text. The path shows it too.
    files = [
        msgspec.structs.replace(source, file=msgspec.structs.replace(source.file, location="")) for source in sources
    ]
    made_of = [(file, unit.groups) for file, unit in zip(files, units, strict=True)]
    return xxhash.xxh3_64_intdigest(msgspec.json.encode((how, made_of))) >> 1  # it has to fit in an int64


def finished_part(task: PartTask) -> PartDone | None:
    """The part as an earlier attempt left it; None where it is not there, was damaged, or skipped rows that now stop."""
    done = None
    with contextlib.suppress(ValueError):  # of bytes that are no text
        done = read_done(task.folder, task.key, PartDone)
    if done is None or done.key != task.key or done != with_seal(msgspec.structs.replace(done, seal="")):
        return None
    if task.options.on_error == "stop" and done.dropped.get(NO_KEY):
        return None
    folder = part_folder(task.folder, task.key)
    is_whole = all(digest_of(folder / name) == found for name, found in done.digests.items())
    return done if is_whole else None
