"""Pass 1, in workers: a part of the table decoded once, and written aside as rows sorted by entity and time.

Chunks of rows wait until they fill the memory for sorting. Rows that are already in order are written as they came;
others are sorted first. The runs of a part say what it holds: rows of one entity, rising in time.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash

from millrace.errors import SourceError
from millrace.native import core
from millrace.prepare.files import check_unchanged
from millrace.prepare.parts import write_part
from millrace.prepare.quarantine import Skips
from millrace.prepare.spill import Spill, file_hash
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.read.chunks import Chunk, Reader
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.read.table_file import TableSource
from millrace.ragged import Array, Int64s
from millrace.store import platform

SORT_BYTES = 64 << 20  # memory for the rows that are sorted at once, in each worker
IS_DURABLE = platform.boot_id() is None  # else a part names the start of the machine that made it, and no other uses it
TURN_ROWS = 2048  # turned from columns to rows at a time: the block stays in cache


def run_dtype(time_dtype: str) -> np.dtype[Any]:
    """A run: its entity in the part, whether values are missing, its rows, its first and its last time."""
    time = np.dtype(time_dtype).newbyteorder("<").str
    return np.dtype([("entity", "<i4"), ("gaps", "<i4"), ("rows", "<i8"), ("first", time), ("last", time)])


class PartTask(msgspec.Struct, frozen=True):
    """A part to read."""

    number: int  # in the order of the sources
    key: int  # a hash of what it is made of, and the name of its folder
    row_groups: tuple[tuple[int, ...], ...]  # of each source; none of a CSV file
    sources: tuple[TableSource, ...]
    options: TableOptions
    schema: Schema
    folder: str

    def __str__(self) -> str:
        others = len({source.file.path for source in self.sources}) - 1
        more = f" and {others} more file{'s' * (others > 1)}" if others else ""
        return f"part {self.number} ({self.sources[0].file.path!r}{more})"


class PartDone(msgspec.Struct, frozen=True):
    """What a finished part holds."""

    key: int
    rows: int
    rows_read: int
    rows_sorted: int
    dropped: dict[str, int]
    nulls: tuple[int, ...]  # by feature
    infinite: tuple[int, ...]
    unlabelled: tuple[int, ...]  # rows without a value, by category
    sizes: dict[str, int]
    digests: dict[str, str]  # of its files: a damaged part is made again
    skips: Skips = Skips()
    boot: str | None = None  # parts are not synced: a part of an earlier start of the machine is made again


class PartNames(msgspec.Struct, frozen=True):
    """The names that a part numbers: entities and values of categories; and the static values of each entity."""

    entities: tuple[str, ...]
    categories: dict[str, tuple[str, ...]]
    static: tuple[tuple[float | None, ...], ...]  # by entity: numbers, then codes of categories


def prepare_part(task: PartTask) -> PartDone:
    """Makes one part, unless it is there."""
    return write_part(task.folder, task.key, PartDone, lambda folder: PartMaker(task, folder).run(), durable=IS_DURABLE)


def turn_columns_numpy(columns: list[Array], rows: Array) -> bool:
    """Fills rows from columns; says whether all values are finite. The twin of the core's ``rows_of``."""
    for first in range(0, len(rows), TURN_ROWS):
        block = rows[first : first + TURN_ROWS]
        for k, column in enumerate(columns):
            block[:, k] = column[first : first + TURN_ROWS]
    return bool(np.isfinite(rows).all())


turn_columns = turn_columns_numpy if core is None else core.rows_of


class PartMaker:
    """Reads the rows of one part and writes them into its folder."""

    def __init__(self, task: PartTask, folder: Path) -> None:
        role = task.schema.role
        self._task, self._folder, self._role = task, folder, role
        self._reader = Reader(task.options, task.schema)
        self._raw = np.dtype(task.schema.raw_dtype)
        numbers = len(role.static) + len(role.static_categorical)
        row_bytes = self._raw.itemsize * len(role.features) + 8 + 4 * len(role.categorical) + 8 * numbers
        # Rows are in memory as decoded, as rows, and once more when sorted; with them their order and entities.
        self._room = max(1, SORT_BYTES // (3 * row_bytes + 24))
        self._files = {
            name: Spill(folder / f"{name}.bin", durable=IS_DURABLE) for name in ("values", "time", "categorical")
        }
        self._entities: dict[str, int] = {}
        self._labels: dict[str, dict[str, int]] = {name: {} for name in (*role.categorical, *role.static_categorical)}
        self._static: list[list[float | None]] = []
        self._pending: list[tuple[Chunk, Array]] = []
        self._pending_rows = 0
        self._runs: list[Array] = []
        self._rows = self._sorted = 0
        self._space = np.empty((0, len(role.features)), self._raw)
        self._nulls = np.zeros(len(role.features), np.int64)
        self._infinite = np.zeros(len(role.features), np.int64)
        self._unlabelled = np.zeros(len(role.categorical), np.int64)

    def run(self) -> PartDone:
        with contextlib.closing(self):
            for groups, source in zip(self._task.row_groups, self._task.sources, strict=True):
                check_unchanged(source.file)
                self._source = source
                for chunk in self._reader.read(source, groups):
                    self._pending.append((chunk, self._entity_codes(chunk)))
                    self._pending_rows += len(chunk.time)
                    if self._pending_rows >= self._room:
                        self._write_pending()
                check_unchanged(source.file)
            if self._pending:
                self._write_pending()
            for file in self._files.values():
                file.finish()
            runs = np.concatenate(self._runs) if self._runs else np.zeros(0, run_dtype(self._task.schema.time_dtype))
            names = PartNames(
                tuple(self._entities),
                {name: tuple(known) for name, known in self._labels.items()},
                tuple(map(tuple, self._static)),
            )
            for name, data in (("runs.bin", runs.tobytes()), ("names.json", msgspec.json.encode(names))):
                platform.write_file(self._folder / name, data, mode=0o644, durable=IS_DURABLE)
            paths = sorted(self._folder.iterdir())
            return PartDone(
                self._task.key, self._rows, self._reader.rows_read, self._sorted, dict(sorted(self._reader.dropped.items())),
                tuple(self._nulls.tolist()), tuple(self._infinite.tolist()), tuple(self._unlabelled.tolist()),
                {path.name: path.stat().st_size for path in paths},
                {path.name: file_hash(path, xxhash.xxh3_128) for path in paths}, self._reader.skips, platform.boot_id(),
            )  # fmt: skip

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _entity_codes(self, chunk: Chunk) -> Array:
        """The number of each row's entity in the part."""
        known = self._entities
        numbers = np.array([known.setdefault(name, len(known)) for name in chunk.names], np.int32)
        count = len(self._role.static) + len(self._role.static_categorical)
        while len(self._static) < len(known):
            self._static.append([None] * count)
        return np.broadcast_to(numbers[:1], len(chunk.time)) if chunk.codes is None else numbers[chunk.codes]

    def _codes(self, column: str) -> Array:
        """The part's codes of a category over the pending rows; -1 for null."""
        known = self._labels[column]
        parts = []
        for chunk, _ in self._pending:
            labels, codes = chunk.labels(column)
            numbers = np.array([known.setdefault(label, len(known)) for label in labels] + [-1], np.int32)
            parts.append(numbers[codes])
        return np.concatenate(parts)

    def _write_pending(self) -> None:
        codes = np.concatenate([codes for _, codes in self._pending])
        time = np.concatenate([chunk.time for chunk, _ in self._pending])
        order, starts = _order(codes, time)
        labels = [self._codes(name) for name in self._role.categorical]
        categorical = np.stack(labels, axis=1) if labels else np.zeros((len(time), 0), np.int32)
        self._unlabelled += (categorical < 0).sum(axis=0)
        static = [np.concatenate([chunk.numbers(name) for chunk, _ in self._pending]) for name in self._role.static]
        static += [np.where((c := self._codes(name)) < 0, np.nan, c) for name in self._role.static_categorical]
        is_missing = self._write_values(order)
        if order is not None:
            self._sorted += len(order)
            codes, time, categorical, is_missing = codes[order], time[order], categorical[order], is_missing[order]
            static = [column[order] for column in static]
        self._note_static(codes[starts], starts, static)
        self._note_runs(codes, time, starts, np.logical_or.reduceat(is_missing, starts))
        self._files["time"].write(np.ascontiguousarray(time, f"<{np.dtype(self._task.schema.time_dtype).str[1:]}"))
        if labels:
            self._files["categorical"].write(np.ascontiguousarray(categorical, "<i4"))
        self._rows += len(time)

    def _write_values(self, order: Int64s | None) -> Array:
        """Writes the features of the pending rows; says which rows lack a value."""
        is_missing = np.zeros(self._pending_rows, bool)
        whole = None if order is None else np.empty((self._pending_rows, len(self._role.features)), self._raw)
        at = 0
        for chunk, _ in self._pending:
            rows = slice(at, at + len(chunk.time))
            # Rows that stay in their order go through one small buffer, which stays in cache.
            values = self._buffer(len(chunk.time)) if whole is None else whole[rows]
            columns = [self._as_raw(chunk.numbers(name)) for name in self._role.features]
            if not turn_columns(columns, values):
                is_missing[rows] = self._note_missing(values)
            if whole is None:
                self._files["values"].write(values)
            at = rows.stop
        self._pending, self._pending_rows = [], 0
        if whole is not None:
            self._files["values"].write(whole[order])
        return is_missing

    def _buffer(self, rows: int) -> Array:
        if len(self._space) < rows:
            self._space = np.empty((rows, self._space.shape[1]), self._raw)
        return self._space[:rows]

    def _as_raw(self, column: Array) -> Array:
        is_float = column.dtype in (np.float32, np.float64) and column.itemsize <= self._raw.itemsize
        return column if is_float and column.flags.c_contiguous else np.ascontiguousarray(column, self._raw)

    def _note_missing(self, values: Array) -> Array:
        """For each row, whether values are missing; infinite ones count as missing from here on."""
        finite = np.isfinite(values)
        infinite = np.isinf(values)
        counts = infinite.sum(axis=0)
        self._infinite += counts
        self._nulls += (~finite).sum(axis=0) - counts
        values[infinite] = np.nan
        return np.asarray(~finite.all(axis=1))

    def _note_runs(self, codes: Array, time: Array, starts: Int64s, gaps: Array) -> None:
        ends = np.append(starts[1:], len(time))
        runs = np.empty(len(starts), run_dtype(self._task.schema.time_dtype))
        runs["entity"], runs["gaps"], runs["rows"] = codes[starts], gaps, ends - starts
        runs["first"], runs["last"] = time[starts], time[ends - 1]
        if (
            self._runs
            and self._runs[-1]["entity"][-1] == runs["entity"][0]
            and self._runs[-1]["last"][-1] <= runs["first"][0]
        ):
            before = self._runs[-1][-1:]  # a run that goes on from the last chunk
            before["rows"] += runs["rows"][0]
            before["last"], before["gaps"] = runs["last"][0], before["gaps"] | runs["gaps"][0]
            runs = runs[1:]
        if len(runs):
            self._runs.append(runs)

    def _note_static(self, entities: Array, starts: Int64s, columns: list[Array]) -> None:
        """Notes one value per entity: all its rows must agree, nulls aside."""
        names = (*self._role.static, *self._role.static_categorical)
        for k, column in enumerate(columns):
            low, high = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
            for entity, value, other in zip(entities.tolist(), low.tolist(), high.tolist(), strict=True):
                if not math.isfinite(value) or not math.isfinite(other):
                    continue  # missing; the index counts such entities
                known = self._static[entity][k]
                if value != other or (known is not None and known != value):
                    name = list(self._entities)[entity]
                    raise SourceError(
                        f"{self._source.file.path!r}: static column {names[k]!r} has more than one value for entity {name!r}; "
                        "give it with --features or --categorical", source=self._source.file.path,
                    )  # fmt: skip
                self._static[entity][k] = value


def _order(codes: Array, time: Array) -> tuple[Int64s | None, Int64s]:
    """The order by entity and time, None where rows are in order already; and the start of each entity in it."""
    changes = np.flatnonzero(codes[1:] != codes[:-1]) + 1
    starts = np.concatenate(([0], changes))
    falls = time[1:] < time[:-1]
    falls[changes - 1] = False
    if not falls.any() and len(np.unique(codes[starts])) == len(starts):
        return None, starts
    order = np.lexsort((time, codes))  # stable: rows of one time stay in the order of the source
    taken = codes[order]
    return order, np.concatenate(([0], np.flatnonzero(taken[1:] != taken[:-1]) + 1))
