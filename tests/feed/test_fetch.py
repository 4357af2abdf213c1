"""Rows read past the page cache: the same bytes as through the maps, whatever can be read, and nothing left open."""

import contextlib
import ctypes
import gc
import itertools
import mmap
import os
import resource
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.ahead.core_ring import CoreRing
from millrace.feed.make import program as programs
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program

pytestmark = pytest.mark.needs_core

COLUMNS = {
    "dense": mr.Column("float32", (300,)),
    "token": mr.Column("uint16"),
    "pixel": mr.Column("uint8", (50,), axis="image"),
    "label": mr.Column("int32", per="record"),
}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Of shards of one to many records, none of whose rows lie on whole blocks."""
    rng, found = np.random.default_rng(0), []
    for shard_bytes in (1000, 50_000, 1 << 30):
        path = tmp_path_factory.mktemp("fetch") / "store"
        with mr.StoreWriter(path, kind="records", columns=COLUMNS, shard_bytes=shard_bytes) as writer:
            for k in range(40):
                rows, images = rng.integers(0, 30, 2)
                record = {name: rng.integers(0, 200, (rows, *COLUMNS[name].shape)) for name in ("dense", "token")}
                writer.append({**record, "pixel": rng.integers(0, 200, (images, 50)), "label": k})
        found.append(mr.open_store(path))
    return found


def views(store):
    yield mr.Blocks(store, length=40, stride=3, column="token")
    yield mr.Windows(store, lookback=3, horizon=2, lead=1, column="dense", target=[7])
    yield mr.Records(store)
    yield mr.Records(store, columns=["pixel", "label"], pad=4)
    yield mr.Concat([mr.Records(store, columns=["dense", "label"])] * 2)


@contextlib.contextmanager
def fetching(view, batch, *, workers=1, which=lambda shard: True):
    """A ring that reads what it can, and what the twin makes of the same line."""
    line = mr.Feed(view, batch=batch, device="numpy", seed=3).line(0, None)
    program = Program.of(line)
    with mock.patch.object(programs, "DIRECT_TIMES", 0), mock.patch.object(programs, "MAX_FILES", 200):
        for native in program._natives:
            for column in native.columns.values():
                direct = type(column).direct
                # Of shards that are left out, the descriptor of a file that is too short.
                column.direct = lambda k, column=column, direct=direct: (
                    direct(column, k) if which(k) else os.memfd_create("short")
                )
        program.open_files()
    program.core.fetch(True)
    ring = CoreRing(program, count=None, depth=3, workers=workers)
    with mock.patch("millrace.gather.core_gather.core", None):
        twin = PlanMake(line, slots=2)
        yield ring, twin
    ring.close()


def same(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        found = other[name]
        if isinstance(value, mr.Ragged):
            assert np.array_equal(value.offsets, found.offsets)
            value, found = value.values, found.values
        assert (value.dtype, value.shape, value.tobytes()) == (found.dtype, found.shape, found.tobytes())


@given(data=st.data())
def test_rows_read_are_those_of_the_twin(stores, data):
    store = data.draw(st.sampled_from(stores))
    view = data.draw(st.sampled_from(list(views(store))))
    every = data.draw(st.integers(1, 3))
    batch, workers = data.draw(st.sampled_from([1, 7, 64, 300])), data.draw(st.integers(1, 3))
    before = len(os.listdir("/proc/self/fd"))
    with fetching(view, batch, workers=workers, which=lambda shard: shard % every == 0) as (ring, twin):
        for number in range(5):
            same(ring.take(number), twin.make(number))
        read = ring.report().past_cache
        assert read > 0 or (every > 1 and store is not stores[-1])
    del ring, twin
    assert len(os.listdir("/proc/self/fd")) <= before


def test_without_io_uring_the_maps_serve(stores):
    """A kernel that forbids it answers as one that has no descriptor left for it."""
    view = mr.Records(stores[-1])
    maps = CoreRing(Program.of(mr.Feed(view, batch=64).line(0, None)), count=None, depth=3, workers=1)
    maps.take(0)  # which are there then
    with fetching(view, 64) as (ring, twin):
        same(ring.take(0), twin.make(0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with fetching(view, 64, workers=0) as (ring, twin):
            gc.collect()  # what earlier tests left to it would be closed below the limit
            os.close(free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
            for number in range(3):
                same(ring.take(number), twin.make(number))
            assert ring.report().past_cache == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        maps.close()


class Wrong(mr.Windows):
    """Its last record is said to lie beyond the rows there are."""

    def plan(self):
        kind, _, ends, firsts, *rest = mr.Windows(self.store, lookback=3, horizon=2, column="dense").plan()[0]
        return [(kind, self, ends, np.where(np.arange(len(firsts)) == len(firsts) - 1, 1 << 40, firsts), *rest)]


def test_a_sample_that_is_wrong_is_an_error_while_others_are_being_read(stores):
    view = Wrong(stores[-1], lookback=3, horizon=2, column="dense")
    with fetching(view, 300, workers=2) as (ring, _):
        for number in range(6):
            with pytest.raises(mr.ConfigError, match="whose column has"):
                ring.take(number)
        assert ring.report().past_cache > 0


def test_columns_much_larger_than_memory_are_read_past_the_page_cache(tmp_path, monkeypatch):
    rows = np.arange(2_000_000, dtype=np.float32).reshape(-1, 20)
    with mr.StoreWriter(tmp_path / "store", kind="series", columns={"values": mr.Column("float32", (20,))}) as writer:
        writer.append({"values": rows})
    (path,) = (tmp_path / "store").rglob("values.f32")
    monkeypatch.setattr(programs, "memory_bytes", lambda: rows.nbytes)
    assert read_cold(path, rows)["past_cache"] == 0  # memory can hold it: through the cache, which is hot afterwards
    monkeypatch.setattr(programs, "memory_bytes", lambda: rows.nbytes // 4)
    found = read_cold(path, rows)
    assert found["past_cache"] > 0 or not found["is_cold"]  # a filesystem in memory is never cold
    assert found["resident"] < 0.1 or not found["is_cold"]


def read_cold(path, rows):
    """What a feed did over a file of which no page was in memory, and the share of pages it left there."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    view = mr.Windows(mr.open_store(path.parents[2]), lookback=50, horizon=1)
    with mr.Feed(view, batch=128, seed=1, device="numpy") as feed:
        for batch in itertools.islice(feed, 16):
            starts = view.spans(batch.samples).starts
            assert np.array_equal(batch.x, rows[starts[:, None] + np.arange(50)])
        report = feed.report()
    return {**report.as_dict(), "resident": resident(path)}


def resident(path):
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as area,
    ):
        pages = (ctypes.c_ubyte * -(-len(area) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(area)
        failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(area)), pages)
        del start
        assert failed == 0
        return float((np.frombuffer(pages, np.uint8) & 1).mean())


FORK = """
from millrace.feed.make.program import Program
from millrace.feed.make import program
program.DIRECT_TIMES = native.IN_LINE_BYTES = 0
opens = Program.open_files

def open_files(self):
    opens(self)
    self.core.fetch(True)

Program.open_files = open_files
store, rows = mr.open_store({path!r}), 0
view = mr.Blocks(store, length=40, stride=1, column="token")
tokens = np.asarray(store.columns["token"]).astype(np.int64)

def check(batch):
    assert np.array_equal(batch.x, tokens[batch.samples[:, None] + np.arange(40)])

held = len(os.listdir("/proc/self/fd"))
feed = mr.Feed(view, batch=100, device="numpy", workers=2)
iterator = iter(feed)
for _ in range(10):
    check(next(iterator))
    if os.fork() == 0:
        try:
            next(iterator)
        except mr.FeedError:
            del iterator
            gc.collect()
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 3
    check(next(iterator))
assert feed.report().past_cache > 0
feed.close()
del iterator, feed
for _ in range(200):
    with mr.Feed(view, batch=100, device="numpy", workers=2) as feed:
        check(next(iter(feed)))
del feed
gc.collect()
print(len(os.listdir("/proc/self/fd")) - held, threads())
"""


def test_reads_outlive_forks_and_leave_nothing_open(stores, run):
    code, out, err = run(FORK.format(path=str(stores[-1].path)))
    assert (code, out) == (0, "0 []\n"), err
