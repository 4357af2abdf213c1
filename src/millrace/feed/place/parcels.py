"""Batches on a GPU that a transform or numpy made: packed into one run of pinned memory, for one copy each.

Whoever makes a batch packs it: a thread of the transform, or the loop. The loop's thread queues the copies.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import FeedError
from millrace.feed.batch import Batch, aligned
from millrace.feed.make.slots import Slots
from millrace.feed.place.device import DeviceMemory
from millrace.feed.place.host import Convert
from millrace.feed.processes.packing import Layout, Part, array_view, num_bytes, tensor_dtype
from millrace.feed.stages import Ahead, Counters, Make, closed_error
from millrace.ragged import Array, Ragged

AHEAD = 2  # copies queued before they are asked for
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
    marks: Batch  # positions, samples, valid
    columns: dict[str, Any]
    device: Any

    def unpack(self, memory: Any) -> dict[str, Any]:
        """The columns, in the memory of the device that the parcel was copied to."""

        def there(value: Any) -> Any:
            if isinstance(value, Extent):
                return value.view(memory)
            return value.to(self.device, non_blocking=True) if hasattr(value, "to") else value

        return {name: v.map(there) if isinstance(v, Ragged) else there(v) for name, v in self.columns.items()}


def parcel_of(layout: Layout, memory: Array, device: Any) -> Parcel:
    """The parcel that a worker process packed into a slot: the slot is copied to the device as it is."""
    end = 0

    def extent(_: Array, part: Part) -> Any:
        nonlocal end
        dtype, own = tensor_dtype(part.kind, part.dtype), num_bytes(part)
        if dtype is None:  # text stays on the host
            return array_view(memory, part).copy()
        end = max(end, part.begin + own)
        return Extent(part.begin, own, dtype, part.shape)

    columns = layout.columns(memory, extent)
    return Parcel(memory, memory.ctypes.data, max(end, 1), Batch(marks=layout.marks(memory)), columns, device)


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

        columns = {name: v.map(extent) if isinstance(v, Ragged) else extent(v) for name, v in dict.items(batch)}
        with self._slots.take() as slot:
            memory = slot.array("batch", (max(end, 1),), np.dtype(np.uint8))
        target = torch.from_numpy(memory)
        for at, tensor in tensors:
            at.view(target).copy_(tensor.detach())
        marks = Batch(positions=batch.positions, samples=batch.samples, valid=batch.valid)
        return Parcel(memory, memory.ctypes.data, end, marks, columns, self._device)

    def report(self) -> Counters:
        return self._source.report()


class Parcels:
    """Batches on a device, copied as parcels ahead of the loop; at most ``depth`` copies at a time."""

    def __init__(self, ahead: Ahead[Parcel], gpu: Any, *, depth: int) -> None:
        self._ahead, self._gpu, self._depth = ahead, gpu, depth
        self.ready: list[Batch] = []  # stays empty
        self.stream, self.current = 0, gpu.current
        self._behind_s = self._transfer_s = 0.0
        self._free: list[DeviceMemory] = []  # in the order in which they were let go
        self._held: list[DeviceMemory] = []  # the loop's
        self._most = 0  # bytes of the largest
        # Two events per copy. They are used again when the copy is done and the loop's stream waits for it.
        with gpu:
            self._events = deque((gpu.event(), gpu.event()) for _ in range(depth + AHEAD))
        self._flights: deque[tuple[DeviceMemory, Any, Parcel] | Exception] = deque()  # not handed out yet
        # Events of a copy's end and beginning, and the memory on the host that it needs until then.
        self._landings: deque[tuple[tuple[Any, Any], Array | None]] = deque()

    def take(self, batch: int) -> Batch:
        gpu, flights = self._gpu, self._flights
        with gpu:
            self._release()
            while len(flights) < AHEAD and self._launch(batch + len(flights), wait=not flights):
                pass
            if not flights:
                raise closed_error()
            flight = flights.popleft()
            if isinstance(flight, Exception):
                raise flight
            target, copy_done, parcel = flight
            gpu.use(copy_done)
            self._held.append(target)
            target.use_on(gpu, gpu.current())
            marks = parcel.marks
            values = parcel.unpack(target.memory)
            return Batch(values, positions=marks.positions, samples=marks.samples, valid=marks.valid)

    def _release(self) -> None:
        """Frees device memory that nobody holds."""
        for memory in [memory for memory in self._held if not memory.is_held]:
            memory.leave(self._gpu, self._gpu.current())
            self._gpu.mark(memory.let_go)
            self._held.remove(memory)
            # At the end: a copy takes the memory let go longest ago, and so waits for no recent step.
            self._free.append(memory)

    def _launch(self, batch: int, *, wait: bool) -> bool:
        """Queues the copy of the next batch, if there is one; an error waits for its turn."""
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
