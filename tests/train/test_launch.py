"""``millrace train --ranks 2``: real processes; their exit code, their messages said once, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.cli import run as millrace
from millrace.train import launch
from millrace.train.signals import REPEAT_S, Signals

from .conftest import losses
from .test_commands import CONFIG, environment


@pytest.fixture
def command(tokens: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "small.toml").write_text(CONFIG)
    millrace = [sys.executable, "-m", "millrace", "train", str(tmp_path / "small.toml")]
    return [*millrace, "--store", str(tokens), "--run", str(tmp_path / "run"), "--ranks", "2"]


def children_of(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


def test_ranks_train_together_and_end_without_freeing_objects_but_run_what_must_run_at_exit(command, tmp_path):
    """And JSON is printed once."""
    (tmp_path / "own.py").write_text(
        "import atexit, os, pathlib\n"
        "from millrace.train.models.gpt import GPT\n"
        "def note(what):\n"
        "    pathlib.Path(what + os.environ['RANK']).touch()\n"
        "atexit.register(note, 'exit')\n"
        "class Freed:\n"
        "    def __del__(self, note=note):\n"
        "        note('freed')\n"
        "freed = Freed()\n"
        "def model():\n"
        "    return GPT(vocabulary=320, length=16, layers=1, heads=2, width=16)\n"
    )
    command += ["--set", "model.kind=own:model", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 6
    assert done.stderr.count("step 6/6") == 1
    assert "2 ranks" in done.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "exit0").exists()
    assert (tmp_path / "exit1").exists()
    assert not list(tmp_path.glob("freed*"))


def test_an_error_is_said_once(command, tmp_path):
    done = subprocess.run(
        [*command, "--set", "model.kind=lstm"], capture_output=True, text=True, timeout=100, env=environment()
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "is a text store" in done.stderr


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (signal.SIGINT, 130, "interrupted; run it again with: "),
        pytest.param(signal.SIGTERM, 143, "continue with: ", marks=pytest.mark.soak),
    ],
)
def test_a_signal_saves_and_says_once_how_to_continue(number, code, told, command, tmp_path):
    command += ["--set", "train.max_steps=1000000", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while not losses(tmp_path / "run"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert error.count("\n") == 1
    assert f"{told}millrace train {tmp_path}/small.toml" in error
    assert "--ranks 2" in error
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last:08d}\n"


@pytest.mark.parametrize("whom", ["a rank", "the launcher"])
def test_nobody_is_left_when_one_is_killed(whom, command, tmp_path):
    command += ["--set", "train.max_steps=1000000", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while not losses(tmp_path / "run"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        os.kill(max(ranks) if whom == "a rank" else process.pid, signal.SIGKILL)
        error = process.stderr.read()  # ends when the last of them has ended
    assert process.returncode == (1 if whom == "a rank" else -signal.SIGKILL)
    if whom == "a rank":  # one line of the launcher, and nothing of gloo
        assert error.count("\n") == 1
        assert error.startswith("error: rank 1 was ended by SIGKILL")
        assert f"continue from the last checkpoint with: millrace train {tmp_path}/small.toml" in error
    else:  # they save, as on SIGTERM
        assert (tmp_path / "run/checkpoints/latest").exists()


def test_sigterm_for_each_thread_of_a_killed_launcher_is_one(monkeypatch):
    now = 100.0
    monkeypatch.setattr("millrace.train.signals.time.monotonic", lambda: now)
    for second, later in ((signal.SIGTERM, now + 1.1 * REPEAT_S), (signal.SIGINT, now)):
        now, signals = 100.0, Signals()
        for _ in range(4):
            signals.note(signal.SIGTERM)
        assert signals.received == signal.SIGTERM
        now = later
        with pytest.raises(KeyboardInterrupt):
            signals.note(second)


def test_what_libraries_write_goes_to_a_log_and_a_silent_end_is_named(command, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import os, torch\n"
        "class Model(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(1, 1)\n"
        "    def forward(self, batch):\n"
        "        if os.environ['RANK'] == '1':\n"
        "            os.write(2, b'[E] words of a library')\n"
        "            os._exit(3)\n"
        "        return self.weight.sum()\n"
    )
    command += ["--set", "model.kind=own:Model", "--set", "train.timeout_s=20"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment(), cwd=tmp_path)
    log = tmp_path / "run/rank-1.log"
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"error: rank 1 ended with exit code 3 (more in {log}); continue from the last checkpoint"
    )
    assert done.stderr.count("\n") == 1
    assert "[E] words of a library" in log.read_text()


def test_a_rank_that_does_not_end_is_ended_and_named(monkeypatch, capsys):
    monkeypatch.setattr(launch, "END_S", 0.0)
    ranks = [subprocess.Popen(["true"]), subprocess.Popen(["sleep", "600"])]
    assert launch._wait(ranks, []) == [0, 0]
    assert ranks[1].returncode == -signal.SIGTERM
    assert capsys.readouterr().err == (
        "note: rank 1 did not end within 0 s of the others, so it is ended now; the run itself is complete\n"
    )


def test_ranks_under_torchrun_are_refused(command, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert millrace(command[3:]) == 1
    assert capsys.readouterr().err == (
        "error: --ranks 2, but WORLD_SIZE = 4 is set, as torchrun does; leave --ranks out under torchrun, or start millrace "
        "without it\n"
    )
