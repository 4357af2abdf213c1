"""What a run says before its first step: why it cannot begin, and what may not be what was wanted."""

from __future__ import annotations

import pytest

import millrace as mr
from millrace import native
from millrace.cli import run as millrace
from millrace.train.trainer import train

from .conftest import config_of


class Lines:
    """A console that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    show = note = say


def test_a_lookback_longer_than_every_series_is_told_with_its_key_and_the_longest(waves, tmp_path):
    store = mr.open_store(waves)
    longest = max((store.offsets[1:] - store.offsets[:-1]) * 4 // 5)
    expected = (
        f"data.lookback = 500, data.horizon = 4, data.lead = 0 need a series of 504 rows, and the longest in the split "
        f"'train' of {waves} has {longest}; lower data.lookback or data.horizon"
    )
    with pytest.raises(mr.ConfigError) as found:
        train(config_of(waves, model__kind="lstm", data__lookback=500), tmp_path / "run")
    assert str(found.value) == expected


def said_by(config, run) -> list[str]:
    console = Lines()
    train(config, run, console=console)
    return [line for line in console.said if line.startswith(("warning", "already"))]


def test_fewer_steps_than_were_done_are_warned_of(tokens, tmp_path):
    assert said_by(config_of(tokens, train__max_steps=5), tmp_path / "run") == []
    assert said_by(config_of(tokens, train__max_steps=5), tmp_path / "run") == [
        "already at step 5 of 5: nothing left to do; raise train.max_steps to go on"
    ]
    assert said_by(config_of(tokens, train__max_steps=3), tmp_path / "run") == [
        "warning: the run stands at step 5, and train.max_steps = 3 asks for fewer: nothing is done, and its model has 5 "
        "steps; start another with --run for a model of 3"
    ]


def test_a_batch_larger_than_the_samples_is_warned_of(tokens, tmp_path):
    (told,) = said_by(config_of(tokens, train__max_steps=1, train__batch=5000), tmp_path / "run")
    assert told.startswith("warning: train.batch = 5,000 is larger than the ")
    assert "every step sees each of them about" in told


def test_a_batch_that_memory_cannot_hold_is_refused_at_the_start(waves, tmp_path, monkeypatch):
    config = config_of(waves, model__kind="lstm", train__batch=1000)
    sample = (16 + 4) * 3 * 4  # lookback and horizon of three float32
    monkeypatch.setattr(native, "memory_bytes", lambda: 5 * 1000 * sample - 1)
    with pytest.raises(
        mr.ConfigError, match=r"train.batch = 1,000 needs .* \(240 bytes a sample, 5 batches at a time\)"
    ):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    huge = config_of(waves, model__kind="lstm", train__batch=10**9)
    monkeypatch.setattr(native, "memory_bytes", lambda: 10**9 * sample)  # more than the samples need
    with pytest.raises(mr.ConfigError) as found:
        train(huge, tmp_path / "run")
    store = mr.open_store(waves).split("train")
    samples = len(mr.Windows(store, lookback=16, horizon=4))
    assert str(found.value).endswith(f"set train.batch to {samples:,} or less")
    monkeypatch.setattr(native, "memory_bytes", lambda: 5 * 1000 * sample)
    train(config_of(waves, model__kind="lstm", train__batch=1000, train__max_steps=1), tmp_path / "run")


def test_a_step_that_a_run_never_took_is_refused(tokens, tmp_path, capsys):
    train(config_of(tokens, train__max_steps=3), tmp_path / "run")
    assert millrace(["explain", str(tmp_path / "run"), "--step", "3"]) == 0
    capsys.readouterr()
    assert millrace(["explain", str(tmp_path / "run"), "--step", "99"]) == 1
    run = tmp_path / "run"
    assert (
        capsys.readouterr().err == f"error: step 99 is after the end of the run {run}, which has 3 steps; give 1 to 3\n"
    )


def test_a_transform_that_drops_what_the_model_reads_is_named(tokens, tmp_path):
    with pytest.raises(mr.ConfigError, match=r"'hiding:drop' returned x, and gpt reads y too; return \{\*\*batch"):
        train(config_of(tokens, data__transform="hiding:drop"), tmp_path / "run")
