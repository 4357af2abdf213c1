"""Batches on a GPU: pinned slots, one copy each into a slot of the device, on a stream of its own.

The training thread only queues work: it never waits for the GPU and allocates nothing once the slots are there. A
column is a view of the device's slot, which is used again when no tensor shares its storage and the work that was
queued until then is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.errors import ConfigError, FeedError
from millrace.feed.batch import Batch
from millrace.feed.native import NativeRing
from millrace.feed.program import Layout
from millrace.ragged import Array, Ragged

AHEAD = 2  # copies queued before they are asked for


class CudaLanes:
    """Two streams of one GPU: the training loop's, and one for copies; events order them.

    What a batch costs the loop is calls: through torch's own streams and events they took 270 us on an H200, by the
    driver's functions 41 us.
    """

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"device={device!r} needs torch; pip install millrace[torch]") from error
        if not torch.cuda.is_available():
            raise ConfigError(f'device={device!r}, but torch finds no GPU; take device="cpu"')
        wanted = torch.device(device)
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        self._device, self._driver = torch.device("cuda", index), Driver()
        self._torch_copies: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._copies = int(self._torch_copies.cuda_stream)
        current = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        self._current: Callable[[], int] = (
            (lambda: int(current(index)))
            if current is not None
            else (lambda: int(torch.cuda.current_stream(self._device).cuda_stream))
        )

    def new_memory(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def event(self) -> Any:
        return DriverEvent(self._driver)

    def mark(self, event: Any) -> None:
        """The event comes after everything the loop has queued."""
        self._driver.record(event.handle, self._current())

    def copy(self, source: int, target: int, num_bytes: int, after: Any, done: Any) -> None:
        """Queues the copy between two addresses, after one event and before the other."""
        driver = self._driver
        driver.wait(self._copies, after.handle, 0)
        driver.copy(target, source, num_bytes, self._copies)
        driver.record(done.handle, self._copies)

    def use(self, done: Any) -> None:
        """What the loop queues from now on comes after the copy."""
        self._driver.wait(self._current(), done.handle, 0)

    def is_done(self, event: Any) -> bool:
        return self._driver.is_done(event.handle)

    def finish(self) -> None:
        self._torch_copies.synchronize()


class Driver:
    """The few functions of the CUDA driver that order copies; they work in the context torch has made current."""

    NOT_READY = 600

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f'the CUDA driver cannot be loaded ({error}); reinstall it, or take device="cpu"'
            ) from error
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
        self._library = library
        self.wait = self._function("cuStreamWaitEvent", pointer, pointer, number)
        self.record = self._function("cuEventRecord", pointer, pointer)
        self.copy = self._function("cuMemcpyHtoDAsync_v2", pointer, pointer, size, pointer)
        self.create = self._function("cuEventCreate", ctypes.POINTER(pointer), number)
        self.destroy = self._function("cuEventDestroy_v2", pointer)
        self._query = library.cuEventQuery
        self._query.argtypes = [pointer]

    def _function(self, name: str, *types: Any) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes = types
        function.errcheck = _check
        return function  # type: ignore[no-any-return]

    def is_done(self, event: int) -> bool:
        code = int(self._query(event))
        if code not in (0, self.NOT_READY):
            _check(code, self._query, ())
        return code == 0


def _check(code: int, function: Any, arguments: Any) -> None:
    if code != 0:
        raise FeedError(
            f"the GPU refused {function.__name__} with error {code}; an earlier kernel may have failed: "
            "run with CUDA_LAUNCH_BLOCKING=1"
        )


class DriverEvent:
    """An event without a clock."""

    def __init__(self, driver: Driver) -> None:
        handle = ctypes.c_void_p()
        driver.create(ctypes.byref(handle), 2)  # 2: no timing
        self.handle = handle.value or 0
        self._finish = weakref.finalize(self, _destroy, driver, self.handle)
        self._finish.atexit = False  # the driver is gone by then, and its events with it


def _destroy(driver: Driver, handle: int) -> None:
    with contextlib.suppress(FeedError):
        driver.destroy(handle)


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
        self.address = self.memory.data_ptr()
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
        self._addresses: dict[int, tuple[Any, int]] = {}  # of host memory, which is not held: who holds it is counted
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
        self._lanes.copy(self._address(number, memory), slot.address, used, slot.let_go, slot.copied)
        self._landing.append((slot.copied, memory[:0]))
        rows = {name: len(value.values) for name, value in batch.items() if isinstance(value, Ragged)}
        self._flying.append((slot, Batch(rows, positions=batch.positions, samples=batch.samples, valid=batch.valid)))
        return True

    def _address(self, number: int, memory: Array) -> int:
        """Where a slot of the host lies; asked for once, since numpy takes its time to tell."""
        known = self._addresses.get(number)
        if known is None or known[0]() is not memory:
            known = self._addresses[number] = (weakref.ref(memory), memory.ctypes.data)
        return known[1]

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
