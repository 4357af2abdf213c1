"""The index of all parts: the runs of every entity; slices and blocks of rows, which have bounded size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.parts import part_folder
from millrace.prepare.table.read.part import PartDone, PartNames, run_dtype
from millrace.prepare.table.read.schema import Role, Schema
from millrace.ragged import Array, Int64s

SLICE_BYTES = 16 << 20  # of float64 values worked on at once
BLOCK_ROWS = 1 << 15  # rows of small entities worked on at once, about: 2 MiB of 16 float32 features
MAX_CATEGORIES = 100_000


class Index(NamedTuple):
    """All runs by entity, then by source; ``offsets`` are those of each entity. Entities are numbered by name."""

    names: list[str]
    categories: dict[str, tuple[str, ...]]
    static: Array  # (entities, static columns) as numbers, codes of categories behind them
    runs: Array
    offsets: Int64s
    parts: tuple[int, ...]  # their keys, in the order of the sources

    @property
    def rows(self) -> Int64s:
        """Rows of each entity as they were read."""
        return np.add.reduceat(self.runs["rows"], self.offsets[:-1]) if len(self.runs) else np.zeros(0, np.int64)


def index_dtype(time_dtype: str) -> np.dtype[Any]:
    time = np.dtype(time_dtype).newbyteorder("<").str
    counts = [(name, "<i8") for name in ("entity", "part", "start", "rows", "gaps")]
    return np.dtype([*counts, ("first", time), ("last", time)])


def build_index(
    folder: Path, parts: Sequence[PartDone], schema: Schema, known: Mapping[str, Sequence[str]] | None = None
) -> Index:
    """The runs of all parts; entities are numbered in the order of their names' bytes.

    ``known`` are the categories of a store that is appended to: they keep their codes, new ones follow.
    """
    read = [part_names(folder, part.key) for part in parts]
    names = sorted({name for part in read for name in part.entities}, key=str.encode)
    numbers = {name: k for k, name in enumerate(names)}
    categories = _categories(read, schema.role, known or {})
    runs = [_runs(folder, part, found, numbers, schema.time_dtype) for part, found in zip(parts, read, strict=True)]
    every = np.concatenate(runs) if runs else np.zeros(0, index_dtype(schema.time_dtype))
    every = every[np.argsort(every["entity"], kind="stable")]
    used = np.unique(every["entity"])  # an entity all of whose rows were left out has none
    every["entity"] = np.searchsorted(used, every["entity"])
    offsets = np.searchsorted(every["entity"], np.arange(len(used) + 1))
    static = _static(read, schema.role, numbers, categories)[used]
    return Index([names[k] for k in used], categories, static, every, offsets, tuple(part.key for part in parts))


def part_names(folder: str | Path, number: int) -> PartNames:
    return msgspec.json.decode((part_folder(folder, number) / "names.json").read_bytes(), type=PartNames)


def _runs(folder: Path, part: PartDone, found: PartNames, numbers: dict[str, int], time_dtype: str) -> Array:
    raw = np.fromfile(part_folder(folder, part.key) / "runs.bin", run_dtype(time_dtype))
    runs = np.empty(len(raw), index_dtype(time_dtype))
    runs["entity"] = np.array([numbers[name] for name in found.entities], np.int64)[raw["entity"]]
    runs["part"] = part.key
    runs["start"] = np.cumsum(raw["rows"]) - raw["rows"]
    for name in ("rows", "gaps", "first", "last"):
        runs[name] = raw[name]
    return runs


def _categories(
    read: Sequence[PartNames], role: Role, known: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """The values of each category over all parts, by their bytes; code 0 is missing, k + 1 the k-th of them."""
    found = {}
    for column in (*role.categorical, *role.static_categorical):
        before = known.get(column, ())
        new = {value for part in read for value in part.categories[column]}.difference(before)
        values = [*before, *sorted(new, key=str.encode)]
        if len(values) > MAX_CATEGORIES:
            raise ConfigError(
                f"column {column!r} has {len(values):,} different values; a category may have {MAX_CATEGORIES:,}: "
                "leave it out, or group them with --transform"
            )
        found[column] = tuple(values)
    return found


def local_codes(values: Sequence[str], known: Sequence[str]) -> Array:
    """From a part's codes to those of the store; the last entry, for -1, is 0."""
    places = {value: k + 1 for k, value in enumerate(known)}
    return np.array([places[value] for value in values] + [0], np.int32)


def _static(
    read: Sequence[PartNames], role: Role, numbers: dict[str, int], categories: dict[str, tuple[str, ...]]
) -> Array:
    columns = (*role.static, *role.static_categorical)
    found = np.full((len(numbers), len(columns)), np.nan)
    for part in read:
        codes = [local_codes(part.categories[name], categories[name]) for name in role.static_categorical]
        for name, row in zip(part.entities, part.static, strict=True):
            for k, value in enumerate(row):
                if value is None:
                    continue
                plain = value if k < len(role.static) else float(codes[k - len(role.static)][int(value)])
                known = found[numbers[name], k]
                if known == known and known != plain:
                    raise SourceError(
                        f"static column {columns[k]!r} has more than one value for entity {name!r}; "
                        "give it with --features or --categorical"
                    )
                found[numbers[name], k] = plain
    return found


def slice_rows(features: int) -> int:
    """Rows in a slice, by the width of a row."""
    return min(max(SLICE_BYTES // (8 * features), 1024), 1 << 17)


class Slice(NamedTuple):
    """Some of an entity's rows in order of time."""

    time: Array
    values: Array
    categorical: Array
    has_gaps: bool

    def take(self, rows: Array) -> Slice:
        """Some of the rows."""
        return Slice(self.time[rows], self.values[rows], self.categorical[rows], self.has_gaps)


class Block(NamedTuple):
    """All rows of some entities, those of each in order of time."""

    time: Array
    values: Array
    categorical: Array
    offsets: Int64s
    gaps: Array  # for each entity, whether values are missing

    def slice(self, first: int, last: int) -> Slice:
        """The rows of some of the entities, one after the other."""
        rows = slice(self.offsets[first], self.offsets[last])
        return Slice(self.time[rows], self.values[rows], self.categorical[rows], bool(self.gaps[first:last].any()))


def block_bounds(rows: Int64s, features: int, is_alone: Array | None = None) -> list[tuple[int, int]]:
    """Entities [first, last) of each block, by the rows each has; an entity larger than a slice is a block of its own."""
    room = slice_rows(features)
    numbers = (np.cumsum(rows) - rows) // min(BLOCK_ROWS, room)
    is_single = rows > room if is_alone is None else is_alone | (rows > room)
    is_edge = (np.diff(numbers) > 0) | is_single[1:] | is_single[:-1]
    return list(pairwise([0, *(np.flatnonzero(is_edge) + 1).tolist(), len(rows)]))
