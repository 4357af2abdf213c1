"""Batches on a GPU that a transform or numpy made: packed into one run of pinned memory, for one copy each.

Whoever makes a batch packs it: a worker, a thread of the transform, or the loop. The loop's thread queues the copies,
those of several small batches in one go: between two steps its caches hold the code of the model, so the first batch
takes several times as long as each one after it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.errors import FeedError
from millrace.feed.batch import MARKS, Batch, aligned, with_marks
from millrace.feed.make.slots import Slots
from millrace.feed.place.device import GROUP_BYTES, MAX_GROUP, DeviceMemory
from millrace.feed.place.host import Convert
from millrace.feed.processes.packing import Layout, Part, array_view, num_bytes, tensor_dtype
from millrace.feed.stages import Ahead, Counters, Make, closed_error
from millrace.ragged import Array, Ragged, shared

SOON = 0.1  # of the time until a copy is done: copies that follow each other begin so soon


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies in a parcel."""

    begin: int
    num_bytes: int
    dtype: Any
    shape: tuple[int, ...]

    def view(self, memory: Any) -> Any:
        return memory[self.begin : self.begin + self.num_bytes].view(self.dtype).reshape(self.shape)


@dataclass(slots=True)
class Parcel:
    """A batch on its way to a device. Columns are extents of its memory, or values that are not in it."""

    memory: Array | None  # on the host, until its copy is queued
    address: int
    num_bytes: int
    marks: Mapping[str, Any]  # as a batch holds them
    columns: dict[str, Any]
    device: Any
    is_alike: bool = False  # many parcels have this very dict, of extents alone

    def unpack(self, target: DeviceMemory) -> Batch:
        """The batch, in the memory of the device that it was copied to."""
        there = self._there(target.memory)
        if not self.is_alike:
            once = shared(there)
            columns = {name: v.map(once) if isinstance(v, Ragged) else there(v) for name, v in self.columns.items()}
        else:
            if target.plan is not self.columns:
                target.lay_out(self.columns, [(name, there(extent)) for name, extent in self.columns.items()])
            columns = {name: view.data for name, view in target.columns[0]}  # their storage counts who holds it
        return with_marks(columns, self.marks)

    def _there(self, memory: Any) -> Callable[[Any], Any]:
        def there(value: Any) -> Any:
            if isinstance(value, Extent):
                return value.view(memory)
            return value.to(self.device, non_blocking=True) if hasattr(value, "to") else value

        return there


def parcel_of(layout: Layout, memory: Array, device: Any) -> Parcel:
    """The parcel that a worker process packed into a slot: the slot is copied to the device as it is."""
    marks = {"_marks": layout.marks(memory)}
    if (alike := _extents_of(layout)) is not None:
        return Parcel(memory, memory.ctypes.data, alike[1], marks, alike[0], device, is_alike=True)
    end = 1

    def extent(_: Array, part: Part) -> Any:
        nonlocal end
        found = _extent_of(part)
        if found is None:  # text stays on the host
            return array_view(memory, part).copy()
        end = max(end, found.begin + found.num_bytes)
        return found

    columns = layout.columns(memory, extent)
    return Parcel(memory, memory.ctypes.data, end, marks, columns, device)


def _extent_of(part: Part) -> Extent | None:
    dtype = tensor_dtype(part.kind, part.dtype)
    return None if dtype is None else Extent(part.begin, num_bytes(part), dtype, part.shape)


@lru_cache(maxsize=64)
def _extents_of(layout: Layout) -> tuple[dict[str, Any], int] | None:
    """The columns of all batches that lie like this, and where the last one ends; None if some are not plain numbers."""
    extents = {name: _extent_of(part) for name, part in (layout.arrays or {}).items()}
    known = [extent for extent in extents.values() if extent is not None]
    if layout.arrays is None or len(known) < len(extents):
        return None
    return extents, max((extent.begin + extent.num_bytes for extent in known), default=1)


class ParcelMake:
    """Makes parcels from the batches of another ``Make``, in pinned memory that is used again."""

    def __init__(self, source: Make[Batch], convert: Convert, gpu: Any, *, slots: int) -> None:
        self._source, self._convert = source, convert
        self._slots, self._device = Slots(slots, gpu.host_memory), gpu.device

    def make(self, batch: int) -> Parcel:
        return self._pack(self._convert(self._source.make(batch)))

    def _pack(self, batch: Batch) -> Parcel:
        import torch

        tensors: list[tuple[Extent, Any]] = []
        end = 0

        def extent(value: Any) -> Any:
            nonlocal end
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
                return value
            num_bytes = value.numel() * value.element_size()
            tensors.append((Extent(end, num_bytes, value.dtype, tuple(value.shape)), value))
            end += aligned(num_bytes)
            return tensors[-1][0]

        once = shared(extent)  # the offsets of an axis are packed once
        columns = {name: v.map(once) if isinstance(v, Ragged) else extent(v) for name, v in dict.items(batch)}
        with self._slots.take() as slot:
            memory = slot.array("batch", (max(end, 1),), np.dtype(np.uint8))
        target = torch.from_numpy(memory)
        for at, tensor in tensors:
            at.view(target).copy_(tensor.detach())
        marks = {name: getattr(batch, name) for name in MARKS}
        return Parcel(memory, memory.ctypes.data, end, marks, columns, self._device)

    def report(self) -> Counters:
        return self._source.report()


class Parcels:
    """Batches on a device, copied as parcels ahead of the loop; at most ``depth`` copies at a time.

    Small batches are copied as a group, while the loop has the group before it.
    """

    def __init__(self, ahead: Ahead[Parcel], gpu: Any, *, depth: int) -> None:
        self._ahead, self._gpu, self._depth = ahead, gpu, depth
        self.ready: list[Batch] = []  # their copies were queued a group ago; the next one at the end
        self.stream, self.current = 0, gpu.current
        self._behind_s = self._transfer_s = 0.0
        self._free: list[DeviceMemory] = []  # in the order in which they were let go
        self._held: list[DeviceMemory] = []  # the loop's, and those of ``ready`` at the end
        self._most = 0  # bytes of the largest
        self._group = 1  # batches that are copied in one go
        # Two events per copy. They are used again when the copy is done and the loop's stream waits for it.
        with gpu:
            self._events = deque((gpu.event(), gpu.event()) for _ in range(depth + MAX_GROUP + 1))
        self._flights: deque[tuple[DeviceMemory, Any, Parcel] | Exception] = deque()  # not handed out yet
        # Events of a copy's end and beginning, and the memory on the host that it needs until then.
        self._landings: deque[tuple[tuple[Any, Any], Array | None]] = deque()
        self._arrived: Any = None  # the event of the last copy that was handed out

    def take(self, batch: int) -> Batch:
        stream = self.current()
        if not self.ready:
            self._refill(batch, stream)
        elif stream != self.stream:
            self._follow(stream)
        return self.ready.pop()

    def _refill(self, batch: int, stream: int) -> None:
        """Queues the copies of the next group, and hands over the one before. So no step waits for its copy."""
        flights = self._flights
        with self._gpu:
            self._release(stream)
            count = len(flights)
            while len(flights) < max(2, count + self._group) and self._launch(batch + len(flights), wait=not flights):
                pass
            if not flights:
                raise closed_error()
            batches = [self._land_in_loop(stream)]
            while len(batches) < count and not isinstance(flights[0], Exception):
                batches.append(self._land_in_loop(stream))
            self._gpu.use(self._arrived)  # copies run in order
        self.stream, self.ready = stream, batches[::-1]

    def _land_in_loop(self, stream: int) -> Batch:
        flight = self._flights.popleft()
        if isinstance(flight, Exception):
            raise flight
        target, self._arrived, parcel = flight
        self._held.append(target)
        target.use_on(self._gpu, stream)
        return parcel.unpack(target)

    def _follow(self, stream: int) -> None:
        """The loop has gone to another stream between two batches of a group."""
        with self._gpu:
            self._gpu.use(self._arrived)
            for target in self._held[-len(self.ready) :]:
                target.use_on(self._gpu, stream)
        self.stream = stream

    def _release(self, stream: int) -> None:
        """Frees device memory that nobody holds."""
        held = []
        for memory in self._held:
            if memory.is_held:
                held.append(memory)
                continue
            memory.leave(self._gpu, stream)
            self._gpu.mark(memory.let_go)
            # At the end: a copy takes the memory let go longest ago, and so waits for no recent step.
            self._free.append(memory)
        self._held = held

    def _launch(self, batch: int, *, wait: bool) -> bool:
        """Queues the copy of the next batch, if there is one; an error waits for its turn."""
        if self._flights and isinstance(self._flights[-1], Exception):
            return False
        if len(self._landings) >= self._depth and not self._land(wait):
            return False
        try:
            parcel = self._ahead.take(batch, wait)
            if parcel is None:
                return False
            target, events = self._memory_for(parcel.num_bytes), self._events[0]
            self._gpu.copy(parcel.address, target.address, parcel.num_bytes, target.let_go, *events)
        except Exception as error:  # noqa: BLE001 - it is raised when this batch is asked for
            self._flights.append(error)
            return True
        self._events.rotate(-1)
        self._landings.append((events, parcel.memory))
        parcel.memory = None
        self._flights.append((target, events[0], parcel))
        self._group = max(1, min(self._depth, MAX_GROUP, GROUP_BYTES // max(parcel.num_bytes, 1)))
        return True

    def _land(self, wait: bool) -> bool:
        """Frees host memory whose copy is done; says whether there was any.

        Called only when memory is needed: asking whether a copy is done costs as much as queueing one.
        """
        gpu, landings = self._gpu, self._landings
        if gpu.is_done(landings[-1][0][0]):  # then all are: copies run in order
            landings.clear()
            return True
        done, begun = landings[0][0]
        if not gpu.is_done(done):
            if not wait:
                return False
            self._wait(done, begun)
        landings.popleft()
        return True

    def _wait(self, done: Any, begun: Any) -> None:
        """Waits for a copy. If it has begun, or does so soon, the bus is what the loop waits for; else earlier steps."""
        start = time.perf_counter()
        self._gpu.finish(begun)
        began = time.perf_counter()
        self._gpu.finish(done)
        end = time.perf_counter()
        if began - start <= SOON * (end - start):
            self._transfer_s += end - start
        else:
            self._behind_s += end - start

    def _memory_for(self, num_bytes: int) -> DeviceMemory:
        # The one let go last is left: the loop's last step comes before it, and the copy would wait for that.
        for number, memory in enumerate(self._free[:-1]):
            if memory.num_bytes >= num_bytes:
                return self._free.pop(number)
        self._free[:] = [memory for memory in self._free if memory.num_bytes >= num_bytes]
        if num_bytes > self._most:  # a quarter more where ragged batches grow
            self._most = num_bytes + (num_bytes // 4 if self._most else 0)
        return DeviceMemory(self._gpu, max(self._most, 1))

    def report(self) -> Counters:
        return Counters(behind_s=self._behind_s, transfer_s=self._transfer_s)

    def close(self) -> None:
        try:
            if self._landings:
                with contextlib.suppress(FeedError), self._gpu:  # a GPU that failed copies no more
                    self._gpu.finish(self._landings[-1][0][0])
        finally:
            self._ahead.close()  # after the copies: it may give up the memory that they read
        self._landings.clear()
        self._flights.clear()
        self.ready.clear()
