"""Threads: as asked, as the run began, or the cores; the number never changes within a run, nor with the machine's load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from millrace.train import threads
from millrace.train.run_folder import read_run
from millrace.train.trainer import train

from .conftest import config_of, losses


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
def test_a_continued_run_keeps_its_threads(tokens, tmp_path):
    changes = {"optimizer__decay_steps": 10}
    train(config_of(tokens, train__threads=1, **changes), tmp_path / "straight")
    train(config_of(tokens, train__threads=1, train__max_steps=5, **changes), tmp_path / "run")
    train(config_of(tokens, train__threads=0, **changes), tmp_path / "run")
    assert torch.get_num_threads() == read_run(tmp_path / "run").threads == 1
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


@pytest.mark.usefixtures("default_of_two")
@pytest.mark.parametrize(
    ("environment", "asked", "before", "chosen"),
    [
        ({}, 0, None, 2),
        ({}, 3, 1, 3),
        ({}, 0, 1, 1),
        ({"OMP_NUM_THREADS": "2"}, 0, 1, 2),
        ({"LOCAL_WORLD_SIZE": "2"}, 0, None, 1),
        ({"LOCAL_WORLD_SIZE": "8"}, 0, None, 1),
    ],
)
def test_who_says_how_many(environment, asked, before, chosen, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    threads.set_threads(asked, before)
    assert torch.get_num_threads() == chosen


def test_the_command_line_asks_for_threads_that_sleep_before_torch_is_loaded(tmp_path):
    """Threads that spin while another has no core made a fortieth of the steps."""
    code = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY'))\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from millrace.cli import run\n"
        f"run(['train', 'nano', '--store', {str(tmp_path / 'none')!r}, '--run', {str(tmp_path / 'run')!r}])"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines()[:1] == ["PASSIVE"], done.stderr
