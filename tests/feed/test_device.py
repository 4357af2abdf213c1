"""Batches on a device, against one that is as slow as it may be."""

import ctypes
import gc
import itertools

import numpy as np
import pytest
import torch

import millrace as mr
from millrace.feed.device import DeviceRing
from millrace.feed.program import Program

from .lanes import SlowLanes

pytestmark = pytest.mark.needs_core


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


def on_device(view, lanes, count=None):
    feed = mr.Feed(VIEWS[view], batch=8, seed=3, device="numpy", epochs=None if count is None else count)
    program = Program.of(feed.line(0, feed.stop))
    total = feed.line(0, feed.stop).num_batches
    return DeviceRing(program, lanes, count=total, depth=DEPTH, workers=2), feed


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
    assert len(lanes.allocated) == SLOTS
    ring.close()


@pytest.mark.parametrize("lag", [0, 3, 5, 20, 1000])
@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_that_is_behind_takes_no_more_memory(lag, eager):
    """The loop queues 300 steps; each is run as many steps later as the GPU is behind."""
    lanes = SlowLanes(eager)
    ring, feed = on_device("dense", lanes)
    wanted, read, ends, most = expected(feed, 300), [], [], 0
    for number in range(300):
        batch = ring.take(number)
        low, high = np.lib.array_utils.byte_bounds(np.asarray(batch.x))
        lanes.queue("loop", lambda low=low, high=high: read.append(peek(low, high, (8, 4, 3), np.float32)))
        ends.append(len(lanes.queues["loop"]))
        del batch
        if number >= lag:
            lanes.run("loop", ends[number - lag])
        most = max(most, lanes.num_alive)
        assert (
            number - len(read) <= 2 * SLOTS
        )  # a slot is filled again when its last copy, and so the step before it, is done
    lanes.run("loop", len(lanes.queues["loop"]))
    assert all(np.array_equal(one, other["x"][0]) for one, other in zip(read, wanted, strict=True))
    assert len(lanes.host) == most == len(lanes.allocated) == SLOTS  # all that was ever asked for is still in use
    assert ring.report()["behind_s"] >= 0
    if eager and lag == 0:
        assert lanes.num_waits == 0
    if lag > 2 * SLOTS:
        assert lanes.num_waits > 0
    ring.close()


@pytest.mark.parametrize("lag", [0, 1000])
def test_a_copy_waits_for_no_step_but_old_ones(lag):
    """Else copies and steps would take turns instead of running beside each other. Threads may swap two copies."""
    lanes, awaited = SlowLanes(eager=True), []
    wait = lanes.wait
    lanes.wait = lambda stream, event: (stream == "copies" and awaited.append(event.place), wait(stream, event))
    ring, _ = on_device("dense", lanes)
    ends = []
    for number in range(200):
        batch = ring.take(number)
        del batch
        lanes.queue("loop", lambda: None)
        ends.append(len(lanes.queues["loop"]))
        if number >= lag:
            lanes.run("loop", ends[number - lag])
    later = range(2 * SLOTS, 200)
    assert all(awaited[copy] <= ends[copy - DEPTH] for copy in later)
    assert sum(awaited[copy] <= ends[copy - SLOTS] for copy in later) > len(later) / 2
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
