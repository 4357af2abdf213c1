"""Batches on a device, against one that is as slow as it may be."""

import ctypes
import gc
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.make.program import Program
from millrace.feed.place.device import DeviceSlots

from .slow_gpu import LOOP, SIDE, STREAMS, SlowGpu

pytestmark = [pytest.mark.needs_core, pytest.mark.one_way]


def dense_view():
    values = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    return mr.Windows(mr.from_arrays({"values": values}), lookback=4, horizon=1)


def ragged_view():
    offsets = np.concatenate(([0], np.cumsum(np.random.default_rng(1).integers(0, 30, 200))))
    hits = np.arange(offsets[-1])
    return mr.Records(mr.from_arrays({"hits": hits, "bits": hits % 2 == 0, "label": np.arange(200)}, offsets))


VIEWS = {"dense": dense_view(), "ragged": ragged_view()}
DEPTH = 3
SLOTS = DEPTH + 2  # of batches that are ready or being made, of the loop's step and of the step before
TOGETHER = 3  # batches in a slot; then two slots are ahead


def on_device(view, gpu, count=None, group=1):
    feed = mr.Feed(VIEWS[view], batch=8, seed=3, device="numpy", epochs=None if count is None else count)
    program = Program.of(feed.line(0, feed.stop), group)
    total = feed.line(0, feed.stop).num_batches
    return DeviceSlots(program, gpu, count=total, depth=DEPTH, workers=2), feed


def flat(value):
    return [value.values, value.offsets] if isinstance(value, mr.Ragged) else [value]


def expected(feed, count):
    return [
        {name: [np.array(part) for part in flat(v)] for name, v in b.items()} for b in itertools.islice(feed, count)
    ]


@pytest.mark.parametrize(("view", "group"), [("dense", 1), ("dense", TOGETHER), ("ragged", 1)])
@pytest.mark.parametrize("held_for", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("eager", [False, True])
def test_kernels_that_run_late_read_what_they_were_given(view, group, held_for, eager):
    """Each step queues a kernel that reads its batch; some steps later another does, and then the loop lets go of it."""
    gpu = SlowGpu(eager)
    ring, feed = on_device(view, gpu, group=group)
    wanted, read, held = expected(feed, 60), [], []

    def queue_read(number, batch):
        # The kernel knows addresses, as on a GPU; it does not keep tensors alive.
        arrays = {name: [np.asarray(tensor) for tensor in flat(value)] for name, value in batch.items()}
        bare = {
            name: [(*np.lib.array_utils.byte_bounds(v), v.shape, v.dtype) for v in parts]
            for name, parts in arrays.items()
        }
        gpu.queue("loop", lambda: read.append((number, {n: [peek(*b) for b in parts] for n, parts in bare.items()})))

    for number in range(60):
        held.append((number, ring.take(number)))
        queue_read(*held[-1])
        if held_for < len(held):
            queue_read(*held[0])
            del held[0]
    gpu.run("loop", len(gpu.queues["loop"]))
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
    gpu = SlowGpu()
    ring, _ = on_device("dense", gpu)
    for number in range(200):
        batch = ring.take(number)
        assert batch.x.shape == (8, 4, 3)
        gpu.run("loop", len(gpu.queues["loop"]))
    assert len(gpu.allocated) == SLOTS
    ring.close()


@pytest.mark.parametrize("lag", [0, 3, 5, 20, 1000])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(("group", "slots"), [(1, SLOTS), (TOGETHER, 4)])
def test_a_gpu_that_is_behind_takes_no_more_memory(lag, eager, group, slots):
    """The loop queues 300 steps; each is run as many steps later as the GPU is behind."""
    gpu = SlowGpu(eager)
    ring, feed = on_device("dense", gpu, group=group)
    wanted, read, ends, most = expected(feed, 300), [], [], 0
    for number in range(300):
        batch = ring.take(number)
        low, high = np.lib.array_utils.byte_bounds(np.asarray(batch.x))
        gpu.queue("loop", lambda low=low, high=high: read.append(peek(low, high, (8, 4, 3), np.float32)))
        ends.append(len(gpu.queues["loop"]))
        del batch
        if number >= lag:
            gpu.run("loop", ends[number - lag])
        most = max(most, gpu.num_alive)
        # A slot is filled again when its last copy, and so the step before it, is done.
        assert number - len(read) <= 2 * slots * group
    gpu.run("loop", len(gpu.queues["loop"]))
    assert all(np.array_equal(one, other["x"][0]) for one, other in zip(read, wanted, strict=True))
    assert len(gpu.host) == most == len(gpu.allocated) == slots  # all that was ever asked for is still in use
    assert ring.report().behind_s >= 0
    if eager and lag == 0:
        assert gpu.num_waits == 0
    if lag > 2 * slots * group:
        assert gpu.num_waits > 0
    ring.close()


class WatchedGpu(SlowGpu):
    """Notes which place of the loop's stream the copy of each batch waits for."""

    def __init__(self):
        super().__init__(eager=True)
        self.awaited, self.changed = {}, threading.Condition()

    def wait(self, stream, event):
        if stream == "copies":
            self.place = event.place
        super().wait(stream, event)

    def move(self, source, target, num_bytes):
        """Of a batch of 8, whose positions come first."""
        super().move(source, target, num_bytes)
        with self.changed:
            self.awaited[ctypes.c_int64.from_address(source).value // 8] = self.place
            self.changed.notify_all()

    def until_queued(self, count):
        with self.changed:
            assert self.changed.wait_for(lambda: all(batch in self.awaited for batch in range(count)), timeout=60)


@pytest.mark.parametrize("lag", [0, 1000])
def test_a_copy_waits_for_no_step_but_old_ones(lag):
    """Else copies and steps would take turns instead of running beside each other.

    Each copy waits for the step that let go of the oldest memory. The loop lets the threads come as far as they do by
    themselves: they are woken for two batches, not for one. It never has to make a batch that a thread has begun.
    """
    gpu, ends = WatchedGpu(), []
    ring, _ = on_device("dense", gpu)
    for number in range(200):
        gpu.until_queued(number + DEPTH - 1)
        batch = ring.take(number)
        del batch
        gpu.queue("loop", lambda: None)
        ends.append(len(gpu.queues["loop"]))
        if number >= lag:
            gpu.run("loop", ends[number - lag])
    assert [gpu.awaited[copy] for copy in range(SLOTS, 200)] == ends[: 200 - SLOTS]
    ring.close()


@pytest.mark.parametrize("group", [1, 2, TOGETHER, 7])
def test_a_finite_feed_ends_and_its_marks_are_on_the_host(group):
    gpu = SlowGpu()
    ring, feed = on_device("dense", gpu, 1, group)
    total = len(feed)
    batches = [ring.take(number) for number in range(total)]
    with pytest.raises(mr.FeedError):
        ring.take(-(-total // group) * group)  # the slot after the last
    samples = np.concatenate([batch.samples[batch.valid] for batch in batches])
    assert sorted(samples.tolist()) == list(range(len(VIEWS["dense"])))
    ring.close()
    gc.collect()


def test_a_loop_may_change_streams_between_batches_of_a_slot():
    """The first batch of each slot is used on one stream, which runs late, the others on another, which runs at once."""
    gpu, read = SlowGpu(), {}
    ring, feed = on_device("dense", gpu, group=TOGETHER)
    for number, wanted in enumerate(expected(feed, 30)):
        gpu.stream = SIDE if number % TOGETHER else LOOP
        bounds = np.lib.array_utils.byte_bounds(np.asarray(ring.take(number).x))
        gpu.queue(STREAMS[gpu.stream], lambda n=number, b=bounds: read.update({n: peek(*b, (8, 4, 3), np.float32)}))
        if number % TOGETHER:
            gpu.run("side", len(gpu.queues["side"]))
            assert np.array_equal(read[number], wanted["x"][0])
        if number % TOGETHER == TOGETHER - 1:
            gpu.run("loop", len(gpu.queues["loop"]))
    ring.close()


class LateGpu(SlowGpu):
    """A GPU that needs its time for every copy somebody waits for while the loop waits too, and says how much in all."""

    late_s = 0.0

    def __init__(self):
        super().__init__()
        self.is_awaited = threading.Event()

    def synchronize(self, event):
        if not self.has_come(event):
            assert self.is_awaited.wait(60)
            time.sleep(0.02)
            self.late_s += 0.02
        super().synchronize(event)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("group", [1, TOGETHER])
def test_waiting_for_a_gpu_that_is_behind_is_told_apart_from_waiting_for_data(group, workers):
    """Also what it takes to make the batch once its memory is free: nobody could have made it before."""
    gpu = LateGpu()
    feed = mr.Feed(VIEWS["dense"], batch=8, seed=3, device="numpy")
    ring = DeviceSlots(Program.of(feed.line(0, None), group), gpu, count=None, depth=DEPTH, workers=workers)
    began = time.perf_counter()
    for number in range(60):
        gpu.is_awaited.set()
        ring.take(number)
        gpu.is_awaited.clear()
    taken = time.perf_counter() - began
    gpu.is_awaited.set()
    counters = ring.report()  # what a copy takes is counted apart
    assert gpu.late_s > 0
    assert counters.behind_s + counters.transfer_s > 0.2 * gpu.late_s / workers  # as many threads wait at a time
    assert counters.behind_s + counters.transfer_s <= taken
    ring.close()


@pytest.mark.parametrize(("workers", "ahead"), [(1, 2), (3, 3), (5, 4), (16, 4)])
def test_slots_of_several_batches_are_as_many_as_threads_up_to_four(workers, ahead):
    gpu = SlowGpu()
    feed = mr.Feed(VIEWS["dense"], batch=8, seed=3, device="numpy")
    program = Program.of(feed.line(0, None), TOGETHER)
    ring = DeviceSlots(program, gpu, count=None, depth=DEPTH, workers=workers)
    for number in range(60):
        ring.take(number)
        gpu.run("loop", len(gpu.queues["loop"]))
    assert len(gpu.allocated) <= ahead + 2
    assert len(ring._memory.arrays) == ahead + 2
    ring.close()


@pytest.mark.parametrize("pattern", ["LS", "LSSL", "LLS", "SL"])
@pytest.mark.parametrize("group", [1, 2, TOGETHER])
@pytest.mark.parametrize("drops", [False, True])
def test_memory_waits_for_every_stream_that_uses_it(pattern, group, drops):
    """One stream runs as its steps are queued, the other never before it must."""
    gpu, read = SlowGpu(eager=True), {}
    ring, feed = on_device("dense", gpu, group=group)
    wanted = expected(feed, 60)
    batch = None
    for number in range(60):
        gpu.stream = SIDE if pattern[number % len(pattern)] == "S" else LOOP
        if drops:
            batch = None
        batch = ring.take(number)
        bounds = np.lib.array_utils.byte_bounds(np.asarray(batch.x))
        gpu.queue(STREAMS[gpu.stream], lambda n=number, b=bounds: read.update({n: peek(*b, (8, 4, 3), np.float32)}))
        gpu.run("loop", len(gpu.queues["loop"]))
    gpu.run("side", len(gpu.queues["side"]))
    assert all(np.array_equal(read[number], wanted[number]["x"][0]) for number in range(60))
    ring.close()


@given(
    n=st.integers(1, 60), batch=st.integers(1, 12), world=st.integers(1, 3), group=st.integers(1, 5),
    start=st.integers(0, 100), rest=st.none() | st.integers(1, 150),
)  # fmt: skip
def test_batches_that_are_made_together_are_those_made_alone(n, batch, world, group, start, rest):
    world = min(world, batch)
    view = mr.Windows(mr.from_arrays({"values": np.arange(n + 4.0)}), lookback=4, horizon=1)
    for rank in range(world):
        feed = mr.Feed(view, batch=batch, rank=rank, world=world, device="numpy")
        line = feed.line(start, None if rest is None else start + rest)
        alone, together = Program.of(line), Program.of(line, group)
        for number in range(8 if rest is None else line.num_batches):
            one, all_ = (np.zeros(p.layout.fixed_bytes, np.uint8) for p in (alone, together))
            alone.core.fill(number, one)
            together.core.fill(number // group, all_)
            mine = alone.layout.batch(alone.layout.views(one), one)
            other = together.layout.batch(together.layout.views(all_), all_)
            rows = slice(number % group * line.size, (number % group + 1) * line.size)
            for name in ("positions", "samples", "valid", "x", "y"):
                assert np.array_equal(getattr(mine, name), getattr(other, name)[rows])


def test_without_a_gpu_the_feed_says_so():
    if torch.cuda.is_available():
        batch = next(iter(mr.Feed(VIEWS["dense"], batch=8, device="cuda")))
        assert batch.x.is_cuda
        return
    with pytest.raises(mr.ConfigError, match="torch finds no GPU"):
        iter(mr.Feed(VIEWS["dense"], batch=8, device="cuda"))
    with pytest.raises(mr.ConfigError, match="expected one of"):
        mr.Feed(VIEWS["dense"], batch=8, device="tpu")
