"""Makes one part, in a worker: reads slices of sources, converts their records, and keeps them aside as the store has them."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import check_unchanged
from millrace.prepare.functions import load_function
from millrace.prepare.inflate import max_bytes
from millrace.prepare.parts import read_done, write_part
from millrace.prepare.quarantine import QUARANTINE, Skips
from millrace.prepare.records.formats.format import Chunk, Format, named
from millrace.prepare.records.formats.known import format_of
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.records.read.hashes import HASHES, record_hashes
from millrace.prepare.records.read.schema import AxisMismatch, Schema, converted
from millrace.prepare.records.read.sources import Slice
from millrace.prepare.spill import Spill
from millrace.ragged import Array
from millrace.store import platform
from millrace.store.layout import Column, Layout

UNREADABLE, FILTERED = "unreadable", "filtered"
NAME = "the records given"  # of what Python gave


class PartTask(msgspec.Struct, frozen=True):
    """What a worker needs to make a part."""

    number: int
    key: str
    slices: tuple[Slice, ...]
    schema: Schema
    detail: bytes
    options: RecordOptions
    folder: str

    def __str__(self) -> str:
        first = self.slices[0]
        return f"part {self.number} ({first.source.path!r} from {first.start}, {len(self.slices)} ranges)"


class PartDone(msgspec.Struct, frozen=True):
    """What a finished part holds."""

    number: int
    key: str
    records: int
    rows: dict[str, int]  # by axis
    bytes: int
    dropped: dict[str, int]
    sizes: dict[str, int]
    hashes: dict[str, str]
    split: str | None = None
    boot: str | None = None
    skips: Skips = Skips()


def prepare_part(task: PartTask) -> PartDone:
    """Makes one part, unless it is there."""
    if not task.slices and read_done(task.folder, task.key, PartDone) is None:
        raise SourceError(f"part {task.number} was damaged after it was written; run it again", source=NAME)
    return write_part(
        task.folder, task.key, PartDone, lambda folder: PartMaker(task, folder).run(), durable=False
    )  # fmt: skip


class PartFiles:
    """The files of a part: those of a shard with the same columns, and a hash for each record."""

    def __init__(self, folder: Path, columns: Mapping[str, Column]) -> None:
        self._folder, self._columns, self._layout = folder, columns, Layout(columns)
        self._spills: dict[str, Spill] = {}
        self._rows = dict.fromkeys(self._layout.axes, 0)
        self.num_records = 0
        for file in self._layout.files:
            spill = self.spill(file.name)
            if file.column is None:
                spill.write(np.zeros(1, "<i8"))
        self.spill(HASHES)

    def spill(self, name: str) -> Spill:
        if name not in self._spills:
            self._spills[name] = Spill(self._folder / name, durable=False)
        return self._spills[name]

    def add(self, chunk: Chunk, key: str | None) -> None:
        for file in self._layout.files:
            if file.column is not None:
                self.spill(file.name).write(np.ascontiguousarray(chunk.columns[file.column]))
            else:
                axis = str(file.axis)
                self.spill(file.name).write(chunk.offsets[axis][1:] + self._rows[axis])
                self._rows[axis] += int(chunk.offsets[axis][-1])
        self.spill(HASHES).write_bytes(record_hashes(chunk, self._columns, key))
        self.num_records += chunk.num_records

    def finish(
        self, number: int, key: str, dropped: Mapping[str, int], split: str | None, first_skipped: str
    ) -> PartDone:
        sizes = {name: spill.finish() for name, spill in self._spills.items()}
        hashes = {name: spill.hash for name, spill in self._spills.items()}
        gone = {reason: count for reason, count in sorted(dropped.items()) if count}
        skips = Skips(gone.get(UNREADABLE, 0), self.num_records + sum(gone.values()), first_skipped)
        return PartDone(
            number, key, self.num_records, self._rows, sum(sizes.values()), gone, sizes, hashes, split,
            platform.boot_id(), skips,
        )  # fmt: skip

    def close(self) -> None:
        for spill in self._spills.values():
            spill.close()


class PartMaker:
    """Makes one part in ``folder``; also the ``Reading`` that formats ask."""

    def __init__(self, task: PartTask, folder: Path) -> None:
        self._task, self.options, self.detail = task, task.options, task.detail
        self.wanted: Mapping[str, Column] = task.schema.wanted
        self._files = PartFiles(folder, task.schema.columns)
        self._dropped: Counter[str] = Counter()
        self._first_skipped = ""
        self._filter = load_function(task.options.filter, "--filter")
        self._key = key_column(task.options, task.schema.columns)

    def run(self) -> PartDone:
        with contextlib.closing(self._files):
            for piece in self._task.slices:
                self._read(piece)
            split = self._task.slices[0].source.split
            return self._files.finish(self._task.number, self._task.key, self._dropped, split, self._first_skipped)

    def _read(self, piece: Slice) -> None:
        source, format_ = piece.source, format_of(piece.source.format)
        most, num_bytes = max_bytes(source, self.options.max_ratio), 0
        if not source.members:
            check_unchanged(source)

        def refuse(place: str, problem: str) -> None:
            self.refuse(source.path, place, problem)

        for chunk in self._chunks(format_, piece):
            num_bytes += chunk.num_bytes
            if num_bytes > most:
                raise SourceError(
                    f"{source.path!r} expands to more than {most:,} bytes; if that is right, raise --max-ratio",
                    source=source.path,
                )
            try:
                stored = converted(chunk, self._task.schema, refuse) if chunk.num_records else []
            except AxisMismatch as error:
                raise SourceError(f"{source.path!r}, {error}", source=source.path) from error
            for some in stored:
                kept = self._filtered(some, source.path)
                self._files.add(kept, self._key)
            alive(records=chunk.num_records, bytes=0)

    def _chunks(self, format_: Format, piece: Slice) -> Iterator[Chunk]:
        with named(piece.source, format_.name):
            yield from format_.chunks(piece.source, piece.start, piece.stop, self)

    def refuse(self, source: str, place: str, problem: str) -> None:
        """Stops at a record that cannot be used, or lists it."""
        where = f"{source!r}, {place}" if place else repr(source)
        if self.options.on_error == "stop":
            raise SourceError(f"{where}: {problem}; fix it, or go on with --on-error skip", source=source)
        self._dropped[UNREADABLE] += 1
        self._first_skipped = self._first_skipped or f"{where}: {problem}"
        self._files.spill(QUARANTINE).write_bytes(quarantine_line(source, place, problem))

    def _filtered(self, chunk: Chunk, source: str) -> Chunk:
        """The records that the user's function keeps."""
        if self._filter is None:
            return chunk
        columns = self._task.schema.columns
        kept = np.ones(chunk.num_records, bool)
        for k in range(chunk.num_records):
            try:
                kept[k] = bool(self._filter(as_record(chunk.part(k, k + 1, columns), columns)))
            except (Exception, SystemExit) as error:
                problem = f"--filter {self.options.filter!r} raised {type(error).__name__} on {source!r}, {chunk.where(k)}: {error}"
                raise SourceError(problem, source=source) from error
            alive()
        self._dropped[FILTERED] += int((~kept).sum())
        return chunk.take(kept, columns)


def quarantine_line(source: str, place: str, problem: str) -> bytes:
    return json.dumps({"source": source, "place": place, "reason": problem}).encode() + b"\n"


def as_record(chunk: Chunk, columns: Mapping[str, Column]) -> dict[str, Any]:
    """A chunk of one record as a user sees it: arrays of rows, one item for each record column, texts."""

    def value(name: str, array: Array) -> Any:
        if columns[name].dtype == "string":
            return array.tobytes().decode()
        return array[0] if columns[name].axis is None else array

    return {name: value(name, array) for name, array in chunk.columns.items()}


def key_column(options: RecordOptions, columns: Mapping[str, Column]) -> str | None:
    """The column that records are known by."""
    return options.key if options.key is not None else "key" if "key" in columns else None
