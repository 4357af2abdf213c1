"""Workers that raise, die or are killed, a parent that dies, Ctrl-C: an error that says where, and nothing left."""

import importlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

import millrace as mr
from millrace.prepare.engines import local
from millrace.testing import expect_no_leaks, tree_digest

OPTIONS = {"tokenizer": "bytes", "part_bytes": 300, "val": 0}

FILTERS = """
import ctypes, os, signal, time

def poison(action):
    def keep(text):
        if "document 7 of the second" in text:
            action()
        return True
    return keep

def boom():
    raise ValueError("no such word")

raises = poison(boom)
exits = poison(lambda: os._exit(3))
leaves = poison(lambda: (_ for _ in ()).throw(SystemExit(5)))
crashes = poison(lambda: ctypes.string_at(0))
killed = poison(lambda: os.kill(os.getpid(), signal.SIGKILL))

def slow(text):
    time.sleep(0.02)
    return held(text)

def held(text):
    while os.path.exists(__file__ + ".stuck"):
        time.sleep(0.02)
    return True
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    for k, name in enumerate(("first", "second")):
        texts = [f"document {k} of the {name} file" for k in range(60)]
        (tmp_path / f"{k}.txt").write_text("\n\n".join(texts))
    (tmp_path / "poisoned_filters.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "poisoned_filters", raising=False)  # that of another test lies elsewhere
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return [str(tmp_path / "0.txt"), str(tmp_path / "1.txt")]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def command(source, out, **options):
    given = {**OPTIONS, "workers": 2, "filter": "poisoned_filters:slow", **options}
    return [sys.executable, "-c", f"import millrace as mr; mr.prepare_text({source!r}, {str(out)!r}, **{given})"]


def wait_for_workers(process, out):
    """Waits until workers are in the middle of parts; returns all processes of the run."""
    while len(list(out.with_name("out.partial").glob("parts/*.tmp"))) < 2:
        assert process.poll() is None
        time.sleep(0.01)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("exits", "exit code 3"),
        ("crashes", "signal SIGSEGV"),
        ("killed", "signal SIGKILL; it may have run out of memory"),
    ],
)
def test_a_worker_that_dies_is_retried_then_named_with_its_slice(source, out, how, said):
    named = rf"a worker died \({said}\) 3 times on part \d+ \('.*1\.txt' from"
    with expect_no_leaks(), pytest.raises(local.WorkerFailed, match=named):
        mr.prepare_text(source, out, workers=2, filter=f"poisoned_filters:{how}", **OPTIONS)
    assert not out.exists()


def test_a_worker_that_dies_is_named_also_where_the_corpus_is_one_part(source, out):
    with pytest.raises(local.WorkerFailed, match="exit code 3"):
        mr.prepare_text(source, out, workers=2, filter="poisoned_filters:exits", **{**OPTIONS, "part_bytes": 1 << 20})


def test_no_process_starts_for_a_corpus_of_one_part(source, out, monkeypatch):
    monkeypatch.setattr(local, "_Worker", None)
    report = mr.prepare_text(source, out, workers=2, **{**OPTIONS, "part_bytes": 1 << 20, "shard_tokens": 1000})
    assert report.shards["train"] > 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_filter_that_raises_is_named_with_the_document(source, out, workers):
    with pytest.raises(
        mr.SourceError, match=r"poisoned_filters:raises. raised ValueError.*1\.txt' from 2\d\d: no such word"
    ):
        mr.prepare_text(source, out, workers=workers, filter="poisoned_filters:raises", **OPTIONS)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_filter_that_exits_is_named_with_the_document(source, out, workers):
    with pytest.raises(mr.SourceError, match=r"poisoned_filters:leaves. raised SystemExit.*1\.txt' from 2\d\d: 5"):
        mr.prepare_text(source, out, workers=workers, filter="poisoned_filters:leaves", **OPTIONS)


def test_a_worker_killed_once_costs_a_retry_and_no_more(source, out, tmp_path):
    mr.prepare_text(source, tmp_path / "undisturbed", workers=1, filter="poisoned_filters:slow", **OPTIONS)
    stuck = tmp_path / "poisoned_filters.py.stuck"  # else one worker may be done before the other has started
    stuck.touch()
    with subprocess.Popen(command(source, out)) as process:
        wait_for_workers(process, out)[-1].kill()
        stuck.unlink()
    assert process.returncode == 0
    assert tree_digest(out) == tree_digest(tmp_path / "undisturbed")


def test_a_script_without_a_guard_prepares_with_workers(source, out, tmp_path):
    """Spawned processes import the main module again; ours must not."""
    script = tmp_path / "script.py"
    script.write_text(f"import millrace as mr\nmr.prepare_text({source!r}, {str(out)!r}, workers=2, **{OPTIONS})\n")
    subprocess.run([sys.executable, str(script)], check=True, timeout=60)
    again = script.read_text().replace(str(out), str(tmp_path / "again"))
    subprocess.run([sys.executable], input=again, text=True, check=True, timeout=60)
    assert tree_digest(out) == tree_digest(tmp_path / "again")


def test_workers_end_with_a_parent_that_is_killed_and_the_next_run_continues(source, out, tmp_path):
    stuck = tmp_path / "poisoned_filters.py.stuck"  # in the middle of a part, where no pipe is looked at
    stuck.touch()
    process = subprocess.Popen(command(source, out))
    family = wait_for_workers(process, out)
    assert len(family) >= 2
    process.kill()
    process.wait()
    alive = psutil.wait_procs(family, timeout=10)[1]
    stuck.unlink()
    assert alive == []
    mr.prepare_text(source, out, workers=1, filter="poisoned_filters:slow", **OPTIONS)
    mr.prepare_text(source, tmp_path / "undisturbed", workers=1, filter="poisoned_filters:slow", **OPTIONS)
    assert tree_digest(out) == tree_digest(tmp_path / "undisturbed")


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("starting", signal.SIGINT, 130),
        ("working", signal.SIGTERM, 143),
        pytest.param("starting", signal.SIGTERM, 143, marks=pytest.mark.soak),
        pytest.param("working", signal.SIGINT, 130, marks=pytest.mark.soak),
    ],
)
def test_ctrl_c_and_sigterm_say_how_to_continue_and_leave_no_worker(source, out, tmp_path, moment, number, code, tools):
    big = tmp_path / "big.txt"  # the command line has parts of 16 MiB
    big.write_bytes(b"\n\n".join(b"%d %s" % (k, b"word " * 2000) for k in range(4000)))
    arguments = ["prepare", "text", str(big), "--out", str(out), "--tokenizer", "bytes", "--workers", "2", "--no-dedup"]
    arguments += ["--filter", "poisoned_filters:held"]
    stuck = tmp_path / "poisoned_filters.py.stuck"  # no machine is so fast that it is done before the signal
    stuck.touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "millrace", *arguments], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    if moment == "working":
        wait_for_workers(process, out)
    else:
        while not psutil.Process(process.pid).children(recursive=True):
            assert process.poll() is None
            time.sleep(0.001)
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
    stuck.unlink()
    if moment == "working":
        assert tools.shell(*arguments).returncode == 0
        assert tools.shell(*arguments[:3], "--out", tmp_path / "undisturbed", *arguments[5:]).returncode == 0
        assert tree_digest(out) == tree_digest(tmp_path / "undisturbed")
        assert not out.with_name("out.partial").exists()


MARKING = """
from pathlib import Path

def mark(path):
    Path(path).touch()
    return path
"""


def test_tasks_are_given_and_results_held_while_the_parent_does_something_else(tmp_path, monkeypatch):
    (tmp_path / "marking_task.py").write_text(MARKING)
    monkeypatch.syspath_prepend(tmp_path)
    mark = importlib.import_module("marking_task").mark
    paths, given, has_ended = [str(tmp_path / f"{k}.mark") for k in range(8)], [], []

    def meanwhile():
        deadline = time.monotonic() + 60
        while not all(map(os.path.exists, paths)):  # more than one for each worker
            assert time.monotonic() < deadline, "the tasks wait for this to end"
            time.sleep(0.01)
        assert not given
        has_ended.append(True)

    workers = local.Workers(2)
    try:
        for number, result in workers.run(mark, paths, meanwhile=meanwhile):
            assert has_ended
            given.append((number, result))
    finally:
        workers.close()
    assert sorted(given) == list(enumerate(paths))


def test_what_the_parent_raises_meanwhile_ends_the_run(tmp_path, monkeypatch):
    (tmp_path / "marking_task.py").write_text(MARKING)
    monkeypatch.syspath_prepend(tmp_path)
    mark = importlib.import_module("marking_task").mark

    def meanwhile():
        raise LookupError("another engine")

    workers = local.Workers(2)
    with pytest.raises(LookupError, match="another engine"):
        list(workers.run(mark, [str(tmp_path / f"{k}.mark") for k in range(4)], meanwhile=meanwhile))
    assert not workers._workers


def test_a_run_that_fails_does_not_wait_for_what_is_done_meanwhile(tmp_path, monkeypatch):
    (tmp_path / "marking_task.py").write_text(MARKING)
    monkeypatch.syspath_prepend(tmp_path)
    mark = importlib.import_module("marking_task").mark
    may_end = threading.Event()
    workers = local.Workers(2)
    try:
        with pytest.raises(RuntimeError, match="FileNotFoundError"):
            list(workers.run(mark, [str(tmp_path / "none" / f"{k}.mark") for k in range(4)], meanwhile=may_end.wait))
        assert not may_end.is_set()
        assert not workers._workers
    finally:
        may_end.set()
