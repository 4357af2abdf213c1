"""Pass 1, in the parent: lists the parts, keeps those an earlier attempt finished, and has the others read.

The key of a part covers its files (path, size, time of change, hash of both ends), their row groups, the schema and the
options of reading. So an attempt with other files still finds the parts of unchanged ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import xxhash

from millrace.prepare.functions import source_digest
from millrace.prepare.parts import part_folder, read_done
from millrace.prepare.spill import file_hash
from millrace.prepare.table.options import READING, TableOptions
from millrace.prepare.table.read.chunks import BAD_TIME, NO_KEY
from millrace.prepare.table.read.part import PartDone, PartTask
from millrace.prepare.table.read.sources import Survey
from millrace.prepare.table.read.table_file import TableSource


def part_tasks(folder: Path, options: TableOptions, survey: Survey) -> list[PartTask]:
    """The parts of all sources, in their order."""
    schema = survey.schema
    how = {
        "options": {name: getattr(options, name) for name in (*READING, "time_format")},
        "transform": options.transform and source_digest(options.transform, "--transform"),
        "schema": msgspec.structs.replace(schema, role=msgspec.structs.replace(schema.role, known_future=())),
    }
    tasks = []
    for number, pieces in enumerate(survey.parts):
        sources = tuple(survey.sources[piece.source] for piece in pieces)
        groups = tuple(piece.groups for piece in pieces)
        tasks.append(PartTask(number, _key(how, sources, groups), groups, sources, options, schema, str(folder)))
    return tasks


def _key(how: Mapping[str, object], sources: Sequence[TableSource], groups: Sequence[tuple[int, ...]]) -> int:
    """What a part is made of, as one number that fits in an int64."""
    # Without its location, which may hold bytes that are no text. The path shows it too.
    files = [msgspec.structs.replace(one, file=msgspec.structs.replace(one.file, location="")) for one in sources]
    return xxhash.xxh3_64_intdigest(msgspec.json.encode((how, list(zip(files, groups, strict=True))))) >> 1


def finished_part(task: PartTask) -> PartDone | None:
    """The part of an earlier attempt; None where there is none, it is damaged, or it skipped rows that must now stop."""
    done = read_done(task.folder, task.key, PartDone)
    if done is None or done.key != task.key:
        return None
    if task.options.on_error == "stop" and (NO_KEY in done.dropped or BAD_TIME in done.dropped):
        return None
    folder = part_folder(task.folder, task.key)
    is_whole = all(file_hash(folder / name, xxhash.xxh3_128) == digest for name, digest in done.digests.items())
    return done if is_whole else None
