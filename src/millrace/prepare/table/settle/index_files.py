"""The index of all parts on disk, which each worker opens once; and the rows of entities in order of time.

Rows of one entity from several parts are merged by time. Rows of equal time keep the order of the sources, in one slice.
A slice depends on the parts alone, never on the worker that reads it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.prepare.parts import part_folder
from millrace.prepare.spill import map_array
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.index import Block, Index, Slice, index_dtype, local_codes, part_names, slice_rows
from millrace.ragged import Array, Int64s, concatenated_ranges
from millrace.store import platform


def save_index(folder: Path, index: Index) -> None:
    """Saves the index for workers. It need not be durable: every run saves its own."""
    names = msgspec.json.encode({"names": index.names, "categories": index.categories})
    offsets = index.offsets.astype("<i8").tobytes()
    with platform.writing(folder):
        platform.make_dir(folder / "index")
        for name, data in (("runs.bin", index.runs.tobytes()), ("offsets.bin", offsets), ("names.json", names)):
            if (folder / "index" / name).is_dir():
                platform.remove(folder / "index" / name)
            platform.write_file(folder / "index" / name, data, mode=0o644, durable=False)


class IndexReader:
    """The index in a worker, and the rows of its entities."""

    def __init__(self, folder: str, schema: Schema) -> None:
        path = Path(folder) / "index"
        self.runs = map_array(path / "runs.bin", "u1").view(index_dtype(schema.time_dtype))
        self.offsets = map_array(path / "offsets.bin", "int64")
        body = msgspec.json.decode((path / "names.json").read_bytes())
        self.names: list[str] = body["names"]
        self.categories = {name: tuple(values) for name, values in body["categories"].items()}
        self._folder, self._schema = folder, schema
        self._room = slice_rows(len(schema.role.features))
        self._read_part = lru_cache(maxsize=512)(self._part)
        self.rows = np.add.reduceat(self.runs["rows"], self.offsets[:-1])  # of each entity, as they were read

    def runs_of(self, entity: int) -> Array:
        return self.runs[self.offsets[entity] : self.offsets[entity + 1]]

    def _part(self, number: int) -> tuple[Array, Array, Array, list[Array]]:
        """Times, values and categories of a part, and the store's codes for its own."""
        path, role = part_folder(self._folder, number), self._schema.role
        time = map_array(path / "time.bin", self._schema.time_dtype)
        values = map_array(path / "values.bin", self._schema.raw_dtype).reshape(len(time), len(role.features))
        if not role.categorical:
            return time, values, np.zeros((len(time), 0), np.int32), []
        names = part_names(self._folder, number)
        codes = [local_codes(names.categories[name], self.categories[name]) for name in role.categorical]
        return time, values, map_array(path / "categorical.bin", "int32").reshape(len(time), len(codes)), codes

    def slices(self, entity: int) -> Iterator[Slice]:
        """The rows of one entity."""
        runs = self.runs_of(entity)
        if int(runs["rows"].sum()) <= self._room:
            yield self._slice(runs, [(0, int(run["rows"])) for run in runs])
            return
        splitters = self._splitters(runs)
        edges = np.array(
            [[0, *np.searchsorted(self._times(run), splitters, side="left").tolist(), int(run["rows"])] for run in runs]
        )
        for k in range(edges.shape[1] - 1):
            if (edges[:, k + 1] > edges[:, k]).any():
                yield self._slice(runs, list(zip(edges[:, k].tolist(), edges[:, k + 1].tolist(), strict=True)))

    def _times(self, run: Any) -> Array:
        start = int(run["start"])
        return self._read_part(int(run["part"]))[0][start : start + int(run["rows"])]

    def _splitters(self, runs: Array) -> Array:
        """Times that cut the entity into slices of about the same size."""
        step = max(1, self._room // (4 * len(runs)))  # each run is off by less than one step
        samples = np.sort(np.concatenate([self._times(run)[step - 1 :: step] for run in runs]))
        return np.unique(samples[:: max(1, self._room // (2 * step))])

    def _slice(self, runs: Array, bounds: list[tuple[int, int]]) -> Slice:
        pieces = [(run, first, last) for run, (first, last) in zip(runs, bounds, strict=True) if last > first]
        starts = [int(run["start"]) for run, _, _ in pieces]
        places = [(int(run["part"]), k + first, k + last) for k, (run, first, last) in zip(starts, pieces, strict=True)]
        rows = Slice(*self._read(places), any(bool(run["gaps"]) for run, _, _ in pieces))
        is_sorted = len(pieces) == 1 or not (rows.time[1:] < rows.time[:-1]).any()
        return rows if is_sorted else rows.take(np.argsort(rows.time, kind="stable"))

    def _read(self, places: list[tuple[int, int, int]]) -> tuple[Array, Array, Array]:
        """Times, values and categories at some places, one after the other."""
        pieces = [self._piece(*place) for place in places]
        if len(pieces) == 1:
            return pieces[0]
        time, values, categorical = (np.concatenate(parts) for parts in zip(*pieces, strict=True))
        return time, values, categorical

    def _piece(self, part: int, start: int, stop: int) -> tuple[Array, Array, Array]:
        time, values, categorical, codes = self._read_part(part)
        labels = categorical[start:stop]
        if codes:
            labels = np.stack([known[labels[:, k]] for k, known in enumerate(codes)], axis=1)
        return time[start:stop], values[start:stop], labels

    def block(self, entities: Int64s) -> Block:
        """All rows of some entities, each of which fits in one slice; neighbouring rows are read together."""
        starts, counts = self.offsets[entities], self.offsets[entities + 1] - self.offsets[entities]
        runs = self.runs[concatenated_ranges(starts, counts)]
        part, start, stop = runs["part"], runs["start"], runs["start"] + runs["rows"]
        firsts = np.flatnonzero(np.concatenate(([True], (part[1:] != part[:-1]) | (start[1:] != stop[:-1]))))
        lasts = np.append(firsts[1:], len(runs)) - 1
        places = zip(part[firsts].tolist(), start[firsts].tolist(), stop[lasts].tolist(), strict=True)
        time, values, categorical = self._read(list(places))
        edges = np.cumsum(counts) - counts
        gaps = np.logical_or.reduceat(runs["gaps"] != 0, edges)
        rows = np.add.reduceat(runs["rows"], edges)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(rows)))
        falls = time[1:] < time[:-1]
        falls[offsets[1:-1] - 1] = False
        if falls.any():
            order = np.lexsort((time, np.repeat(np.arange(len(rows)), rows)))
            time, values, categorical = time[order], values[order], categorical[order]
        return Block(time, values, categorical, offsets, gaps)


@lru_cache(maxsize=1)
def _open_index(folder: str, encoded: bytes, version: tuple[int, int]) -> IndexReader:
    return IndexReader(folder, msgspec.json.decode(encoded, type=Schema))


def open_index(folder: str, schema: Schema) -> IndexReader:
    """The index of a folder, opened once by each process until another is saved there."""
    with open(
        Path(folder) / "index" / "names.json"
    ) as file:  # opened: a shared file system may answer stat from memory
        status = os.fstat(file.fileno())
    return _open_index(folder, msgspec.json.encode(schema), (status.st_ino, status.st_mtime_ns))


def close_index() -> None:
    """Closes the memory maps of the parts, which keep their disk space in use."""
    _open_index.cache_clear()
