"""One writer per folder: the second is refused at once and told who the first is, however that one fares."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import millrace as mr
from millrace.store import gc, lock
from millrace.testing import run_forked, stopped, tree_digest


@pytest.fixture
def start(scripts):
    """Starts ``write_store.py hold`` and waits until it has its lock."""
    running: list[subprocess.Popen] = []

    def start(*arguments: str, script: str = "write_store.py") -> subprocess.Popen:
        command = [sys.executable, str(scripts / script), *arguments]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        process.first_line = process.stdout.readline().strip()
        assert process.first_line, "the first writer did not start"
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture(params=[False, True], ids=["fresh", "append"])
def append(request) -> bool:
    return request.param


@pytest.fixture
def target(append, fresh_copy, tmp_path):
    """Where to write, and the options of hold and StoreWriter that do it."""
    return fresh_copy() if append else tmp_path / "out"


def second(job, path, *, append: bool) -> mr.StoreWriter:
    return mr.StoreWriter(path, append=True) if append else mr.StoreWriter(path, columns=job.COLUMNS)


def hold(target, append: bool) -> list[str]:
    return ["hold", str(target), *(["--append"] if append else [])]


def test_second_writer_is_refused_and_told_who_the_first_is(job, start, target, append):
    first = start(*hold(target, append))
    with pytest.raises(mr.StoreLocked) as caught:
        second(job, target, append=append)
    assert caught.value.owner["pid"] == first.pid
    for known in (str(target), str(first.pid), socket.gethostname(), "write_store.py hold", "wait for it or end it"):
        assert known in str(caught.value)
    first.communicate(timeout=60)  # the end of stdin lets it finish, undisturbed by the second
    assert first.returncode == 0
    assert mr.open_store(target).num_records == (24 if append else 12)


def test_second_writer_is_refused_while_the_first_is_stopped(job, start, target, append):
    first = start(*hold(target, append))
    with stopped(first.pid), pytest.raises(mr.StoreLocked, match=str(first.pid)):
        second(job, target, append=append)


def test_second_writer_proceeds_after_the_first_was_killed(job, start, target, append, undisturbed):
    first = start(*hold(target, append))
    first.kill()
    first.wait()
    (job.append if append else job.write)(target)
    assert tree_digest(target) == (undisturbed.appended_tree if append else undisturbed.fresh_tree)
    assert os.listdir(target.parent) == ["out"]


def test_second_writer_in_the_same_process_is_refused(job, target, append):
    with second(job, target, append=append) as first:
        with pytest.raises(mr.StoreLocked, match=str(os.getpid())):
            second(job, target, append=append)
        job.fill(first, 0, 3)
    assert os.listdir(target.parent) == ["out"]


def test_refused_writer_leaves_nothing(job, fresh_copy):
    """gc holds the lock without a .partial; a writer refused by it must not leave one."""
    out = fresh_copy()
    held = lock.FolderLock(out, out.with_name("out.partial"), out)
    assert held.acquire()
    with pytest.raises(mr.StoreLocked, match="another process"):
        mr.StoreWriter(out, append=True)
    held.release()
    assert os.listdir(out.parent) == ["out"]


def test_gc_is_refused_while_somebody_appends(job, fresh_copy):
    out = fresh_copy()
    with mr.StoreWriter(out, append=True) as writer:
        with pytest.raises(mr.StoreLocked):
            gc.collect(out)
        job.fill(writer, 12, 14)
    assert mr.open_store(out).num_records == 14


def test_forked_child_does_not_keep_the_lock(job, start, tmp_path):
    first = start(str(tmp_path / "out"), script="outlived.py")
    child = int(first.first_line)
    try:
        first.kill()
        first.wait()
        os.kill(child, 0)  # it lives
        job.write(tmp_path / "out")
    finally:
        os.kill(child, signal.SIGKILL)


def test_forked_child_cannot_end_the_write_of_its_parent(job, tmp_path, undisturbed):
    """sys.exit in a child unwinds through the parent's ``with`` block, which is not its to close."""
    out = tmp_path / "out"
    with mr.StoreWriter(out, columns=job.COLUMNS, shard_bytes=job.SHARD_BYTES) as writer:
        job.fill(writer, 0, 6)

        def child() -> None:
            with pytest.raises(mr.ConfigError, match="belongs to the parent"):
                writer.append(job.record(0))
            writer.__exit__(SystemExit, SystemExit(), None)

        assert run_forked(child) == 0
        job.fill(writer, 6, 12)
    assert tree_digest(out) == undisturbed.fresh_tree


def test_lock_of_a_folder_that_was_replaced_is_not_a_lock(tmp_path, monkeypatch):
    """Between open and flock the holder may remove the folder, and a third writer make a new one."""
    folder = tmp_path / "out.partial"
    folder.mkdir()
    real = lock.fcntl.flock

    def late(fd: int, how: int) -> None:
        folder.rmdir()
        folder.mkdir()
        real(fd, how)

    mine = lock.FolderLock(folder, folder, tmp_path / "out")
    monkeypatch.setattr(lock.fcntl, "flock", late)
    assert not mine.acquire()
    monkeypatch.setattr(lock.fcntl, "flock", real)
    assert mine.acquire()
    mine.release()


def test_many_writers_at_once_make_one_store(job, tmp_path, undisturbed):
    """Threads that all try: one wins, the others are refused as locked or as too late."""
    out, outcomes = tmp_path / "out", []
    ready = threading.Barrier(8)

    def attempt() -> None:
        ready.wait()
        try:
            job.write(out)
            outcomes.append("wrote")
        except mr.StoreLocked:
            outcomes.append("locked")
        except mr.ConfigError as error:
            outcomes.append("late" if "already holds a store" in str(error) else repr(error))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes.count("wrote") == 1
    assert set(outcomes) <= {"wrote", "locked", "late"}
    assert tree_digest(out) == undisturbed.fresh_tree
    assert os.listdir(tmp_path) == ["out"]


def finished_store(path, job) -> None:
    job.write(path)


def folder_with_a_file(path, job) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def plain_file(path, job) -> None:
    path.write_text("mine")


def link_to_a_file(path, job) -> None:
    (path.parent / "file").write_text("mine")
    path.symlink_to("file")


@pytest.mark.parametrize("make", [finished_store, folder_with_a_file, plain_file, link_to_a_file])
@pytest.mark.parametrize("resume", [False, True])
def test_what_is_there_is_never_written_over(job, tmp_path, make, resume):
    make(tmp_path / "out", job)
    before = tree_digest(tmp_path)
    with pytest.raises(mr.ConfigError, match="choose another path"):
        job.write(tmp_path / "out", resume=resume)
    assert tree_digest(tmp_path) == before


def test_store_behind_a_link(job, tmp_path, undisturbed):
    """The link stays, and the store is written where it leads, whether that exists yet or not."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/store")
    job.write(tmp_path / "out")
    job.append(tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["store"]
    assert tree_digest(tmp_path / "disk" / "store") == undisturbed.appended_tree


@pytest.fixture
def no_flock(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(lock, "HAS_FLOCK", False)


@pytest.mark.usefixtures("no_flock")
def test_lease_stands_in_where_there_is_no_flock(job, target, append):
    with second(job, target, append=append) as first:
        with pytest.raises(mr.StoreLocked, match=str(os.getpid())):
            second(job, target, append=append)
        job.fill(first, 0, 3)
    assert mr.open_store(target).num_records == (15 if append else 3)
    assert os.listdir(target.parent) == ["out"]


@pytest.mark.usefixtures("no_flock")
def test_lease_of_a_killed_writer_is_taken_over(job, target, append, undisturbed):
    def killed() -> None:
        second(job, target, append=append)
        os.kill(os.getpid(), signal.SIGKILL)

    assert run_forked(killed) == -signal.SIGKILL
    (job.append if append else job.write)(target)
    assert tree_digest(target) == (undisturbed.appended_tree if append else undisturbed.fresh_tree)
    assert os.listdir(target.parent) == ["out"]


@pytest.mark.usefixtures("no_flock")
def test_lease_that_was_never_filled_does_not_block_for_ever(job, tmp_path):
    """Its owner was killed between making the file and writing its name into it."""
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "lease").touch()
    with pytest.raises(mr.StoreLocked):
        job.write(tmp_path / "out")
    os.utime(tmp_path / "out.partial" / "lease", (1, 1))
    job.write(tmp_path / "out")
