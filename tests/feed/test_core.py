"""What the core does beside giving the right bytes: making ahead, asking ahead, threads, limits. Seen by what it counts."""

import ctypes
import itertools
import mmap
import os
import sys
import threading
import time
from unittest import mock

import numpy as np
import pytest

import millrace as mr
from millrace.feed.ahead.core_ring import CoreRing, SlotMemory
from millrace.feed.make.program import Program
from millrace.feed.make.slots import new_memory
from millrace.gather import core_gather as gather
from millrace.native import core

pytestmark = pytest.mark.needs_core
HANG_S = 60  # a hang fails, whatever the machine does meanwhile


def lies_in_memory(path):
    """Whether the folder's filesystem has no disk behind it."""
    with open("/proc/self/mounts") as file:
        mounts = [line.split()[1:3] for line in file]
    return max((m for m in mounts if str(path).startswith(m[0])), key=lambda m: len(m[0]))[1] in ("tmpfs", "ramfs")


def ring_of(*, depth=4, workers=1, slots=6, new_memory=new_memory):
    view = mr.Windows(mr.from_arrays({"values": np.arange(300.0)}), lookback=4, horizon=1)
    program = Program.of(mr.Feed(view, batch=8, device="numpy").line(0, None))
    memory = SlotMemory(program.layout, slots, new_memory)
    return CoreRing(program, count=None, depth=depth, workers=workers, memory=memory), program


def until(condition):
    deadline = time.monotonic() + HANG_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.0005)
    return found


def test_threads_alone_make_batches():
    """The loop only looks: it makes none itself, so threads must be woken again and again."""
    ring, _ = ring_of()
    for _ in range(100):
        until(lambda: ring.take_slot(False))
    report = ring.report()
    assert report.made_here == 0
    assert report.put_wait_s > 0  # with four ready there was nothing to do
    ring.close()


def test_a_second_getter_is_refused_by_the_core():
    is_open, is_inside, got = threading.Event(), threading.Event(), []

    def new_memory(num_bytes):
        is_inside.set()
        is_open.wait()
        return np.empty(num_bytes, np.uint8)

    ring, _ = ring_of(workers=0, new_memory=new_memory)
    first = threading.Thread(target=lambda: got.append(ring.take_slot(True)), daemon=True)
    first.start()
    is_inside.wait()
    with pytest.raises(mr.FeedError, match="two threads"):
        ring.take_slot(False)
    is_open.set()
    first.join()
    assert got[0] is not None
    assert ring.take_slot(True) is not None
    ring.close()


@pytest.mark.skipif(sys.platform != "linux", reason="thread ids count up on Linux")
def test_large_batches_are_gathered_by_several_threads():
    """Ids of threads count up: between two that Python starts lie those of the core."""
    view = mr.Windows(mr.from_arrays({"values": np.arange(5000.0)}), lookback=4, horizon=1)

    def next_id():
        found = []
        thread = threading.Thread(target=lambda: found.append(threading.get_native_id()))
        thread.start()
        thread.join()
        return found[0]

    gaps = []
    with mock.patch.multiple(gather, THREAD_BYTES=1, MAX_THREADS=5, num_cores=lambda: 5):
        for _ in range(50):
            before = next_id()
            view[np.arange(640)]
            gaps.append(next_id() - before)
    assert min(gap for gap in gaps if gap > 0) >= 5  # other processes make it more, never less


def test_a_map_beyond_the_end_of_its_file_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 5000)
    with open(tmp_path / "file", "rb") as file:
        assert len(memoryview(core.Map(file.fileno(), 5000))) == 5000
        for length in (5001, 5001 + mmap.PAGESIZE, 1 << 40):
            with pytest.raises(ValueError, match="beyond the file's 5000 bytes"):
                core.Map(file.fileno(), length)
        with pytest.raises(ValueError, match="must be positive"):
            core.Map(file.fileno(), 0)


# Cold data. Where the folder lies in memory nothing is ever cold.


@pytest.fixture
def cold(tmp_path):
    """A feed over a store of which no page is in memory, its rows, and where they lie."""
    rows = np.arange(16 * 400_000, dtype=np.float32).reshape(-1, 16)
    with mr.StoreWriter(tmp_path / "store", kind="series", columns={"values": mr.Column("float32", (16,))}) as writer:
        writer.extend({"values": rows}, [0, len(rows)])
    (path,) = (tmp_path / "store").rglob("values.f32")
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    view = mr.Windows(mr.open_store(tmp_path / "store"), lookback=64, horizon=8)
    with mr.Feed(view, batch=32, seed=5, device="numpy") as feed:
        yield feed, path


def share_in_memory(path, first_rows, num_rows):
    """Of the pages that hold these rows of 64 bytes."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        states = (ctypes.c_ubyte * -(-len(array) // mmap.PAGESIZE))()
        libc = ctypes.CDLL(None, use_errno=True)
        code = libc.mincore(ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(array)), states)
        assert code == 0
        del array
    firsts, lasts = first_rows * 64 // mmap.PAGESIZE, ((first_rows + num_rows) * 64 - 1) // mmap.PAGESIZE
    pages = np.unique(np.concatenate([np.arange(a, b + 1) for a, b in zip(firsts, lasts, strict=True)]))
    return np.mean(np.frombuffer(states, np.uint8)[pages] & 1)


def test_rows_of_the_next_batches_come_into_memory_before_they_are_copied(cold):
    feed, path = cold
    iterator = iter(feed)
    for _ in range(3):
        next(iterator)
    assert feed.report().is_cold != lies_in_memory(path)
    later = np.arange(7 * 32, 8 * 32)  # further than threads make ahead
    starts = feed.view.spans(feed.order.samples(later)).starts
    until(lambda: share_in_memory(path, starts, 72) > 0.9)
    iterator.close()


def test_asking_ends_when_the_data_is_in_memory(cold):
    feed, path = cold
    iterator = iter(feed)
    next(iterator)
    assert feed.report().is_cold != lies_in_memory(path)
    assert path.read_bytes()
    assert any(not feed.report().is_cold for _ in itertools.islice(iterator, 2000))
    iterator.close()
