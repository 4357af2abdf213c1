"""Batches on a GPU: a slot has pinned memory of the host and memory of the device, and one copy brings its batches over.

The core's threads make batches and queue their copy, on a stream of the feed's own, ahead of the loop. Small batches
share a slot: every call to the driver costs the thread that queues kernels, whichever thread makes it. That thread makes two
calls per slot and allocates nothing once the slots are there. Where all slots are on their way, the GPU is more steps behind
than batches fit in them: then it waits for the GPU, with or without making the batch itself. A column is a view of the device's
memory, which is used again when no tensor shares its storage and the work that was queued until then is done.
"""

from __future__ import annotations

import contextlib
from typing import Any

from millrace.errors import FeedError
from millrace.feed.batch import ALIGN, Batch, Marks
from millrace.feed.core_ring import HELD, Memory, NativeRing
from millrace.feed.line import Line
from millrace.feed.program import Layout, Program, is_ragged, torch_dtype
from millrace.ragged import Ragged

GROUP_BYTES = 16 << 20  # of the batches that share a slot
MOST_TOGETHER = 8  # of them: who keeps a column keeps the slot


def group_of(line: Line, depth: int) -> int:
    """How many batches of a line share a slot: those that do are made, copied and let go together.

    Each column of each must begin where a column alone does: which kernel computes with it may depend on its address.
    """
    layout = Layout(line.view.fields, line.size)
    if any(is_ragged(field) or layout.num_bytes(field) % ALIGN for field in line.view.fields):
        return 1
    most = min(2 * depth - 1, MOST_TOGETHER, GROUP_BYTES // layout.fixed_bytes)
    return max(1, most if line.num_batches is None else min(most, line.num_batches))


def _views_of_each(layout: Layout, memory: Any, group: int) -> list[list[tuple[str, Any]]]:
    """Of each batch of a slot its columns; of ragged ones the offsets."""
    fields = layout.views(memory, torch_dtype)[1]
    if group == 1:
        return [[(name, view) for name, _, view in fields]]
    size = layout.size // group
    return [[(name, view[k * size : (k + 1) * size]) for name, _, view in fields] for k in range(group)]


class DeviceMemory:
    """Memory of the device for one slot, the event after which it may be written again, and views of it by a layout."""

    def __init__(self, lanes: Any, num_bytes: int, layout: Layout | None = None, group: int = 1) -> None:
        import torch

        self.memory, self.num_bytes = lanes.new_memory(num_bytes), num_bytes
        self.address: int = self.memory.data_ptr()
        self.let_go = lanes.event()
        lanes.mark_new(self.let_go)
        self._streams: set[int] = set()  # that it was handed out to since it was last let go
        self._told: set[int] = set()  # that torch's allocator knows of
        self.views = [] if layout is None else _views_of_each(layout, self.memory, group)
        self._storage, self._count = self.memory.untyped_storage(), torch._C._storage_Use_Count
        self._name = self._storage._cdata
        self._idle = self._count(self._name)

    def use_on(self, lanes: Any, stream: int) -> None:
        """A batch in it is handed to a loop on this stream; torch is told of one that is not the memory's own."""
        self._streams.add(stream)
        if stream != lanes.home and stream not in self._told:
            lanes.record_use(self.memory, stream)
            self._told.add(stream)

    def leave(self, lanes: Any, stream: int) -> None:
        """What this stream queues from now on, as the event of letting go, comes after what the others did with the memory."""
        for other in self._streams - {stream}:
            lanes.follow(stream, other, self.let_go)
        self._streams.clear()

    def was_elsewhere(self, stream: int) -> bool:
        """Whether a batch in it was handed to another stream too."""
        return not self._streams <= {stream}

    @property
    def is_held(self) -> bool:
        """Whether there are tensors in it besides these."""
        return bool(self._count(self._name) > self._idle)


class Twins(Memory):
    """The memory of the slots on the host, and of each its twin on the device."""

    def __init__(self, layout: Layout, count: int, lanes: Any, group: int) -> None:
        super().__init__(layout, count, lanes.host_memory)
        self._lanes, self._group = lanes, group
        self.twins: list[DeviceMemory | None] = [None] * count
        self.copied: list[Any] = [None] * count  # events: the core knows them by their handles

    def allocate(self, slot: int, num_bytes: int) -> Any:
        array = super().allocate(slot, num_bytes)
        with self._lanes:
            twin = self.twins[slot] = DeviceMemory(self._lanes, num_bytes, self.layout, self._group)
            copied = self.copied[slot] = self._lanes.event()
        return array, twin.address, copied.handle, twin.let_go.handle


class DeviceRing:
    """The batches of a program on a device, at least ``depth`` ahead of the loop where that lets them."""

    def __init__(self, program: Program, lanes: Any, *, count: int | None, depth: int, workers: int) -> None:
        self._lanes, self._layout, self.group = lanes, program.layout, program.group
        self._size = program.layout.size // program.group
        self._is_ragged = any(is_ragged(field) for field in program.layout.fields)
        groups = None if count is None else -(-count // self.group)
        ahead = depth if self.group == 1 else max(2, -(-depth // self.group), workers)
        self._memory = Twins(program.layout, ahead + HELD, lanes, self.group)
        self._ring = NativeRing(program, count=groups, depth=ahead, workers=workers, memory=self._memory, lanes=lanes)
        self.num_workers = workers
        self._out: list[tuple[int, DeviceMemory]] = []  # the loop's, the last one at the end
        self.ready: list[Batch] = []  # of the last slot, the next one at the end
        self._count, self.stream, self.current = count, 0, lanes.current

    def take(self, batch: int) -> Batch:
        """The next batch, which is number ``batch``."""
        stream = self.current()
        if not self.ready:
            self._take_slot(stream, self.group if self._count is None else min(self.group, self._count - batch))
        elif stream != self.stream:
            self._follow(stream)
        return self.ready.pop()

    def _take_slot(self, stream: int, count: int) -> None:
        """The next slot, which has ``count`` batches; gives back those of whose batches nobody holds any."""
        twins, held, let_go = self._memory.twins, [], []
        for number, twin in self._out:
            if twin.is_held:
                held.append((number, twin))
            elif twins[number] is twin:  # a slot that was held for too long has another by now
                with self._lanes if twin.was_elsewhere(stream) else contextlib.nullcontext():
                    twin.leave(self._lanes, stream)
                let_go.append(number)
        self._out = held
        found = self._ring.poll(True, stream, let_go)
        if found is None:
            raise FeedError("the feed was closed while a batch was awaited")
        number = found[0]
        there, views = twins[number], self._memory.views[number]
        assert there is not None
        assert views is not None
        held.append((number, there))
        self.stream = stream
        there.use_on(self._lanes, stream)
        marks, size, total = views[0].tobytes(), self._size, self._layout.size
        for k in reversed(range(count)):
            values = {name: view.data for name, view in there.views[k]}  # their storage counts who holds it
            if self._is_ragged:
                self._add_ragged(values, there.memory, views[1])
            self.ready.append(Batch(values, marks=Marks(marks, total, size, k * size)))

    def _follow(self, stream: int) -> None:
        """The loop has gone to another stream between two batches of a slot."""
        number, there = self._out[-1]
        with self._lanes:
            self._lanes.use(self._memory.copied[number])
        there.use_on(self._lanes, stream)
        self.stream = stream

    def _add_ragged(self, values: dict[str, Any], memory: Any, host: list[Any]) -> None:
        """Ragged columns for their offsets; how many rows they have is looked up where they were made."""
        end = self._layout.fixed_bytes
        for name, ragged, offsets in host:
            if ragged is not None:
                rows = int(offsets[-1])
                there = self._layout.ragged_values(memory, ragged, end, rows, torch_dtype)
                values[name] = Ragged.trusted(there, values[name])
                end = self._layout.ragged_end(ragged, end, rows)

    @property
    def behind_s(self) -> float:
        """How long the loop has waited until the GPU had caught up."""
        return self._ring.behind_s

    def report(self) -> dict[str, Any]:
        found = self._ring.report()
        return {
            **found,
            "depth_seen": found["depth_seen"] * self.group,
            "made_in_line": found["made_in_line"] * self.group,
        }

    def close(self) -> None:
        self._ring.close()
