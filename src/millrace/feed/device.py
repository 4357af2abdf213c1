"""Batches on a GPU: a slot has pinned memory of the host and memory of the device, and one copy brings a batch over.

The core's threads make a batch and queue its copy, on a stream of the feed's own, ahead of the loop. The training thread
makes two calls to the driver per batch and allocates nothing once the slots are there. It waits for the GPU in one
case: where all slots are on their way, since then the GPU is more steps behind than there are. A column is a view of the
device's memory, which is used again when no tensor shares its storage and the work that was queued until then is done.
"""

from __future__ import annotations

from typing import Any

from millrace.errors import FeedError
from millrace.feed.batch import Batch
from millrace.feed.native import HELD, Memory, NativeRing
from millrace.feed.program import Layout, Program, is_ragged, torch_dtype
from millrace.ragged import Ragged


class DeviceMemory:
    """Memory of the device for one batch, the event after which it may be written again, and views of it by a layout."""

    def __init__(self, lanes: Any, num_bytes: int, layout: Layout | None = None) -> None:
        import torch

        self.memory, self.num_bytes = lanes.new_memory(num_bytes), num_bytes
        self.address: int = self.memory.data_ptr()
        self.let_go = lanes.event()
        lanes.mark_new(self.let_go)
        self._streams: set[int] = set()
        self.views = [] if layout is None else layout.views(self.memory, torch_dtype)[1]
        self._storage, self._count = self.memory.untyped_storage(), torch._C._storage_Use_Count
        self._name = self._storage._cdata
        self._idle = self._count(self._name)

    def use_on(self, lanes: Any, stream: int) -> None:
        """Where the loop has gone to another stream than the memory's own, torch is told before it gives the memory away."""
        if stream != lanes.home and stream not in self._streams:
            lanes.record_use(self.memory, stream)
            self._streams.add(stream)

    @property
    def is_held(self) -> bool:
        """Whether there are tensors in it besides these."""
        return bool(self._count(self._name) > self._idle)


class Twins(Memory):
    """The memory of the slots on the host, and of each its twin on the device."""

    def __init__(self, layout: Layout, count: int, lanes: Any) -> None:
        super().__init__(layout, count, lanes.host_memory)
        self._lanes = lanes
        self.twins: list[DeviceMemory | None] = [None] * count
        self._copied: list[Any] = [None] * count  # events: the core knows them by their handles

    def allocate(self, slot: int, num_bytes: int) -> Any:
        array = super().allocate(slot, num_bytes)
        with self._lanes:
            twin = self.twins[slot] = DeviceMemory(self._lanes, num_bytes, self.layout)
            copied = self._copied[slot] = self._lanes.event()
        return array, twin.address, copied.handle, twin.let_go.handle


class DeviceRing:
    """The batches of a program on a device, at most ``depth`` ahead of the loop."""

    def __init__(self, program: Program, lanes: Any, *, count: int | None, depth: int, workers: int) -> None:
        self._lanes, self._layout = lanes, program.layout
        self._is_ragged = any(is_ragged(field) for field in program.layout.fields)
        self._memory = Twins(program.layout, depth + HELD, lanes)
        self._ring = NativeRing(program, count=count, depth=depth, workers=workers, memory=self._memory, lanes=lanes)
        self.num_workers = workers
        self._out: list[tuple[int, DeviceMemory]] = []  # the loop's

    def take(self, batch: int) -> Batch:
        """The next batch, which is number ``batch``."""
        twins, held, let_go = self._memory.twins, [], []
        for number, twin in self._out:
            if twin.is_held:
                held.append((number, twin))
            elif twins[number] is twin:  # a slot that was held for too long has another by now
                let_go.append(number)
        self._out = held
        stream = self._lanes.current()
        found = self._ring.poll(True, stream, let_go)
        if found is None:
            raise FeedError("the feed was closed while a batch was awaited")
        number = found[0]
        there, views = twins[number], self._memory.views[number]
        assert there is not None
        assert views is not None
        self._out.append((number, there))
        if stream != self._lanes.home:
            there.use_on(self._lanes, stream)
        marks, host = views
        values = {name: view.data for name, _, view in there.views}  # their storage counts who holds it
        if self._is_ragged:
            self._add_ragged(values, there.memory, host)
        return Batch(values, marks=self._layout.own_marks(marks))

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
        return self._ring.report()

    def close(self) -> None:
        self._ring.close()
