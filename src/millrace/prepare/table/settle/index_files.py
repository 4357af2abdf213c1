"""The index of all parts on disk. Each worker opens it once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from millrace.prepare.spill import mapped
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.index import Block, EntityRows, Index, Slice, index_dtype
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
        self.runs = mapped(path / "runs.bin", "u1").view(index_dtype(schema.time_dtype))
        self.offsets = mapped(path / "offsets.bin", "int64")
        body = msgspec.json.decode((path / "names.json").read_bytes())
        self.names: list[str] = body["names"]
        self.categories = {name: tuple(values) for name, values in body["categories"].items()}
        self._rows = EntityRows(folder, schema, self.categories)
        self.rows = np.add.reduceat(self.runs["rows"], self.offsets[:-1])  # of each entity, as they were read

    def runs_of(self, entity: int) -> Array:
        return self.runs[self.offsets[entity] : self.offsets[entity + 1]]

    def slices(self, entity: int) -> Iterator[Slice]:
        return self._rows.slices(self.runs_of(entity))

    def block(self, entities: Int64s) -> Block:
        """All rows of some entities, each of which fits in one slice."""
        starts, counts = self.offsets[entities], self.offsets[entities + 1] - self.offsets[entities]
        return self._rows.block(self.runs[concatenated_ranges(starts, counts)], counts)


@lru_cache(maxsize=1)
def _open_index(folder: str, encoded: bytes, version: tuple[int, int]) -> IndexReader:
    return IndexReader(folder, msgspec.json.decode(encoded, type=Schema))


def open_index(folder: str, schema: Schema) -> IndexReader:
    """The index of a folder, opened once by each process until another is saved there."""
    status = os.stat(Path(folder) / "index" / "names.json")
    return _open_index(folder, msgspec.json.encode(schema), (status.st_ino, status.st_mtime_ns))


def close_index() -> None:
    """Closes the memory maps of the parts, which keep their disk space in use."""
    _open_index.cache_clear()
