"""Pass 2, in workers: the rows of some entities filled, scaled, cast and written as one shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.spill import read_result, write_result
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.clean import Cleaner, calendar
from millrace.prepare.table.settle.index import Block, Slice, block_bounds
from millrace.prepare.table.settle.index_files import IndexReader, open_index
from millrace.prepare.table.write.fill import Filler, fill_block
from millrace.prepare.table.write.old_rows import OldRows
from millrace.ragged import Array, Int64s
from millrace.scaling.scaler import Scaling
from millrace.store.layout import Column, Layout, bfloat16_bits
from millrace.store.shard import ShardEntry, ShardWriter, shard_name

MIN_SHARD, SHARDS = 8 << 20, 32  # about this many shards, none smaller than this or larger than the option


class Entity(msgspec.Struct, frozen=True):
    """One entity of a shard: its number in the index, and what its record columns hold."""

    number: int
    name: str
    rows: int
    cuts: tuple[int, ...]
    static: tuple[float, ...] = ()
    static_categorical: tuple[int, ...] = ()
    scaling: bytes = b""  # float64 (2, features), where it has its own
    record: int = -1  # of the store that is appended to; number -1: it has no new rows


class ShardTask(msgspec.Struct, frozen=True):
    """A shard to write."""

    split: str
    number: int
    entities: tuple[Entity, ...]
    folder: str
    options: TableOptions
    schema: Schema
    scaling: dict[str, Any]
    columns: Mapping[str, Column]
    store: tuple[str, str] | None = None  # path and snapshot that records are copied from
    rescale: dict[str, Any] | None = None  # the scaling of that store, where this one is another

    def __str__(self) -> str:
        return f"shard {self.split}-{self.number:05d} ({self.entities[0].name!r} to {self.entities[-1].name!r})"


def layout_columns(options: TableOptions, schema: Schema) -> dict[str, Column]:
    """The columns of the store, rows first."""
    role = schema.role
    columns = {
        "values": Column(options.dtype, (len(role.features) + 2 * len(options.calendar),)),
        "time": Column(schema.time_dtype),
    }
    if options.freq is not None or any(options.policy(name)[0] == "mask" for name in role.features):
        columns["mask"] = Column("uint8", columns["values"].shape)
    if role.categorical:
        columns["categorical"] = Column("int32", (len(role.categorical),))
    columns["name"] = Column("string", per="record")
    if options.has_time_split:
        columns["cuts"] = Column("int64", (len(options.time_splits) - 1,), per="record")
    if role.static:
        columns["static"] = Column("float32", (len(role.static),), per="record")
    if role.static_categorical:
        columns["static_categorical"] = Column("int32", (len(role.static_categorical),), per="record")
    if options.per_entity:
        columns["scaling"] = Column("float64", (2, *columns["values"].shape), per="record")
    return columns


def cut_shards(rows: Int64s, row_bytes: int, limit: int) -> list[tuple[int, int]]:
    """Entities [first, last) of each shard: it ends before the entity that would pass the limit."""
    room = max(1, min(limit, max(MIN_SHARD, int(rows.sum()) * row_bytes // SHARDS)) // row_bytes)
    edges, filled = [0], 0
    for k, count in enumerate(rows.tolist()):
        if filled and filled + count > room:
            edges.append(k)
            filled = 0
        filled += count
    return [(first, last) for first, last in zip(edges, [*edges[1:], len(rows)], strict=True) if last > first]


def write_shard(task: ShardTask) -> ShardEntry:
    """Writes one shard, and beside it the counts of filled cells."""
    maker = ShardMaker(task)
    with ShardWriter(Path(task.folder) / "shards", task.split, task.number, task.columns) as writer:
        maker.write(writer)
        write_result(_filled_path(task), msgspec.json.encode([maker.filled.tolist(), maker.leading.tolist()]))
        return writer.finish()


def _filled_path(task: ShardTask) -> Path:
    return Path(task.folder) / "fit" / f"{shard_name(task.split, task.number)}.bin"


def has_counts(task: ShardTask, out: Path) -> bool:
    """Whether the counts of filled cells of a finished shard are there; without them it is written again."""
    path = _filled_path(task)
    if read_result(path) is not None:
        return True
    if (out / "shards" / shard_name(task.split, task.number)).exists():  # a killed append has moved it
        raise ConfigError(f"{path} is damaged; begin afresh with --restart")
    return False


def filled_cells(tasks: Sequence[ShardTask]) -> Int64s:
    """(2, features): cells that were filled in all shards, and those of them before the first observation."""
    counts = [msgspec.json.decode(read_result(_filled_path(task)) or b"") for task in tasks]
    return np.asarray(np.sum(counts, axis=0, dtype=np.int64))


class ShardMaker:
    """Writes the entities of one task; counts the cells it fills."""

    def __init__(self, task: ShardTask) -> None:
        self._task, self._options, self._schema = task, task.options, task.schema
        self._index: IndexReader = open_index(task.folder, task.schema)
        self._cleaner = Cleaner(task.options, task.schema)
        self._scaling = Scaling.from_manifest(task.scaling)
        self._axis = Layout(task.columns).primary
        features = task.schema.role.features
        self._width = len(features)
        self._policies = [task.options.policy(name) for name in features]
        self._interpolates = any(kind == "interpolate" for kind, _ in self._policies)
        self.filled, self.leading = np.zeros(self._width, np.int64), np.zeros(self._width, np.int64)
        self._old_rows = None if task.store is None else OldRows(task.store, task.rescale, task.options.dtype)

    def write(self, writer: ShardWriter) -> None:
        """Writes all entities of the shard; small ones that need no cleaning many at a time."""
        entities = self._task.entities
        is_alone = np.array([entity.record >= 0 or self._options.freq is not None for entity in entities])
        numbers = np.array([entity.number for entity in entities])
        for first, last in block_bounds(np.where(is_alone, 0, self._index.rows[numbers]), self._width, is_alone):
            if last - first == 1:
                self._write_one(writer, entities[first])
            else:
                self._write_block(writer, entities[first:last], self._index.block(numbers[first:last]))

    def _write_one(self, writer: ShardWriter, entity: Entity) -> None:
        for rows in self._rows(entity):
            writer.write_rows(rows)
        writer.end_record(*self._records([entity]))

    def _write_block(self, writer: ShardWriter, entities: Sequence[Entity], block: Block) -> None:
        is_plain = self._cleaner.plain(block)
        if self._interpolates:
            is_plain &= ~block.gaps
        edges = [0, *(np.flatnonzero(is_plain[1:] != is_plain[:-1]) + 1).tolist(), len(entities)]
        for first, last in pairwise(edges):
            if not is_plain[first]:
                for entity in entities[first:last]:
                    self._write_one(writer, entity)
                continue
            offsets = block.offsets[first : last + 1] - block.offsets[first]
            part, mask = block.slice(first, last), None
            if part.has_gaps:
                part = part._replace(values=part.values.astype(np.float64))
                centers = np.array([self._scale_of(entity)[0] for entity in self._scaled_apart(entities[first:last])])
                mask, filled, leading = fill_block(self._policies, part.values, offsets, centers)
                self.filled += filled
                self.leading += leading
            rows = self._columns(part, mask, entities[first:last], offsets)
            columns, names = self._records(entities[first:last])
            writer.write({**rows, **columns}, {self._axis: offsets, **names})

    def _scaled_apart(self, entities: Sequence[Entity]) -> Sequence[Entity]:
        """The entities, or the first of them where one scaling is for all."""
        return entities if entities[0].scaling else entities[:1]

    def _rows(self, entity: Entity) -> Iterator[dict[str, Array]]:
        """The row columns of an entity, slice by slice: its rows in the store, then the new ones."""
        if entity.record >= 0 and self._old_rows is not None:
            yield from self._old_rows.rows(entity.record, self._scaling)
        if entity.number >= 0:
            yield from self._new_rows(entity)

    def _new_rows(self, entity: Entity) -> Iterator[dict[str, Array]]:
        center, scale = self._scale_of(entity)
        has_gaps = self._options.freq is not None or bool(self._index.runs_of(entity.number)["gaps"].any())
        filler = Filler(self._policies, center, entity.cuts) if has_gaps else None
        if filler is not None and entity.record >= 0 and self._old_rows is not None:
            filler.carry(*self._old_rows.end(entity.record, center, scale))
        if filler is not None and self._interpolates:
            filler.look_ahead(self._slices(entity))
        for number, part in enumerate(self._slices(entity)):
            mask = None
            if filler is not None and part.has_gaps:
                part = part._replace(values=part.values.astype(np.float64))
                mask = filler.fill(number, part, part.values)
            elif filler is not None:
                filler.skip(part, part.values)
            yield self._columns(part, mask, [entity], np.array([0, len(part.time)]))
        if filler is not None:
            self.filled += filler.filled
            self.leading += filler.leading

    def _scale_of(self, entity: Entity) -> tuple[Array, Array]:
        """Center and scale of an entity."""
        if not entity.scaling:
            return self._scaling.center, self._scaling.scale
        center, scale = np.frombuffer(entity.scaling, np.float64).reshape(2, -1)
        return center, scale

    def _slices(self, entity: Entity) -> Iterable[Slice]:
        after = self._old_rows.last_time(entity.record) if self._old_rows is not None and entity.record >= 0 else None
        return self._cleaner.rows(entity.name, self._index.slices(entity.number), after)

    def _columns(
        self, part: Slice, mask: Array | None, entities: Sequence[Entity], offsets: Int64s
    ) -> dict[str, Array]:
        """The row columns of a slice; ``offsets`` are those of the entities in it."""
        columns = {
            "values": self._scaled(part.values, part.time, entities, offsets),
            "time": np.ascontiguousarray(part.time, part.time.dtype.newbyteorder("<")),
        }
        if "mask" in self._task.columns:
            columns["mask"] = np.ones(columns["values"].shape, np.uint8)
            if mask is not None:
                columns["mask"][:, : self._width] = mask
        if "categorical" in self._task.columns:
            columns["categorical"] = np.ascontiguousarray(part.categorical, "<i4")
        return columns

    def _scaled(self, values: Array, time: Array, entities: Sequence[Entity], offsets: Int64s) -> Array:
        """Values scaled in float64 and cast, followed by the calendar."""
        width = self._width
        is_bits = self._options.dtype == "bfloat16"
        shape = (len(values), *self._task.columns["values"].shape)
        out = np.empty(shape, "<f4" if is_bits else np.dtype(self._options.dtype))
        apart = self._scaled_apart(entities)
        edges = offsets if len(apart) == len(entities) else offsets[[0, -1]]
        for entity, (first, last) in zip(apart, pairwise(edges.tolist()), strict=True):
            center, scale = self._scale_of(entity)
            self._scaling.scale_into(values[first:last], out[first:last, :width], center[:width], scale[:width])
        if self._options.calendar:
            assert self._schema.time_unit is not None
            at = np.ascontiguousarray(time)
            out[:, width:] = calendar(at, self._schema.time_unit, self._options.calendar, self._schema.time_zone)
        return bfloat16_bits(out) if is_bits else out

    def _records(self, entities: Sequence[Entity]) -> tuple[dict[str, Array], dict[str, Int64s]]:
        """The record columns of entities, and the offsets of their names."""
        names = [entity.name.encode() for entity in entities]
        columns: dict[str, Array] = {"name": np.frombuffer(b"".join(names), np.uint8)}
        for column in ("cuts", "static", "static_categorical"):
            if column in self._task.columns:
                dtype = self._task.columns[column].storage
                columns[column] = np.array([getattr(entity, column) for entity in entities], dtype)
        if "scaling" in self._task.columns:
            both = b"".join(entity.scaling for entity in entities)
            columns["scaling"] = np.frombuffer(both, "<f8").reshape(len(entities), 2, -1)
        return columns, {"name": np.cumsum([0, *map(len, names)])}
