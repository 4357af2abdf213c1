"""Batches of worker processes on a device: slots are registered, and copied as they are."""

import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.feed import compose
from millrace.feed.processes import pool

sys.path.insert(0, str(Path(__file__).parents[1] / "feed"))

import tensor_functions
import worker_functions
from slow_gpu import LOOP, SIDE, SlowGpu


class StrictGpu(SlowGpu):
    """Copies read registered memory only, at the moment when they run."""

    num_copies = 0

    def move(self, source, target, num_bytes):
        def run():
            assert any(at <= source and source + num_bytes <= at + size for at, size in self.registered.items())
            self.num_copies += 1
            ctypes.memmove(target, source, num_bytes)

        self.queue("copies", run)


@pytest.mark.parametrize("eager", [False, True])
def test_batches_on_a_device_are_those_of_the_host(eager, feed_of, contents, monkeypatch):
    gpu = StrictGpu(eager)
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    options = {"transform": tensor_functions.tensors, "epochs": 4}
    expected = contents(feed_of(processes=False, device="cpu", **options))
    feed = feed_of(device="cuda", **options)
    found, held = [], []
    for batch in feed:
        with gpu:
            gpu.finish_all()
        held = [*held[-2:], batch]
        found += contents([batch])
    assert found == expected
    assert gpu.num_copies == len(expected)
    assert gpu.registered == {}  # the end of the pass gave it back


def test_a_loop_that_changes_its_stream_within_a_group_reads_what_it_was_given(feed_of, monkeypatch):
    gpu, read = StrictGpu(), []
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    wanted = [batch.x.tolist() for batch in feed_of(worker_functions.same, processes=False, epochs=12)]
    feed = feed_of(worker_functions.same, device="cuda", epochs=12)
    sizes = set()
    for number, batch in enumerate(feed):
        at, count = batch.x.data_ptr(), batch.x.numel()
        sizes.add(len(feed.live._place.ready) if feed.live else 0)
        queue = {LOOP: "loop", SIDE: "side"}[gpu.stream]
        gpu.queue(queue, lambda at=at, count=count, number=number: read.append((number, numbers(at, count))))
        if gpu.stream == SIDE:  # at once, whatever the other streams have done
            gpu.run("side", len(gpu.queues["side"]))
        gpu.stream = SIDE if number % 3 == 1 else LOOP
    gpu.run("loop", len(gpu.queues["loop"]))
    assert max(sizes) > 1  # batches were handed over in groups
    assert [[[value] for value in found] for _, found in sorted(read)] == wanted


@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_worker_that_dies_with_tickets_for_a_group_loses_none(what, feed_of, contents, monkeypatch, tmp_path):
    monkeypatch.setattr(compose, "Gpu", lambda device: StrictGpu())
    monkeypatch.setattr(pool, "POLL_S", 0.2)
    wanted = contents(feed_of(worker_functions.same, processes=False, device="cpu", epochs=12))
    feed = feed_of(worker_functions.Once(tmp_path / "once", what), device="cuda", epochs=12)
    assert contents([(gpu_done(feed), batch)[1] for batch in feed]) == wanted
    assert feed.report().deaths == 1


def gpu_done(feed):
    """Runs what is queued, so that a batch can be read."""
    if feed.live is not None:
        with (gpu := feed.live._place._gpu):
            gpu.finish_all()


def test_copies_under_way_still_end_where_a_slot_cannot_be_had(feed_of, contents, monkeypatch):
    class FullGpu(StrictGpu):
        """It refuses to pin more than so much memory."""

        def register(self, memory):
            if len(self.registered) == 20:  # 16 ahead, and copies under way
                raise mr.FeedError("the GPU refused cuMemHostRegister_v2")
            super().register(memory)

    gpu, found = FullGpu(), []
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    wanted = contents(feed_of(worker_functions.same, processes=False, device="cpu", epochs=12))
    feed = feed_of(worker_functions.same, device="cuda", epochs=12)
    with pytest.raises(mr.FeedError, match="refused cuMemHostRegister"):
        found.extend(iter(feed))
    with gpu:
        gpu.finish_all()
    assert 0 < len(found) < len(wanted)
    assert contents(found) == wanted[: len(found)]
    assert gpu.registered == {}


def numbers(at, count):
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(at)).tolist()


def test_a_pass_left_with_copies_under_way_gives_up_its_memory_after_them(feed_of, monkeypatch):
    gpu = StrictGpu()
    monkeypatch.setattr(compose, "Gpu", lambda device: gpu)
    feed = feed_of(tensor_functions.tensors, device="cuda")
    for _ in itertools.islice(feed, 3):
        pass
    feed.close()
    with gpu:
        gpu.finish_all()
    assert gpu.registered == {}
