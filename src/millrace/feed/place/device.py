"""Batches on a GPU, straight from the core's ring: a slot has pinned host memory and device memory.

The core's threads make batches and queue their copies. Every call to the driver costs the thread that queues kernels,
so small batches share a slot, and the loop's thread makes two calls per slot. A column is a view of device memory. That
memory is used again when no tensor shares its storage and the work queued until then is done.
"""

from __future__ import annotations

import contextlib
from typing import Any

from millrace.errors import ConfigError, StoreError
from millrace.feed.ahead.core_ring import HELD, CoreRing, SlotMemory
from millrace.feed.batch import ALIGN, Batch, Marks
from millrace.feed.line import Line
from millrace.feed.make.program import Program
from millrace.feed.make.slot_layout import SlotLayout, is_ragged, torch_dtype
from millrace.feed.stages import Counters, Ungrouped, closed_error
from millrace.native import num_cores

GROUP_BYTES = 16 << 20  # of the batches that share a slot
GROUPS_AHEAD = 4  # slots with several batches each that are filled ahead, where there are as many threads
MAX_GROUP = 8  # batches in a slot: whoever keeps a column keeps the slot


def group_size(line: Line, depth: int) -> int:
    """How many batches of a line share a slot: they are made, copied and let go together.

    Every column must start at an aligned address, as a column alone does: the choice of a kernel may depend on it.
    """
    layout = SlotLayout(line.view.fields, line.size)
    if any(is_ragged(field) or layout.num_bytes(field) % ALIGN for field in line.view.fields):
        return 1
    most = min(2 * depth - 1, MAX_GROUP, GROUP_BYTES // layout.fixed_bytes)
    return max(1, most if line.num_batches is None else min(most, line.num_batches))


def _columns_of_each(layout: SlotLayout, memory: Any, group: int) -> list[list[tuple[str, Any]]]:
    """The columns of each batch in a slot; for ragged columns the offsets."""
    fields = layout.views(memory, torch_dtype)[1]
    if group == 1:
        return [[(name, view) for name, _, view in fields]]
    size = layout.size // group
    return [[(name, view[k * size : (k + 1) * size]) for name, _, view in fields] for k in range(group)]


class DeviceMemory:
    """Device memory of one slot, its columns, and the event after which it may be written again."""

    def __init__(self, gpu: Any, num_bytes: int, layout: SlotLayout | None = None, group: int = 1) -> None:
        import torch

        self.memory, self.num_bytes = gpu.new_memory(num_bytes), num_bytes
        self.address: int = self.memory.data_ptr()
        self.let_go = gpu.event()
        gpu.mark_new(self.let_go)
        self.streams: set[int] = set()  # that use it since it was last let go
        self._recorded: set[int] = set()  # streams that torch's allocator knows of
        self.columns = [] if layout is None else _columns_of_each(layout, self.memory, group)
        self.plan: object = None  # by which ``lay_out`` was called
        self._storage, self._count = self.memory.untyped_storage(), torch._C._storage_Use_Count
        self._name = self._storage._cdata
        self._idle = self._count(self._name)

    def lay_out(self, plan: object, columns: list[tuple[str, Any]]) -> None:
        """Keeps the columns of one batch, for those after it. Nobody else may hold any now."""
        self.plan, self.columns = plan, [columns]
        self._idle = self._count(self._name)

    def use_on(self, gpu: Any, stream: int) -> None:
        """Notes that a loop on this stream gets a batch in it, also for torch if the stream is not the memory's own."""
        self.streams.add(stream)
        if stream != gpu.home and stream not in self._recorded:
            gpu.record_use(self.memory, stream)
            self._recorded.add(stream)

    def leave(self, gpu: Any, stream: int) -> None:
        """Makes this stream wait for what the other streams did with the memory."""
        for other in self.streams - {stream}:
            gpu.follow(stream, other, self.let_go)
        self.streams.clear()

    @property
    def is_held(self) -> bool:
        """Whether there are tensors in it besides these."""
        return bool(self._count(self._name) > self._idle)


class PairedMemory(SlotMemory):
    """The memory of the slots on the host, and for each slot the memory on the device."""

    def __init__(self, layout: SlotLayout, count: int, gpu: Any, group: int) -> None:
        super().__init__(layout, count, gpu.host_memory)
        self._gpu, self._group = gpu, group
        self.on_device: list[DeviceMemory | None] = [None] * count
        self.copies: list[Any] = [None] * count  # events after each copy: the core knows them by their handles

    def allocate(self, slot: int, num_bytes: int) -> Any:
        array = super().allocate(slot, num_bytes)
        with self._gpu:
            there = self.on_device[slot] = DeviceMemory(self._gpu, num_bytes, self.layout, self._group)
            copy = self.copies[slot] = self._gpu.event()
        return array, there.address, copy.handle, there.let_go.handle


class DeviceSlots:
    """The batches of a program on a device, at least ``depth`` ahead of the loop if it lets them."""

    splits = True  # the columns of a slot are those of its batches, one after the other

    def __init__(self, program: Program, gpu: Any, *, count: int | None, depth: int, workers: int | None) -> None:
        self._gpu, self._layout, self._group, self._count = gpu, program.layout, program.group, count
        self._size = program.layout.size // program.group
        groups = None if count is None else -(-count // self._group)
        ahead = (
            depth
            if self._group == 1
            else max(2, -(-depth // self._group), min(workers or num_cores() - 1, GROUPS_AHEAD))
        )
        self._memory = PairedMemory(program.layout, ahead + HELD, gpu, self._group if self.splits else 1)
        self.ring = CoreRing(program, count=groups, depth=ahead, workers=workers, memory=self._memory, gpu=gpu)
        self._slots: list[tuple[int, DeviceMemory]] = []  # the loop's, the last one at the end
        self.ready: list[Batch] = []  # of the last slot, the next one at the end
        self.stream, self.current = 0, gpu.current
        self._transfer_s = 0.0

    def take(self, batch: int) -> Batch:
        stream = self.current()
        if not self.ready:
            self._take_slot(stream, self._group if self._count is None else min(self._group, self._count - batch))
        elif stream != self.stream:
            self._follow(stream)
        return self.ready.pop()

    def _take_slot(self, stream: int, count: int) -> None:
        """Takes the next slot, which has ``count`` batches; gives back slots whose batches nobody holds."""
        on_device, held, let_go = self._memory.on_device, [], []
        for number, there in self._slots:
            if there.is_held:
                held.append((number, there))
            elif on_device[number] is there:  # a slot that was held for too long has other memory by now
                with contextlib.nullcontext() if there.streams <= {stream} else self._gpu:
                    there.leave(self._gpu, stream)
                let_go.append(number)
        self._slots = held
        slot = self._next_slot(stream, let_go)
        memory = on_device[slot]
        assert memory is not None
        held.append((slot, memory))
        self.stream = stream
        memory.use_on(self._gpu, stream)
        self._unpack(slot, memory, count)

    def _unpack(self, slot: int, memory: DeviceMemory, count: int) -> None:
        """Makes the ``count`` batches of a slot ready."""
        views = self._memory.views[slot]
        assert views is not None
        marks, size, total = views[0].tobytes(), self._size, self._layout.size
        for k in reversed(range(count)):
            values = {name: view.data for name, view in memory.columns[k]}  # their storage counts who holds it
            if self._layout.has_ragged:
                self._layout.add_ragged(values, views, memory.memory, torch_dtype)
            self.ready.append(Batch(values, marks=Marks(marks, total, size, k * size)))

    def _next_slot(self, stream: int, let_go: list[int]) -> int:
        behind_s = self.ring.behind_s
        try:
            slot = self.ring.take_slot(True, stream, let_go)
        except (StoreError, ConfigError) as error:  # about the data of one of the batches
            if self._group > 1:
                raise Ungrouped(str(error)) from error
            raise
        if slot is None:
            raise closed_error()
        if (late_s := self.ring.behind_s - behind_s) > 0 and self._awaits_copy(slot):
            self._transfer_s += late_s
        return slot

    def _awaits_copy(self, slot: int) -> bool:
        """Whether the device has let the memory of a slot go, and yet its copy is not done."""
        there = self._memory.on_device[slot]
        with self._gpu:
            return (
                there is not None
                and self._gpu.is_done(there.let_go)
                and not self._gpu.is_done(self._memory.copies[slot])
            )

    def _follow(self, stream: int) -> None:
        """The loop has gone to another stream between two batches of a slot."""
        slot, memory = self._slots[-1]
        with self._gpu:
            self._gpu.use(self._memory.copies[slot])
        memory.use_on(self._gpu, stream)
        self.stream = stream

    def report(self) -> Counters:
        return Counters(behind_s=self.ring.behind_s - self._transfer_s, transfer_s=self._transfer_s)

    def close(self) -> None:
        self.ring.close()
