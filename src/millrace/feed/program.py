"""A line of batches as a program of the C core: order, view and columns as plain steps, and where things lie in a slot.

``Program.of`` is None where only Python knows the view or the order, or numpy alone can gather its fields; then the
batches are planned in Python, many at a time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from millrace.errors import FeedError, StoreError
from millrace.feed.batch import MARKS, Batch, Marks, aligned
from millrace.feed.line import Line
from millrace.gather.core_gather import Native
from millrace.gather.gather import Field
from millrace.native import core, memory_bytes
from millrace.ragged import Ragged, as_int64s
from millrace.store import platform
from millrace.view.view import View

MAX_SIZE = 1 << 28  # samples of a batch, as in core.h
MAX_FILES = 1024  # that a feed holds open to read by, and at most an eighth of what the process may
DIRECT_TIMES = 2  # the page cache has few rows of a column so many times larger than memory

Views: TypeAlias = tuple[Any, list[tuple[str, Field | None, Any]]]  # of arrays, or of tensors


class Unmapped(FeedError):
    """A shard cannot be mapped: there are too many, or it is not one run of memory. Python reads it instead."""


class Layout:
    """Where the marks and fields of a batch of ``size`` samples lie in a slot.

    Ragged fields have their offsets among the others and their values behind all, one after the other.
    """

    def __init__(self, fields: tuple[Field, ...], size: int) -> None:
        self.fields, self.size = fields, size
        self._end = 0
        self.marks = tuple(self._take(size * dtype.itemsize) for dtype in MARKS.values())
        self._marks_bytes = self._end
        self.places = tuple(self._take(_fixed_bytes(field, size)) for field in fields)
        self.fixed_bytes = self._end

    def _take(self, num_bytes: int) -> int:
        place = self._end
        self._end += aligned(num_bytes)
        return place

    def views(self, memory: Any, dtype_of: Callable[[np.dtype[Any]], Any] = np.dtype) -> Views:
        """Everything but ragged values, as views of a slot's memory: all marks, and (name, field if ragged, array).

        The memory is numpy's, or a tensor's with ``dtype_of`` giving its types.
        """
        fields = []
        for field, place in zip(self.fields, self.places, strict=True):
            shape = (self.size + 1,) if is_ragged(field) else (self.size, *(n or 0 for n in field.shape))
            dtype = np.dtype(np.int64) if is_ragged(field) else field.dtype
            part = memory[place : place + _fixed_bytes(field, self.size)].view(dtype_of(dtype)).reshape(shape)
            fields.append((field.name, field if is_ragged(field) else None, part))
        return memory[: self._marks_bytes], fields

    def num_bytes(self, field: Field) -> int:
        """What a field takes of a slot, ragged values apart."""
        return _fixed_bytes(field, self.size)

    def ragged_values(self, memory: Any, field: Field, begin: int, rows: int, dtype_of: Any = np.dtype) -> Any:
        part = memory[begin : begin + rows * _row_bytes(field)].view(dtype_of(field.dtype))
        return part.reshape(rows, *field.tail)

    def ragged_end(self, field: Field, begin: int, rows: int) -> int:
        """Where the next ragged field's values begin."""
        return begin + aligned(rows * _row_bytes(field))

    def batch(self, views: Views, memory: Any) -> Batch:
        """The batch that lies in a slot: new views, and marks of its own, which may outlive the slot."""
        marks, fields = views
        values: dict[str, Any] = {}
        end = self.fixed_bytes
        for name, ragged, array in fields:
            if ragged is None:
                values[name] = array[:]
                continue
            rows = int(array[-1])
            values[name] = Ragged.trusted(self.ragged_values(memory, ragged, end, rows), array[:])
            end = self.ragged_end(ragged, end, rows)
        return Batch(values, marks=Marks(marks.tobytes(), self.size, self.size))


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def is_ragged(field: Field) -> bool:
    return field.axis is not None and field.length is None and field.pad is None


def _row_bytes(field: Field) -> int:
    return int(np.prod(field.tail, dtype=np.int64)) * field.dtype.itemsize


def _fixed_bytes(field: Field, size: int) -> int:
    if is_ragged(field):
        return (size + 1) * 8
    return int(np.prod([n or 0 for n in field.shape], dtype=np.int64)) * size * field.dtype.itemsize


class Program:
    """Makes any batch of a line in a slot, or ``group`` of them; ``core`` is the C object, ``layout`` where things lie."""

    def __init__(
        self, line: Line, order: tuple[Any, ...], plan: list[tuple[Any, ...]], natives: list[Native], group: int
    ) -> None:
        steps: list[Any] = []
        _flatten(plan, steps, [])
        self._natives, self.layout = natives, Layout(line.view.fields, line.size * group)
        self.group = group
        self.batch_bytes = self.layout.fixed_bytes + _ragged_bytes(line)
        first, last = line.share
        stop = -1 if line.stop is None else line.stop
        self.core = core.Program(
            order, tuple(steps), tuple(native.gather for native in natives), (line.start, stop, line.batch, first, last, group),
            self.layout.marks, self.layout.places, self.layout.fixed_bytes, _finder(natives),
        )  # fmt: skip

    def open_files(self) -> None:
        """Gives the core what it reads cold rows by, past the page cache: of columns much larger than memory, as many files as
        may be had. The maps serve the rest."""
        left, limit = min(MAX_FILES, platform.descriptor_limit() // 8), DIRECT_TIMES * memory_bytes()
        with contextlib.suppress(OSError, StoreError):  # no more descriptors to be had; what is damaged the copy says
            for native in self._natives:
                for name, table in native.tables.items():
                    column = native.columns[name]
                    is_large = math.prod(column.shape) * column.dtype.itemsize > limit
                    for shard in range(min(left, len(column.starts) - 1) if is_large else 0):
                        if (fd := column.direct(shard)) is None:
                            break
                        table.read_by(shard, fd)
                        left -= 1
                        self.core.fetch()

    @classmethod
    def of(cls, line: Line, group: int = 1) -> Program | None:
        """The line as a program, or None where it must be planned in Python."""
        view, order = line.view, line.order.plan()
        plan = None if core is None or order is None else view.plan()
        if plan is None or order is None or line.size * group > MAX_SIZE or any(field.is_text for field in view.fields):
            return None
        natives = []
        for leaf in _leaves(plan):
            # Tables of its own: a feed has its own maps, without the kernel's read-ahead.
            native = Native.of(leaf._sources, leaf.fields)
            if native is None:
                return None
            natives.append(native)
        if not _can_map([native.columns[name] for native in natives for name in native.tables]):
            return None
        return cls(line, order, plan, natives, group)


def _can_map(columns: list[Any]) -> bool:
    """Whether every shard may be mapped: better known before thousands of them are."""
    files: dict[int, tuple[Any, set[tuple[int, int]]]] = {}
    for column in columns:
        shards, own = column.files()
        files.setdefault(id(shards), (shards, set()))[1].update(own)
    return all(shards.will_need(own) for shards, own in files.values())


def _leaves(plan: list[tuple[Any, ...]]) -> list[View]:
    last = plan[-1]
    return [leaf for part in last[2] for leaf in _leaves(part)] if last[0] == "concat" else [last[1]]


def _flatten(plan: list[tuple[Any, ...]], steps: list[Any], leaves: list[View]) -> int:
    """Appends the steps of a plan, each naming the next by its number; returns the number of the first."""
    number = len(steps)
    kind, *rest = plan[0]
    steps.append(None)
    if kind == "take":
        steps[number] = (kind, as_int64s(rest[0]), _flatten(plan[1:], steps, leaves))
    elif kind == "concat":
        nexts = [_flatten(part, steps, leaves) for part in rest[1]]
        steps[number] = (kind, as_int64s(rest[0]), np.array(nexts, np.int64))
    else:
        view, part = rest[0], len(leaves)
        leaves.append(view)
        if kind == "offsets":
            axes = dict.fromkeys(field.axis for field in view.fields if field.axis is not None) or {None: None}
            offsets = (view.store.axis_offsets(axis or view.store.layout.primary) for axis in axes)
            steps[number] = (kind, part, tuple(as_int64s(own) for own in offsets))
        else:
            numbers = (as_int64s(own) if isinstance(own, np.ndarray) else own for own in rest[1:])
            steps[number] = (kind, part, *numbers)
    return number


def _finder(natives: list[Native]) -> Any:
    def find_shard(part: int, column: int, shard: int) -> None:
        native = natives[part]
        name = list(native.tables)[column]
        if not native.give(name, shard, native.columns[name].random(shard)):
            raise Unmapped(f"shard {shard} of column {name!r} cannot be mapped")

    return find_shard


def _ragged_bytes(line: Line) -> int:
    """About how many bytes the ragged values of a batch take."""
    store, total = line.view.store, 0
    for field in line.view.fields:
        if is_ragged(field):
            rows = len(store.columns[field.column])
            total += _row_bytes(field) * rows * line.size // max(store.num_records, 1)
    return total
