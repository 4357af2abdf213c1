"""Parquet files that are compressed as a whole, unpacked beside the parts: they are read from their end, which a stream has not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from millrace.identity import digest
from millrace.prepare.files import check_unchanged
from millrace.prepare.run import check_room
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.read.streams import BUFFER, open_source
from millrace.store import platform

FOLDER = "unpacked"


class UnpackTask(msgspec.Struct, frozen=True):
    """One file to unpack to ``path``."""

    source: Source
    path: str
    options: ReadOptions

    def __str__(self) -> str:
        return f"unpacking {self.source.path!r}"


def unpack_tasks(sources: Sequence[Source], options: ReadOptions, folder: Path) -> list[UnpackTask]:
    """What has to be unpacked, and is not yet; the disk must have room for it."""
    tasks = [
        UnpackTask(source, path, options)
        for source, path in _packed(sources, folder)
        if not os.path.exists(path)
    ]  # fmt: skip
    if tasks:
        with platform.writing(folder):
            platform.make_dir(folder / FOLDER)
        # Parquet is compressed inside: unpacked it is hardly ever smaller.
        total = sum(task.source.size for task in tasks)
        check_room(folder, total, total * 9 // 10)
    return tasks


def unpack(task: UnpackTask) -> int:
    """Unpacks one file block by block, within the cap on what it may expand to; returns its size."""
    check_unchanged(task.source)
    with platform.writing(task.path):
        platform.remove(f"{task.path}.tmp")
        with open_source(task.source, task.options) as packed, open(f"{task.path}.tmp", "wb") as file:
            shutil.copyfileobj(packed, file, BUFFER)
            file.flush()
            os.fsync(file.fileno())
        check_unchanged(task.source)
        platform.rename(f"{task.path}.tmp", task.path)
    return os.path.getsize(task.path)


def unpacked(sources: Sequence[Source], folder: Path) -> list[Source]:
    """The sources, with the places where packed ones lie unpacked."""
    places = {source.path: path for source, path in _packed(sources, folder)}
    return [msgspec.structs.replace(source, unpacked=places.get(source.path)) for source in sources]


def _packed(sources: Sequence[Source], folder: Path) -> list[tuple[Source, str]]:
    return [
        (
            source,
            str(
                folder / FOLDER / f"{digest(source.path, str(source.size), str(source.mtime_ns), source.ends)}.parquet"
            ),
        )
        for source in sources
        if source.format == "parquet" and source.compression is not None
    ]
