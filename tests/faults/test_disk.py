"""Disks that are really full, read-only or broken: the kernel and libfiu refuse, not a hook of ours."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.errors import StoreWriteFailed
from millrace.testing import NotPossibleHere, expect_no_leaks, run_forked, small_disk, tree_digest

AS_ROOT = os.geteuid() == 0


@pytest.fixture
def full_disk():
    try:
        with small_disk(1 << 20) as folder:
            yield folder
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def write_big(path: Path, num_bytes: int, *, append: bool = False) -> None:
    """More than one shard of zeros and ones, in steps."""
    columns = None if append else {"bytes": mr.Column("uint8")}
    with mr.StoreWriter(path, columns=columns, append=append, shard_bytes=300_000) as writer:
        for start in range(0, num_bytes, 100_000):
            writer.append({"bytes": np.full(min(100_000, num_bytes - start), start % 251, np.uint8)})


def test_full_disk_is_an_error_and_is_given_back(full_disk):
    out = full_disk / "out"
    with expect_no_leaks(), pytest.raises(StoreWriteFailed, match="free space or choose another disk") as caught:
        write_big(out, 3_000_000)
    assert caught.value.errno == errno.ENOSPC
    assert os.listdir(full_disk) == []
    write_big(out, 500_000)
    assert mr.open_store(out).num_rows == 500_000


def test_full_disk_while_appending_leaves_the_store_as_it_was(full_disk):
    out = full_disk / "out"
    write_big(out, 300_000)
    before = tree_digest(out)
    with pytest.raises(StoreWriteFailed):
        write_big(out, 2_000_000, append=True)
    assert tree_digest(out) == before
    assert os.listdir(full_disk) == ["out"]
    write_big(out, 300_000, append=True)
    assert mr.open_store(out, check=True).num_rows == 600_000


def test_disk_that_is_full_after_any_page(full_disk, job, undisturbed):
    """Room for 0, 1, 2, ... pages: every file in turn is the one that does not fit, the manifest too."""
    out, ballast = full_disk / "out", full_disk / "ballast"
    refused = []
    for pages in range(200):
        ballast.write_bytes(bytes(1 << 19))
        ballast.write_bytes(bytes(free_bytes(full_disk) + (1 << 19) - 4096 * pages))
        try:
            job.write(out)
            break
        except StoreWriteFailed as error:
            refused.append((error.errno, Path(error.path).name))
        assert os.listdir(full_disk) == ["ballast"]
    assert {code for code, _ in refused} == {errno.ENOSPC}
    assert {"owner.json", "journal.jsonl", "values.f32", "name.utf8", "shards.bin", "store.json"} <= {
        name for _, name in refused
    }
    assert tree_digest(out) == undisturbed.fresh_tree


def free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


def test_file_size_limit(tmp_path):
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
        with pytest.raises(
            StoreWriteFailed, match=r"at byte 65,536: File too large; raise the file size limit \(ulimit -f\)"
        ):
            write_big(tmp_path / "out", 500_000)

    assert run_forked(limited) == 0
    assert os.listdir(tmp_path) == []


def report_of(command: list[str], report: Path) -> dict[str, object]:
    """The report of a writer that must be refused."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    return json.loads(report.read_text())


@pytest.mark.skipif(not AS_ROOT, reason="a private read-only mount needs root")
def test_read_only_target_is_refused_before_any_work(tmp_path, scripts):
    """In a mount namespace of its own, since root writes through chmod 555."""
    target, report = tmp_path / "target", tmp_path / "report"
    target.mkdir()
    mount = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && exec "$@"'
    script = [sys.executable, str(scripts / "try_to_write.py"), str(target / "out"), str(report)]
    said = report_of(["unshare", "-m", "sh", "-c", mount, str(target), *script], report)
    assert said["path"] == f"{target}/out.partial"
    assert "Read-only file system; choose a writable place" in said["message"]
    assert said["steps"] == 1


def test_target_without_permission_is_refused_before_any_work(tmp_path):
    target = tmp_path / "target"
    target.mkdir(mode=0o555)

    def refused() -> None:
        if AS_ROOT:
            os.setuid(65534)
        with pytest.raises(StoreWriteFailed, match=r"Permission denied for user .+; fix the permission") as caught:
            mr.StoreWriter(target / "out", columns={"bytes": mr.Column("uint8")})
        assert caught.value.path.startswith(str(target))

    for folder in (tmp_path, *tmp_path.parents)[:2]:
        folder.chmod(0o755)  # so that another user gets as far as the target
    assert run_forked(refused) == 0
    assert os.listdir(target) == []


@pytest.mark.skipif(not AS_ROOT and shutil.which("fiu-run") is None, reason="fiu-run is not installed: make servers")
@pytest.mark.parametrize(
    ("failure", "code"),
    [("posix/io/rw/write", errno.ENOSPC), ("posix/io/sync/fsync", errno.EIO), ("posix/io/dir/rename", errno.EIO)],
)
def test_libfiu_fails_calls_at_random(tmp_path, scripts, undisturbed, failure, code):
    """The C library refuses, whatever code of ours or of Python makes the call."""
    out = tmp_path / "out"
    fiu = ["fiu-run", "-x", "-c", f"enable_random name={failure},probability=0.05,failinfo={code}"]
    script = [sys.executable, "-B", str(scripts / "try_to_write.py"), str(out), "-"]
    refused = 0
    for _ in range(6):
        done = subprocess.run([*fiu, *script], capture_output=True, text=True, check=False)
        assert done.returncode in (0, 3), done.stderr
        if done.returncode == 3:
            refused += 1
            assert not out.exists()
            subprocess.run(script, check=True)
        assert tree_digest(out) == undisturbed.fresh_tree
        assert os.listdir(tmp_path) == ["out"]
        shutil.rmtree(out)
    print(f"{refused} of 6 writes were refused")
