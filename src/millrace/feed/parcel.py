"""Parcels: batches of a transform, or of numpy, packed into one run of pinned memory, so that one copy brings them to a device.

They are packed in the transform's threads, or in line; the training thread queues the copies.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import FeedError
from millrace.feed.batch import Batch, aligned
from millrace.feed.device import DeviceMemory
from millrace.feed.slots import Slots
from millrace.feed.stage import Stage
from millrace.ragged import Array, Ragged

AHEAD = 2  # copies queued before they are asked for


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a parcel."""

    begin: int
    num_bytes: int
    dtype: Any
    shape: tuple[int, ...]

    def view(self, memory: Any) -> Any:
        return memory[self.begin : self.begin + self.num_bytes].view(self.dtype).reshape(self.shape)


@dataclass(slots=True)
class Parcel:
    """A batch on its way to a device; what has no place stays as it is, or moves by itself."""

    memory: Array | None  # of the host, until its copy is queued
    address: int
    num_bytes: int
    marks: Batch  # positions, samples, valid
    placed: dict[str, Any]
    device: Any

    def unpack(self, memory: Any) -> dict[str, Any]:
        """The columns, in the memory of the device that the parcel was copied to."""

        def there(value: Any) -> Any:
            if isinstance(value, Place):
                return value.view(memory)
            return value.to(self.device, non_blocking=True) if hasattr(value, "to") else value

        return {name: v.map(there) if isinstance(v, Ragged) else there(v) for name, v in self.placed.items()}


class Packer:
    """Puts the tensors of a batch side by side into pinned memory that is used again."""

    def __init__(self, lanes: Any, num_slots: int) -> None:
        self._slots, self._device = Slots(num_slots, lanes.host_memory), lanes.device

    def pack(self, batch: Batch) -> Parcel:
        import torch

        tensors: list[tuple[Place, Any]] = []
        end = 0

        def place(value: Any) -> Any:
            nonlocal end
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
                return value
            num_bytes = value.numel() * value.element_size()
            tensors.append((Place(end, num_bytes, value.dtype, tuple(value.shape)), value))
            end += aligned(num_bytes)
            return tensors[-1][0]

        placed = {name: v.map(place) if isinstance(v, Ragged) else place(v) for name, v in dict.items(batch)}
        slot = self._slots.take()
        try:
            memory = slot.array("batch", (max(end, 1),), np.dtype(np.uint8))
        finally:
            slot.is_filling = False
        there = torch.from_numpy(memory)
        for at, tensor in tensors:
            at.view(there).copy_(tensor.detach())
        marks = Batch(positions=batch.positions, samples=batch.samples, valid=batch.valid)
        return Parcel(memory, memory.ctypes.data, end, marks, placed, self._device)


class InLine:
    """Parcels that the loop makes itself, when it asks for them."""

    num_workers = 0

    def __init__(self, make: Callable[[int], Parcel]) -> None:
        self._make = make

    def poll(self, batch: int, wait: bool) -> Parcel | None:
        return self._make(batch) if wait else None

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


class ParcelRing:
    """Parcels, each copied to the device ahead of the loop; ``depth`` copies at a time."""

    def __init__(self, source: Stage | InLine, lanes: Any, *, depth: int) -> None:
        self._source, self._lanes, self._depth = source, lanes, depth
        self.num_workers = source.num_workers
        self.behind_s = 0.0  # for which the loop waited until the GPU had caught up
        self._free: list[DeviceMemory] = []  # in the order in which they were let go
        self._out: list[DeviceMemory] = []  # the loop's
        self._most = 0  # bytes of the largest
        # An event per copy: its turn comes again when the copy is done and the loop was told to wait for it.
        with lanes:
            self._events = deque(lanes.event() for _ in range(depth + AHEAD))
        self._flying: deque[tuple[DeviceMemory, Any, Parcel] | Exception] = deque()  # not handed out yet
        self._landing: deque[tuple[Any, Array | None]] = deque()  # host memory in use until its copy is done

    def take(self, batch: int) -> Batch:
        """The next batch, which is number ``batch``."""
        lanes, flying = self._lanes, self._flying
        with lanes:
            self._release()
            while len(flying) < AHEAD and self._launch(batch + len(flying), wait=not flying):
                pass
            if not flying:
                raise FeedError("the feed was closed while a batch was awaited")
            flight = flying.popleft()
            if isinstance(flight, Exception):
                raise flight
            target, copied, parcel = flight
            lanes.use(copied)
            self._out.append(target)
            target.use_on(lanes, lanes.current())
            marks = parcel.marks
            values = parcel.unpack(target.memory)
            return Batch(values, positions=marks.positions, samples=marks.samples, valid=marks.valid)

    def _release(self) -> None:
        """Memory of the device that nobody holds may be used again."""
        for memory in [memory for memory in self._out if not memory.is_held]:
            memory.leave(self._lanes, self._lanes.current())
            self._lanes.mark(memory.let_go)
            self._out.remove(memory)
            # Behind all others: a copy takes what was let go longest ago, and waits for no step just queued.
            self._free.append(memory)

    def _launch(self, batch: int, *, wait: bool) -> bool:
        """Queues the copy of the next batch, if there is one; what went wrong is kept until its turn."""
        if len(self._landing) >= self._depth and not self._land(wait):
            return False
        try:
            parcel = self._source.poll(batch, wait)
            if parcel is None:
                return False
            target, copied = self._memory_for(parcel.num_bytes), self._events[0]
            self._lanes.copy(parcel.address, target.address, parcel.num_bytes, target.let_go, copied)
        except Exception as error:  # noqa: BLE001 - it is raised when this batch is asked for
            self._flying.append(error)
            return True
        self._events.rotate(-1)
        self._landing.append((copied, parcel.memory))
        parcel.memory = None
        self._flying.append((target, copied, parcel))
        return True

    def _land(self, wait: bool) -> bool:
        """Host memory whose copy is done may be used again; says whether there was any.

        It is looked at when it is needed: to ask whether a copy is done takes about as long as to queue one.
        """
        lanes, landing = self._lanes, self._landing
        if lanes.is_done(landing[-1][0]):  # then all are, since they are copied in turn
            landing.clear()
            return True
        if not lanes.is_done(landing[0][0]):
            if not wait:
                return False
            began = time.perf_counter()
            lanes.finish(landing[0][0])
            self.behind_s += time.perf_counter() - began
        landing.popleft()
        return True

    def _memory_for(self, num_bytes: int) -> DeviceMemory:
        for number, memory in enumerate(self._free):
            if memory.num_bytes >= num_bytes:
                return self._free.pop(number)
        self._free.clear()  # all too small
        if num_bytes > self._most:  # a quarter more where ragged batches grow
            self._most = num_bytes + (num_bytes // 4 if self._most else 0)
        return DeviceMemory(self._lanes, max(self._most, 1))

    def report(self) -> dict[str, Any]:
        return {**self._source.report(), "behind_s": self.behind_s}

    def close(self) -> None:
        self._source.close()
        if self._landing:
            with contextlib.suppress(FeedError), self._lanes:  # a GPU that failed copies no more
                self._lanes.finish(self._landing[-1][0])
        self._landing.clear()
        self._flying.clear()
