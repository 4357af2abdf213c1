"""Several writers of one store at once: by threads, by processes, in any order, the bytes are the same."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import millrace as mr
from millrace.errors import StoreWriteFailed
from millrace.testing import Fault, expect_no_leaks, iofault, run_forked, tree_digest

SHARDS = 8


@pytest.fixture(scope="module")
def parallel(scripts):
    spec = importlib.util.spec_from_file_location("parallel_write", scripts / "parallel_write.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_serially(path, parallel, *, resume: bool = False) -> None:
    with mr.StoreWriter(path, columns=parallel.COLUMNS, resume=resume) as writer:
        for number in range(SHARDS):
            writer.add(parallel.fill(writer.shard(number), number))


@pytest.fixture(scope="module")
def serial(tmp_path_factory, parallel):
    path = tmp_path_factory.mktemp("serial") / "out"
    write_serially(path, parallel)
    return tree_digest(path)


def test_shards_added_in_any_order(tmp_path, parallel, serial, seed):
    with mr.StoreWriter(tmp_path / "out", columns=parallel.COLUMNS) as writer:
        entries = [parallel.fill(writer.shard(number), number) for number in range(SHARDS)]
        random.Random(seed).shuffle(entries)
        for entry in entries:
            writer.add(entry)
    assert tree_digest(tmp_path / "out") == serial


def test_shards_written_by_threads(tmp_path, parallel, serial):
    with expect_no_leaks(), mr.StoreWriter(tmp_path / "out", columns=parallel.COLUMNS) as writer:

        def work(number: int) -> None:
            writer.add(parallel.fill(writer.shard(number), number))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, reversed(range(SHARDS))))
    assert tree_digest(tmp_path / "out") == serial


def test_shards_written_by_processes(tmp_path, scripts, serial):
    command = [sys.executable, str(scripts / "parallel_write.py"), str(tmp_path / "out"), str(SHARDS), "2"]
    with expect_no_leaks():
        done = subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""  # where Python tells of semaphores that were left
    assert tree_digest(tmp_path / "out") == serial


def test_shards_appended_by_several_writers(tmp_path, parallel):
    """Numbers given to shard() count from the end of what is there."""
    for order, name in ((range(3), "a"), (reversed(range(3)), "b")):
        write_serially(tmp_path / name, parallel)
        with mr.StoreWriter(tmp_path / name, columns=parallel.COLUMNS, append=True) as writer:
            for number in order:
                writer.add(parallel.fill(writer.shard(number), 50 + number))
    assert tree_digest(tmp_path / "a") == tree_digest(tmp_path / "b")
    assert mr.open_store(tmp_path / "a").num_records == 8 * (SHARDS + 3)


def test_shard_that_fails_leaves_no_trace(tmp_path, parallel, serial):
    with expect_no_leaks(), mr.StoreWriter(tmp_path / "out", columns=parallel.COLUMNS) as writer:
        for number in range(SHARDS):
            with pytest.raises(StoreWriteFailed), iofault(7, 5), writer.shard(number) as shard:
                parallel.fill(shard, number)
            assert len(os.listdir(tmp_path / "out.partial" / "shards")) == number
            writer.add(parallel.fill(writer.shard(number), number))
    assert tree_digest(tmp_path / "out") == serial


def test_resumed_run_may_write_and_add_a_shard_again(tmp_path, parallel, serial):
    at = 0
    while run_forked(write_serially, tmp_path / "out", parallel, resume=True, fault=Fault(at := at + 5, "kill")):
        write_serially(tmp_path / "out", parallel, resume=True)
        assert tree_digest(tmp_path / "out") == serial
        subprocess.run(["rm", "-rf", str(tmp_path / "out")], check=True)
    assert at > 100


def test_two_shards_of_one_number_are_refused(tmp_path, parallel):
    with mr.StoreWriter(tmp_path / "out", columns=parallel.COLUMNS) as writer:
        first, second = writer.shard(0), writer.shard(0)
        writer.add(parallel.fill(first, 1))
        with pytest.raises(mr.ConfigError, match="use each number once"):
            writer.shard(0)
        with pytest.raises(mr.ConfigError, match="train-00000 was added twice"):
            writer.add(parallel.fill(second, 2))
        writer.abort()
    assert os.listdir(tmp_path) == []
