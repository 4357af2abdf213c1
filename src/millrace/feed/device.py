"""Batches on a GPU: pinned slots, one copy each into a slot of the device, on a stream of its own.

The training thread only queues work and allocates nothing once the slots are there. It waits for the GPU in one case:
where ``depth`` copies are under way and none is left to hand out, since then the GPU is more steps behind than that.
A column is a view of the device's slot, which is used again when no tensor shares its storage and the work that was
queued until then is done.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

from millrace.errors import FeedError
from millrace.feed.batch import Batch
from millrace.feed.parcel import InLineParcels, NativeParcels, Parcel
from millrace.feed.stage import Stage
from millrace.ragged import Array

AHEAD = 2  # copies queued before they are asked for


class DeviceSlot:
    """Memory of the device for one batch, and the event after which it may be written again."""

    def __init__(self, lanes: Any, num_bytes: int, parcel: Parcel) -> None:
        import torch

        self.memory = lanes.new_memory(num_bytes)
        self.address = self.memory.data_ptr()
        self.views = parcel.views(self.memory)
        self.let_go = lanes.event()
        lanes.mark(self.let_go)
        self.is_free, self.is_out = True, False  # neither: on its way
        self._storage = self.memory.untyped_storage()
        self._count = torch._C._storage_Use_Count
        self._idle = self.holders()

    def holders(self) -> int:
        return int(self._count(self._storage._cdata))

    @property
    def is_held(self) -> bool:
        return self.holders() > self._idle


class DeviceRing:
    """The batches of a source on the host, each copied to the device ahead of the loop; ``depth`` copies at a time."""

    def __init__(self, source: NativeParcels | Stage | InLineParcels, lanes: Any, *, depth: int) -> None:
        self._source, self._lanes, self._depth = source, lanes, depth
        self.num_workers = source.num_workers
        self.behind_s = 0.0  # for which the loop waited until the GPU had caught up
        self._slots: list[DeviceSlot] = []
        # An event per copy: its turn comes again when the copy is done and the loop was told to wait for it.
        with lanes:
            self._events = deque(lanes.event() for _ in range(depth + AHEAD))
        self._flying: deque[tuple[DeviceSlot, Any, Parcel] | Exception] = deque()  # not handed out yet
        self._landing: deque[tuple[Any, Array | None]] = deque()  # host memory in use until its copy is done

    def take(self, batch: int) -> Batch:
        lanes = self._lanes
        with lanes:
            self._release()
            while len(self._flying) < AHEAD and self._launch(batch + len(self._flying), wait=not self._flying):
                pass
            if not self._flying:
                raise FeedError("the feed was closed while a batch was awaited")
            flight = self._flying.popleft()
            if isinstance(flight, Exception):
                raise flight
            slot, copied, parcel = flight
            lanes.use(copied)
            slot.is_out = True
            marks = parcel.marks
            values = parcel.unpack(slot.memory, slot.views)
            return Batch(values, positions=marks.positions, samples=marks.samples, valid=marks.valid)

    def _release(self) -> None:
        """Host memory whose copy is done, and memory of the device that nobody holds, may be used again."""
        while self._landing and self._lanes.is_done(self._landing[0][0]):
            self._landing.popleft()
        for slot in [slot for slot in self._slots if slot.is_out and not slot.is_held]:
            self._lanes.mark(slot.let_go)
            slot.is_free, slot.is_out = True, False
            # Behind all others: a copy takes the slot that was let go longest ago, and waits for no step just queued.
            self._slots.remove(slot)
            self._slots.append(slot)

    def _launch(self, batch: int, *, wait: bool) -> bool:
        """Queues the copy of the next batch, if there is one; what went wrong is kept until its turn."""
        if len(self._landing) >= self._depth:
            if not wait:
                return False
            began = time.perf_counter()
            self._lanes.finish(self._landing[0][0])
            self.behind_s += time.perf_counter() - began
            self._landing.popleft()
        try:
            parcel = self._source.poll(batch, wait)
        except Exception as error:  # noqa: BLE001 - it is raised when this batch is asked for
            self._flying.append(error)
            return True
        if parcel is None:
            return False
        slot, copied = self._slot_for(parcel), self._events[0]
        self._events.rotate(-1)
        slot.is_free = False
        self._lanes.copy(parcel.address, slot.address, parcel.num_bytes, slot.let_go, copied)
        self._landing.append((copied, parcel.memory))
        parcel.memory = None
        self._flying.append((slot, copied, parcel))
        return True

    def _slot_for(self, parcel: Parcel) -> DeviceSlot:
        used = parcel.num_bytes
        slot = next((s for s in self._slots if s.is_free and len(s.memory) >= used), None)
        if slot is None:
            # A quarter more where ragged batches grow; slots too small for them go.
            most = max((len(s.memory) for s in self._slots), default=used)
            self._slots = [s for s in self._slots if not s.is_free or len(s.memory) >= used]
            slot = DeviceSlot(self._lanes, max(most if used <= most else used + used // 4, 1), parcel)
            self._slots.append(slot)
        return slot

    def report(self) -> dict[str, Any]:
        return {**self._source.report(), "behind_s": self.behind_s}

    def close(self) -> None:
        self._source.close()
        if self._landing:
            with contextlib.suppress(FeedError), self._lanes:  # a GPU that failed copies no more
                self._lanes.finish(self._landing[-1][0])
        self._landing.clear()
        self._flying.clear()
