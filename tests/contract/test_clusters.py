"""Whole stores made on Ray and Dask: the bytes of a local run, whatever dies, and nothing left."""

import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import millrace as mr
from millrace.prepare.engines import cluster as cluster_engine
from millrace.prepare.engines import on_dask
from millrace.prepare.engines.choice import open_engine
from millrace.testing import tree_digest

pytestmark = [pytest.mark.own_process, pytest.mark.timeout(300)]


@pytest.fixture(params=["ray", "dask"])
def cluster(request):
    """The options for a cluster that was there before."""
    return {"engine": request.param, "address": request.getfixturevalue(f"{request.param}_address")}


@pytest.fixture
def fragile(kind, tmp_path, monkeypatch):
    """Sources in several parts, one of which holds what functions of a user fail on."""
    for name in kind.sizes:
        monkeypatch.setattr(name, 1)
    (tmp_path / "in").mkdir()
    return kind.write_fragile(tmp_path / "in")


# Every kind, and every cluster; all kinds on all clusters in a soak.
USUAL = [("text", "ray"), ("table", "dask"), ("records", "dask")]
OTHERS = [("text", "dask"), ("table", "ray"), ("records", "ray")]
each_kind = pytest.mark.parametrize(
    ("kind", "cluster"), [*USUAL, *(pytest.param(*pair, marks=pytest.mark.soak) for pair in OTHERS)], indirect=True
)


def wait_for(condition, process=None):
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.02)


@each_kind
def test_a_cluster_makes_the_bytes_of_a_local_run(kind, cluster, tmp_path):
    source, seen = kind.write(tmp_path / "in"), []
    kind.prepare(source, tmp_path / "local", workers=1, **kind.options)
    report = kind.prepare(source, tmp_path / "out", progress=lambda *call: seen.append(call), **cluster, **kind.options)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "local")
    assert report.fingerprint == mr.open_store(tmp_path / "out", check=True).fingerprint
    assert sorted(os.listdir(tmp_path)) == ["in", "local", "out"]
    read = [done for stage, done, _, _ in seen if stage == "read"]
    assert (read, len(set(read)) > 3) == (sorted(read), True)


@each_kind
def test_a_worker_that_is_killed_in_a_task_changes_no_byte(kind, cluster, fragile, tmp_path, stuck):
    options = {**kind.fragile, kind.function: "user_functions:dies_once"}
    died = stuck.with_name("died")
    died.touch()
    kind.prepare(fragile, tmp_path / "local", workers=1, **options)
    died.unlink()
    kind.prepare(fragile, tmp_path / "out", **cluster, **options)
    assert died.exists()
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "local")
    assert sorted(os.listdir(tmp_path)) == ["in", "local", "out"]  # what the dead attempt wrote is swept


@each_kind
def test_a_task_that_outlives_its_run_and_the_next_one_harms_neither(
    kind, cluster, fragile, tmp_path, stuck, program, monkeypatch
):
    """Only on Dask it does: Ray ends the tasks of a driver that was killed."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    kind.prepare(fragile, tmp_path / "local", workers=1, **kind.fragile)
    monkeypatch.setattr(kind, "sizes", dict.fromkeys(kind.sizes, 1))
    stuck.touch()
    options = {**kind.fragile, **cluster, kind.function: "user_functions:held"}
    with subprocess.Popen(program(kind, fragile, out, **options)) as process:
        wait_for(lambda: len(list(partial.glob("attempts/*/*.tmp"))) == 2, process)
        process.kill()
    kind.prepare(fragile, out, workers=1, restart=True, **kind.fragile)
    assert stuck.exists()
    stuck.unlink()
    tasks, pids = importlib.import_module("engine_tasks"), set()
    engine = open_engine(cluster["engine"], cluster["address"], 2, 0)
    while len(pids) < 2:  # each worker has one thread, so that its late task has ended now
        pids |= {pid for _, pid in engine.run(tasks.process_id, range(4))}
    engine.close()
    assert tree_digest(out) == tree_digest(tmp_path / "local")
    assert not partial.exists()


@pytest.mark.parametrize("kind", ["text"], indirect=True)
@pytest.mark.parametrize("engine", [pytest.param("ray", marks=pytest.mark.soak), "dask"])
def test_a_cluster_of_our_own_ends_with_us_also_after_kill_9_and_ctrl_c(
    kind, engine, fragile, tmp_path, stuck, monkeypatch
):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = ["--tokenizer", "bytes", "--workers", "2", "--filter", "user_functions:held"]
    what = [sys.executable, "-m", "millrace", "prepare", "text", *fragile, *options]
    out, local, partial = tmp_path / "out", tmp_path / "local", tmp_path / "out.partial"
    command = [*what, "--out", str(out), "--engine", engine]
    stuck.touch()
    earlier = set[Path]()
    for number, code in ((signal.SIGKILL, -9), (signal.SIGINT, 130)):
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        wait_for(lambda: set(partial.glob("attempts/*/*.tmp")) - earlier, process)
        earlier.update(partial.glob("attempts/*/*.tmp"))
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 1
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to all of them
        else:
            process.kill()
            # Those of Ray that run no tasks look for their dead server for a minute before they end.
            family = [member for member in family if "Agent" not in member.name()]
        _, said = process.communicate(timeout=100)
        assert process.returncode == code, said
        assert psutil.wait_procs(family, timeout=60)[1] == [], number
    assert [line for line in said.splitlines() if not line.startswith(("read:", "note:"))] == [
        f"interrupted; run it again with: millrace {' '.join(command[3:])}"
    ]
    stuck.unlink()
    before = {*os.listdir(tmp_path)} - {partial.name}  # with what the killed run left; it is TMPDIR too
    with subprocess.Popen(command) as process:
        process.wait(timeout=200)
    assert process.returncode == 0
    subprocess.run([*what, "--out", str(local)], check=True, timeout=100)
    assert tree_digest(out) == tree_digest(local)
    assert not partial.exists()
    assert {*os.listdir(tmp_path)} == before | {"local", "out"}
    assert list(Path("/tmp").glob(f"millrace-ray-{process.pid}-*")) == []


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_a_worker_with_other_code_is_refused(kind, cluster, fragile, tmp_path, stuck, monkeypatch):
    out = tmp_path / "out"
    module = tmp_path / f"my_{cluster['engine']}.py"
    module.write_text("def keep(text):\n    return True\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    options = {**kind.fragile, **cluster, "filter": f"{module.stem}:keep"}
    kind.prepare(fragile, tmp_path / "first", **options)
    module.write_text("def keep(text):\n    return False\n")
    with pytest.raises(mr.ConfigError, match=r"worker \S+ has loaded another file of that name .*restart the workers"):
        kind.prepare(fragile, out, **options)
    monkeypatch.setattr(cluster_engine, "__version__", "9.9")
    with pytest.raises(mr.ConfigError, match=r"worker \S+ has millrace 0\S+, this run 9\.9; install the same version"):
        kind.prepare(fragile, out, **kind.fragile, **cluster)
    assert not out.exists()


@pytest.mark.parametrize("kind", ["text"], indirect=True)
def test_an_address_where_nobody_answers_and_a_package_that_is_missing_are_named(kind, fragile, tmp_path, monkeypatch):
    monkeypatch.setattr(on_dask, "CONNECT_S", 1)
    with pytest.raises(mr.ConfigError, match=r"address=.*tcp://127.0.0.1:9.*: no Dask cluster answers"):
        kind.prepare(fragile, tmp_path / "out", engine="dask", address="tcp://127.0.0.1:9", **kind.fragile)
    for name in ("ray", "dask"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, f"millrace.prepare.engines.on_{name}", raising=False)
        with pytest.raises(mr.ConfigError, match=rf"engine=\"{name}\" needs {name}; pip install '\.\[{name}\]'"):
            kind.prepare(fragile, tmp_path / "out", engine=name, **kind.fragile)
    assert not (tmp_path / "out.partial").exists()
