"""Every call to the CUDA driver is made in the context it belongs to, whichever thread asks and whichever GPU is current.

The driver here is a stand-in that knows two GPUs, refuses what comes from another context, and copies at once.
"""

# ruff: noqa: N802 - the names are the driver's

import ctypes
import itertools
import threading

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed import compose
from millrace.feed.place import cuda

pytestmark = [pytest.mark.needs_core, pytest.mark.one_way]
POINTER, FOUND, INTEGER, INTEGERS = (
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_int),
)
INVALID_CONTEXT = 201


class FakeDriver:
    """The functions of libcuda; a context is 1000 + its GPU, a stream 10 x context, the default stream 0."""

    def __init__(self):
        self.own = threading.local()
        self.events, self.numbers, self.recorded = {}, itertools.count(5), {}
        self.num_copies = 0

    @property
    def stack(self):
        return self.own.__dict__.setdefault("stack", [])

    def current(self, *owners):
        """0 where the current context owns all of these."""
        return 0 if self.stack and all(owner == self.stack[-1] for owner in owners) else INVALID_CONTEXT

    def stream_owner(self, stream):
        return stream // 10 if stream else self.stack[-1] if self.stack else None

    def cuDeviceGet(self, found, index):
        found[0] = 70 + index
        return 0

    def cuDevicePrimaryCtxRetain(self, found, device):
        found[0] = 1000 + device - 70
        return 0

    def cuCtxGetCurrent(self, found):
        found[0] = self.stack[-1] if self.stack else 0
        return 0

    def cuCtxSetCurrent(self, context):
        self.stack[-1:] = [context] if context else []
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        return 0

    def cuStreamSynchronize(self, stream):
        return self.current(self.stream_owner(stream))

    def cuCtxPushCurrent_v2(self, context):
        self.stack.append(context)
        return 0

    def cuCtxPopCurrent_v2(self, found):
        found[0] = self.stack.pop()
        return 0

    def cuEventCreate(self, found, flags):
        found[0] = next(self.numbers)
        self.events[found[0]] = self.stack[-1] if self.stack else None
        return self.current()

    def cuEventDestroy_v2(self, event):
        code = self.current(self.events[event])
        if code == 0:
            del self.events[event]
        return code

    def cuEventRecord(self, event, stream):
        return self.current(self.events[event], self.stream_owner(stream))

    def cuEventQuery(self, event):
        return self.current(self.events[event])

    def cuEventSynchronize(self, event):
        return self.current(self.events[event])

    def cuStreamWaitEvent(self, stream, event, flags):
        return self.current(self.events[event], self.stream_owner(stream))

    def cuMemcpyHtoDAsync_v2(self, target, source, num_bytes, stream):
        ctypes.memmove(target, source, num_bytes)
        self.num_copies += 1
        return self.current(self.stream_owner(stream))

    def cuMemHostRegister_v2(self, address, num_bytes, flags):
        return self.current()

    def cuMemHostUnregister(self, address):
        return self.current()


TYPES = {
    "cuDeviceGet": (INTEGERS, INTEGER),
    "cuDevicePrimaryCtxRetain": (FOUND, INTEGER),
    "cuCtxGetCurrent": (FOUND,),
    "cuCtxSetCurrent": (POINTER,),
    "cuThreadExchangeStreamCaptureMode": (INTEGERS,),
    "cuStreamSynchronize": (POINTER,),
    "cuCtxPushCurrent_v2": (POINTER,),
    "cuCtxPopCurrent_v2": (FOUND,),
    "cuEventCreate": (FOUND, ctypes.c_uint),
    "cuEventDestroy_v2": (POINTER,),
    "cuEventRecord": (POINTER, POINTER),
    "cuEventQuery": (POINTER,),
    "cuEventSynchronize": (POINTER,),
    "cuStreamWaitEvent": (POINTER, POINTER, ctypes.c_uint),
    "cuMemcpyHtoDAsync_v2": (POINTER, POINTER, ctypes.c_size_t, POINTER),
    "cuMemHostRegister_v2": (POINTER, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (POINTER,),
}


def library_of(driver):
    """The same as a library of C functions."""

    class Library:
        pass

    Library.driver = driver
    for name, types in TYPES.items():
        function = ctypes.CFUNCTYPE(INTEGER, *types)(_plain(getattr(driver, name)))
        function.__name__ = name
        setattr(Library, name, function)
    return Library


def _plain(method):
    return lambda *args: method(*(0 if arg is None else arg for arg in args))


class FakeStream:
    def __init__(self, device):
        self.cuda_stream = 10 * (1000 + device.index)


class HostGpu(cuda.Gpu):
    """Its GPUs have the host's memory."""

    def host_memory(self, num_bytes):
        return np.empty(num_bytes, np.uint8)

    def new_memory(self, num_bytes):
        return torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture
def driver(monkeypatch):
    made = FakeDriver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: library_of(made))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(compose, "Gpu", HostGpu)
    return made


def feed_of(device, transform=None):
    values = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    view = mr.Windows(mr.from_arrays({"values": values}), lookback=4, horizon=1)
    return mr.Feed(view, batch=64, seed=3, device=device, transform=transform)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("transform", [None, lambda batch, rng: batch], ids=["plain", "transform"])
@pytest.mark.parametrize("has_context", [False, True])
def test_calls_are_made_in_their_context(device, transform, has_context, driver):
    """The loop's thread has no context, or that of the first GPU, which it keeps."""
    if has_context:
        driver.stack.append(1000)
    wanted = [batch.x.copy() for batch in itertools.islice(feed_of("numpy"), 60)]
    feed = feed_of(device, transform)
    for batch, other in zip(itertools.islice(feed, 60), wanted, strict=True):
        assert np.array_equal(batch.x.numpy(), other)
        assert driver.stack == ([1000] if has_context else [])
    feed.close()
    least = 60 if transform else 60 // (2 * feed.depth)  # small batches share a slot
    assert least <= driver.num_copies <= least + 2 * feed.depth
    del batch, feed
    assert driver.events == {}  # each destroyed, in its context
    assert driver.stack == ([1000] if has_context else [])


@pytest.mark.parametrize("has_context", [False, True])
def test_a_slot_may_be_registered_between_two_copies(has_context, driver):
    """Whoever is inside may enter again: it stays inside until it leaves as often."""
    outside = [1000] * has_context
    driver.stack[:] = outside
    gpu, memory = HostGpu("cuda:1"), np.zeros(8, np.uint8)
    with gpu:
        for change in (gpu.register, gpu.unregister):
            change(memory)
            assert driver.stack == [*outside, 1001]
        driver.stack.append(1000)  # torch on the other GPU
        gpu.register(memory)
        assert driver.stack.pop() == 1000
        gpu.mark_new(gpu.event())
    assert driver.stack == outside


@pytest.mark.parametrize("transform", [None, lambda batch, rng: batch], ids=["plain", "transform"])
def test_streams_may_change_in_a_loop_on_another_gpu(transform, driver, monkeypatch):
    now = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: now[0], raising=False)
    monkeypatch.setattr(HostGpu, "record_use", lambda gpu, memory, stream: None)
    driver.stack.append(1000)
    wanted = [batch.x.copy() for batch in itertools.islice(feed_of("numpy"), 60)]
    with feed_of("cuda:1", transform) as feed:
        for number, (batch, other) in enumerate(zip(feed, wanted, strict=False)):
            assert np.array_equal(batch.x.numpy(), other)
            assert driver.stack == [1000]
            now[0] = 10010 * (number % 2)
            if number == len(wanted) - 1:
                break


def test_next_may_move_from_thread_to_thread(driver):
    iterator, got = iter(feed_of("cuda:1")), []
    for _ in range(10):
        thread = threading.Thread(target=lambda: got.append(next(iterator).positions[0]))
        thread.start()
        thread.join()
    assert got == list(range(0, 640, 64))
    iterator.close()


def test_a_gpu_that_is_not_there_is_named(driver):
    with pytest.raises(mr.ConfigError, match=r"cuda:2.*finds 2 GPUs"):
        iter(feed_of("cuda:2"))


def test_what_the_driver_refuses_is_an_error(driver, monkeypatch):
    monkeypatch.setattr(FakeDriver, "cuMemcpyHtoDAsync_v2", lambda *args: 700)
    with pytest.raises(mr.FeedError, match="cuMemcpyHtoDAsync_v2 with error 700"):
        next(iter(feed_of("cuda")))
