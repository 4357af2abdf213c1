"""Batches on a GPU: pinned slots, one copy each into a slot of the device, on a stream of its own.

The training thread only queues work: it never waits for the GPU and allocates nothing once the slots are there. A
column is a view of the device's slot, which is used again when no tensor shares its storage and the work that was
queued until then is done.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from millrace.errors import ConfigError, FeedError
from millrace.feed.batch import Batch
from millrace.feed.native import NativeRing
from millrace.feed.program import Layout
from millrace.ragged import Array, Ragged

AHEAD = 2  # copies queued before they are asked for


class CudaLanes:
    """Two streams of one GPU: the training loop's, and one for copies; events order them."""

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"device={device!r} needs torch; pip install millrace[torch]") from error
        if not torch.cuda.is_available():
            raise ConfigError(f'device={device!r}, but torch finds no GPU; take device="cpu"')
        self._cuda, self._device = torch.cuda, torch.device(device)
        self._copies: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def new_memory(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Any:
        return self._cuda.Event()  # type: ignore[no-untyped-call]

    def mark(self, event: Any) -> None:
        """The event comes after everything the loop has queued."""
        event.record(self._cuda.current_stream(self._device))

    def copy(self, source: Any, target: Any, after: Any, done: Any) -> None:
        self._copies.wait_event(after)
        with self._cuda.stream(self._copies):
            target.copy_(source, non_blocking=True)
        done.record(self._copies)

    def use(self, done: Any) -> None:
        """What the loop queues from now on comes after the copy."""
        self._cuda.current_stream(self._device).wait_event(done)

    def is_done(self, event: Any) -> bool:
        return bool(event.query())

    def finish(self) -> None:
        self._copies.synchronize()


def pinned_memory(num_bytes: int) -> Array:
    """Host memory that the GPU reads by itself."""
    import torch

    found: Array = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return found


class DeviceSlot:
    """Memory of the device for one batch, its columns as views, and the two events that order its use."""

    def __init__(self, lanes: Any, layout: Layout, num_bytes: int) -> None:
        import torch

        self.memory = lanes.new_memory(num_bytes)
        self.views = layout.views(self.memory, _torch_dtype)
        self.copied, self.let_go = lanes.event(), lanes.event()
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
    """The batches of a ring on the host, each copied to the device ahead of the loop."""

    def __init__(self, host: NativeRing, layout: Layout, lanes: Any) -> None:
        self._host, self._layout, self._lanes = host, layout, lanes
        self.num_workers = host.num_workers
        self._slots: list[DeviceSlot] = []
        self._flying: deque[tuple[DeviceSlot, Batch]] = deque()
        self._landing: deque[tuple[Any, Array]] = deque()  # host memory in use until its copy is done

    def take(self, batch: int) -> Batch:
        lanes = self._lanes
        while self._landing and lanes.is_done(self._landing[0][0]):
            self._landing.popleft()
        for slot in self._slots:
            if slot.is_out and not slot.is_held:
                lanes.mark(slot.let_go)
                slot.is_free, slot.is_out = True, False
        while len(self._flying) < AHEAD and self._launch(wait=not self._flying):
            pass
        if not self._flying:
            raise FeedError("the feed was closed while a batch was awaited")
        slot, found = self._flying.popleft()
        lanes.use(slot.copied)
        values: dict[str, Any] = {}
        end = self._layout.fixed_bytes
        for name, ragged, view in slot.views[1]:
            values[name] = view.detach()  # a tensor of its own: its storage counts who holds it
            if ragged is not None:
                rows = found[name]
                rows_there = self._layout.ragged_values(slot.memory, ragged, end, rows, _torch_dtype)
                values[name] = Ragged.trusted(rows_there, values[name])
                end = self._layout.ragged_end(ragged, end, rows)
        slot.is_out = True
        return Batch(values, positions=found.positions, samples=found.samples, valid=found.valid)

    def _launch(self, *, wait: bool) -> bool:
        """Queues the copy of the next batch, if there is one."""
        got = self._host.poll(wait)
        if got is None:
            return False
        number, used = got
        memory, batch = self._host.memory.arrays[number], self._host.memory.batch(number)
        assert memory is not None
        slot = next((s for s in self._slots if s.is_free and len(s.memory) >= used), None)
        if slot is None:
            # A quarter more where ragged batches grow; slots too small for them go.
            self._slots = [s for s in self._slots if not s.is_free or len(s.memory) >= used]
            room = used if used == self._layout.fixed_bytes else used + used // 4
            slot = DeviceSlot(self._lanes, self._layout, room)
            self._slots.append(slot)
        slot.is_free = False
        import torch

        self._lanes.copy(torch.from_numpy(memory[:used]), slot.memory[:used], slot.let_go, slot.copied)
        self._landing.append((slot.copied, memory[:0]))
        rows = {name: len(value.values) for name, value in batch.items() if isinstance(value, Ragged)}
        self._flying.append((slot, Batch(rows, positions=batch.positions, samples=batch.samples, valid=batch.valid)))
        return True

    def report(self) -> dict[str, Any]:
        return self._host.report()

    def close(self) -> None:
        self._host.close()
        if self._landing:
            self._lanes.finish()
        self._landing.clear()
        self._flying.clear()


def _torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def to_device(batch: Batch, device: str) -> Batch:
    """Tensors of a batch on a device, column by column: for batches that a transform or numpy made."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if hasattr(value, "to") else value

    for name, value in batch.items():
        batch[name] = value.map(move) if isinstance(value, Ragged) else move(value)
    return batch
