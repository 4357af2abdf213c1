"""A folder of the user's that happens to be named ``<out>.partial`` stays as it is; one of ours is always taken over."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.store import gc, lock
from millrace.testing import Fault, count_steps, iofault, run_forked, tree_digest

from .conftest import moments

KILLED = -signal.SIGKILL


@pytest.fixture(params=["flock", "lease"])
def kind_of_lock(request, monkeypatch) -> None:
    monkeypatch.setattr(lock, "HAS_FLOCK", request.param == "flock")


def notes(folder: Path, store: Path) -> None:
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")


def other_owner(folder: Path, store: Path) -> None:
    folder.mkdir()
    (folder / "owner.json").write_text('{"owner": "me"}')


def other_journal(folder: Path, store: Path) -> None:
    folder.mkdir()
    (folder / "journal.jsonl").write_text('{"day": 1}\n')


def other_lease(folder: Path, store: Path) -> None:
    folder.mkdir()
    (folder / "lease").write_text("for the flat in Ulm")


def other_plan(folder: Path, store: Path) -> None:
    (folder / "shards").mkdir(parents=True)
    (folder / "plan.json").write_text('{"version": 1}')


def finished_store(folder: Path, store: Path) -> None:
    shutil.copytree(store, folder)


def linked_owner(folder: Path, store: Path) -> None:
    folder.mkdir()
    (folder / "owner.json").symlink_to("/dev/zero")


def fifo(folder: Path, store: Path) -> None:
    folder.mkdir()
    os.mkfifo(folder / "owner.json")
    os.mkfifo(folder / "journal.jsonl")


def plain_file(folder: Path, store: Path) -> None:
    folder.write_text("mine")


def broken_link(folder: Path, store: Path) -> None:
    folder.symlink_to("nowhere")


def link_to_a_folder(folder: Path, store: Path) -> None:
    (folder.parent / "elsewhere").mkdir()
    folder.symlink_to("elsewhere")


USERS = [
    notes, other_owner, other_journal, other_lease, other_plan, finished_store, linked_owner, fifo, plain_file,
    broken_link, link_to_a_folder,
]  # fmt: skip


def snapshot(folder: Path) -> list[tuple[str, int, int, bytes]]:
    """All that lies below a folder: what it is, when it was changed, what it holds."""
    found = []
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found.append((str(path), status.st_mode, status.st_mtime_ns if not path.is_dir() else 0, data))
    return found


@pytest.mark.usefixtures("kind_of_lock")
@pytest.mark.parametrize("make", USERS)
@pytest.mark.parametrize("action", ["write", "resume", "append", "gc", "gc --dry-run"])
def test_folder_of_the_user_is_refused_by_name_and_not_touched(job, tmp_path, undisturbed, make, action):
    out = tmp_path / "out"
    make(tmp_path / "out.partial", undisturbed.fresh)
    if action not in ("write", "resume"):
        shutil.copytree(undisturbed.fresh, out)
    before = snapshot(tmp_path)
    actions: dict[str, Callable[[], object]] = {
        "write": lambda: job.write(out),
        "resume": lambda: job.write(out, resume=True),
        "append": lambda: job.append(out),
        "gc": lambda: gc.collect(out, keep=1),
        "gc --dry-run": lambda: gc.collect(out, keep=1, dry_run=True),
    }
    with pytest.raises(mr.ConfigError, match=r"out\.partial .*rename or move out\.partial, or choose another"):
        actions[action]()
    assert snapshot(tmp_path) == before


@pytest.mark.usefixtures("kind_of_lock")
@pytest.mark.parametrize("make", USERS)
@pytest.mark.parametrize("kind", ["text", "table"])
@pytest.mark.parametrize("append", [False, True])
def test_prepare_refuses_it_too(tmp_path, undisturbed, make, kind, append):
    out, texts, table = tmp_path / "out", tmp_path / "in.txt", tmp_path / "in.csv"
    texts.write_text("one line of text\n")
    table.write_text("name,time,value\n" + "".join(f"a,{k},{k}.5\n" for k in range(8)))

    def prepare(more: bool) -> None:
        if kind == "text":
            options = {} if more else {"tokenizer": "bytes", "val": 0}
            mr.prepare_text([str(texts)], out=out, workers=1, append=more, **options)
        else:
            options = {} if more else {"entity": "name", "time": "time"}
            mr.prepare_table([str(table)], out=out, workers=1, append=more, **options)

    if append:
        prepare(False)
        texts.write_text("another line of text\n")
        table.write_text("name,time,value\n" + "".join(f"a,{k},{k}.5\n" for k in range(8, 16)))
    make(tmp_path / "out.partial", undisturbed.fresh)
    before = snapshot(tmp_path)
    with pytest.raises(mr.ConfigError, match=r"out\.partial .*rename or move out\.partial, or choose another"):
        prepare(append)
    assert snapshot(tmp_path) == before


@pytest.mark.usefixtures("kind_of_lock")
def test_an_empty_folder_is_taken(job, tmp_path, undisturbed):
    (tmp_path / "out.partial").mkdir()
    job.write(tmp_path / "out")
    assert tree_digest(tmp_path / "out") == undisturbed.fresh_tree
    assert os.listdir(tmp_path) == ["out"]


def test_a_users_folder_is_not_called_an_unfinished_store(tmp_path):
    notes(tmp_path / "out.partial", tmp_path)
    with pytest.raises(mr.StoreNotFound, match="does not exist; check the path"):
        mr.open_store(tmp_path / "out")


# With a lease in the place of flock: killed at every step, the folder is still ours.


@pytest.fixture
def no_flock(monkeypatch) -> None:
    monkeypatch.setattr(lock, "HAS_FLOCK", False)


def steps_of(function, *args, **kwargs) -> int:
    with count_steps() as steps:
        function(*args, **kwargs)
    return len(steps)


@pytest.mark.usefixtures("no_flock")
def test_fresh_write_with_a_lease_killed_at_every_step(tmp_path, job, undisturbed):
    out = tmp_path / "out"
    total = steps_of(job.write, tmp_path / "counted")
    shutil.rmtree(tmp_path / "counted")
    for at in moments(total):
        assert run_forked(job.write, out, fault=Fault(at, "kill")) == KILLED
        if not (out / "store.json").exists():
            age_leases(tmp_path / "out.partial")
            job.write(out)
        gc.collect(out)  # a lease that its owner could not remove from the finished store
        assert tree_digest(out) == undisturbed.fresh_tree, f"killed at step {at}"
        assert os.listdir(tmp_path) == ["out"], f"killed at step {at}"
        shutil.rmtree(out)


@pytest.mark.usefixtures("no_flock")
def test_append_with_a_lease_killed_at_every_step(fresh_copy, job, undisturbed):
    total = steps_of(job.append, fresh_copy())
    for at in moments(total):
        out = fresh_copy()
        assert run_forked(job.append, out, fault=Fault(at, "kill")) == KILLED
        age_leases(out.with_name("out.partial"))
        if mr.open_store(out).fingerprint == undisturbed.old:
            job.append(out)
        else:
            gc.collect(out)
        assert tree_digest(out) == undisturbed.appended_tree, f"killed at step {at}"
        assert os.listdir(out.parent) == ["out"], f"killed at step {at}"


def age_leases(folder: Path) -> None:
    """A lease without its owner's name, who was killed before it was written, is dead after a minute."""
    for path in folder.glob("lease*"):
        if not path.stat().st_size:
            os.utime(path, (1, 1))


@pytest.mark.usefixtures("kind_of_lock")
@pytest.mark.parametrize("end", ["gc", "abort"])
def test_the_end_of_an_attempt_killed_at_every_step_can_be_repeated(fresh_copy, job, undisturbed, end):
    """gc, and a writer that gives up, remove the folder of an append with all that lies in it."""

    def interrupted() -> Path:
        out = fresh_copy()
        writer = mr.StoreWriter(out, append=True, shard_bytes=100, resume=True)
        job.fill(writer, 12, 20)
        writer.abort()
        assert (out.with_name("out.partial") / "shards").is_dir()
        return out

    def remove(out: Path) -> None:
        if end == "gc":
            gc.collect(out)
        else:
            mr.StoreWriter(out, append=True, shard_bytes=100).abort()

    for at in range(1, steps_of(remove, interrupted()) + 1):
        out = interrupted()
        assert run_forked(remove, out, fault=Fault(at, "kill")) == KILLED
        age_leases(out.with_name("out.partial"))
        remove(out)
        assert tree_digest(out) == undisturbed.fresh_tree, f"killed at step {at}"
        assert os.listdir(out.parent) == ["out"], f"killed at step {at}"


def test_store_that_was_moved_aside_is_no_unfinished_one(job, tmp_path, undisturbed):
    """A store that was finished here has lost the mark of those that wait for their name."""
    job.write(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "out.partial")
    with pytest.raises(mr.ConfigError, match="which is not an unfinished store"):
        job.write(tmp_path / "out")
    assert tree_digest(tmp_path / "out.partial") == undisturbed.fresh_tree
    assert np.isfinite(mr.open_store(tmp_path / "out.partial").columns["values"][:]).all()


@pytest.mark.usefixtures("no_flock")
def test_a_lease_that_cannot_be_removed_from_a_finished_store_is_no_error(job, tmp_path, undisturbed):
    """An error must mean that there is no store; gc removes the lease later."""
    out = tmp_path / "out"
    with count_steps() as steps:
        job.write(tmp_path / "counted")
    assert steps[-1] == ("unlink", str(tmp_path / "counted" / "lease"))
    with iofault(len(steps), errno.EIO):
        job.write(out)
    assert gc.collect(out)["removed"] == ["lease"]
    assert tree_digest(out) == undisturbed.fresh_tree
