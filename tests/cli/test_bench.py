"""``millrace doctor DIR`` and ``millrace bench DIR``: numbers for people and programs, and settings that the trainer takes."""

from __future__ import annotations

import itertools
import json
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.cli.bench import write_settings
from millrace.feed import speed
from millrace.feed.speed import SampleBytes, Stages, choices
from millrace.meter import machine
from millrace.train.config import load_config

SECONDS = ("--seconds", "0.05")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "store"
    with mr.StoreWriter(path, kind="series", columns={"values": mr.Column("float32", (4,))}) as writer:
        writer.append({"values": np.zeros((50_000, 4), np.float32)})
    return path


def test_doctor_says_what_limits_a_store(store, capsys, monkeypatch):
    monkeypatch.setattr(machine, "READ_S", 0.02)
    assert run(["doctor", str(store), "--batch", "64", *SECONDS, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    found = facts["store"]
    assert found["limit"] in ("gather", "transfer")  # it fits into memory
    assert found["sample"] == {"read": 72 * 16, "made": 72 * 16}
    assert found["rates"]["gather"] > 0
    assert found["limit"] in found["verdict"]
    assert facts["cores"] >= 1
    assert facts["copies"] > 0
    assert run(["doctor", str(store), "--lookback", "8", "--horizon", "1", *SECONDS]) == 0
    shown = capsys.readouterr().out
    assert "samples/s" in shown
    assert "limits this store" in shown


def stages(**rates):
    sample = SampleBytes(100.0, 100.0)
    return Stages(10, rates, sample, 1 << 60, 0.0, None, 1e9, None)


def test_the_slowest_stage_limits_but_not_a_disk_that_is_read_once():
    found = stages(gather=100.0, memory=1.0, disk=50.0, transfer=70.0)
    assert found.limit == "disk"
    assert "200 ms for 10 samples" in found.verdict
    small = replace(found, store_bytes=1000)
    assert small.limit == "transfer"
    assert "first pass" in small.verdict


def test_a_store_in_memory_has_sizes_too():
    store = mr.from_arrays({"values": np.zeros((900, 4), np.float32), "name": ["a"]}, offsets=[0, 900], kind="series")
    assert SampleBytes.of(mr.Windows(store, lookback=6, horizon=2)) == SampleBytes(128.0, 128.0)


def test_bench_measures_and_tunes(store, capsys, tmp_path):
    written = tmp_path / "tuned.toml"
    arguments = ["bench", str(store), "--batch", "32", "--seconds", "0.2"]
    assert run([*arguments, "--autotune", "--write", str(written), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["samples_per_s"] == pytest.approx(32 * facts["batches_per_s"])
    config = load_config(written, ["model.kind=lstm"])
    assert {"workers": config.data.workers, "depth": config.data.depth} == facts["best"]
    assert run(arguments) == 0
    assert "does not wait" in capsys.readouterr().out
    assert run([*arguments, "--write", str(written)]) == 1


def test_tuning_with_a_transform_writes_it_for_the_trainer(store, capsys, tmp_path, monkeypatch):
    (tmp_path / "tuned_here.py").write_text(
        "def double(batch, rng):\n    batch['x'] = batch['x'] * 2\n    return batch\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    written, few = tmp_path / "tuned.toml", [{"workers": 1, "depth": 2, "processes": way} for way in (False, True)]
    monkeypatch.setattr(speed, "choices", lambda *_, **__: few)
    arguments = ["bench", str(store), "--batch", "32", *SECONDS, "--processes"]
    assert run([*arguments, "--transform", "tuned_here:double", "--autotune", "--write", str(written)]) == 0
    assert "data.transform, data.processes" in capsys.readouterr().out
    data = load_config(written, ["model.kind=lstm"]).data
    assert (data.workers, data.depth, data.transform, data.processes) == (1, 2, "tuned_here:double", True)
    assert run(arguments) == 1
    assert "give --transform or --decode" in capsys.readouterr().err


def test_bench_compares_cold_data_with_its_disk(store, capsys, monkeypatch):
    shares = iter([0.2, 0.4])
    monkeypatch.setattr(machine, "resident_share", lambda files: next(shares))
    monkeypatch.setattr(
        machine,
        "disk_rates",
        lambda files, size: {"sequential_bytes_per_s": 1e9, "random_reads_per_s": 70.0, "read_bytes": 4096.0},
    )
    assert run(["bench", str(store), "--batch", "32", *SECONDS]) == 0
    assert "of what the disk gives, 100 samples/s, while 30% of the store lies in memory" in capsys.readouterr().out


@pytest.mark.parametrize("workers", [1, 4])
def test_the_rate_of_workers_that_end_together_is_theirs(workers, monkeypatch):
    """By a clock of its own: 16 batches lie ready, then each worker makes one in 50 ms."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(speed, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def batches():
        for number in itertools.count():
            clock.now += 0.05 if number >= 16 and number % workers == 0 else 1e-6
            yield SimpleNamespace(num_samples=1)

    assert speed.rate(batches(), 0.01, ready=16, least=3 * workers) == pytest.approx(workers / 0.05, rel=0.35)
    began = clock.now
    speed.rate(batches(), 5.0, ready=16, least=1000, until=began + 1.0)
    assert clock.now - began < 1.1


def test_the_end_of_time_leaves_what_was_measured(monkeypatch):
    monkeypatch.setattr(speed, "rate", lambda batches, *args, ready, **options: 1000.0 - ready)
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(4096, dtype=np.uint16)}), length=16)
    setting, found = speed.autotune(view, batch=8, within_s=0.0)
    assert found == 1000.0 - max(setting["depth"], setting["workers"])


@pytest.mark.parametrize("command", ["doctor", "bench"])
def test_what_cannot_be_measured_is_one_line(command, store, tmp_path, capsys):
    with mr.StoreWriter(tmp_path / "none", kind="text", columns={"tokens": mr.Column("uint16")}):
        pass
    for arguments, said in (([tmp_path / "none"], "has no samples"), ([store, "--batch", 10**9], "lower it")):
        assert run([command, *map(str, arguments)]) == 1
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1
        assert said in printed


def test_processes_are_tried_where_there_are_functions():
    ways = [setting["processes"] for setting in choices(1000.0, has_functions=True)]
    assert {*ways} == {False, True}
    assert all("processes" not in setting for setting in choices(1000.0, has_functions=False))
    assert {setting["depth"] for setting in choices(1e12, has_functions=False)} == {2}  # more would not fit into memory


@pytest.mark.parametrize(
    "text",
    [
        "", "[train]\nbatch = 8\n", "[data]\nlength = 32\nworkers = 1\n[train]\nbatch = 8 # depth = 2\n",
        "# depth = 9\n[train]\nbatch = 8\n[data]\n  depth=7\nstore = 's'\n", "[data]\ndepth = 1", "title = 'x'",
    ],
)  # fmt: skip
def test_settings_change_their_keys_of_a_file_and_nothing_else(text, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(text)
    before = tomllib.loads(text)
    keys = {"workers": 3, "depth": 16, "transform": "mine:f", "processes": True}
    write_settings(str(path), keys)
    assert tomllib.loads(path.read_text()) == {**before, "data": {**before.get("data", {}), **keys}}
    assert [line for line in text.splitlines() if "#" in line] == [
        line for line in path.read_text().splitlines() if "#" in line
    ]


@pytest.mark.parametrize("text", ["data = {length = 3}\n", "[data", "[data]\ninputs = [\n'[data]',\n'depth = 3'\n]\n"])
def test_a_file_that_cannot_be_changed_so_is_left_alone(text, tmp_path):
    path = Path(tmp_path / "c.toml")
    path.write_text(text)
    try:
        write_settings(str(path), {"workers": 3, "depth": 16})
    except mr.ConfigError:
        assert path.read_text() == text
    else:
        before = tomllib.loads(text)
        assert tomllib.loads(path.read_text()) == {**before, "data": {**before["data"], "workers": 3, "depth": 16}}
