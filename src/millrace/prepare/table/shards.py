"""Pass 2, in workers: the rows of some entities filled, scaled, cast and written as one shard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.prepare.table.clean import Cleaner, calendar
from millrace.prepare.table.copied import Copied
from millrace.prepare.table.fill import Filler
from millrace.prepare.table.fit import Opened, opened
from millrace.prepare.table.index import Slice
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.schema import Schema
from millrace.ragged import Array, Int64s
from millrace.scaling.scaler import Scaling
from millrace.store import platform
from millrace.store.layout import Column, bfloat16_bits
from millrace.store.shard import ShardEntry, ShardWriter, shard_name

MIN_SHARD, SHARDS = 8 << 20, 32  # without a wish: this many shards, none smaller than this or larger than the option


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
    columns: dict[str, tuple[str, tuple[int, ...], str]]
    store: tuple[str, str] | None = None  # path and snapshot that records are copied from
    rescale: dict[str, Any] | None = None  # the scaling of that store, where this one is another

    def __str__(self) -> str:
        return f"shard {self.split}-{self.number:05d} ({self.entities[0].name!r} to {self.entities[-1].name!r})"


def layout_columns(options: TableOptions, schema: Schema, *, has_mask: bool) -> dict[str, Column]:
    """The columns of the store, rows first."""
    role = schema.role
    columns = {
        "values": Column(options.dtype, (len(role.features) + 2 * len(options.calendar),)),
        "time": Column(schema.time_dtype),
    }
    if has_mask:
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


def needs_mask(options: TableOptions, schema: Schema) -> bool:
    return options.freq is not None or any(options.policy(name)[0] == "mask" for name in schema.role.features)


def cut_shards(rows: Int64s, row_bytes: int, limit: int) -> list[tuple[int, int]]:
    """Entities [first, last) of each shard: cut before the one that would pass the limit."""
    room = max(1, min(limit, max(MIN_SHARD, int(rows.sum()) * row_bytes // SHARDS)) // row_bytes)
    edges, filled = [0], 0
    for k, count in enumerate(rows.tolist()):
        if filled and filled + count > room:
            edges.append(k)
            filled = 0
        filled += count
    return [(first, last) for first, last in zip(edges, [*edges[1:], len(rows)], strict=True) if last > first]


def write_shard(task: ShardTask) -> ShardEntry:
    """Writes one shard, and beside it what was filled in it."""
    maker = _Maker(task)
    columns = {name: Column(dtype, shape, per=per) for name, (dtype, shape, per) in task.columns.items()}
    with ShardWriter(Path(task.folder) / "shards", task.split, task.number, columns) as writer:
        for entity in task.entities:
            for rows in maker.rows(entity):
                writer.write_rows(rows)
            writer.end_record(*maker.record(entity))
        counts = msgspec.json.encode([maker.filled.tolist(), maker.leading.tolist()])
        with platform.writing(_filled_path(task)):
            platform.write_file(_filled_path(task), counts, mode=0o644)
        return writer.finish()


def _filled_path(task: ShardTask) -> Path:
    return Path(task.folder) / "fit" / f"{shard_name(task.split, task.number)}.json"


def filled_cells(tasks: Sequence[ShardTask]) -> Int64s:
    """(2, features): cells that were filled in all shards, and those of them before the first observation."""
    found: Int64s = np.sum(
        [msgspec.json.decode(_filled_path(task).read_bytes()) for task in tasks], axis=0, dtype=np.int64
    )
    return found


class _Maker:
    def __init__(self, task: ShardTask) -> None:
        self._task, self._options, self._schema = task, task.options, task.schema
        self._index: Opened = opened(task.folder, task.schema)
        self._cleaner = Cleaner(task.options, task.schema)
        self._scaling = Scaling.from_manifest(task.scaling)
        features = task.schema.role.features
        self._width = len(features)
        self._policies = [task.options.policy(name) for name in features]
        self.filled, self.leading = np.zeros(self._width, np.int64), np.zeros(self._width, np.int64)
        self._copied = None if task.store is None else Copied(task.store, task.rescale, task.options.dtype)

    def rows(self, entity: Entity) -> Iterator[dict[str, Array]]:
        """The row columns of an entity, slice by slice: those it has in the store, then the new ones."""
        if entity.record >= 0 and self._copied is not None:
            yield from self._copied.rows(entity.record, self._scaling)
        if entity.number >= 0:
            yield from self._new_rows(entity)

    def _new_rows(self, entity: Entity) -> Iterator[dict[str, Array]]:
        center, scale = self._scaling.center, self._scaling.scale
        if entity.scaling:
            center, scale = np.frombuffer(entity.scaling, np.float64).reshape(2, -1)
        has_gaps = self._options.freq is not None or bool(self._index.runs_of(entity.number)["gaps"].any())
        filler = Filler(self._policies, center, entity.cuts) if has_gaps else None
        if filler is not None and entity.record >= 0 and self._copied is not None:
            filler.carry(*self._copied.end(entity.record, center, scale))
        if filler is not None and filler.needs_ahead:
            filler.look_ahead(self._slices(entity))
        for number, part in enumerate(self._slices(entity)):
            yield self._columns(number, part, filler, center, scale)
        if filler is not None:
            self.filled += filler.filled
            self.leading += filler.leading

    def _slices(self, entity: Entity) -> Iterable[Slice]:
        after = self._copied.last_time(entity.record) if self._copied is not None and entity.record >= 0 else None
        return self._cleaner.rows(entity.name, self._index.slices(entity.number), after)

    def _columns(
        self, number: int, part: Slice, filler: Filler | None, center: Array, scale: Array
    ) -> dict[str, Array]:
        values, mask = part.values, None
        if filler is not None and part.has_gaps:
            values = values.astype(np.float64)
            mask = filler.fill(number, part, values)
        elif filler is not None:
            filler.skip(part, values)
        columns = {
            "values": self._scaled(values, part.time, center, scale),
            "time": np.ascontiguousarray(part.time, part.time.dtype.newbyteorder("<")),
        }
        if "mask" in self._task.columns:
            columns["mask"] = np.ones(columns["values"].shape, np.uint8)
            if mask is not None:
                columns["mask"][:, : self._width] = mask
        if "categorical" in self._task.columns:
            columns["categorical"] = np.ascontiguousarray(part.categorical, "<i4")
        return columns

    def _scaled(self, values: Array, time: Array, center: Array, scale: Array) -> Array:
        """Scaled in float64 and cast, with the calendar behind."""
        width = self._width
        is_bits = self._options.dtype == "bfloat16"
        out = np.empty(
            (len(values), self._task.columns["values"][1][0]), "<f4" if is_bits else np.dtype(self._options.dtype)
        )
        self._scaling.rows_into(values, out[:, :width], center[:width], scale[:width])
        if self._options.calendar:
            assert self._schema.time_unit is not None
            at = np.ascontiguousarray(time)
            out[:, width:] = calendar(at, self._schema.time_unit, self._options.calendar, self._schema.time_zone)
        return bfloat16_bits(out) if is_bits else out

    def record(self, entity: Entity) -> tuple[dict[str, Array], dict[str, Int64s]]:
        """The record columns of an entity, and the length of its name."""
        name = np.frombuffer(entity.name.encode(), np.uint8)
        columns: dict[str, Array] = {"name": name}
        plain: dict[str, Sequence[Any]] = {
            "cuts": entity.cuts, "static": entity.static, "static_categorical": entity.static_categorical,
        }  # fmt: skip
        for column, value in plain.items():
            if column in self._task.columns:
                dtype = Column(self._task.columns[column][0]).storage
                columns[column] = np.array([value], dtype)
        if "scaling" in self._task.columns:
            columns["scaling"] = np.frombuffer(entity.scaling, "<f8").reshape(1, 2, -1)
        return columns, {"name": np.array([0, len(name)], np.int64)}
