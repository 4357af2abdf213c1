"""Threads: as asked, as the run began, or as many as there are idle cores; the number never changes within a run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from millrace.train import threads
from millrace.train.run import read_run
from millrace.train.trainer import train

from .conftest import config_of, losses


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    show = note = say


@pytest.fixture
def default_of_two(monkeypatch):
    """A process that torch would give two threads, as on a machine of two cores; nothing else says how many."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads._default_threads.cache_clear()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)
    threads._default_threads.cache_clear()


@pytest.mark.usefixtures("default_of_two")
def test_a_continued_run_keeps_its_threads_whatever_the_machine_does(tokens, tmp_path, monkeypatch):
    changes = {"optimizer__decay_steps": 10}
    train(config_of(tokens, train__threads=2, **changes), tmp_path / "straight")
    train(config_of(tokens, train__threads=2, train__max_steps=5, **changes), tmp_path / "run")
    monkeypatch.setattr(threads, "idle_cores", lambda: 0.0)
    console = Lines()
    train(config_of(tokens, train__threads=0, **changes), tmp_path / "run", console=console)
    assert torch.get_num_threads() == read_run(tmp_path / "run").threads == 2
    assert not any(line.startswith(("note", "threads")) for line in console.said)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.usefixtures("default_of_two")
@pytest.mark.parametrize(("idle", "chosen"), [(0.0, 1), (0.69, 1), (1.2, 1), (1.8, 2), (64.0, 2)])
def test_a_new_run_takes_the_idle_cores_and_says_when_they_are_fewer(idle, chosen, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "idle_cores", lambda: idle)
    console = Lines()
    train(config_of(tokens, train__threads=0, train__max_steps=1), tmp_path / "run", console=console)
    assert torch.get_num_threads() == read_run(tmp_path / "run").threads == chosen
    told = "threads 1 of 2: the other cores are busy; train.threads sets another number"
    assert (told in console.said) == (chosen == 1)


@pytest.mark.usefixtures("default_of_two")
def test_the_environment_goes_before_the_idle_cores(tokens, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(threads, "idle_cores", lambda: 0.0)
    train(config_of(tokens, train__threads=0, train__max_steps=1), tmp_path / "run")
    assert torch.get_num_threads() == 2


def test_idle_cores_are_those_this_process_may_use():
    assert 0 <= threads.idle_cores() <= len(os.sched_getaffinity(0))
    code = "import os; os.sched_setaffinity(0, {0}); from millrace.train.threads import idle_cores; print(idle_cores())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 <= float(done.stdout) <= 1


def test_idle_cores_are_counted_by_core():
    first = "cpu 9 9 9 9 9\ncpu0 10 0 10 100 5 0 0 0 0 0\ncpu1 10 0 10 100 5 0 0 0 0 0\nintr 3"
    second = "cpu 9 9 9 9 9\ncpu0 10 0 10 115 10 0 0 0 0 0\ncpu1 25 0 10 105 5 0 0 0 0 0\nintr 3"
    assert threads.idle_between(first, second, {0, 1}) == 1.25
    assert threads.idle_between(first, second, {1}) == 0.25


def test_without_proc_the_load_decides(monkeypatch):
    monkeypatch.setattr(threads, "STAT", Path("/nowhere"))
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0, 0))
    assert threads.idle_cores() == 0
