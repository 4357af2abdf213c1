"""Batches in pieces: any number of threads, any depth, threads that get no core, and late writers that must not exist."""

import os
import random
import threading
import time
from unittest import mock

import numpy as np
import pytest

import millrace as mr
from millrace.feed.ahead import core_ring
from millrace.feed.ahead.core_ring import CoreRing, SlotMemory, num_threads
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program, ProgramMake
from millrace.feed.make.slots import new_memory
from millrace.store.columns import ColumnArray
from millrace.testing import expect_no_leaks

pytestmark = pytest.mark.needs_core
HANG_S = 60
PIECE = 256 << 10  # as in pieces.c
SHARDS_OF_A_BATCH = 6


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr(core_ring, "num_cores", lambda: 16)


def tokens_view(count=400_000, length=1024):
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(count, dtype=np.int32)}), length=length)


def records_view():
    rng = np.random.default_rng(3)
    offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 900, 300))))
    hits = rng.normal(size=(offsets[-1], 3)).astype(np.float32)
    return mr.Records(mr.from_arrays({"hits": hits}, offsets))


VIEWS = {"tokens": tokens_view(), "records": records_view()}
SIZES = {"tokens": (1, 7, 33, 200, 700), "records": (1, 40, 250)}  # up to 44 pieces


def arrays_of(batch):
    found = [batch.positions, batch.samples, batch.valid]
    for value in batch.values():
        found += [value.values, value.offsets] if isinstance(value, mr.Ragged) else [value]
    return found


def check_run(seed, num_batches):
    """One ring of random options against the numpy twin. The loop writes into what it holds, which nobody else may."""
    rng = random.Random(seed)
    name = rng.choice(list(VIEWS))
    size, depth, workers = rng.choice(SIZES[name]), rng.randint(1, 8), rng.randint(1, 16)
    line = mr.Feed(VIEWS[name], batch=size, seed=seed, device="numpy").line(0, size * num_batches)
    stage = CoreRing(Program.of(line), count=line.num_batches, depth=depth, workers=workers)
    twin, held, ends_at = PlanMake(line, slots=2), [], rng.choice((num_batches, rng.randrange(num_batches)))
    with mock.patch("millrace.gather.core_gather.core", None):
        for number in range(ends_at):
            batch = stage.take(number)
            for own, expected in zip(arrays_of(batch), arrays_of(twin.make(number)), strict=True):
                assert own.tobytes() == expected.tobytes(), (seed, number)
            mine = next(array for array in arrays_of(batch)[3:] if array.size or array is arrays_of(batch)[-1])
            mine[...] = number
            held = [*held, (mine, number)][-rng.randint(1, 4) :]
            assert all((array == written).all() for array, written in held), (seed, number)
    if ends_at == num_batches:
        assert stage.take(num_batches) is None
    stage.close()
    assert all((array == written).all() for array, written in held)


def test_any_threads_depth_and_size_give_the_bytes_of_the_twin(seed):
    with expect_no_leaks():
        for k in range(25):
            check_run(seed + k, num_batches=12)


@pytest.mark.soak
def test_any_threads_depth_and_size_for_long(seed):
    for k in range(1500):
        check_run(seed + k, num_batches=random.Random(k).randint(1, 60))


class Stuck:
    """Holds every thread but the loop's where ``applies``, as a machine does that gives them no core."""

    def __init__(self, applies=lambda *arguments: True):
        self.applies, self.opened, self.inside = applies, threading.Event(), threading.Event()
        self.loop = threading.get_ident()

    def through(self, function):
        def call(*arguments):
            if threading.get_ident() != self.loop and self.applies(*arguments) and not self.opened.is_set():
                self.inside.set()
                assert self.opened.wait(HANG_S)
            return function(*arguments)

        return call


def take_when_ready(ring, number):
    """A batch that threads made. The loop only looks: one that waits may make the batch itself."""
    ends_at = time.monotonic() + HANG_S
    while (batch := ring.take(number, False)) is None:
        assert time.monotonic() < ends_at, f"batch {number} is not there after {HANG_S} s"
        time.sleep(0.001)
    return batch


@pytest.fixture
def sharded(tmp_path):
    """Lines of batches of 3 pieces, each of which reads two shards of its own."""
    with mr.StoreWriter(
        tmp_path / "store", columns={"v": mr.Column("float32", (4096,))}, shard_bytes=1 << 18
    ) as writer:
        for k in range(96):
            writer.append({"v": np.full((8, 4096), k, np.float32)})
    view = mr.Records(mr.open_store(tmp_path / "store"), pad=8)

    def line(num_batches):
        return mr.Feed(view, batch=6, order=mr.Sequential(96), device="numpy").line(0, num_batches * 6)

    return line


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("where", ["while it opens a slot", "within a piece"])
def test_the_loop_makes_the_batch_of_a_thread_that_gets_no_core(where, depth, sharded, monkeypatch):
    line, is_opening = sharded(16), where == "while it opens a slot"
    # The shards of the first batch are found when it is opened, and those of the others piece by piece.
    stuck = Stuck() if is_opening else Stuck(lambda column, shard: shard >= SHARDS_OF_A_BATCH)
    if not is_opening:
        monkeypatch.setattr(ColumnArray, "random", stuck.through(ColumnArray.random))
    program = Program.of(line)
    memory = SlotMemory(program.layout, depth + 3, stuck.through(new_memory) if is_opening else new_memory)
    ring, twin = (
        CoreRing(program, count=16, depth=depth, workers=1, memory=memory),
        ProgramMake(Program.of(line), slots=2),
    )
    if not is_opening:
        take_when_ready(ring, 0)  # so that the thread comes to the next batch
    assert stuck.inside.wait(HANG_S)
    for number in range(0 if is_opening else 1, 16):
        if number == 12:
            assert ring.report().made_again == 1
            stuck.opened.set()
        assert ring.take(number).v.tobytes() == twin.make(number).v.tobytes()
    assert ring.take(16) is None
    ring.close()


def test_threads_make_one_large_batch_side_by_side(sharded, monkeypatch):
    """Three must be inside its pieces at once before any goes on."""
    barrier, real, is_over = threading.Barrier(3), ColumnArray.random, threading.Event()

    def random_shard(column, shard):
        if shard >= SHARDS_OF_A_BATCH and not is_over.is_set():
            barrier.wait(HANG_S)
            is_over.set()
        return real(column, shard)

    monkeypatch.setattr(ColumnArray, "random", random_shard)
    ring = CoreRing(Program.of(sharded(2)), count=2, depth=1, workers=3)
    take_when_ready(ring, 0)
    batch = take_when_ready(ring, 1)
    assert (ring.report().pieces, ring.report().made_here) == (3, 0)
    assert batch.v[:, 0, 0].tolist() == list(range(6, 12))
    ring.close()


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_of_several_errors_in_a_batch_the_first_is_raised(workers, sharded, tmp_path):
    shards = sorted((tmp_path / "store" / "shards").iterdir())
    for number in (5, 3, 1):
        victim = shards[number] / "v.f32"
        os.chmod(victim, 0o644)
        os.truncate(victim, 10)
    for _ in range(10):
        ring = CoreRing(Program.of(sharded(1)), count=1, depth=2, workers=workers)
        with pytest.raises(mr.StoreCorrupt, match=shards[1].name):
            ring.take(0)
        ring.close()


def test_threads_are_as_many_as_cores_and_bytes_are_worth():
    w1, w2, small = 2_120_000, 530_000, 70_000
    assert [num_threads(cores, 4 * w1) for cores in (1, 2, 4, 16)] == [0, 1, 3, 8]
    assert [num_threads(cores, 4 * w2) for cores in (1, 2, 4, 16)] == [0, 1, 3, 4]
    assert [num_threads(cores, 4 * small) for cores in (1, 2, 16)] == [0, 1, 1]


def test_threads_have_nothing_to_do_with_depth(monkeypatch):
    feed = mr.Feed(VIEWS["tokens"], batch=200, depth=2, workers=11, device="numpy")
    next(iter(feed))
    report = feed.report()
    assert (report.workers, report.cores, report.pieces) == (11, 16, 200 * 2 * 1024 * 8 // PIECE)
    assert f"11 threads on 16 cores; a batch has {report.pieces} pieces" in str(report)
    feed.close()
    monkeypatch.setattr(core_ring, "num_cores", lambda: 1)
    alone = mr.Feed(VIEWS["tokens"], batch=200, epochs=1, device="numpy")
    assert sum(1 for _ in alone) == alone.report().made_in_line
    assert alone.report().workers == 0


@pytest.mark.parametrize("cores", [1, 2, 3, 5, 6, 9, 16, 64])
def test_a_feed_of_defaults_works_on_any_number_of_cores(cores, monkeypatch):
    """Of 6 cores and more hot data takes more threads than cold data needs at least."""
    monkeypatch.setattr(core_ring, "num_cores", lambda: cores)
    with mr.Feed(VIEWS["tokens"], batch=390, device="numpy") as feed:  # 6 MB: worth eight threads
        batch = next(iter(feed))
        assert np.array_equal(batch.x, VIEWS["tokens"][batch.samples]["x"])
        assert feed.report().workers == min(cores - 1, core_ring.MAX_THREADS)
