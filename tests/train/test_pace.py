"""What the progress line and metrics.jsonl say of a run's speed."""

from __future__ import annotations

import re
import urllib.request
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import millrace as mr
from millrace.feed.report import Report
from millrace.meter.interval import Interval
from millrace.meter.verdict import BOTH, BURSTS, FASTER, REMEDIES, THREADS, Verdict, judge
from millrace.train.config import parse_config
from millrace.train.console import Console
from millrace.train.dist import World
from millrace.train.judging import Judging, Reading, in_keys
from millrace.train.metrics import Metrics, boards, read_metrics
from millrace.train.pace import Pace
from millrace.train.trainer import train


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


def test_evaluations_and_saves_are_no_part_of_the_time(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("millrace.train.pace.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    pace = Pace(nn.Linear(1, 1), World(0, 1, torch.device("cpu")), 10, 5)
    clock[0] += 3
    with pace.paused():
        clock[0] += 50
    clock[0] += 4
    assert pace.seconds == 7
    pace.wait_begins(1.0)
    clock[0] += 2
    pace.wait_ends(mr.Batch({"x": torch.zeros((1, 7))}), 1.5)
    assert pace.data_s == 1.5  # the rest was the GPU's
    assert pace.facts(1, None)["wait"] == pytest.approx(1.5 / 9)
    assert pace.data_s == 1.5  # goes on counting


def config(**train):
    return {"data": {"length": 16}, "model": {"layers": 1, "heads": 2, "width": 16}, "train": {"batch": 4, **train}}


def test_each_stretch_and_the_whole_run_have_a_verdict(tokens, tmp_path):
    """Evaluations and saves are no part of it: the loop does not wait for data in them."""
    said = []

    class Heard(Console):
        say = show = lambda self, text: said.append(text)

    values = config(max_steps=30, log_every=10, tensorboard=False)
    values["data"]["store"] = str(tokens)
    assert train(parse_config(values), tmp_path / "run", console=Heard(), metrics_port=None) == 0
    lines = [line for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert len(lines) == 3
    assert all(line["verdict"].startswith(("input-bound: ", "compute-bound", "balanced")) for line in lines)
    assert all(0 <= line["wait"] <= 1 and line["cpu_cores"] > 0 for line in lines)
    steps = [text for text in said if text.startswith("step ") and "data wait" in text]
    assert all(f"({line['verdict']})" in text for line, text in zip(lines, steps, strict=True))
    assert sum(text.startswith("what limited this run: ") for text in said) == 1


class Counted:
    """A feed, clocks and ranks that say what they are told."""

    def __init__(self):
        self.batches = self.seconds = self.get_s = self.data_s = self.forward_s = 0.0
        self.ends = ()
        self.device, self.others, self.config = torch.device("cpu"), (), parse_config(config())

    def step(self, count, get_s, other_s):
        self.batches, self.seconds = self.batches + count, self.seconds + count
        self.get_s, self.data_s = self.get_s + get_s * count, self.data_s + get_s * count
        self.others = tuple(
            was + s * count for was, s in zip(self.others or (0.0,) * len(other_s), other_s, strict=True)
        )

    def report(self):
        deaths, ends = len(self.ends), self.ends[-2:]
        return Report("transform", 1, int(self.batches), 0, 0.0, self.get_s, deaths=deaths, ends=ends)

    def gather(self, own_s):
        return (own_s, *self.others)


def test_a_stretch_is_judged_by_itself_and_over_as_many_lines_as_it_takes():
    run = Counted()
    judging = Judging(run, run, run, run)
    run.step(4, 0.5, ())
    assert judging.stretch() is None
    run.step(4, 0.5, ())
    assert judging.stretch().is_input_bound
    for _ in range(2):
        run.step(4, 0.0, ())
        judging.stretch()
    assert judging.stretch().name == "compute-bound"
    assert judging.whole().name == "compute-bound"  # without the start


def test_every_worker_that_ended_is_told_of_once():
    run = Counted()
    judging = Judging(run, run, run, run)
    told = []
    for ended in ((), ("a",), ("a",), ("a", "b"), ("a", "b", "c", "d", "e")):
        run.ends = ended
        told.append(judging.ends())
    assert told == [(), ("a",), (), ("b",), ("d", "e")]  # a report has only the last ones


def test_a_rank_that_is_slow_by_itself_is_named():
    run = Counted()
    judging = Judging(run, run, run, run)
    run.step(10, 0.01, (0.0, 0.0, 0.0))
    judging.stretch()
    run.step(10, 0.01, (0.01, 0.5, 0.01))
    found = judging.stretch()
    assert found.name == "input-bound: straggler rank"
    assert "rank 2" in found.evidence


def test_a_rank_whose_data_is_late_is_named_beside_long_forward_passes():
    """Both ranks spend 1 of 2.5 s in forward passes: the backward passes cannot have taken 2 more."""
    counted = Interval(seconds=2.5, batches=50, get_s=0.01)
    found = judge(Reading(counted, (0.0, 1.5), (1.0, 1.0)).since(None, 3))
    assert found.name == "input-bound: straggler rank"
    assert "rank 1 took 0.05 s per step of its own, the usual rank 0.02 s" in found.evidence
    assert "its disk" in found.remedy
    assert "not its data" in judge(Reading(counted, (0.01, 0.0), (0.1, 1.8)).since(None, 1)).remedy
    even = judge(Reading(counted, (0.1, 0.0), (0.8, 0.8)).since(None, 3))
    assert even.name == "compute-bound"


@pytest.mark.parametrize("remedy", [*REMEDIES.values(), THREADS, BURSTS, BOTH, FASTER])
def test_remedies_of_a_run_name_keys_of_its_configuration(remedy):
    said = in_keys(Verdict("balanced", "", remedy)).remedy
    assert "=" not in said.replace("data.processes = true", "")
    named = re.findall(r"data\.(\w+)", said)
    assert all(hasattr(parse_config({}).data, name) for name in named)
    assert bool(named) == ("=" in remedy and "order=" not in remedy)


def test_prometheus_reads_the_last_of_every_number(tmp_path):
    said = []
    shown = boards(tmp_path, 0, said.append, False, "0")
    metrics = Metrics(tmp_path, step=0, boards=shown)
    url = said[0].rpartition(" ")[2]
    metrics.write(1, {"loss": 3.5, "wait": 0.25, "verdict": "balanced"})
    metrics.write(2, {"loss": 2.5, "wait": 0.5, "verdict": "input-bound: disk"})
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    metrics.close()
    assert url.startswith("http://127.0.0.1:")
    for line in (
        "millrace_loss 2.5",
        "millrace_wait 0.5",
        "millrace_step 2.0",
        'millrace_verdict{name="input-bound: disk"} 1.0',
    ):
        assert line in text.splitlines()
    assert "balanced" not in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


@pytest.mark.parametrize("address", ["-1", "a", "65536", "host:", "::"])
def test_a_wrong_port_is_refused(address, tmp_path):
    with pytest.raises(mr.ConfigError, match="expected a port"):
        boards(tmp_path, 0, print, False, address)


def test_a_port_in_use_is_refused(tmp_path):
    said = []
    [endpoint] = boards(tmp_path, 0, said.append, False, "127.0.0.1:0")
    with pytest.raises(mr.ConfigError, match="cannot be used"):
        boards(tmp_path, 0, print, False, endpoint.url.removeprefix("http://").removesuffix("/metrics"))
    endpoint.close()
