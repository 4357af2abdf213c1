"""Configurations: every key known, every value checked, every preset valid."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.errors import ConfigError
from millrace.train import config as config_module
from millrace.train.config import Config, as_dict, load_config, parse_config, value_of
from millrace.train.data import store_path
from millrace.train.optimizers import learning_rate

REPOSITORY = Path(__file__).parents[2]
PRESETS = sorted((REPOSITORY / "configs").glob("*.toml"))


def test_the_presets_are_these():
    assert [path.stem for path in PRESETS] == ["gpt-124m", "gpt-150m", "gpt-250m", "lstm", "nano", "transformer"]


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_survives_json(path):
    config = load_config(path)
    assert parse_config(json.loads(json.dumps(as_dict(config)))) == config


def test_a_preset_is_found_by_its_name_unless_a_file_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in PRESETS:
        assert load_config(path.stem) == load_config(path.name) == load_config(path)
    Path("nano").mkdir()  # a folder is no configuration
    assert load_config("nano").model.width == 64
    Path("nano.toml").write_text("[model]\nwidth = 48\n")
    assert load_config("nano.toml").model.width == 48
    with pytest.raises(
        ConfigError,
        match=r"nan cannot be read.* \(did you mean 'nano'\?\).*or a preset: gpt-124m, gpt-150m, .* nano, tr",
    ):
        load_config("nan")


def test_there_is_one_copy_of_each_preset_and_it_is_packaged():
    """In the package, so that an installed millrace has them; ``configs/`` shows the same files."""
    import tomllib

    assert (REPOSITORY / "configs").resolve() == config_module.PRESETS.resolve()
    data = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["millrace"]
    package = Path(mr.__file__).parent
    assert {path for pattern in data for path in package.glob(pattern)} >= set(config_module.PRESETS.glob("*.toml"))


def test_the_help_names_every_preset(capsys):
    from millrace.cli import run

    assert run(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(path.stem in shown for path in PRESETS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"trian": {}}, "unknown key trian; did you mean train?"),
        ({"train": {"max_step": 3}}, r"unknown key train.max_step; did you mean train.max_steps\?"),
        ({"train": 3}, r"train = 3; expected a table \[train\]"),
        ({"train": {"max_steps": "many"}}, r"train.max_steps = 'many'; expected an integer, 1 or more$"),
        ({"train": {"compile": "yes"}}, r"train.compile = 'yes'; expected true or false$"),
        ({"train": {"device": 3}}, r"train.device = 3; expected auto, cpu or cuda$"),
        ({"data": {"target": 7}}, r"data.target = 7; expected a list of names, or one name$"),
        ({"data": {"target": ["a", 3]}}, r"data.target = \['a', 3\]; expected a list of names, or one name$"),
        ({"optimizer": {"betas": [0.9]}}, r"optimizer.betas = \[0.9\]; expected two numbers$"),
        ({"data": {"prepare": 3}}, r"data.prepare = 3; expected a table$"),
        ({"train": {"lr": 1}}, r"unknown key train.lr; did you mean optimizer.lr\?"),
        *(
            (
                {"data": {"sources": [{"store": "a", "weight": weight}]}},
                r"data.sources has .*; expected a store and its",
            )
            for weight in (-1, "1", True, float("nan"), float("inf"), None)
        ),
        ({"data": {"sources": [{"store": "a", "weight": 1, "wieght": 1}]}}, r"data.sources has .*; expected a store"),
        ({"data": {"sources": [{"store": "a"}]}}, r"data.sources has .*; expected a store"),
        ({"data": {"sources": [{"store": "a", "weight": 0}]}}, "every weight of data.sources is 0"),
        ({"data": {"pack": True, "stride": 8}}, "data.stride = 8 with data.pack: packed samples do not overlap"),
        ({"model": {"dropout": 1.0}}, "model.dropout = 1.0; expected less than 1"),
        ({"optimizer": {"betas": [2, 3]}}, r"optimizer.betas = \[2.0, 3.0\]; expected two numbers from 0 to below 1"),
        ({"optimizer": {"lr": float("inf")}}, "optimizer.lr = inf; expected less than"),
        ({"train": {"threads": 10**7}}, "train.threads = 10000000; expected less than 4096"),
        ({"train": {"batch": 10**12}}, "train.batch = 1000000000000; expected less than"),
        ({"checkpoint": {"every_minutes": float("inf")}}, "checkpoint.every_minutes = inf; expected less than"),
        (
            {"model": {"options": {"when": [datetime.date(2020, 1, 1)]}}},
            "model.options.when.0 is a date; expected text",
        ),
        ({"model": {"document_mask": True, "kind": "lstm"}}, "model.document_mask is for gpt"),
        ({"model": {"kind": "lstm"}, "train": {"recompute": True}}, "train.recompute is for gpt and transformer"),
        ({"train": {"max_steps": 0}}, "train.max_steps = 0; expected 1 or more"),
        ({"optimizer": {"lr": float("nan")}}, "optimizer.lr = nan; expected 0 or more"),
        ({"train": {"precision": "int8"}}, "train.precision = 'int8'; expected fp32, bf16, fp16 or fp64"),
        ({"data": {"processes": "fork"}}, "data.processes = 'fork'; expected false, true, auto, forkserver or spawn"),
        ({"data": {"processes": 2}}, "data.processes = 2; expected false, true, auto, forkserver or spawn"),
        ({"model": {"kind": "gtp"}}, "model.kind = 'gtp'; expected gpt, lstm, transformer or module:callable"),
        ({"model": {"width": 10, "heads": 4}}, "model.width = 10 is not a multiple of model.heads = 4"),
        ({"data": {"store": "a", "input": "b"}}, r"both a store \(a\) and an input \(b\) are given; give one"),
        ({"optimizer": {"name": "adafactor"}, "train": {"parallel": "fsdp2"}}, "Adafactor cannot step on the sharded"),
        ({"train": {"precision": "fp16", "parallel": "fsdp2"}}, "fp16 with its gradient scaler is for ddp"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(values, message):
    with pytest.raises(mr.ConfigError, match=message):
        parse_config(values)


def test_overrides_are_read_as_toml(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[train]\nmax_steps = 5\n")
    changes = [
        "train.max_steps=7",
        "data.store=some/where",
        "optimizer.betas=[0.8, 0.9]",
        "train.compile=true",
        "optimizer.lr=1",
    ]
    config = load_config(path, changes)
    assert (config.train.max_steps, config.data.store, config.optimizer.betas) == (7, "some/where", (0.8, 0.9))
    assert config.train.compile is True
    assert config.optimizer.lr == 1.0
    for wrong in ("max_steps=7", "train.max_steps", "a.b.c=3"):
        with pytest.raises(mr.ConfigError, match=r"expected section.key=value"):
            load_config(path, [wrong])
    with pytest.raises(
        mr.ConfigError, match=r"not TOML; quote it for the shell: --set 'data.prepare={name=\"text\"}'$"
    ):
        load_config(path, ["data.prepare={text_field=body}"])
    with pytest.raises(mr.ConfigError, match=r"^--set train.max_step=7: unknown key train.max_step; did you mean"):
        load_config(path, ["train.max_step=7"])
    path.write_text("[train]\nbatch = 0\n")
    with pytest.raises(mr.ConfigError, match=r"^/.*c.toml: train.batch = 0"):
        load_config(path, ["train.max_steps=7"])
    assert load_config(path, ["train.batch=3"]).train.batch == 3
    path.write_text("[train]\nmax_steps = 5\n")
    with pytest.raises(
        mr.ConfigError, match=r"^--set model.width=33 --set model.heads=2: model.width = 33 is not a mult"
    ):
        load_config(path, ["train.batch=3", "model.width=33", "model.heads=2"])
    with pytest.raises(mr.ConfigError, match=r"^--set trian.x=1: unknown key trian;"):
        load_config(path, ["train.batch=3", "trian.x=1", "model.width=32"])
    with pytest.raises(mr.ConfigError, match=r"^--set train.batch=-1: train.batch = -1; expected 1 or more$"):
        load_config(path, ["train.batch=3", "train.batch=-1", "model.width=32"])
    path.write_text("[train\n")
    with pytest.raises(mr.ConfigError, match="is not TOML"):
        load_config(path)
    with pytest.raises(mr.ConfigError, match="cannot be read"):
        load_config(tmp_path / "no.toml")


def test_a_file_that_is_no_configuration_is_one_line_at_once(tmp_path):
    path = tmp_path / "c.toml"
    for text in ("x = " + "[" * 5000 + "]" * 5000, ".".join(["a"] * 60_000) + " = 1", "[" + ".".join(["a"] * 60_000) + "]",
                 "x = " + "[" * 70 + "]" * 70, "x = " + "{a = " * 70 + "1" + "}" * 70):  # fmt: skip
        path.write_text(text)
        with pytest.raises(mr.ConfigError, match=r"c.toml is not TOML: .*nest.* deeper than 64$"):
            load_config(path)
    path.write_bytes(b"[model]\noptions = {a = '\xff'}")
    with pytest.raises(mr.ConfigError, match=r"c.toml is not TOML: .*can't decode byte 0xff"):
        load_config(path)
    path.write_text("data = 3\n")
    with pytest.raises(mr.ConfigError, match=r"data = 3; expected a table \[data\]$"):
        load_config(path, (), {"store": "s"})
    os.truncate(path, 1 << 34)
    with pytest.raises(
        mr.ConfigError, match=r"c.toml has 17179869184 bytes; expected at most 1048576 bytes; give a TOML"
    ):
        load_config(path)
    os.mkfifo(tmp_path / "fifo")
    for odd in ("/dev/zero", tmp_path / "fifo", tmp_path):
        with pytest.raises(mr.ConfigError, match=f"^{odd} is not a plain file; give a TOML file, or a preset: gpt"):
            load_config(odd)
    path.write_text("[model.options]\nweights = [\n" + "0.5, " * 200 + "\n]\n")
    assert len(load_config(path).model.options["weights"]) == 200
    for deep in ("[" * 5000, "[" * 70 + "]" * 70):
        with pytest.raises(mr.ConfigError, match=r"^--set train.max_steps=[][]+: the value is not TOML") as refused:
            load_config(path, [f"train.max_steps={deep}"])
        assert len(str(refused.value)) < 400


@pytest.mark.parametrize("store", ["back\\slash", "both 'and\"", "s3://bucket/store", "a\nb"])
def test_a_store_is_taken_as_it_is_given(tmp_path, store):
    path = tmp_path / "c.toml"
    path.write_text("[data]\nlength = 5\n")
    config = load_config(path, (), {"store": store})
    assert (config.data.store, config.data.length) == (store, 5)
    assert store_path(config, tmp_path / "run") == store


def test_values_cannot_be_changed_afterwards():
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.max_steps = 3  # type: ignore[misc]
    assert value_of(config, "train.max_steps") == 100


@given(st.integers(0, 50), st.integers(1, 200), st.sampled_from(["cosine", "linear", "constant"]))
def test_the_learning_rate_warms_up_then_falls(warmup, steps, schedule):
    options = {"lr": 0.4, "min_lr": 0.1, "warmup": warmup, "schedule": schedule}
    config = parse_config({"optimizer": options, "train": {"max_steps": max(steps, warmup + 1)}})
    rates = [learning_rate(step, config) for step in range(1, config.train.max_steps + 1)]
    assert all(0 < rate <= 0.4 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[-1] == pytest.approx(0.4 if schedule == "constant" else 0.1)
    if warmup:
        assert rates[warmup - 1] == pytest.approx(0.4)


def test_one_name_is_a_list_of_one(tmp_path):
    (tmp_path / "c.toml").write_text("[data]\ninclude = 'mask'\n")
    for written, expected in (("temp", ("temp",)), ('["temp", "load"]', ("temp", "load"))):
        config = load_config(tmp_path / "c.toml", [f"data.target={written}"])
        assert (config.data.target, config.data.include) == (expected, ("mask",))
