"""Decides which records are in which shard, from the parts in their order, and writes one shard.

Shards end where the next record would pass ``--shard-bytes``: a rule of the records alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from millrace.prepare.parts import part_folder
from millrace.prepare.records.read.part import PartDone
from millrace.prepare.records.shards.splits import SPLITS, Splits
from millrace.prepare.runs import copy_runs, offsets_of
from millrace.prepare.spill import map_array
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column, Layout
from millrace.store.pending import record_bytes
from millrace.store.shard import ShardEntry, ShardWriter
from millrace.store.snapshot import Base

STEP_BYTES = 16 << 20  # of records that are copied at once
Range = tuple[int, str, int, int]  # number and key of a part, first and last record of it
SPLIT_FOLDER = "splits"


class ShardTask(msgspec.Struct, frozen=True):
    """Records [first, last) of some parts, those of one split."""

    split: str
    number: int
    ranges: tuple[Range, ...]
    folder: str
    columns: dict[str, Column]
    has_codes: bool  # whether some records of these ranges are in other splits

    @property
    def parts(self) -> set[int]:
        return {number for number, *_ in self.ranges}

    def __str__(self) -> str:
        return f"shard {self.split}-{self.number:05d} (parts {self.ranges[0][0]} to {self.ranges[-1][0]})"


class Cutter:
    """Cuts the records of a split into shards as they come."""

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes, self._filled = shard_bytes, 0
        self.shards: list[list[Range]] = []
        self.num_records = 0

    def add(self, part: PartDone, records: Int64s, sizes: Int64s) -> None:
        """Takes these records of a part, with the bytes of each."""
        self.num_records += len(records)
        ends = np.cumsum(sizes)
        at = 0
        while at < len(records):
            done = int(ends[at - 1]) if at else 0
            last = int(np.searchsorted(ends, done + self._shard_bytes - self._filled, side="right"))
            if last <= at:
                if self._filled:
                    self._filled = 0
                    self.shards.append([])
                    continue
                last = at + 1  # a record larger than a shard has one to itself
            if not self.shards:
                self.shards.append([])
            self.shards[-1].append((part.number, part.key, int(records[at]), int(records[last - 1]) + 1))
            self._filled += int(ends[last - 1]) - done
            at = last


def plan_shards(
    folder: Path,
    parts: Sequence[PartDone],
    columns: Mapping[str, Column],
    splits: Splits,
    shard_bytes: int,
    base: Base | None,
) -> tuple[list[ShardTask], dict[str, int]]:
    """The tasks of all shards, numbered after those of the store that is appended to; and records by split."""
    layout = Layout(columns)
    cutters = {split: Cutter(shard_bytes) for split in SPLITS}
    has_codes = False
    for part in parts:
        codes = splits.of(part)
        if codes is not None:
            has_codes = True
            (folder / SPLIT_FOLDER / f"{part.number:06d}.bin").write_bytes(codes.tobytes())
        offsets = {axis: part_offsets(folder, part.key, layout, axis) for axis in layout.axes}
        sizes = record_bytes(layout, offsets)
        for code, cutter in enumerate(cutters.values()):
            mine = np.flatnonzero(codes == code) if codes is not None else np.arange(0 if code else part.records)
            if len(mine):
                cutter.add(part, mine, sizes[mine])
    tasks = []
    for split, cutter in cutters.items():
        first = 0 if base is None else base.next_number(split)
        shards = [ranges for ranges in cutter.shards if ranges]
        tasks += [
            ShardTask(split, first + k, tuple(ranges), str(folder), dict(columns), has_codes)
            for k, ranges in enumerate(shards)
        ]
    return tasks, {split: cutter.num_records for split, cutter in cutters.items() if cutter.num_records}


def part_offsets(folder: str | Path, key: str, layout: Layout, axis: str) -> Int64s:
    name = next(file.name for file in layout.files if file.axis == axis and file.column is None)
    return map_array(part_folder(folder, key) / name, "<i8")


def write_shard(task: ShardTask) -> ShardEntry:
    """Copies the records of one shard out of the parts."""
    layout = Layout(task.columns)
    code = SPLITS.index(task.split)
    with ShardWriter(Path(task.folder) / "shards", task.split, task.number, task.columns) as writer:
        for number, key, first, last in task.ranges:
            offsets = {axis: part_offsets(task.folder, key, layout, axis) for axis in layout.axes}
            arrays = _part_arrays(task.folder, key, layout)
            ends = np.cumsum(record_bytes(layout, {axis: array[first : last + 1] for axis, array in offsets.items()}))
            is_mine = np.ones(last - first, bool)
            if task.has_codes:
                codes = map_array(Path(task.folder) / SPLIT_FOLDER / f"{number:06d}.bin", np.uint8)
                is_mine = codes[first:last] == code
            at = 0
            while at < last - first:
                done = int(ends[at - 1]) if at else 0
                stop = max(at + 1, int(np.searchsorted(ends, done + STEP_BYTES, side="right")))
                edges = np.flatnonzero(np.diff(is_mine[at:stop], prepend=False, append=False)).reshape(-1, 2)
                if len(edges):
                    writer.write(*_taken(layout, arrays, offsets, first + at + edges))
                at = stop
        return writer.finish()


def _part_arrays(folder: str, key: str, layout: Layout) -> dict[str, Array]:
    found = {}
    for file in layout.files:
        if file.column is not None:
            found[file.column] = map_array(part_folder(folder, key) / file.name, file.dtype).reshape(-1, *file.tail)
    return found


def _taken(
    layout: Layout, arrays: Mapping[str, Array], offsets: Mapping[str, Int64s], edges: Int64s
) -> tuple[dict[str, Array], dict[str, Int64s]]:
    """Runs of records: a view where there is one run."""
    columns = {}
    for name, array in arrays.items():
        axis = layout.column_axis(name)
        inside = edges if axis is None else offsets[axis][edges]
        if len(edges) == 1:
            columns[name] = array[inside[0, 0] : inside[0, 1]]
        else:
            columns[name] = copy_runs(array, np.ascontiguousarray(inside))
    local = {}
    for axis, array in offsets.items():
        lengths = np.concatenate([np.diff(array[first : last + 1]) for first, last in edges.tolist()])
        local[axis] = offsets_of(lengths)
    return columns, local
