"""A line of batches as a program of the C core: order, view and columns as plain steps.

``Program.of`` is None if only Python knows the view or the order, or if only numpy can gather the fields. Then Python
plans the batches (``plan.py``).
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import numpy as np

from millrace.errors import StoreError
from millrace.feed.batch import Batch
from millrace.feed.foresight import choose_ways
from millrace.feed.line import Line
from millrace.feed.make.slot_layout import SlotLayout, is_ragged, row_bytes
from millrace.feed.make.slots import Slots
from millrace.feed.stages import Counters, Unmapped
from millrace.gather.core_gather import Native
from millrace.native import core, memory_bytes
from millrace.ragged import as_int64s
from millrace.store import platform
from millrace.view.view import View

MAX_SIZE = 1 << 28  # samples of a batch, as in core.h
MAX_FILES = 1024  # that a feed keeps open for reading; also at most an eighth of the process's limit
DIRECT_TIMES = 2  # the page cache holds few rows of a column that is this many times larger than memory


class Program:
    """Fills a slot with any batch of a line, or with ``group`` batches. ``core`` is the C object."""

    def __init__(
        self, line: Line, order: tuple[Any, ...], plan: list[tuple[Any, ...]], natives: list[Native], group: int
    ) -> None:
        steps: list[Any] = []
        leaves: list[View] = []
        _flatten(plan, steps, leaves)
        parts = [leaf.fields for leaf in leaves]
        self._natives, self.layout = natives, SlotLayout(line.view.fields, line.size * group, parts)
        self.group = group
        self.batch_bytes = self.layout.fixed_bytes + _ragged_bytes(line)
        first, last = line.share
        stop = -1 if line.stop is None else line.stop
        self.core = core.Program(
            order, tuple(steps), tuple(native.gather for native in natives), (line.start, stop, line.batch, first, last, group),
            self.layout.marks, self.layout.starts, self.layout.fixed_bytes, _finder(natives),
        )  # fmt: skip

    def open_files(self) -> None:
        """Opens files for reading cold rows past the page cache, for columns much larger than memory.

        It opens as many as it may. Rows of the other files come through the maps.
        """
        left, limit = min(MAX_FILES, platform.descriptor_limit() // 8), DIRECT_TIMES * memory_bytes()
        with contextlib.suppress(OSError, StoreError):  # no descriptors left; the copy reports damage
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
        """The line as a program, or None if Python must plan it."""
        choose_ways(line)  # once more: a worker process has no foresight
        view, order = line.view, line.order.plan()
        plan = view.plan() if core is not None and order is not None and type(line) is Line else None
        if plan is None or order is None or line.size * group > MAX_SIZE or any(field.is_text for field in view.fields):
            return None
        natives = []
        for leaf in _leaves(plan):
            # A feed has its own maps, without the kernel's read-ahead.
            native = Native.of(leaf._sources, leaf.fields)
            if native is None:
                return None
            natives.append(native)
        read = [(native, field.column) for native in natives for field in native.fields if field.measure is None]
        if not _can_map([native.columns[name] for native, name in dict.fromkeys(read)]):
            return None
        return cls(line, order, plan, natives, group)


class ProgramMake:
    """Makes any batch by a program, into a slot of its own."""

    def __init__(self, program: Program, *, slots: int) -> None:
        self._program, self._slots = program, Slots(slots)

    def make(self, batch: int) -> Batch:
        layout, needed = self._program.layout, self._program.layout.fixed_bytes
        with self._slots.take() as slot:
            while True:
                memory = slot.array("batch", (needed,), np.dtype(np.uint8))
                used = self._program.core.fill(batch, memory)
                if used >= 0:
                    return layout.batch(layout.views(memory), memory)
                needed = -used

    def report(self) -> Counters:
        return Counters(is_cold=bool(self._program.core.is_cold()))


def _can_map(columns: list[Any]) -> bool:
    """Whether every shard may be mapped; asked before thousands of them are."""
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
    if kind in ("take", "select"):
        steps[number] = (kind, *map(as_int64s, rest), _flatten(plan[1:], steps, leaves))
    elif kind == "concat":
        nexts = [_flatten(part, steps, leaves) for part in rest[1]]
        steps[number] = (kind, as_int64s(rest[0]), np.array(nexts, np.int64))
    else:
        view, part = rest[0], len(leaves)
        leaves.append(view)
        if kind == "offsets":
            axes = dict.fromkeys(field.axis for field in view.fields if field.axis is not None) or {None: None}
            indexes = [view.store.whole.axis_index(axis or view.store.layout.primary) for axis in axes]
            if all(len(index.pieces) == 1 for index in indexes):
                steps[number] = (kind, part, tuple(as_int64s(index.joined) for index in indexes))
            else:
                steps[number] = ("pieces", part, _pieces(indexes))
        elif kind == "ranked":
            ranks, *shape = rest[1:]
            index = view.store.whole.axis_index(view.fields[0].axis or "")
            steps[number] = (kind, part, as_int64s(ranks), _pieces([index]), *shape)
        else:
            numbers = (as_int64s(own) if isinstance(own, np.ndarray) else own for own in rest[1:])
            steps[number] = (kind, part, *numbers)
    return number


def _pieces(indexes: list[Any]) -> tuple[Any, ...]:
    """The offsets of several axes as the core reads them, shard by shard."""
    axes = ((as_int64s(index.rows[: len(index.pieces)]), tuple(map(as_int64s, index.pieces))) for index in indexes)
    return as_int64s(indexes[0].records), tuple(axes)


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
            total += row_bytes(field) * rows * line.size // max(store.num_records, 1)
    return total
