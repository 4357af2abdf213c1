"""Verdicts on real loops in which something is slow on purpose: five times what the rest needs, and all of it sleep."""

from __future__ import annotations

import pytest

from benchmarks import verdicts
from benchmarks.verdicts import STAGES, Bench, Case
from millrace.meter.verdict import judge

SLEEPING = [
    ("gather", "sleep"), ("transform", "one thread"), ("transfer", "simulated GPU"), ("straggler rank", "its compute"),
    ("compute", "one thread"),
]  # fmt: skip


@pytest.fixture(scope="module")
def bench():
    with Bench.open(with_redis=False, rows=20_000) as found:
        yield found


@pytest.mark.needs_core
@pytest.mark.parametrize(("stage", "form"), SLEEPING)
def test_what_is_five_times_slower_is_named(stage, form, bench, monkeypatch):
    monkeypatch.setattr(verdicts, "COUNTED", 12)
    found = judge(bench.measure(Case(stage, form, 5.0, 0.02 if stage == "compute" else 0.008)))
    assert found.name == STAGES[stage], found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_verdicts_are_right_in_95_of_100_cases(seed):
    found = verdicts.run(seed)
    assert found["share"] >= 0.95, found
    assert sum(found["confusion"]["compute"].values()) >= 30
