"""The operating system refuses a step: the writer says which and why, leaves nothing, and a rerun works."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil

import pytest

import millrace as mr
from millrace.errors import StoreWriteFailed
from millrace.store import gc
from millrace.testing import count_steps, expect_no_leaks, iofault, tree_digest

REFUSALS = {
    "mkdir": (errno.ENOSPC, errno.EACCES),
    "open": (errno.EACCES, errno.ENOSPC),
    "write": (errno.ENOSPC, errno.EIO),
    "fsync": (errno.EIO,),
    "rename": (errno.EIO, errno.EACCES),
    "unlink": (errno.EACCES,),
    "rmdir": (errno.EACCES,),
}


def refusals(function, *args, **kwargs) -> list[tuple[int, int]]:
    """Every step of this function with each errno worth trying there; but in soaks, with one of them in turn."""
    with count_steps() as steps:
        function(*args, **kwargs)
    codes = [REFUSALS[doing] for doing, _ in steps]
    if not os.environ.get("MILLRACE_SOAK"):
        codes = [each[at % len(each) :][:1] for at, each in enumerate(codes)]
    return [(at, code) for at, each in enumerate(codes, 1) for code in each]


def error_of(function, *args, **kwargs) -> OSError | None:
    try:
        function(*args, **kwargs)
    except OSError as error:
        return error.with_traceback(None)
    return None


def fails(function, *args, **kwargs) -> StoreWriteFailed:
    """Runs it into the fault; nothing but the one class may come out, with path, reason and remedy."""
    with pytest.raises(OSError) as caught:
        function(*args, **kwargs)
    error = caught.value
    assert type(error) is StoreWriteFailed, repr(error)
    assert error.path in str(error)
    assert os.strerror(error.errno) in str(error)
    assert "then run the same command again" in str(error)
    return error


@pytest.mark.parametrize("resume", [False, True])
def test_fresh_write_refused_at_every_step(tmp_path, job, undisturbed, resume):
    out = tmp_path / "out"
    cases = refusals(job.write, tmp_path / "counted", resume=resume)
    shutil.rmtree(tmp_path / "counted")
    with expect_no_leaks():
        for at, code in cases:
            with iofault(at, code):
                assert fails(job.write, out, resume=resume).errno == code
            with pytest.raises(mr.StoreNotFound):
                mr.open_store(out)
            assert resume or os.listdir(tmp_path) == [], f"step {at} refused with {code}"
            job.write(out, resume=resume)
            assert tree_digest(out) == undisturbed.fresh_tree, f"step {at} refused with {code}"
            assert os.listdir(tmp_path) == ["out"], f"step {at} refused with {code}"
            shutil.rmtree(out)


@pytest.mark.parametrize("resume", [False, True])
def test_append_refused_at_every_step(fresh_copy, tmp_path, job, undisturbed, resume):
    """An error means that nothing was appended; no error, that all of it was."""
    cases = refusals(job.append, fresh_copy(), resume=resume)
    with expect_no_leaks():
        for at, code in cases:
            out = fresh_copy()
            with iofault(at, code) as steps:
                error = error_of(job.append, out, resume=resume)
            if error is None:  # the append was in the store and only cleaning up failed
                assert steps[at - 1][0] in ("unlink", "rmdir")
                gc.collect(out)
            else:
                assert type(error) is StoreWriteFailed, repr(error)
                assert error.errno == code
                assert mr.open_store(out, check=True).fingerprint == undisturbed.old
                assert resume or tree_digest(out) == undisturbed.fresh_tree, f"step {at} refused with {code}"
                assert resume or os.listdir(tmp_path) == ["out"], f"step {at} refused with {code}"
                job.append(out, resume=resume)
            assert tree_digest(out) == undisturbed.appended_tree, f"step {at} refused with {code}"
            assert os.listdir(tmp_path) == ["out"], f"step {at} refused with {code}"


def test_disk_that_dies_for_good_is_still_our_error(tmp_path, job, undisturbed):
    """Every later step fails too, cleaning up included; what is left is never readable and never in the way."""
    out = tmp_path / "out"
    with count_steps() as steps:
        job.write(tmp_path / "counted")
    with expect_no_leaks():
        for at in range(1, len(steps) + 1):
            with iofault(at, errno.EIO, lasting=True):
                fails(job.write, out)
            if at < len(steps):  # the last is the sync after the rename: the disk is too dead to take it back
                with pytest.raises(mr.StoreNotFound):
                    mr.open_store(out)
                job.write(out)
            assert tree_digest(out) == undisturbed.fresh_tree, f"disk died at step {at}"
            shutil.rmtree(out)


def test_failed_fsync_is_never_retried(tmp_path, job, monkeypatch):
    """After a failed fsync the kernel may have dropped the pages and call the next one a success."""
    real, synced = os.fsync, []

    def fsync(fd: int) -> None:
        status = os.fstat(fd)
        synced.append((status.st_dev, status.st_ino, status.st_ctime_ns))
        if len(synced) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    failing = 0
    job.write(tmp_path / "counted")
    total = len(synced)
    assert total > 20
    for failing in range(1, total + 1):  # fsync above reads it
        synced.clear()
        fails(job.write, tmp_path / f"out{failing}")
        refused = synced[failing - 1]
        assert refused not in synced[failing:], f"fsync {failing} was tried again"


@pytest.mark.parametrize("append", [False, True])
def test_everything_is_synced_before_it_is_published(tmp_path, fresh_copy, job, append):
    """kill -9 does not lose what the kernel has, a power cut does: so the order of the steps itself is checked."""
    out = fresh_copy() if append else tmp_path / "new" / "folder" / "out"
    with count_steps() as steps:
        (job.append if append else job.write)(out)
    commit = ("rename", str(out / "store.json" if append else out))
    moment = steps.index(commit)
    assert steps[moment + 1] == ("fsync", os.path.dirname(commit[1]))
    partial = f"{out}.partial"
    for at, (doing, path) in enumerate(steps[:moment]):
        if path == partial or path.startswith(f"{partial}/owner.json"):
            continue  # the first is what the commitment renames, the other is for people and never published
        later = steps[at + 1 : moment + 1]
        if doing == "write":
            names = (("rename", path), ("rename", whole(path)))
            renamed = next((k for k, step in enumerate(later) if step in names), 1)  # 1: a line of the journal
            assert ("fsync", path) in later[:renamed], f"{path} counts before its bytes are synced"
        if doing in ("rename", "mkdir", "open"):
            folder = os.path.dirname(path)
            renamed = next((k for k, step in enumerate(later) if step == ("rename", whole(path))), len(later))
            synced = ("fsync", folder) in (later[:renamed] if folder.endswith(".tmp") else later)
            assert synced or path.endswith("store.json.tmp"), f"the name {path} is not synced before it counts"


def whole(path: str) -> str:
    """The name under which a file or its folder appears when it is whole."""
    folder, name = os.path.split(path)
    return folder.removesuffix(".tmp") if folder.endswith(".tmp") else os.path.join(folder, name.removesuffix(".tmp"))


def interrupted(job, path, fault=None, **options) -> None:
    """A user's own error in the block of a writer."""
    with mr.StoreWriter(path, shard_bytes=200, **options) as writer:
        job.fill(writer, 12, 20)
        with fault or contextlib.nullcontext():
            raise RuntimeError("mine")


def test_exception_in_the_block_leaves_nothing(tmp_path, job):
    with expect_no_leaks(), pytest.raises(RuntimeError, match="mine"):
        interrupted(job, tmp_path / "out", columns=job.COLUMNS)
    assert os.listdir(tmp_path) == []


def test_exception_in_the_block_is_told_even_if_cleaning_up_fails(tmp_path, job):
    class DeadDisk(contextlib.ExitStack):
        def __exit__(self, *details) -> None:
            """Dead from here on, while the writer cleans up."""
            disk.enter_context(iofault(1, errno.EIO, lasting=True))

    with contextlib.ExitStack() as disk, pytest.raises(RuntimeError, match="mine"):
        interrupted(job, tmp_path / "out", fault=DeadDisk(), columns=job.COLUMNS)
    assert os.listdir(tmp_path) == ["out.partial"]
    job.write(tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]


def test_exception_while_appending_leaves_the_store_as_it_was(fresh_copy, tmp_path, job, undisturbed):
    out = fresh_copy()
    with pytest.raises(RuntimeError, match="mine"):
        interrupted(job, out, append=True)
    assert tree_digest(out) == undisturbed.fresh_tree
    assert os.listdir(tmp_path) == ["out"]
