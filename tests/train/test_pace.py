"""What the progress line and metrics.jsonl say of a run's speed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import millrace as mr
from millrace.train.dist import World
from millrace.train.pace import Pace


@pytest.mark.parametrize(("dtype", "tokens"), [(torch.int64, 5 * 7), (torch.float32, None)])
def test_rates_are_of_all_ranks_also_where_this_one_has_a_small_share(dtype, tokens):
    pace = Pace(nn.Linear(1, 1), World(0, 3, torch.device("cpu")), 10, 5)
    for _ in range(4):
        pace.wait_begins(0.0)
        pace.wait_ends(mr.Batch({"x": torch.zeros((1, 7), dtype=dtype)}), 0.0)
    facts = pace.facts(4, None)
    assert facts["samples_per_s"] * facts["step_s"] == pytest.approx(5)
    assert ("tokens_per_s" in facts) == (tokens is not None)
    if tokens is not None:
        assert facts["tokens_per_s"] * facts["step_s"] == pytest.approx(tokens)
