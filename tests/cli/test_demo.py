"""The demo: what a newcomer runs first, in one go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import millrace as mr
from millrace.cli.demo import GPT, LSTM, free_name, summarise
from millrace.cli.demo_run import Demo


def test_a_shorter_demo_is_killed_and_continues_exactly(tmp_path: Path) -> None:
    """The way of the demo in a fifth of its steps; ``make soak`` and ``make demo`` go all of it."""
    said: list[str] = []
    demo = Demo(str(tmp_path), said.append)
    steps = ("train.max_steps=100", "checkpoint.every=20", "evaluation.every=20", "evaluation.batches=2")
    text = demo.text((*GPT, *steps), kill_at=50)
    assert (text["is_exact"], text["killed_at"] >= 50, text["resumed_from"] in (20, 40)) == (True, True, True)
    sensors = demo.sensors((*LSTM, "train.max_steps=60"))
    assert sensors["ratio"] <= 1.0
    pictures = (*text["pictures"], *sensors["pictures"])
    assert all(Path(picture).stat().st_size > 5000 for picture in pictures)
    assert any("the same" in line for line in said)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_the_demo_trains_is_killed_and_continues_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "millrace", "demo", "--out", "demo", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    text, sensors = facts["text"], facts["sensors"]
    assert text["is_exact"]
    assert text["compared"] >= 4
    assert text["killed_at"] >= 250
    assert text["resumed_from"] in (100, 200)  # on a slow disk the checkpoint of step 200 is still on its way
    assert text["below"] >= 0.5
    assert sensors["ratio"] <= 0.8
    assert 0 < text["wait"] < 1
    assert all((tmp_path / picture).stat().st_size > 5000 for picture in (*text["pictures"], *sensors["pictures"]))
    assert mr.open_store(tmp_path / "demo/sensors").num_records == 60
    summarise(facts, print)
    shown = capsys.readouterr().out
    assert "the same to the last bit" in shown
    for line in shown.partition("Try next:\n")[2].splitlines():
        command = line.strip().replace('"', "").split(None, 4)
        again = subprocess.run([sys.executable, "-m", *command], cwd=tmp_path, capture_output=True, text=True)
        assert again.returncode == 0, again.stderr


def test_the_next_free_name(tmp_path: Path) -> None:
    for expected in ("demo", "demo-2", "demo-3"):
        name = free_name(str(tmp_path / "demo"))
        assert Path(name).name == expected
        Path(name).mkdir()
