"""Cold data: rows are asked for ahead whatever the batch, the way batches are made and the size of samples."""

import gc
import itertools
import os
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.feed import compose
from millrace.feed.ahead import core_ring as native

pytestmark = pytest.mark.needs_core

ROWS = np.arange(16 * 400_000, dtype=np.float32).reshape(-1, 16)  # 25.6 MB
RECORDS = 20
TEXT = {"text": mr.Column("string", per="record"), "row": mr.Column("int8")}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("cold") / "store"
    columns = {"hits": mr.Column("float32", (16,)), "name": mr.Column("string", per="record")}
    with mr.StoreWriter(path, kind="series", columns=columns) as writer:
        offsets = np.arange(0, len(ROWS) + 1, len(ROWS) // RECORDS)
        writer.extend({"hits": ROWS, "name": [f"n{k}" for k in range(RECORDS)]}, offsets)
    return path


@pytest.fixture
def is_on_disk(path):
    """Whether the store, which no page of is in memory now, has a disk behind it."""
    return drop(path, "hits.f32")


def drop(path, files):
    gc.collect()  # pages that are mapped would stay
    for file in path.rglob(files):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with open("/proc/self/mounts") as file:
        mounts = [line.split()[1:3] for line in file]
    own = max((mount for mount in mounts if str(path).startswith(mount[0])), key=lambda mount: len(mount[0]))
    return own[1] not in ("tmpfs", "ramfs")


def check(view, batch):
    starts = view.spans(batch.samples).starts
    assert np.array_equal(batch.x, ROWS[starts[:, None] + np.arange(batch.x.shape[1])])


class Own(mr.Windows):
    """The same view, which Python alone knows."""

    def spans(self, samples, axis=None):
        return super().spans(samples, axis)


def windows(path, kind=mr.Windows, lookback=64):
    return kind(mr.open_store(path), lookback=lookback, horizon=8, column="hits")


@pytest.mark.parametrize("batch", [1, 8, 31, 256])
def test_rows_of_a_cold_store_are_asked_for_ahead_until_it_is_hot(path, is_on_disk, batch):
    def taken():
        view = windows(path)
        with mr.Feed(view, batch=batch, device="numpy") as feed:
            for found in itertools.islice(feed, 512 // batch):
                check(view, found)
            return feed.report()

    assert taken().is_cold is is_on_disk
    assert all(file.read_bytes() for file in path.rglob("hits.f32"))
    assert taken().is_cold is False


@pytest.mark.parametrize("lookback", [1024, 16_384])
def test_large_samples_are_asked_for_before_the_first_is_copied(path, is_on_disk, lookback):
    """64 KiB, 1 MiB; one batch tells."""
    view = windows(path, lookback=lookback)
    with mr.Feed(view, batch=2, device="numpy", epochs=1) as feed:
        check(view, next(iter(feed)))
        assert feed.report().is_cold is is_on_disk


def test_transforms_read_cold_stores_ahead(path, is_on_disk):
    view = windows(path)
    with mr.Feed(view, batch=32, device="numpy", transform=lambda batch, rng: batch) as feed:
        iterator = iter(feed)
        for found in itertools.islice(iterator, 8):
            check(view, found)
        assert feed.report().is_cold is is_on_disk


def test_views_that_python_alone_knows_read_cold_stores_ahead(path, is_on_disk):
    view = windows(path, kind=Own)
    with mr.Feed(view, batch=64, device="numpy") as feed:
        for found in itertools.islice(feed, 20):
            check(view, found)
        assert (feed.report().way, feed.report().is_cold) == ("numpy", is_on_disk)
    (lent,) = view.store._shards._lent  # a map without the kernel's read-ahead, and no other
    assert lent not in view.store._shards._maps


def test_records_with_text_read_cold_stores_ahead(path, is_on_disk):
    view = mr.Records(mr.open_store(path))
    with mr.Feed(view, batch=4, epochs=1, device="numpy") as feed:
        for batch in feed:
            assert batch.name.tolist() == [f"n{k}" for k in batch.samples]
            rows = [ROWS[k * 20_000 : (k + 1) * 20_000] for k in batch.samples]
            assert np.array_equal(batch.hits.values, np.concatenate(rows))
        assert feed.report().is_cold is is_on_disk


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts of some kilobytes."""
    path = tmp_path_factory.mktemp("texts") / "store"
    texts = [f"{k} é " * (200 + k % 700) for k in range(3000)]
    with mr.StoreWriter(path, kind="records", columns=TEXT) as writer:
        writer.extend({"text": texts, "row": np.zeros(3000, np.int8)}, np.arange(3001))
    return path, texts


def test_text_is_read_ahead_by_maps_without_read_ahead_of_the_kernel(texts):
    path, expected = texts
    is_on_disk = drop(path, "text.*")
    view = mr.Records(mr.open_store(path), columns=["text"])
    with mr.Feed(view, batch=16, device="numpy", seed=1) as feed:
        for batch in itertools.islice(feed, 20):
            assert batch.text.tolist() == [expected[k] for k in batch.samples]
        assert feed.report().is_cold is is_on_disk
    shards = view.store._shards
    file = next(k for k, file in enumerate(view.store.layout.files) if file.column == "text")
    assert (0, file) in shards._lent
    assert (0, file) not in shards._maps


def test_more_threads_make_batches_while_the_data_is_cold(path, is_on_disk, monkeypatch):
    def num_threads():
        return sum(thread.name.startswith("millrace-fill") for thread in threading.enumerate())

    monkeypatch.setattr(compose, "IN_LINE_BYTES", 0)
    with mr.Feed(windows(path), batch=32, device="numpy", workers=1, depth=8) as feed:
        iterator = iter(feed)
        next(iterator)
        next(iterator)
        assert num_threads() == (native.COLD_WORKERS if is_on_disk else 1)
        assert feed.report().workers == 1
    assert num_threads() == 0
