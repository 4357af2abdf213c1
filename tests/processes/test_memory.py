"""Anonymous memory of a worker: little, the same for any number of samples, and flat over batches."""

import itertools
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.processes.job import Job, read_job, write_job
from millrace.feed.processes.shared_slots import SharedSlots

from .conftest import feed_processes

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="only Linux says it")


def anonymous(pid):
    """Its share of the anonymous pages, and of those of the job: pages of files and of slots do not count."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return 1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss_Anon:"))


def workers():
    return [process for process in feed_processes() if not process.children()]


def subset_feed(n, processes=True, **options):
    """A store in memory and ids in no order: what a worker must not copy."""
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1, dtype=np.int64)}), length=1)
    ids = np.random.default_rng(0).permutation(n)
    return mr.Feed(
        mr.Subset(view, ids), batch=64, device="numpy", transform=functions.same, processes=processes, **options
    )


IMPORTS = """
import worker_functions
from millrace.feed.processes import worker
with open("/proc/self/smaps_rollup") as file:
    print(1024 * sum(int(line.split()[1]) for line in file if line.startswith("Pss_Anon:")))
"""


@pytest.fixture(scope="module")
def imports():
    """What a Python holds that has imported what a worker does, and nothing else."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", IMPORTS], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_it_does_not_grow_with_the_samples(method, imports):
    found = []
    for n in (1_000, 5_000_000):  # 80 MB of tokens and ids
        with subset_feed(n, method, workers=2) as feed:
            for _ in itertools.islice(feed, 20):
                pass
            iterator = iter(feed)
            next(iterator)
            found.append(max(anonymous(process.pid) for process in workers()))
    assert found[1] < found[0] + (20 << 20)
    assert found[1] < imports + (50 << 20)


def flat(batches):
    with subset_feed(10_000, workers=1) as feed:
        iterator, found = iter(feed), []
        for _ in range(2):
            for _ in itertools.islice(iterator, batches):
                pass
            found.append(anonymous(workers()[0].pid))
        assert found[1] < found[0] + (4 << 20)


def test_it_is_flat_over_batches():
    flat(1500)


@pytest.mark.soak
def test_it_is_flat_over_many_batches():
    flat(50_000)


def test_a_job_is_mapped_and_what_is_written_into_it_stays_there():
    data = np.arange(1_000_000)
    job = Job(data, data[:10], 3, None, functions.same, None)
    fd = write_job(job)
    try:
        one, two = read_job(fd), read_job(fd)
    finally:
        os.close(fd)
    assert not one.view.flags.owndata
    assert np.array_equal(one.view, data)
    one.view[0] = 7
    assert (two.view[0], data[0]) == (0, 0)
    assert (one.seed, one.transform) == (3, functions.same)
    assert len(pickle.dumps(functions.same)) < 100


def test_one_large_batch_does_not_make_all_slots_large():
    slots, usual, large = SharedSlots(keep=6), 1 << 16, 1 << 24
    ours = [slots.take() for _ in range(6)]  # before the size of a batch is known
    for slot in ours:
        slots.grow(slot, usual)
        slots.note(usual)
    slots.grow(ours[0], large)
    assert (slots.num_grown, ours[0].size) == (1, large + large // 4)
    sizes = []
    for _ in range(100):
        for slot in ours:
            slot.is_out = False
        ours = [slots.take() for _ in range(6)]
        for _ in ours:
            slots.note(usual)
        sizes.append(sum(slot.size for slot in ours))
    slots.close()
    assert max(sizes) <= 6 * 4 * usual + large + large // 4
    assert sizes[-1] <= 6 * 8 * usual


def test_slots_of_small_and_of_equal_batches_stay_where_they_are():
    slots = SharedSlots(keep=2)
    for num_bytes in (100, 300_000):
        where = set()
        for _ in range(500):
            slot = slots.take()
            if slot.size < num_bytes:
                slots.grow(slot, num_bytes)
            where.add(slot.offset)
            slots.note(num_bytes)
            slot.is_out = False
        assert len(where) <= 2  # the first, and the one it grew to
    slots.close()


def sent(view):
    """A view as workers get it."""
    feed = mr.Feed(view, batch=4, device="numpy")
    fd = write_job(Job.of(feed))
    try:
        return read_job(fd).view
    finally:
        os.close(fd)


def test_tables_of_records_are_in_memory_once_for_all_workers(tmp_path):
    """Where records begin in a store of many shards, how many windows each has, which samples a mask chose, a packing."""
    lengths = np.random.default_rng(0).integers(0, 9, 3000)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    columns = {"tokens": mr.Column("int32"), "cuts": mr.Column("int64", (1,), per="record")}
    cuts = mr.Cuts(("train", "val"))
    with mr.StoreWriter(tmp_path / "store", columns=columns, cuts=cuts, shard_bytes=1 << 13) as writer:
        for first in range(0, 3000, 100):
            rows = slice(offsets[first], offsets[first + 100])
            own = {"tokens": np.arange(offsets[-1])[rows], "cuts": lengths[first : first + 100, None] // 2}
            writer.extend(own, offsets[first : first + 101] - offsets[first])
    store = mr.open_store(tmp_path / "store")
    assert store.num_shards > 1

    windows = mr.Windows(store.split("val"), lookback=2, horizon=1)
    whole, packed = mr.Records(store), mr.Packed(store, length=16)
    half = mr.Subset(whole, np.arange(3000) % 2 == 0)
    tables = {
        windows: lambda view: [view._ends, view._starts],
        packed: lambda view: [view._packing.documents, view._packing.offsets, view.store.offsets],
        half: lambda view: [view.chosen.words, view.chosen.ranks, view.view.store.offsets],
    }
    for view, of in tables.items():
        theirs = sent(view)
        assert [table.flags.owndata for table in of(theirs)] == [False] * len(of(theirs))
        samples = np.arange(0, len(view), 7)
        assert np.array_equal(theirs.spans(samples).starts, view.spans(samples).starts)
