"""What every stage promises that keeps batches ahead. A new one is a line in ``AHEADS``, and passes the same tests."""

import atexit
import functools
import os
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.ahead.core_ring import CoreRing, SlotMemory
from millrace.feed.ahead.in_line import InLine
from millrace.feed.ahead.processes import Processes
from millrace.feed.ahead.queue import Fetch, Queued
from millrace.feed.ahead.threads import Threads
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program
from millrace.feed.make.slots import Slots, new_memory
from millrace.feed.processes.job import Job
from millrace.feed.processes.packing import Layout
from millrace.feed.processes.pool import Pool
from millrace.feed.processes.shared_slots import SharedSlots
from millrace.feed.remote.link import Link
from millrace.feed.remote.payload import Stamp
from millrace.feed.remote.worker import Maker, Worker
from millrace.native import core
from millrace.queues.address import read_address
from millrace.queues.memory import MemoryQueue, Server
from millrace.testing import expect_no_leaks

BATCH = 8


sys.path.insert(0, str(Path(__file__).parents[1] / "processes" / "modules"))

import worker_functions  # noqa: E402 - what workers can import


class Gate:
    """Holds whoever makes a batch until it is opened; counts the batches. Processes do not see it."""

    def __init__(self, is_open=True, is_failing=False):
        self._event, self._made, self.is_failing = threading.Event(), [], is_failing
        if is_open:
            self.open()

    def open(self):
        self._event.set()

    @property
    def num_made(self):
        return len(self._made)

    def through(self, function):
        def call(number):
            self._event.wait()
            self._made.append(number)  # one step for all threads, as += is not
            return function(number)

        return call


def gated(line, gate):
    """Batches planned in Python, by any number of threads."""
    make = PlanMake(line, slots=8, in_threads=True)
    make.make = gate.through(make.make)
    return make


def in_line(line, gate, depth, workers):
    return InLine(gated(line, gate), count=line.num_batches)


def threads(line, gate, depth, workers):
    return Threads(gated(line, gate), line, workers=workers, depth=depth)


class OwnQueue(Queued):
    """With a queue in memory, and the threads of a worker, of its own."""

    def __init__(self, line, gate, depth, workers):
        address, shared, stamp = read_address("memory://own?deadline_s=60"), Server(), Stamp(*["00" * 16] * 6)
        make, queues = gated(line, gate), [MemoryQueue(shared, address) for _ in range(2)]
        worker = Worker(queues[0], "run", lambda attempt, **_: Maker(line, stamp, make), threads=workers, say=len)
        thread = threading.Thread(target=worker.serve)
        thread.start()
        link = Link(queues[1], "run", "/run")
        while link.threads != workers:  # from now on workers make the batches
            link.wake()
            time.sleep(0.001)
        window = link.open_window(line, b"record", depth)
        slots = Slots(2 * depth + 2)
        super().__init__(link, window, make, Fetch(link, window, stamp, unpack=Layout.batch, slots=slots))
        self._end = weakref.finalize(self, end_all, self._finish, link, worker, thread)

    def close(self):
        super().close()
        self._end()


def end_all(finish, link, worker, thread):
    finish()
    link.close()
    worker.is_over = True
    thread.join()


def queued(line, gate, depth, workers):
    return OwnQueue(line, gate, depth, workers)


def ring(line, gate, depth, workers):
    program = Program.of(line)
    memory = SlotMemory(program.layout, depth + 2, gate.through(new_memory))
    return CoreRing(program, count=line.num_batches, depth=depth, workers=workers, memory=memory)


def ring_in_line(line, gate, depth, workers):
    return ring(line, gate, 1, 0)


def processes(line, gate, depth, workers):
    """With a pool of its own."""
    raises = worker_functions.raises if gate.is_failing else None
    pool = Pool(Job(line.view, line.order, 5, None, raises, line), workers, SharedSlots(depth + 2))
    return Processes(pool, line, depth=depth, unpack=Layout.batch)


@functools.cache
def kept_pool(workers):
    line = line_of()
    pool = Pool(Job(line.view, line.order, 5, None, None, line), workers, SharedSlots(8))
    atexit.register(pool.close)
    return pool


def processes_again(line, gate, depth, workers):
    """With a pool that other lines have used before."""
    if gate.is_failing or kept_pool(workers).is_closed:
        kept_pool.cache_clear()
        return processes(line, gate, depth, workers)
    return Processes(kept_pool(workers), line, depth=depth, unpack=Layout.batch, keeps_pool=True)


AHEADS = {"in line": in_line, "threads": threads, "queue": queued, "processes": processes_again}
if core is not None:
    AHEADS |= {"ring": ring, "ring in line": ring_in_line}


@pytest.fixture(params=AHEADS)
def start(request):
    """start(line, gate=..., depth=..., workers=...): the stage, closed at the end."""
    stages = []

    def start(line, gate=None, depth=3, workers=2):
        stages.append(AHEADS[request.param](line, gate or Gate(), depth, workers))
        return stages[-1]

    yield start
    for stage in stages:
        stage.close()


def line_of(num_batches=None, start=0, n=100):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)
    feed = mr.Feed(view, batch=BATCH, seed=5, device="numpy")
    return feed.line(start, None if num_batches is None else start + num_batches * BATCH)


def check(batch, number, line):
    first = line.start + number * BATCH
    assert batch.positions.tolist() == list(range(first, first + BATCH))
    assert batch.x[:, 0].tolist() == batch.samples.tolist() == line.order.samples(batch.positions).tolist()


@given(
    num_batches=st.integers(1, 12), begin=st.integers(0, 500), depth=st.integers(1, 6), workers=st.integers(1, 3),
    waits=st.lists(st.booleans(), min_size=12, max_size=12),
)  # fmt: skip
@pytest.mark.parametrize("ahead", AHEADS)
def test_batches_come_in_exact_order_and_then_none(ahead, num_batches, begin, depth, workers, waits):
    line = line_of(num_batches, begin)
    stage = AHEADS[ahead](line, Gate(), depth, workers)
    for number, wait in zip(range(num_batches), waits, strict=False):
        batch = stage.take(number, wait)
        check(stage.take(number) if batch is None else batch, number, line)
    assert stage.take(num_batches) is None
    assert stage.take(num_batches, False) is None
    stage.close()


def test_an_endless_line_has_no_end(start):
    line = line_of()
    stage = start(line)
    for number in range(100):
        check(stage.take(number), number, line)


def test_no_more_than_depth_batches_are_made_ahead(start):
    gate = Gate()
    stage = start(line_of(), gate, depth=4, workers=3)
    for number in range(50):
        stage.take(number)
        made = stage._given if isinstance(stage, Processes) else gate.num_made
        if isinstance(stage, CoreRing):  # the gate of the ring counts its slots
            made = stage.report().num_bytes // Program.of(line_of()).layout.fixed_bytes
        assert number + 1 <= made <= number + 1 + 4


def test_what_is_counted_agrees(start):
    stage = start(line_of(), depth=3, workers=2)
    assert stage.report().taken == stage.report().made_here == 0
    for number in range(40):
        stage.take(number)
        report = stage.report()
        assert report.taken == number + 1
        assert report.made_here <= number + 1 + 3
    assert report.workers in (0, 2)
    assert report.workers > 0 or report.made_here == 40  # without workers the loop makes them all
    assert report.make_s is None or report.make_s > 0
    assert report.put_wait_s is None or report.put_wait_s >= 0
    assert report.mean_ready is None or 0 <= report.mean_ready <= 4
    stage.close()
    assert stage.report() == stage.report()  # all workers have ended
    assert stage.report().taken == 40


def test_close_may_be_called_again_and_ends_the_batches(start):
    line = line_of()
    stage = start(line, depth=3)
    check(stage.take(0), 0, line)
    stage.close()
    stage.close()
    number = 1
    while (batch := stage.take(number)) is not None:  # that lay ready
        check(batch, number, line)
        number += 1
    assert number <= 1 + 3
    assert stage.report().taken == number
    stage.close()


def test_close_ends_a_take_that_waits(start):
    """Which gets its batch, if that came first, or none."""
    line, gate, got = line_of(), Gate(is_open=False), []
    stage = start(line, gate, workers=1)
    taker = threading.Thread(target=lambda: got.append(stage.take(0)))
    closer = threading.Thread(target=stage.close)
    taker.start()
    closer.start()
    closer.join(timeout=0.1)  # some wait for the batch under way
    gate.open()
    closer.join()
    taker.join()
    assert len(got) == 1
    if got[0] is not None:
        check(got[0], 0, line)


class Failing(PlanMake):
    """Batch 2 fails as in a transform, with its position."""

    def make(self, batch):
        if batch == 2:
            raise mr.StageFailed("my bug", stage="transform", position=2 * BATCH)
        return super().make(batch)


def damaged_line(folder):
    """Sample 23 of 63 reaches into a shard that is cut off: batch 2 cannot be made."""
    with mr.StoreWriter(folder / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=64) as writer:
        for k in range(8):
            writer.append({"tokens": np.full(32, k, np.uint16)})
    view = mr.Blocks(mr.open_store(folder / "store"), length=4)
    victim = sorted((folder / "store" / "shards").iterdir())[3] / "tokens.u16"
    os.chmod(victim, 0o644)
    os.truncate(victim, 10)
    return mr.Feed(view, batch=BATCH, order=mr.Sequential(63), device="numpy").line(0, None)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("ahead", AHEADS)
def test_an_error_comes_in_its_turn_as_it_was_raised(ahead, workers, tmp_path, monkeypatch):
    """The core makes batches by a program of its own, so there the data is damaged."""
    monkeypatch.setattr(f"{__name__}.PlanMake", Failing)
    is_core = ahead.startswith("ring")
    stage = AHEADS[ahead](damaged_line(tmp_path) if is_core else line_of(), Gate(is_failing=True), 4, workers)
    for number in range(2):
        assert stage.take(number).positions[0] == BATCH * number
    with pytest.raises(
        mr.StoreCorrupt if is_core else mr.StageFailed, match=r"tokens\.u16|my bug|transform raised"
    ) as caught:
        stage.take(2)
    assert is_core or (caught.value.stage, caught.value.position) == ("transform", 2 * BATCH)
    assert is_core or stage.take(3).positions[0] == 3 * BATCH
    stage.close()
    for thread in threading.enumerate():
        if thread.name.startswith("millrace-"):
            thread.join(60)  # it ends, however late it gets a core
            assert not thread.is_alive(), thread.name


@pytest.mark.parametrize("ends", ["close", "drop"])
@pytest.mark.parametrize("ahead", AHEADS)
def test_nothing_is_left(ahead, ends):
    with expect_no_leaks():
        for _ in range(2 if ahead == "processes" else 20):
            stage = {**AHEADS, "processes": processes}[ahead](line_of(), Gate(), 3, 2)
            stage.take(0)
            if ends == "close":
                stage.close()
            del stage
