"""The lease that stands in for flock: one holder, however many take over a dead one, whatever their clocks say."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import pytest

import millrace as mr
from millrace.store import lease, lock, platform
from millrace.store.lease import LEASE_S, Lease, myself
from millrace.testing import run_forked, tree_digest

PROCESSES, ROUNDS = 20, 120


@pytest.fixture
def no_flock(monkeypatch) -> None:
    monkeypatch.setattr(lock, "HAS_FLOCK", False)


def dead_pid() -> int:
    """The number of a process that has ended."""
    reader, writer = os.pipe()
    run_forked(lambda: os.write(writer, str(os.getpid()).encode()))
    os.close(writer)
    with open(reader, "rb") as file:
        return int(file.read())


def leave(folder: Path, name: str = "lease", *, silent_s: float = 0.0, **changes: object) -> Path:
    """A lease that some process made and touched last ``silent_s`` ago."""
    path = folder / name
    path.write_text(json.dumps({**myself(), **changes}))
    touched = path.stat().st_mtime - silent_s
    os.utime(path, (touched, touched))
    return path


def contend(folder: Path, number: int, gate, holds) -> None:
    for _ in range(ROUNDS):
        gate.wait()  # the dead lease is there
        mine = Lease(folder)
        holds[number] = mine.take()
        gate.wait()  # all have tried
        gate.wait()  # and were counted
        if holds[number]:
            mine.drop()
        gate.wait()


def test_many_processes_that_take_over_a_dead_lease_make_one_holder(tmp_path):
    folder, pid = tmp_path / "out.partial", dead_pid()
    folder.mkdir()
    context = multiprocessing.get_context("fork")
    gate, holds = context.Barrier(PROCESSES + 1, timeout=60), context.Array("b", PROCESSES, lock=False)
    workers = [
        context.Process(target=contend, args=(folder, number, gate, holds), daemon=True) for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    try:
        for number in range(ROUNDS):
            match number % 4:
                case 0:
                    leave(folder, pid=pid)
                case 1:
                    leave(folder, host="elsewhere", silent_s=LEASE_S + 5)
                case 2:  # its owner had taken over another dead one, and was killed before it could remove that
                    leave(folder, pid=pid)
                    leave(folder, "lease.1", pid=pid)
                case 3:  # nobody holds it
                    pass
            gate.wait()
            gate.wait()
            assert sum(holds) == 1, f"round {number}"
            assert len(os.listdir(folder)) == 1, f"round {number}"
            gate.wait()
            gate.wait()
            assert os.listdir(folder) == []
    finally:
        gate.abort()
        for worker in workers:
            worker.join()


@pytest.mark.parametrize("skew_s", [-90.0, 0.0, 90.0])
def test_age_is_judged_by_the_clock_of_the_file_system(tmp_path, monkeypatch, skew_s):
    """Whatever time this host believes it is, a lease of another one lives for a minute after its last touch."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + skew_s)
    path = leave(tmp_path, host="elsewhere", silent_s=LEASE_S - 20)
    assert not Lease(tmp_path).take()
    assert json.loads(path.read_bytes())["host"] == "elsewhere"
    leave(tmp_path, host="elsewhere", silent_s=LEASE_S + 20)
    mine = Lease(tmp_path)
    assert mine.take()
    mine.drop()
    assert os.listdir(tmp_path) == []


def test_clock_of_this_host_that_was_set_does_not_end_a_lease(tmp_path):
    """The time of birth of a process moves with the clock; a lease that is touched is not dead by that alone."""
    leave(tmp_path, create_time=myself()["create_time"] - 90)
    assert not Lease(tmp_path).take()
    leave(tmp_path, create_time=myself()["create_time"] - 90, silent_s=LEASE_S + 5)
    mine = Lease(tmp_path)
    assert mine.take()
    mine.drop()


def test_a_held_lease_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "HEARTBEAT_S", 0.001)
    mine = Lease(tmp_path)
    assert mine.take()
    (path,) = tmp_path.iterdir()
    before = path.read_bytes()
    os.utime(path, (1, 1))
    while path.stat().st_mtime < 2:  # a hang fails by its timeout
        pass
    mine.drop()
    assert json.loads(before)["pid"] == os.getpid()


@pytest.mark.parametrize(
    "content", ["", "{", "{}", "[]", "null", '{"host": 1, "pid": "x", "create_time": null}', "\0" * 99]
)
def test_a_lease_that_says_nothing_is_dead_after_a_minute(tmp_path, content):
    path = tmp_path / "lease"
    path.write_text(content)
    assert not Lease(tmp_path).take()
    os.utime(path, (1, 1))
    mine = Lease(tmp_path)
    assert mine.take()
    mine.drop()
    assert os.listdir(tmp_path) == []


def test_a_lease_that_is_a_fifo_or_a_link_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "lease")
    (tmp_path / "lease.1").symlink_to("/dev/zero")
    assert not Lease(tmp_path).take()


@pytest.mark.usefixtures("no_flock")
def test_who_finds_the_folder_renamed_under_its_lease_looks_again(job, tmp_path, undisturbed, monkeypatch):
    """The store of another writer appears between the look and the lease: it is found, and stays whole."""
    out, real = tmp_path / "out", Lease.take

    def late(mine: Lease) -> bool:
        monkeypatch.setattr(Lease, "take", real)
        job.write(tmp_path / "other")
        (tmp_path / "out.partial").rmdir()
        (tmp_path / "other").rename(out)
        return real(mine)

    monkeypatch.setattr(Lease, "take", late)
    with pytest.raises(mr.ConfigError, match="already holds a store"):
        job.write(out)
    assert tree_digest(out) == undisturbed.fresh_tree
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.usefixtures("no_flock")
def test_lease_holds_until_the_store_has_its_name(job, tmp_path, undisturbed, monkeypatch):
    """Else another writer could take the folder that is about to become a store, and empty it."""
    out, refused = tmp_path / "out", []

    def look(operation: str, path: str) -> None:
        if operation == "rename" and path == str(out):
            monkeypatch.setattr(platform, "before_write", None)
            with pytest.raises(mr.StoreLocked):
                job.write(out)
            refused.append(path)

    monkeypatch.setattr(platform, "before_write", look)
    job.write(out)
    assert refused == [str(out)]
    assert tree_digest(out) == undisturbed.fresh_tree
    assert os.listdir(tmp_path) == ["out"]
