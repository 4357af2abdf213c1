"""One GPU as a feed sees it: memory, two streams, and the events that order them.

The core queues copies by the driver's functions; it gets their addresses from here. For batches of a transform Python
calls them: with torch's own streams and events a batch took 270 us of the training loop on an H200.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from millrace.distribution import install_command
from millrace.errors import ConfigError, FeedError
from millrace.ragged import Array

CORE_CALLS = (
    "cuStreamWaitEvent", "cuEventRecord", "cuEventSynchronize", "cuMemcpyHtoDAsync_v2", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuThreadExchangeStreamCaptureMode",
)  # fmt: skip


class Gpu:
    """Two streams of one GPU: the training loop's, and one for copies; events order them.

    Call everything but ``host_memory`` inside ``with gpu:``. That enters the GPU's context: the loop may run in a
    thread without one, or on another GPU.
    """

    def __init__(self, device: str) -> None:
        try:
            import torch
        except ImportError as error:
            raise ConfigError(f"device={device!r} needs torch; {install_command('torch')}") from error
        if not torch.cuda.is_available():
            raise ConfigError(f'device={device!r}, but torch finds no GPU; take device="cpu"')
        wanted, count = torch.device(device), torch.cuda.device_count()
        index = torch.cuda.current_device() if wanted.index is None else wanted.index
        if index >= count:
            raise ConfigError(f"device={device!r}, but torch finds {count} GPUs, numbered from 0")
        self.device, self._driver = torch.device("cuda", index), Driver()
        self._torch_copies: Any = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._torch, self._copies = torch, int(self._torch_copies.cuda_stream)
        self._context = self._driver.context(index)
        # Of threads inside that had another context, or none: for each time that they came in, whether it was pushed.
        self._guests: dict[int, list[bool]] = {}
        self.table = (*self._driver.addresses(), self._context, self._copies)  # for the core
        # The stream that the loop's thread uses now.
        self.current: Callable[[], int] = partial(torch._C._cuda_getCurrentRawStream, index)
        self.home = self.current()  # memory is allocated on this stream, in any thread

    def __enter__(self) -> None:
        is_outside = self._driver.current() != self._context  # mostly not; asking is ten times as fast as pushing
        if is_outside:
            self._driver.push(self._context)
        if is_outside or (self._guests and threading.get_ident() in self._guests):
            self._guests.setdefault(threading.get_ident(), []).append(is_outside)

    def __exit__(self, *error: object) -> None:
        if self._guests and (entries := self._guests.get(threading.get_ident())):
            was_pushed = entries.pop()
            if not entries:
                del self._guests[threading.get_ident()]
            if was_pushed:
                self._driver.pop()

    def host_memory(self, num_bytes: int) -> Array:
        """Pinned memory, which the GPU reads by itself."""
        return self._torch.empty(num_bytes, dtype=self._torch.uint8, pin_memory=True).numpy()

    def register(self, memory: Array) -> None:
        """Pins memory that is there already, such as a slot that worker processes write."""
        with self:
            self._driver.register(memory.ctypes.data, memory.nbytes)

    def unregister(self, memory: Array) -> None:
        with contextlib.suppress(FeedError), self:
            self._driver.unregister(memory.ctypes.data)

    def new_memory(self, num_bytes: int) -> Any:
        with self._torch.cuda.stream(self._external(self.home)):
            return self._torch.empty(num_bytes, dtype=self._torch.uint8, device=self.device)

    def free_memory(self) -> int:
        """What is free, also within what torch keeps."""
        cuda = self._torch.cuda
        free = cuda.mem_get_info(self.device)[0]
        return int(free + cuda.memory_reserved(self.device) - cuda.memory_allocated(self.device))

    def record_use(self, memory: Any, stream: int) -> None:
        memory.record_stream(self._external(stream))

    def _external(self, stream: int) -> Any:
        return self._torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]

    def mark_new(self, event: Any) -> None:
        """Puts the event after everything done with new memory before."""
        self._driver.record(event.handle, self.home)

    def event(self) -> Any:
        return DriverEvent(self._driver, self._context)

    def mark(self, event: Any) -> None:
        """Puts the event after everything the loop has queued."""
        self._driver.record(event.handle, self.current())

    def copy(self, source: int, target: int, num_bytes: int, after: Any, done: Any, begun: Any) -> None:
        """Queues the copy between two addresses, after one event and between two others."""
        driver = self._driver
        driver.wait(self._copies, after.handle, 0)
        driver.record(begun.handle, self._copies)
        driver.copy(target, source, num_bytes, self._copies)
        driver.record(done.handle, self._copies)

    def use(self, done: Any) -> None:
        """Makes the loop's stream wait for the copy."""
        self._driver.wait(self.current(), done.handle, 0)

    def follow(self, stream: int, other: int, event: Any) -> None:
        """Makes one stream wait for what another has queued."""
        self._driver.record(event.handle, other)
        self._driver.wait(stream, event.handle, 0)

    def is_done(self, event: Any) -> bool:
        return self._driver.is_done(event.handle)

    def finish(self, event: Any) -> None:
        """Waits, without the GIL, until the event has come."""
        self._driver.synchronize(event.handle)

    def finish_all(self) -> None:
        """Waits until all copies are done."""
        self._driver.finish(self._copies)


class Driver:
    """The functions of the CUDA driver that order copies, in the current context."""

    NOT_READY = 600

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        except OSError as error:
            raise ConfigError(
                f'the CUDA driver cannot be loaded ({error}); reinstall it, or use device="cpu"'
            ) from error
        pointer, number = ctypes.c_void_p, ctypes.c_uint
        result = ctypes.POINTER(pointer)
        self.wait = self._function("cuStreamWaitEvent", pointer, pointer, number)
        self.record = self._function("cuEventRecord", pointer, pointer)
        self.synchronize = self._function("cuEventSynchronize", pointer)
        self.finish = self._function("cuStreamSynchronize", pointer)
        self.copy = self._function("cuMemcpyHtoDAsync_v2", pointer, pointer, ctypes.c_size_t, pointer)
        self.create = self._function("cuEventCreate", result, number)
        self.destroy = self._function("cuEventDestroy_v2", pointer)
        self.push = self._function("cuCtxPushCurrent_v2", pointer)
        self._current = self._function("cuCtxGetCurrent", result)
        self._pop = self._function("cuCtxPopCurrent_v2", result)
        self._retain = self._function("cuDevicePrimaryCtxRetain", result, ctypes.c_int)
        self._device = self._function("cuDeviceGet", ctypes.POINTER(ctypes.c_int), ctypes.c_int)
        self._query = self._library.cuEventQuery
        self._query.argtypes = [pointer]

    def _function(self, name: str, *types: Any) -> Callable[..., None]:
        function = getattr(self._library, name)
        function.argtypes, function.errcheck = types, _check
        return function  # type: ignore[no-any-return]

    def register(self, address: int, num_bytes: int) -> None:
        self._function("cuMemHostRegister_v2", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)(address, num_bytes, 0)

    def unregister(self, address: int) -> None:
        self._function("cuMemHostUnregister", ctypes.c_void_p)(address)

    def addresses(self) -> list[int]:
        """Addresses of the functions the core calls, in its order."""
        return [ctypes.cast(getattr(self._library, name), ctypes.c_void_p).value or 0 for name in CORE_CALLS]

    def context(self, index: int) -> int:
        """The context that torch uses on a GPU. Torch keeps it until the process ends, so it is not released here."""
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._device(ctypes.byref(device), index)
        self._retain(ctypes.byref(context), device)
        return context.value or 0

    def current(self) -> int:
        context = ctypes.c_void_p()
        self._current(ctypes.byref(context))
        return context.value or 0

    def pop(self) -> None:
        self._pop(ctypes.byref(ctypes.c_void_p()))

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
    """An event without a clock, in the current context. Waiting for it is a sleep."""

    def __init__(self, driver: Driver, context: int) -> None:
        handle = ctypes.c_void_p()
        driver.create(ctypes.byref(handle), 1 | 2)  # 1: blocking, 2: no timing
        self.handle = handle.value or 0
        self._finish = weakref.finalize(self, _destroy, driver, context, self.handle)
        self._finish.atexit = False  # the driver is gone by then, and its events with it


def _destroy(driver: Driver, context: int, handle: int) -> None:
    with contextlib.suppress(FeedError):
        driver.push(context)
        try:
            driver.destroy(handle)
        finally:
            driver.pop()
