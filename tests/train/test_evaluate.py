"""Evaluation: how much of the split it takes, which samples, and that none of it depends on the clock."""

from __future__ import annotations

import numpy as np
import pytest

from millrace.train.config import parse_config
from millrace.train.evaluate import EvaluationResult, evaluation_order, num_batches
from millrace.train.trainer import train

from .conftest import config_of, lines, weights


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 50),  # a quarter of all 200 steps: one evaluation at the end
        ({"every": 20}, 5),
        ({"every": 1}, 1),
        ({"every": 1000}, 50),  # never within the run: as one at the end
        ({"every": 20, "max_share": 0.5}, 10),
        ({"every": 20, "max_share": 0}, 1000),
        ({"every": 20, "batches": 7}, 7),
        ({"batches": 5000}, 1000),
        ({"max_share": 100}, 1000),
    ],
)
def test_how_many_batches_an_evaluation_takes(asked, expected):
    config = parse_config({"train": {"max_steps": 200, "batch": 10}, "evaluation": asked})
    assert num_batches(config, samples=9_995, batch=10) == expected


@pytest.mark.parametrize("every", [0, 4, 7, 33, 100])
@pytest.mark.parametrize("steps", [8, 100, 1001])
def test_by_default_all_evaluations_take_at_most_a_quarter_of_the_samples_trained_on(steps, every):
    config = parse_config({"train": {"max_steps": steps, "batch": 10}, "evaluation": {"every": every}})
    evaluations = (steps // every if every else 0) + (not every or steps % every != 0)  # the last at the end
    each = num_batches(config, samples=10**9, batch=10)
    between = min(every or steps, steps)
    assert each <= between / 4
    assert evaluations * each <= (steps + between) / 4


def test_some_of_a_split_are_spread_over_it_and_each_comes_once():
    some = evaluation_order(10_000, is_whole=False).samples(np.arange(500))
    assert len(set(some.tolist())) == 500
    assert all(np.histogram(some, 10, (0, 10_000))[0] > 20)
    assert evaluation_order(100, is_whole=True).samples(np.arange(100)).tolist() == list(range(100))


def test_a_continued_run_evaluates_the_same_samples(waves, tmp_path):
    changes = {"model__kind": "lstm", "evaluation__every": 4, "evaluation__max_share": 0.5, "optimizer__decay_steps": 8}
    train(config_of(waves, train__max_steps=8, **changes), tmp_path / "straight")
    for steps in (6, 8):
        train(config_of(waves, train__max_steps=steps, **changes), tmp_path / "continued")
    straight, continued = (
        [line for line in lines(tmp_path / run) if "val_loss" in line] for run in ("straight", "continued")
    )
    assert [line["step"] for line in straight] == [4, 8]
    assert [line for line in continued if line["step"] != 6] == straight
    assert all((weights(tmp_path / "straight")[k] == v).all() for k, v in weights(tmp_path / "continued").items())


def test_what_a_person_reads_of_an_evaluation():
    assert EvaluationResult(0.5, samples=10).line(10) == "val_loss 0.5000"
    assert EvaluationResult(0.5, 1.0, samples=10).line(10) == (
        "val_loss 0.5000 (better than repeating the last value: 0.500x its error)"
    )
    assert EvaluationResult(1.0001, 1.0, samples=10).line(10) == (
        "val_loss 1.0001 (about the same as repeating the last value: 1.000x its error)"
    )
    assert EvaluationResult(1.5, 1.0, samples=10).line(40) == (
        "val_loss 1.5000 (worse than repeating the last value: 1.500x its error; 10 of 40 samples of the split)"
    )
