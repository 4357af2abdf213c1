"""A few samples of a large file come as blocks of 4 MiB, each checked; many, or a server without ranges, give whole files."""

from __future__ import annotations

import os

import numpy as np
import pytest

import millrace as mr
from millrace.errors import StoreCorrupt
from millrace.store.layout import BLOCK_BYTES
from millrace.store.remote import objects
from millrace.store.remote.pace import Pace
from tests.tiers.conftest import SECRET

BLOCKS, LENGTH = 5, 1000
ROWS = BLOCKS * BLOCK_BYTES - 1000  # bytes: the last block is shorter


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "store"
    with mr.StoreWriter(path, kind="text", columns={"tokens": mr.Column("uint8")}) as writer:
        writer.append({"tokens": np.random.default_rng(3).integers(0, 256, ROWS, dtype=np.uint8)})
    return mr.open_store(path)


@pytest.fixture(autouse=True)
def steady(tmp_path, monkeypatch):
    """Four blocks take less than the whole file, five more: on every machine."""
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(Pace, "latency_s", 0.001)
    monkeypatch.setattr(Pace, "bytes_per_s", 1e8)


def samples_of_block(block: int) -> np.ndarray:
    """Samples of Blocks(length=LENGTH) that lie in one block of the file."""
    first = -(-block * BLOCK_BYTES // LENGTH)
    return np.arange(first, first + 3)


def used(tmp_path) -> int:
    folder = tmp_path / "cache" / "shards"
    return sum(
        entry.stat().st_size for entry in os.scandir(folder) if entry.name != "locks" and entry.stat().st_size > 64
    )


def same(feed, other) -> int:
    count = 0
    for one, two in zip(feed, other, strict=True):
        assert np.array_equal(one["x"], two["x"])
        assert np.array_equal(one.samples, two.samples)
        assert feed.state_dict() == other.state_dict()
        count += 1
    return count


@pytest.mark.parametrize("fault", [None, 503, "reset", "short", "flip"])
def test_few_samples_read_few_blocks_and_more_read_the_file(tmp_path, s3, proxy, local, fault):
    mr.push(local.path, s3)
    proxy.fault = lambda method, path: (
        fault if method == "GET" and "tokens" in path and len(proxy.gets("tokens")) in (1, 3) else None
    )
    here, there = mr.Blocks(local, length=LENGTH), mr.Blocks(mr.open_store(s3), length=LENGTH)
    one = int(samples_of_block(1)[0])
    assert np.array_equal(there[one]["x"], here[one]["x"])
    assert used(tmp_path) == BLOCK_BYTES
    requests = len(proxy.gets("tokens"))
    assert np.array_equal(there[one + 2]["x"], here[one + 2]["x"])
    assert len(proxy.gets("tokens")) == requests  # the block is there

    ids = np.array([samples_of_block(k)[1] for k in (4, 1, 2)])
    options = {"batch": 2, "seed": 2, "epochs": 2, "device": "numpy"}
    with mr.Feed(mr.Subset(here, ids), **options) as a, mr.Feed(mr.Subset(there, ids), **options) as b:
        assert same(a, b) == 3
        assert "3 blocks of 4 MiB read by ranges" in str(b.report())
        assert SECRET not in str(b.report())
    assert used(tmp_path) == 3 * BLOCK_BYTES - 1000
    for sample in (int(samples_of_block(k)[0]) for k in (0, 3)):
        assert np.array_equal(there[sample]["x"], here[sample]["x"])
    assert used(tmp_path) == 4 * BLOCK_BYTES - 1000 + ROWS  # the fifth block cost more than the file: it came whole


def test_a_long_feed_reads_whole_files(tmp_path, s3, proxy, local):
    mr.push(local.path, s3)
    options = {"batch": 512, "seed": 2, "epochs": 1, "device": "numpy"}
    here, there = (mr.Blocks(store, length=LENGTH) for store in (local, mr.open_store(s3)))
    with mr.Feed(here, **options) as a, mr.Feed(there, **options) as b:
        assert same(a, b) == -(-len(here) // 512)
        assert "files come whole" in str(b.report())
    assert len(proxy.gets("tokens")) == 1


def test_a_block_that_stays_wrong_is_never_served(tmp_path, s3, proxy, local, monkeypatch):
    mr.push(local.path, s3)
    monkeypatch.setattr(objects, "ATTEMPTS", 3)
    proxy.fault = lambda method, path: "flip" if method == "GET" and "tokens" in path else None
    view = mr.Blocks(mr.open_store(s3), length=LENGTH)
    with pytest.raises(StoreCorrupt, match=r"tokens.u8: block 2 is not the one that was written"):
        view[int(samples_of_block(2)[0])]
    assert used(tmp_path) == 0


def test_blocks_keep_to_the_size_of_the_cache(tmp_path, s3, proxy, local):
    mr.push(local.path, s3)
    limit = 2 * BLOCK_BYTES + 100
    here, there = mr.Blocks(local, length=LENGTH), mr.Blocks(mr.open_store(s3, cache_size=limit), length=LENGTH)
    for block in (0, 1, 2, 0):
        sample = int(samples_of_block(block)[1])
        assert np.array_equal(there[sample]["x"], here[sample]["x"])
        assert used(tmp_path) <= limit


def test_a_server_without_ranges_gives_whole_files(tmp_path, web, local, request):
    folder, url, _ = web
    mr.push(local.path, str(folder / "store"))
    here, there = mr.Blocks(local, length=LENGTH), mr.Blocks(mr.open_store(f"{url}/store"), length=LENGTH)
    for block in (3, 1):
        sample = int(samples_of_block(block)[0])
        assert np.array_equal(there[sample]["x"], here[sample]["x"])
    has_ranges = "no ranges" not in request.node.name
    assert used(tmp_path) == (2 * BLOCK_BYTES if has_ranges else ROWS)


def test_an_s3_server_without_ranges_gives_whole_files_and_goes_on_after_a_fault(tmp_path, s3, proxy, local):
    mr.push(local.path, s3)
    proxy.fault = lambda method, path: "whole"
    here, there = mr.Blocks(local, length=LENGTH), mr.Blocks(mr.open_store(s3), length=LENGTH)
    sample = int(samples_of_block(3)[0])
    assert np.array_equal(there[sample]["x"], here[sample]["x"])
    assert used(tmp_path) == ROWS
    before = len(proxy.gets("tokens"))
    proxy.fault = lambda method, path: "short" if len(proxy.gets("tokens")) == before + 1 else "whole"
    mr.pull(s3, tmp_path / "copy")
    assert len(proxy.gets("tokens")) == before + 3  # short, refused a part, whole


def test_the_pace_is_that_of_the_downloads(monkeypatch):
    monkeypatch.undo()
    pace = Pace()
    assert pace.prefers_blocks(1, 1 << 30)
    assert not pace.prefers_blocks(300, 1 << 30)
    for seconds in (0.5, 0.2, 0.3):
        pace.note(1000, seconds)
    pace.note(10_000_000, 1.2)
    assert (round(pace.latency_s, 3), round(pace.bytes_per_s)) == (0.2, 10_000_000)
