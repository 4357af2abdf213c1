"""``--profile N``: a trace and a page of N steps; the run itself is unchanged."""

import json
import re
from collections import Counter

import torch

from millrace.train.console import Console
from millrace.train.dist import World
from millrace.train.profile import NOTHING, Profile
from millrace.train.trainer import train

from .conftest import config_of, lines


class Said(Console):
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def losses(run):
    return [(line["step"], line["loss"]) for line in lines(run) if "loss" in line]


def test_a_trace_and_a_page_of_the_steps_asked_for(tokens, tmp_path):
    config = config_of(tokens, train__max_steps=8, train__micro_batch=6)
    plain, profiled, console = tmp_path / "plain", tmp_path / "profiled", Said()
    train(config, plain, console=Console())
    train(config, profiled, console=console, profile=3)
    assert losses(plain) == losses(profiled)
    assert {path.name for path in (profiled / "profile").iterdir()} == {"steps-4-6.json", "steps-4-6.html"}
    assert not (plain / "profile").exists()
    trace = json.loads((profiled / "profile/steps-4-6.json").read_text())["traceEvents"]
    names = Counter(event["name"] for event in trace if str(event.get("name")).startswith("millrace: "))
    steps = {f"millrace: step {k}": 1 for k in (4, 5, 6)}
    halves = {f"millrace: {stage}": 6 for stage in ("forward", "backward")}  # two micro-batches
    assert names == steps | halves | {f"millrace: {stage}": 3 for stage in ("data wait", "transfer", "optimizer")}
    page = (profiled / "profile/steps-4-6.html").read_text()
    assert "3 steps, 4 to 6" in page
    assert Counter(re.findall(r"<title>(\w[\w ]+): [\d.]+ ms</title>", page)) == {
        "data wait": 3, "transfer": 3, "forward": 6, "backward": 6, "optimizer": 3,
    }  # fmt: skip
    assert sum("steps-4-6.html" in line for line in console.lines) == 1


def test_fewer_steps_than_asked_for_are_written_at_the_end(tokens, tmp_path):
    console = Said()
    train(config_of(tokens, train__max_steps=5), tmp_path / "run", console=console, profile=50)
    assert (tmp_path / "run/profile/steps-4-5.html").exists()
    train(config_of(tokens, train__max_steps=6), tmp_path / "run", console=console, profile=50)
    assert any("nothing was profiled" in line for line in console.lines)


def test_it_costs_nothing_when_it_is_off(tmp_path):
    for steps, rank in ((0, 0), (5, 1)):  # not asked for; not the first rank
        profile = Profile(tmp_path, steps, World(rank, 2, torch.device("cpu")), print)
        profile.begin_step(1)
        assert profile.stage("forward") is NOTHING
        profile.end_step(1)
        profile.finish()
    assert list(tmp_path.iterdir()) == []
