"""What this process may use of the machine, as schedulers and containers say it."""

import os
import subprocess
import sys

import pytest

from millrace import native

ON_ONE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"


def printed(script):
    done = subprocess.run([sys.executable, "-c", ON_ONE + script], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture(params=["0::/a/b\n", "4:memory:/a/b\n3:cpu,cpuacct:/a/b\n0::/a\n"], ids=["new", "old"])
def group(request, tmp_path, monkeypatch):
    """The folder of this process's cgroup for a controller, of either version, and whether it is of the new one."""
    (tmp_path / "own").write_text(request.param)
    monkeypatch.setattr(native, "CGROUPS", tmp_path)
    monkeypatch.setattr(native, "OWN_CGROUPS", tmp_path / "own")
    is_new = request.param.startswith("0")

    def folder(controller):
        found = tmp_path / ("" if is_new else {"cpu": "cpu,cpuacct"}.get(controller, controller)) / "a" / "b"
        found.mkdir(parents=True)
        forget()
        return found, is_new

    yield folder
    forget()


def forget():
    native.memory_bytes.cache_clear()
    native._core_limit.cache_clear()


def test_memory_is_what_the_cgroup_leaves(group):
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    folder, is_new = group("memory")
    file = folder / ("memory.max" if is_new else "memory.limit_in_bytes")
    assert native.memory_bytes() == machine
    for text, expected in (("max" if is_new else str(1 << 62), machine), ("123456789", 123456789)):
        forget()
        file.write_text(text + "\n")
        assert native.memory_bytes() == expected


@pytest.mark.parametrize(("quota", "cores"), [("max", None), (50_000, 1), (100_000, 1), (150_000, 2)])
def test_cores_are_what_the_cgroup_leaves(group, quota, cores):
    folder, is_new = group("cpu")
    if is_new:
        (folder / "cpu.max").write_text(f"{quota} 100000\n")
    else:
        (folder / "cpu.cfs_quota_us").write_text("-1\n" if quota == "max" else f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
    allowed = len(os.sched_getaffinity(0))
    assert native.num_cores() == (allowed if cores is None else min(allowed, cores))


def test_doctor_and_verify_take_the_cores_that_are_allowed(tmp_path):
    assert printed("from millrace.cli.doctor import examine; print(examine()['cores'])") == "1"
    script = f"""
import numpy as np, millrace as mr
from concurrent import futures
from millrace.store import verify
with mr.StoreWriter({str(tmp_path / "store")!r}, kind="records", columns={{"a": mr.Column("int64")}}) as writer:
    writer.append({{"a": np.arange(3)}})
class Pool(futures.ThreadPoolExecutor):
    def __init__(self, workers): print(workers); super().__init__(workers)
verify.ThreadPoolExecutor = Pool
verify.verify_store({str(tmp_path / "store")!r})
"""
    assert printed(script) == "1"
