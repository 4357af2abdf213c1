"""Batches on a device, against a device that is as slow as it may be: copies and kernels run when somebody waits for them.

Two streams are queues of work; an event is a place in one. Nothing runs before it must, so that memory that is used
again too early is seen as wrong numbers.
"""

import ctypes
import gc
import itertools

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed.device import DeviceRing
from millrace.feed.native import NativeRing
from millrace.feed.program import Program

pytestmark = pytest.mark.needs_core


class Event:
    stream = place = None


class SlowLanes:
    """A loop's stream that runs as late as it may, and a copy stream that runs as late or, if ``eager``, as early as it may."""

    def __init__(self, eager=False):
        self.queues, self.done = {"loop": [], "copies": []}, {"loop": 0, "copies": 0}
        self.allocated, self.eager = [], eager

    def run(self, stream, until):
        """Runs a stream up to a place, and of the other what it waits for."""
        while self.done[stream] < until:
            event, work = self.queues[stream][self.done[stream]]
            if event is not None and event.stream is not None:
                self.run(event.stream, event.place)
            self._step(stream, work)

    def _step(self, stream, work):
        self.queues[stream][self.done[stream]] = None  # what ran holds nothing
        self.done[stream] += 1
        if work is not None:
            work()

    def _hurry(self):
        while self.eager and self.done["copies"] < len(self.queues["copies"]):
            event, work = self.queues["copies"][self.done["copies"]]
            if event is not None and not self.is_done(event):
                return
            self._step("copies", work)

    def queue(self, stream, work):
        self.queues[stream].append((None, work))
        self._hurry()

    def record(self, event, stream):
        event.stream, event.place = stream, len(self.queues[stream])

    def wait(self, stream, event):
        at = Event()
        at.stream, at.place = event.stream, event.place
        self.queues[stream].append((at, None))
        self._hurry()

    # What the feed asks for.

    def new_memory(self, num_bytes):
        # Kept, since a GPU's allocator too gives memory away only after the work that was queued on it.
        self.allocated.append(torch.full((num_bytes,), 77, dtype=torch.uint8))
        return self.allocated[-1]

    def event(self):
        return Event()

    def mark(self, event):
        self.record(event, "loop")

    def copy(self, source, target, num_bytes, after, done):
        self.wait("copies", after)
        # By address, as on a GPU: a copy under way keeps neither end alive.
        self.queue("copies", lambda: ctypes.memmove(target, source, num_bytes))
        self.record(done, "copies")

    def use(self, done):
        self.wait("loop", done)

    def is_done(self, event):
        return event.stream is None or self.done[event.stream] >= event.place

    def finish(self):
        self.run("copies", len(self.queues["copies"]))


def dense_view():
    values = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    return mr.Windows(mr.from_arrays({"values": values}), lookback=4, horizon=1)


def ragged_view():
    offsets = np.concatenate(([0], np.cumsum(np.random.default_rng(1).integers(0, 30, 200))))
    hits = np.arange(offsets[-1])
    return mr.Records(mr.from_arrays({"hits": hits, "bits": hits % 2 == 0, "label": np.arange(200)}, offsets))


VIEWS = {"dense": dense_view(), "ragged": ragged_view()}


def on_device(view, lanes, count=None):
    feed = mr.Feed(VIEWS[view], batch=8, seed=3, device="numpy", epochs=None if count is None else count)
    program = Program.of(feed.line(0, feed.stop))
    total = feed.line(0, feed.stop).num_batches
    return DeviceRing(NativeRing(program, count=total, depth=3, workers=2), program.layout, lanes), feed


def flat(value):
    return [value.values, value.offsets] if isinstance(value, mr.Ragged) else [value]


def expected(feed, count):
    return [
        {name: [np.array(part) for part in flat(v)] for name, v in b.items()} for b in itertools.islice(feed, count)
    ]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("held_for", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("eager", [False, True])
def test_kernels_that_run_late_read_what_they_were_given(view, held_for, eager):
    """Each step queues a kernel that reads its batch; some steps later another does, and then the loop lets go of it."""
    lanes = SlowLanes(eager)
    ring, feed = on_device(view, lanes)
    wanted, read, held = expected(feed, 60), [], []

    def queue_read(number, batch):
        # The kernel knows addresses, as on a GPU; it does not keep tensors alive.
        arrays = {name: [np.asarray(tensor) for tensor in flat(value)] for name, value in batch.items()}
        bare = {
            name: [(*np.lib.array_utils.byte_bounds(v), v.shape, v.dtype) for v in parts]
            for name, parts in arrays.items()
        }
        lanes.queue("loop", lambda: read.append((number, {n: [peek(*b) for b in parts] for n, parts in bare.items()})))

    for number in range(60):
        held.append((number, ring.take(number)))
        queue_read(*held[-1])
        if held_for < len(held):
            queue_read(*held[0])
            del held[0]
    lanes.run("loop", len(lanes.queues["loop"]))
    assert {number for number, _ in read} == set(range(60))
    for number, found in read:
        for name, parts in wanted[number].items():
            assert all(np.array_equal(one, other) for one, other in zip(found[name], parts, strict=True))
    ring.close()


def peek(low, high, shape, dtype):
    if high == low:
        return np.empty(shape, dtype)
    return np.frombuffer((ctypes.c_char * (high - low)).from_address(low), dtype).reshape(shape).copy()


def test_memory_of_the_device_is_used_again():
    lanes = SlowLanes()
    ring, _ = on_device("dense", lanes)
    for number in range(200):
        batch = ring.take(number)
        assert batch.x.shape == (8, 4, 3)
        lanes.run("loop", len(lanes.queues["loop"]))
    assert len(lanes.allocated) <= 6
    ring.close()


def test_a_finite_feed_ends_and_its_marks_are_on_the_host():
    lanes = SlowLanes()
    ring, feed = on_device("dense", lanes, 1)
    total = len(feed)
    batches = [ring.take(number) for number in range(total)]
    with pytest.raises(mr.FeedError):
        ring.take(total)
    samples = np.concatenate([batch.samples[batch.valid] for batch in batches])
    assert sorted(samples.tolist()) == list(range(len(VIEWS["dense"])))
    ring.close()
    gc.collect()


def test_without_a_gpu_the_feed_says_so():
    if torch.cuda.is_available():
        batch = next(iter(mr.Feed(VIEWS["dense"], batch=8, device="cuda")))
        assert batch.x.is_cuda
        return
    with pytest.raises(mr.ConfigError, match="torch finds no GPU"):
        iter(mr.Feed(VIEWS["dense"], batch=8, device="cuda"))
    with pytest.raises(mr.ConfigError, match="expected one of"):
        mr.Feed(VIEWS["dense"], batch=8, device="tpu")
