"""Workers that raise, die or are killed, a parent that dies, Ctrl-C: an error that says where, and nothing left."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from millrace.prepare.engines import local
from millrace.prepare.engines.engine import WorkerFailed
from millrace.testing import expect_no_leaks, tree_digest

PART_BYTES = "millrace.prepare.table.read.sources.PART_BYTES"


@pytest.fixture
def job(kind, tmp_path, monkeypatch, user_functions):
    """Several parts, one of which holds what the functions fail on."""
    for name in kind.sizes:
        monkeypatch.setattr(name, 1)
    monkeypatch.setattr(kind, "sizes", dict.fromkeys(kind.sizes, 1))
    (tmp_path / "in").mkdir()
    return Job(kind, kind.write_fragile(tmp_path / "in"), tmp_path / "out")


class Job:
    def __init__(self, kind, source, out):
        self.kind, self.source, self.out = kind, source, out

    def prepare(self, how=None, out=None, **options):
        given = {"workers": 2, **self.kind.fragile, **options}
        if how is not None:
            given[self.kind.function] = f"user_functions:{how}"
        return self.kind.prepare(self.source, out or self.out, **given)

    def wait_for_workers(self, process):
        """Waits until workers are in the middle of parts; returns all processes of the run."""
        while len(list(self.out.with_name("out.partial").glob("parts/*.tmp"))) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        return psutil.Process(process.pid).children(recursive=True)


ENDS = {
    "exits": "exit code 3",
    "crashes": "signal SIGSEGV",
    "killed": "signal SIGKILL; it may have run out of memory",
}
# Every end and every kind; all of them with each other in a soak.
USUAL = [
    ("text", "exits", 2),
    ("text", "crashes", 2),
    ("table", "killed", 2),
    ("table", "exits", 1),
    ("records", "exits", 2),
]
DEATHS = [(kind, how, 2) for kind in ("text", "table", "records") for how in ENDS] + [
    ("text", "exits", 1),
    ("table", "exits", 1),
]


@pytest.mark.parametrize(
    ("kind", "how", "workers"),
    [pytest.param(*death, marks=[] if death in USUAL else pytest.mark.soak) for death in DEATHS],
    indirect=["kind"],
)
def test_a_worker_that_dies_is_retried_then_named_with_its_part(job, how, workers):
    named = rf"a worker died \({ENDS[how]}\) 3 times on {job.kind.bad_part}"
    with expect_no_leaks(), pytest.raises(WorkerFailed, match=named):
        job.prepare(how, workers=workers)
    assert not job.out.exists()


def test_a_worker_that_dies_is_named_also_where_there_is_one_part(job, monkeypatch):
    monkeypatch.setattr(PART_BYTES, 1 << 20)
    with pytest.raises(WorkerFailed, match=r"exit code 3\) 3 times on part 0 "):
        job.prepare("exits", **job.kind.one_part)


def test_no_process_starts_for_one_part(job, monkeypatch):
    monkeypatch.setattr(PART_BYTES, 1 << 20)
    monkeypatch.setattr(local, "_Worker", None)
    assert job.prepare(**job.kind.one_part).is_new


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("how", "error", "said"), [("raises", "ValueError", "no such word"), ("leaves", "SystemExit", "5")]
)
def test_a_function_that_fails_is_named_with_its_input(job, how, error, said, workers):
    error_type, named = job.kind.raised
    with pytest.raises(error_type, match=named.format(how=how, error=error, said=said)):
        job.prepare(how, workers=workers)


def test_a_worker_killed_once_costs_a_retry_and_no_more(job, tmp_path, user_functions, program):
    job.prepare("slow", tmp_path / "undisturbed", workers=1)
    user_functions.touch()  # else one worker may be done before the other has started
    options = {**job.kind.fragile, "workers": 2, job.kind.function: "user_functions:slow"}
    with subprocess.Popen(program(job.kind, job.source, job.out, **options)) as process:
        job.wait_for_workers(process)[-1].kill()
        user_functions.unlink()
    assert process.returncode == 0
    assert tree_digest(job.out) == tree_digest(tmp_path / "undisturbed")


def test_a_script_without_a_guard_prepares_with_workers(job, tmp_path, program):
    """Spawned processes import the main module again; ours must not."""
    options = {**job.kind.fragile, "workers": 2, job.kind.function: "user_functions:held"}
    path, code = tmp_path / "script.py", program(job.kind, job.source, job.out, **options)[-1]
    path.write_text(code)
    subprocess.run([sys.executable, str(path)], check=True, timeout=60)
    again = code.replace(str(job.out), str(tmp_path / "again"))
    subprocess.run([sys.executable], input=again, text=True, check=True, timeout=60)
    assert tree_digest(job.out) == tree_digest(tmp_path / "again")


def test_workers_end_with_a_parent_that_is_killed_and_the_next_run_continues(job, tmp_path, user_functions, program):
    user_functions.touch()  # in the middle of a part, where no pipe is looked at
    options = {**job.kind.fragile, "workers": 2, job.kind.function: "user_functions:slow"}
    process = subprocess.Popen(program(job.kind, job.source, job.out, **options))
    family = job.wait_for_workers(process)
    assert len(family) >= 2
    process.kill()
    process.wait()
    alive = psutil.wait_procs(family, timeout=60)[1]
    user_functions.unlink()
    assert alive == []
    job.prepare("slow", workers=1)
    job.prepare("slow", tmp_path / "undisturbed", workers=1)
    assert tree_digest(job.out) == tree_digest(tmp_path / "undisturbed")


STOPS = [
    ("starting", signal.SIGINT),
    ("working", signal.SIGTERM),
    ("starting", signal.SIGTERM),
    ("working", signal.SIGINT),
]
STOPPED = [("text", *STOPS[0]), ("text", *STOPS[1]), ("table", *STOPS[3]), ("records", *STOPS[3])]


@pytest.mark.parametrize(
    ("kind", "moment", "number"),
    [
        pytest.param(kind, *stop, marks=[] if (kind, *stop) in STOPPED else pytest.mark.soak)
        for kind in ("text", "table", "records")
        for stop in STOPS
    ],
    indirect=["kind"],
)
def test_ctrl_c_and_sigterm_say_how_to_continue_and_leave_no_worker(job, tmp_path, user_functions, moment, number):
    user_functions.touch()  # no machine is so fast that it is done before the signal
    what = job.kind.large_command(tmp_path)
    function = (f"--{job.kind.function}", "user_functions:held")
    arguments = ["prepare", *what, "--out", str(job.out), "--workers", "2", *function]
    command = [sys.executable, "-m", "millrace", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    if moment == "working":
        job.wait_for_workers(process)
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
    assert process.returncode == 128 + number
    lines = [line for line in said.splitlines() if not line.startswith(("read:", "note:"))]
    assert lines == [f"interrupted; run it again with: millrace {' '.join(arguments)}"]
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert not job.out.exists()
    user_functions.unlink()
    if (moment, number) == ("working", signal.SIGTERM) and job.kind.function == "filter":
        subprocess.run(command, check=True, timeout=100)
        subprocess.run([part.replace(str(job.out), f"{job.out}2") for part in command], check=True, timeout=100)
        assert tree_digest(job.out) == tree_digest(f"{job.out}2")
        assert not job.out.with_name("out.partial").exists()
