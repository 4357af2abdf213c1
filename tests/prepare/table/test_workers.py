"""Workers that raise, die or are killed in a transform, a parent that dies, Ctrl-C: an error that says where, nothing left."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pytest

import millrace as mr
from millrace.prepare.engines import local
from millrace.prepare.table.read import sources
from millrace.testing import expect_no_leaks, tree_digest

TRANSFORMS = """
import ctypes, os, signal, time
import pyarrow as pa, pyarrow.compute as pc

def poison(action):
    def transform(table):
        if len(table) and pc.any(pc.equal(table["x"], 77.0)).as_py():
            action()
        return table
    return transform

def boom():
    raise ValueError("no such price")

raises = poison(boom)
exits = poison(lambda: os._exit(3))
leaves = poison(lambda: (_ for _ in ()).throw(SystemExit(5)))
crashes = poison(lambda: ctypes.string_at(0))
killed = poison(lambda: os.kill(os.getpid(), signal.SIGKILL))

def slow(table):
    if len(table):
        time.sleep(0.03)
    while len(table) and os.path.exists(__file__ + ".stuck"):
        time.sleep(0.02)
    return table

def doubled(table):
    names = table.column_names
    made = table.append_column("z", pc.multiply(table["x"], 2.0)) if "x" in names else table
    return made.append_column("when", pc.add(table["t"], 1)).filter(pc.greater(made["x"], 10.0))

def raises_at_once(table):
    return table["no such column"]

def gives_nothing(table):
    return None

def forgets(table):
    return table if not len(table) else table.drop_columns(["x"])

def another_type(table):
    return table if not len(table) else table.set_column(0, "t", pa.array(["late"] * len(table)))
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Four files, and as many parts; 77.0 is in the third."""
    for k in range(4):
        frame = pd.DataFrame({"t": np.arange(30), "x": 30.0 * k + np.arange(30)})
        frame.to_parquet(tmp_path / f"{k}.parquet")
    (tmp_path / "poisoned_tables.py").write_text(TRANSFORMS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(sources, "PART_BYTES", 1)
    return str(tmp_path / "?.parquet")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def prepare(source, out, how, **options):
    return mr.prepare_table(
        source, out, **{"workers": 2, "time": "t", "transform": f"poisoned_tables:{how}", **options}
    )


def command(source, out, how="slow"):
    code = "import millrace as mr; from millrace.prepare.table.read import sources; sources.PART_BYTES = 1; "
    code += f"mr.prepare_table({source!r}, {str(out)!r}, workers=2, time='t', transform='poisoned_tables:{how}')"
    return [sys.executable, "-c", code]


def wait_for_workers(process, out):
    """Waits until workers are in the middle of parts; returns all processes of the run."""
    while len(list(out.with_name("out.partial").glob("parts/*.tmp"))) < 2:
        assert process.poll() is None
        time.sleep(0.005)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("how", "workers", "said"),
    [
        ("exits", 2, "exit code 3"),
        ("exits", 1, "exit code 3"),
        ("crashes", 2, "signal SIGSEGV"),
        ("killed", 2, "signal SIGKILL; it may have run out of memory"),
    ],
)
def test_a_worker_that_dies_is_retried_then_named_with_its_files(source, out, how, workers, said):
    named = rf"a worker died \({said}\) 3 times on part 2 \('.*2\.parquet'\); look at that"
    with expect_no_leaks(), pytest.raises(local.WorkerFailed, match=named):
        prepare(source, out, how, workers=workers)
    assert not out.exists()


def test_a_worker_that_dies_is_named_also_where_the_table_is_one_part(source, out, monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 1 << 20)
    with pytest.raises(
        local.WorkerFailed, match=r"exit code 3\) 3 times on part 0 \('.*0\.parquet' and 3 more files\)"
    ):
        prepare(source, out, "exits")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_transform_that_raises_is_named_with_the_file(source, out, workers):
    with pytest.raises(
        mr.ConfigError,
        match=r"""transform="poisoned_tables:raises" raised ValueError: no such price \(on '.*2\.parquet'\)""",
    ):
        prepare(source, out, "raises", workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_transform_that_exits_is_named_with_the_file(source, out, workers):
    with pytest.raises(
        mr.ConfigError, match=r"""transform="poisoned_tables:leaves" raised SystemExit: 5 \(on '.*2\.parquet'"""
    ):
        prepare(source, out, "leaves", workers=workers)
    with pytest.raises(mr.ConfigError, match=r'(?s)transform="sys:exit" raised SystemExit.*on a table without rows'):
        mr.prepare_table(source, out, time="t", transform="sys:exit", workers=workers)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raises_at_once", r"raises_at_once. raised KeyError: .* \(on a table without rows, with the columns of '.*0\.parquet'\)"),
        ("gives_nothing", "transform= gave NoneType for a table without rows; it must give an Arrow table"),
        ("forgets", r"transform= left out column 'x' \(on '.*0\.parquet'\); it must always give it"),
        ("another_type", r"transform= gave column 't' as string, but int64 for a table without rows \(on '.*0\.parquet'\)"),
        ("missing", "cannot be loaded: module 'poisoned_tables' has no attribute 'missing'"),
    ],
)  # fmt: skip
def test_a_transform_that_does_not_keep_its_promise_is_told(source, out, how, said):
    with pytest.raises(mr.ConfigError, match=said):
        prepare(source, out, how, workers=1)
    assert not list(out.parent.glob("out*"))


def test_a_transform_makes_columns_and_takes_rows(source, out):
    report = prepare(source, out, "doubled", time="when", features=["z", "x"], scale="none", where="z < 200")
    expected = [30.0 * k + j for k in range(4) for j in range(30) if 10 < 30 * k + j < 100]
    store = report.open()
    assert store.columns["values"][:].tolist() == [[2 * x, x] for x in expected]
    assert store.columns["time"][:].tolist() == [int(x) % 30 + 1 for x in expected]
    assert report.dropped["where"] == 20


def test_a_worker_killed_once_costs_a_retry_and_no_more(source, out, tmp_path):
    prepare(source, tmp_path / "undisturbed", "slow", workers=1)
    stuck = tmp_path / "poisoned_tables.py.stuck"  # else one worker may be done before the other has started
    stuck.touch()
    with subprocess.Popen(command(source, out)) as process:
        wait_for_workers(process, out)[-1].kill()
        stuck.unlink()
    assert process.returncode == 0
    assert tree_digest(out) == tree_digest(tmp_path / "undisturbed")


def test_workers_end_with_a_parent_that_is_killed_and_the_next_run_continues(source, out, tmp_path):
    stuck = tmp_path / "poisoned_tables.py.stuck"
    stuck.touch()
    process = subprocess.Popen(command(source, out))
    family = wait_for_workers(process, out)
    assert len(family) >= 2
    process.kill()
    process.wait()
    alive = psutil.wait_procs(family, timeout=10)[1]
    stuck.unlink()
    assert alive == []
    prepare(source, out, "slow", workers=1)
    prepare(source, tmp_path / "undisturbed", "slow", workers=1)
    assert tree_digest(out) == tree_digest(tmp_path / "undisturbed")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_say_how_to_continue_and_leave_no_worker(source, out, tmp_path, number, code):
    for k in range(4):  # large enough for a part of its own each
        frame = pd.DataFrame(
            {
                "t": np.arange(1_300_000),
                **{f"x{j}": np.random.default_rng(k + j).normal(size=1_300_000) for j in range(3)},
            }
        )
        frame.to_parquet(tmp_path / f"{k}.parquet", row_group_size=1_300_000)
    (tmp_path / "poisoned_tables.py.stuck").touch()
    arguments = [
        "prepare",
        "table",
        *(str(tmp_path / f"{k}.parquet") for k in range(4)),
        "--out",
        str(out),
        "--time",
        "t",
        "--workers",
        "2",
    ]
    arguments += ["--transform", "poisoned_tables:slow"]
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_for_workers(process, out)
    family = psutil.Process(process.pid).children(recursive=True)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does: to all of them
    else:
        process.terminate()
    _, said = process.communicate(timeout=60)
    assert process.returncode == code
    lines = [line for line in said.splitlines() if not line.startswith("read:")]
    assert lines == [f"interrupted; run it again with: millrace {' '.join(arguments)}"]
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert not out.exists()


def test_a_transform_that_was_mended_reads_all_rows_anew(source, out, tmp_path, monkeypatch):
    """Else the parts of before would stay as the old function left them."""
    code = "import pyarrow.compute as pc\ndef made(t):\n    if len(t) and pc.max(t['x']).as_py() > {limit}: raise ValueError\n"
    code += "    return t.set_column(1, 'x', pc.multiply(t['x'], {factor}))\n"
    (tmp_path / "mended_tables.py").write_text(code.format(limit=70, factor=2.0))
    options = {"time": "t", "transform": "mended_tables:made", "scale": "none", "workers": 1}
    with pytest.raises(mr.ConfigError, match="raised ValueError"):
        mr.prepare_table(source, out, **options)
    assert list(out.with_name("out.partial").glob("parts/*/done.json"))
    (tmp_path / "mended_tables.py").write_text(code.format(limit=1000, factor=10.0))
    said = []
    store = mr.prepare_table(source, out, progress=lambda *told: said.append(told), **options).open()
    assert np.array_equal(np.sort(store.columns["values"][:, 0]), 10.0 * np.arange(120))
    notes = [facts["note"] for stage, _, _, facts in said if stage == "note"]
    assert notes == ['transform="mended_tables:made" has changed since this was begun: all rows are read again']
    (tmp_path / "mended_tables.py").write_text(code.format(limit=1000, factor=100.0))
    with pytest.raises(mr.ConfigError, match="is finished, but with other sources or options: transform was"):
        mr.prepare_table(source, out, **options)
