"""``millrace train``, ``generate`` and ``forecast`` as a person or a script meets them, also under torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.cli.spellings import modern
from millrace.train.run_folder import read_run

from .conftest import losses

CONFIG = """
[data]
length = 16
lookback = 16
horizon = 4
[model]
layers = 1
heads = 2
width = 16
[train]
max_steps = 6
batch = 8
log_every = 1
threads = 1
[checkpoint]
every = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "small.toml").write_text(CONFIG)
    return str(tmp_path / "small.toml")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "t.txt"
    path.write_text("\n\n".join(f"the number {n} follows the number {n - 1}." for n in range(400)))
    return path


def test_train_from_a_file_then_generate(config, text, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--set", "data.prepare={tokenizer = 'bytes', workers = 1, val = 0.1}", "--set", "train.max_steps=8"]
    assert millrace(["train", config, "--input", str(text), *options]) == 0
    shown = capsys.readouterr().out
    assert "step 8/8, loss" in shown
    assert "data wait" in shown
    assert "memory: parameters" in shown
    assert (tmp_path / "runs/small/loss.png").stat().st_size > 5000
    found = read_run(tmp_path / "runs/small")
    assert found.config.train.max_steps == 8
    values = json.loads((tmp_path / "runs/small/run.json").read_text())
    assert values["versions"].keys() == {"millrace", "python", "torch", "numpy"}
    assert values["store"]["fingerprint"] == mr.open_store(tmp_path / "runs/small/data").fingerprint
    assert values["threads"] == 1
    assert millrace(["generate", "runs/small", "--prompt", "the number", "--tokens", "20"]) == 0
    assert capsys.readouterr().out.startswith("the number")
    texts = []
    for _ in range(2):
        assert millrace(["generate", "runs/small", "--prompt", "x", "--seed", "5", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out))
    assert texts[0] == texts[1]
    assert millrace(["explain", "runs/small", "--step", "8"]) == 0
    assert "step 8: 8 samples" in capsys.readouterr().out
    assert millrace(["forecast", "runs/small", "--entity", "x"]) == 1
    assert "forecasts nothing" in capsys.readouterr().err


def test_train_a_forecaster_then_forecast(config, waves, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert millrace(["train", config, "--store", str(waves), "--run", run, "--set", "model.kind=lstm"]) == 0
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "sensor-03", "--windows", "3"]) == 0
    assert "3 forecasts of 4 rows" in capsys.readouterr().out
    assert (tmp_path / "run/forecast.png").stat().st_size > 5000
    assert millrace(["forecast", run, "--entity", "sensor-03", "--windows", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    store = mr.open_store(waves)
    start, stop = store.offsets[3:5].tolist()
    truth = store.columns["values"][stop - 12 : stop].reshape(3, 4, 3)
    np.testing.assert_array_equal(np.array(found["truth"], np.float32), truth)
    assert found["rows"] == np.arange(stop - start - 12, stop - start).reshape(3, 4).tolist()
    assert found["targets"] == ["a", "b", "c"]
    assert found["times"] == found["rows"]  # the store has none
    assert millrace(["forecast", run, "--entity", "nobody"]) == 1
    assert "entity 'nobody' is not in" in capsys.readouterr().err
    assert millrace(["generate", run]) == 1
    assert "which writes no text; see millrace forecast" in capsys.readouterr().err


SCRIPT = ["--dataset-dir", "STORE", "--config-file", "CONFIG", "--max-iters", "3", "--model-name", "tiny"]


@pytest.mark.parametrize("spell", [str, lambda word: word.replace("-", "_").replace("__", "--", 1)])
def test_the_flags_of_earlier_scripts(spell, config, tmp_path, monkeypatch, capsys):
    """On the data of such a script: its vocabulary is in dataset_metadata.json."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / "data" / split).mkdir(parents=True)
        (np.arange(3000) % 150).astype("<u4").tofile(tmp_path / "data" / split / "0.bin")
    Path("data/dataset_metadata.json").write_text('{"vocab_size": 200}')
    own = {"STORE": "data", "CONFIG": config}
    assert millrace(["train", *(spell(word) if word.startswith("-") else own.get(word, word) for word in SCRIPT)]) == 0
    run = mr.open_run("runs/tiny")
    assert (run.config.train.max_steps, run.config.data.store) == (3, "data")
    assert run.model().model.tokens.weight.shape[0] == 256  # 200, rounded up to a multiple of 64
    assert millrace(["train", "--help"]) == 0
    assert "iters" not in capsys.readouterr().out.split("Usage")[-1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--model-name nano --dataset_dir=d", "nano --store d"),
        ("c.toml --model_name=lstm --input-file a.csv", "c.toml --set model.kind=lstm --input a.csv"),
        ("--model-name a:B --config_file c.toml", "c.toml --set model.kind=a:B"),
        ("--max_iters=7 --config-file c.toml --model-name x --run r", "c.toml --run runs/x --set train.max_steps=7 --run r"),
        ("c.toml --set data.store=--max-iters --json", "c.toml --set data.store=--max-iters --json"),
        ("--run --max-iters c.toml --max-iters", "c.toml --run --max-iters --set train.max_steps="),
        ("c.toml -- --max-iters 3", "c.toml -- --max-iters 3"),
        ("c.toml --dataset_di x", "c.toml --dataset_di x"),
    ],
)  # fmt: skip
def test_earlier_flags_are_rewritten_and_nothing_else(given, expected):
    assert modern(["train", *given.split()]) == ["train", *expected.split()]


def test_a_model_of_ones_own_is_not_sent_from_command_to_command(config, waves, tmp_path, capsys):
    run, kind = str(tmp_path / "run"), "own_models:Linear"
    own = ["--set", f"model.kind={kind}", "--set", "model.options={features=3, targets=3}"]
    assert millrace(["train", config, "--store", str(waves), "--run", run, *own]) == 0
    for command, why in (
        (["generate", run], "writes no text"),
        (["forecast", run, "--entity", "0"], "forecasts nothing"),
    ):
        capsys.readouterr()
        assert millrace([*command, "--model", kind]) == 1
        error = capsys.readouterr().err
        assert f"a model of your own, which {why} here; call it yourself: mr.open_run(RUN).model(own='{kind}')" in error
        assert "see millrace" not in error
    assert mr.open_run(run).model(own=kind).model.layer.in_features == 3


def test_forecasts_are_in_the_units_of_the_source(config, tmp_path, capsys):
    from millrace.cli.demo_run import prepare_sensors, write_table

    write_table(str(tmp_path / "t.parquet"), sensors=3, rows=60)
    prepare_sensors(str(tmp_path / "t.parquet"), str(tmp_path / "store"))
    run = str(tmp_path / "run")
    assert (
        millrace(["train", config, "--store", str(tmp_path / "store"), "--run", run, "--set", "model.kind=lstm"]) == 0
    )
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "sensor-001", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    import pandas

    frame = pandas.read_parquet(tmp_path / "t.parquet").query("sensor == 'sensor-001'").sort_values("time")
    np.testing.assert_allclose(np.array(found["truth"]).reshape(-1), frame["temperature"].to_numpy()[-16:], rtol=1e-5)


def test_forecasts_are_drawn_over_time_for_every_target(config, tmp_path, capsys, monkeypatch):
    import pandas
    from matplotlib.figure import Figure

    from millrace.cli.demo_run import prepare_sensors, write_table

    write_table(str(tmp_path / "t.parquet"), sensors=3, rows=60)
    prepare_sensors(str(tmp_path / "t.parquet"), str(tmp_path / "store"))
    run, drawn = str(tmp_path / "run"), []
    changes = ["--set", "model.kind=lstm", "--set", "data.target=['flow', 'temperature']"]
    assert millrace(["train", config, "--store", str(tmp_path / "store"), "--run", run, *changes]) == 0
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    frame = pandas.read_parquet(tmp_path / "t.parquet").query("sensor == 'sensor-001'").sort_values("time")
    for options, expected in (([], ["flow", "temperature"]), (["--target", "temperature"], ["temperature"])):
        assert millrace(["forecast", run, "--entity", "sensor-001", *options]) == 0
        panels = drawn[-1].axes
        assert [axes.get_ylabel() for axes in panels] == expected
        assert panels[-1].get_xlabel() == "time"
        for name, axes in zip(expected, panels, strict=True):
            past = axes.lines[0]
            assert past.get_xdata().tolist() == frame["time"].to_numpy()[-32:].astype("datetime64[s]").tolist()
            np.testing.assert_allclose(past.get_ydata(), frame[name].to_numpy()[-32:], rtol=1e-4)
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "sensor-001", "--target", "flow", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == ["flow"]
    errors = np.array(found["truth"]) - np.array(found["forecast"])
    assert found["mse"] == {"flow": pytest.approx(np.mean(errors**2))}
    assert np.array(found["truth"]).shape == (4, 4, 1)
    assert np.ravel(found["times"]).tolist() == np.datetime_as_string(frame["time"].to_numpy()[-16:], "ms").tolist()
    assert millrace(["forecast", run, "--entity", "sensor-001", "--target", "flw"]) == 1
    assert "target 'flw' is not forecast by this run; expected one of flow, temperature" in capsys.readouterr().err


@pytest.mark.parametrize("include", ["[]", "['mask']"])
def test_missing_values_are_no_truth(include, config, gaps, tmp_path, capsys, monkeypatch):
    import pandas
    from matplotlib.figure import Figure

    run, drawn = str(tmp_path / "run"), []
    changes = ["--set", "model.kind=lstm", "--set", f"data.include={include}"]
    assert millrace(["train", config, "--store", str(gaps), "--run", run, *changes]) == 0
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    heat = pandas.read_parquet(gaps.parent / "t.parquet").query("sensor == 's2'")["heat"].to_numpy()
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "s2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    truth = np.array(found["truth"], np.float64).reshape(-1)  # null is NaN
    np.testing.assert_allclose(truth, heat[-16:], rtol=1e-5)
    assert np.isnan(truth).any()
    assert found["mse"]["heat"] == pytest.approx(np.nanmean((truth - np.ravel(found["forecast"])) ** 2))
    assert millrace(["forecast", run, "--entity", "s2"]) == 0
    np.testing.assert_allclose(drawn[-1].axes[0].lines[0].get_ydata(), heat[-32:], rtol=1e-5)
    assert drawn[-1].axes[0].lines[0].get_marker() == "."  # a value between two gaps is seen


def test_a_forecast_without_one_true_value_has_no_error(config, tmp_path, capsys):
    import pandas

    hours = np.arange(60)
    heat = np.where(hours < 40, np.sin(hours) + 5, np.nan)
    pandas.DataFrame({"sensor": "a", "hour": hours, "heat": heat}).to_parquet(tmp_path / "t.parquet")
    mr.prepare_table(tmp_path / "t.parquet", tmp_path / "store", entity="sensor", time="hour", nulls="mask")
    run = str(tmp_path / "run")
    options = ["--run", run, "--set", "model.kind=lstm"]
    assert millrace(["train", config, "--store", str(tmp_path / "store"), *options]) == 0
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "a"]) == 0
    assert "mean squared error unknown (heat)" in capsys.readouterr().out
    assert millrace(["forecast", run, "--entity", "a", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mse"] == {"heat": None}


@pytest.mark.parametrize("inputs", [["b"], ["c", "a", "b"]])
def test_forecasts_of_all_features_from_some_or_in_another_order(inputs, config, tmp_path, capsys):
    """Without a target all features are forecast: those of x say nothing of their number, order or units."""
    import pandas

    rng = np.random.default_rng(0)
    frame = pandas.DataFrame({"sensor": "s", "hour": np.arange(90)})
    for name, center, scale in (("a", 0, 1), ("b", 500, 3), ("c", -70, 20)):
        frame[name] = rng.normal(center, scale, 90)
    frame.to_parquet(tmp_path / "t.parquet")
    mr.prepare_table(tmp_path / "t.parquet", tmp_path / "store", entity="sensor", time="hour", val_last=0.3)
    run = str(tmp_path / "run")
    options = ["--run", run, "--set", "model.kind=lstm", "--set", f"data.inputs={inputs}"]
    assert millrace(["train", config, "--store", str(tmp_path / "store"), *options]) == 0
    capsys.readouterr()
    assert millrace(["forecast", run, "--entity", "s", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["targets"] == ["a", "b", "c"]
    truth = frame[["a", "b", "c"]].to_numpy()[-16:]
    np.testing.assert_allclose(np.array(found["truth"]).reshape(16, 3), truth, rtol=1e-3, atol=1e-4)
    near = np.abs(np.array(found["forecast"]).reshape(16, 3) - [0, 500, -70])
    assert (near < [15, 45, 300]).all()  # 15 deviations: what is scaled as another feature lies far off


def test_wrong_usage_is_one_line(config, tokens, tmp_path, capsys):
    cases = {
        "give one; --store for prepared data": ["train", config, "--store", "a", "--input", "b"],
        "is a file; give the run a folder": ["train", config, "--store", str(tokens), "--run", config],
        "data.length = 100,000,000 needs 100,000,001 tokens, and the split 'train' of": [
            *("train", config, "--store", str(tokens), "--run", str(tmp_path / "long")),
            *("--set", "data.length=100000000"),
        ],
        "did you mean train.max_steps": ["train", config, "--store", str(tokens), "--set", "train.max_step=3"],
        "or a preset: gpt-124m": ["train", "configs/nan.toml", "--store", str(tokens)],
        "is not the folder of a training run": ["generate", str(tmp_path)],
        "holds a run already": [
            "train",
            config,
            "--store",
            str(tokens),
            "--run",
            str(tmp_path / "r"),
            "--resume",
            "never",
        ],
    }
    assert millrace(["train", config, "--store", str(tokens), "--run", str(tmp_path / "r")]) == 0
    capsys.readouterr()
    for message, arguments in cases.items():
        assert millrace(arguments) == 1
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1


def test_a_wrong_resume_is_wrong_usage(config, tokens, tmp_path, capsys):
    assert millrace(["train", config, "--store", str(tokens), "--run", str(tmp_path / "r"), "--resume", "maybe"]) == 2
    assert "'maybe'; expected auto or never" in capsys.readouterr().err
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE = 2, but RANK, MASTER_ADDR, MASTER_PORT are not set; unset WORLD_SIZE, and start the ranks with",
        ),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "h"}, "WORLD_SIZE = 2, but MASTER_PORT is not set"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' in the environment; expected a number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}, "RANK = 2 and WORLD_SIZE = 2"),
        (
            {"SLURM_STEP_NUM_TASKS": "2"},
            "SLURM_STEP_NUM_TASKS=2, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are",
        ),
    ],
)
def test_ranks_that_torchrun_did_not_start(told, message, config, tokens, tmp_path, capsys, monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert millrace(["train", config, "--store", str(tokens), "--run", str(tmp_path / "r")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_json_of_a_run_is_all_that_stdout_has(config, tokens, tmp_path, capsys):
    run = tmp_path / "r"
    assert millrace(["train", config, "--store", str(tokens), "--run", str(run), "--json"]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert "step 6/6" in shown.err
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found == {
        "run": str(run), "step": 6, "loss": losses(run)[6], "latest": "step-00000006", "best": "step-00000006",
        "val_loss": next(line["val_loss"] for line in lines if "val_loss" in line), "stopped_by": 0,
    }  # fmt: skip


@pytest.mark.parametrize("command", [["train", "nano"], ["generate", "r"], ["forecast", "r", "--entity", "a"]])
def test_without_torch_the_extra_is_named(command):
    code = "import sys; sys.modules['torch'] = None; from millrace.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "error: this needs torch; pip install '.[torch]'\n")


def test_a_training_under_a_file_size_limit_of_0_is_one_line(tokens, tmp_path):
    """torch looks for a folder in which it can write when it is imported."""
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    command = [
        sys.executable,
        "-m",
        "millrace",
        "train",
        "nano",
        "--store",
        str(tokens),
        "--run",
        str(tmp_path / "run"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, preexec_fn=limit)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "ulimit -f" in done.stderr


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("", "ImportError: "),  # a folder that an uninstallation left behind
        pytest.param("raise ImportError('no x')", "ImportError: no x", marks=pytest.mark.soak),
        pytest.param("raise TypeError('Descriptors cannot be')", "TypeError: Descriptors", marks=pytest.mark.soak),
    ],
)
def test_a_broken_tensorboard_is_one_note(broken, why, config, tokens, tmp_path, monkeypatch, capsys):
    package = tmp_path / "site" / "tensorboard" / "__init__.py"
    package.parent.mkdir(parents=True)
    package.write_text(broken)
    monkeypatch.syspath_prepend(tmp_path / "site")
    for name in [name for name in sys.modules if "tensorboard" in name.split(".")]:
        monkeypatch.delitem(sys.modules, name)
    assert millrace(["train", config, "--store", str(tokens), "--run", str(tmp_path / "r")]) == 0
    told = capsys.readouterr()
    assert told.err == ""
    assert told.out.count(f"note: TensorBoard fails ({why}") == 1
    assert told.out.count("note: ") == 1
    assert sorted(losses(tmp_path / "r")) == [1, 2, 3, 4, 5, 6]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("wrong", ["", "\xff", None], ids=["empty", "no text", "missing"])
def test_a_wrong_input_leaves_nothing_behind_that_a_right_one_stumbles_over(wrong, config, text, tmp_path, capsys):
    bad, run = tmp_path / "bad.txt", tmp_path / "run"
    if wrong is not None:
        bad.write_bytes(wrong.encode("latin-1"))
    options = ["--run", str(run), "--set", "data.prepare={tokenizer = 'bytes', workers = 1, val = 0.1}"]
    assert millrace(["train", config, "--input", str(bad), *options]) != 0
    assert "bad.txt" in capsys.readouterr().err
    assert not run.exists()
    assert millrace(["train", config, "--input", str(text), *options]) == 0


def test_an_input_without_a_field_text_is_answered_with_the_key_that_names_it(config, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"body": "some words", "more": "other words"}\n' * 9)
    options = ["--input", str(tmp_path / "a.jsonl"), "--run", str(tmp_path / "run")]
    assert millrace(["train", config, *options, "--set", "data.prepare={tokenizer = 'bytes', workers = 1}"]) == 1
    assert """--set "data.prepare={text_field='body'}\"""" in capsys.readouterr().err


def test_a_run_goes_on_without_the_file_it_was_prepared_from_and_moves_with_its_store(config, text, tmp_path, capsys):
    own = tmp_path / "own.txt"
    own.write_bytes(text.read_bytes())
    options = ["--set", "data.prepare={tokenizer = 'bytes', workers = 1, val = 0.1}", "--run", str(tmp_path / "run")]
    assert millrace(["train", config, "--input", str(own), *options]) == 0
    own.unlink()
    assert millrace(["train", config, "--input", str(own), *options, "--set", "train.max_steps=8"]) == 0
    (tmp_path / "run").rename(tmp_path / "moved")
    capsys.readouterr()
    assert millrace(["generate", str(tmp_path / "moved"), "--tokens", "5", "--temperature", "1e-40", "--json"]) == 0
    coldest = json.loads(capsys.readouterr().out)
    assert millrace(["generate", str(tmp_path / "moved"), "--tokens", "5", "--temperature", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == coldest
    assert coldest["step"] == 8
    assert len(coldest["text"].encode()) <= 5  # and the end of document that stands before it is not shown


def test_a_model_that_is_code_is_only_made_where_it_is_named(config, tokens, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from millrace.train.models.gpt import GPT\nmade = []\n\n"
    code += "def gpt(**options):\n    made.append(1)\n    return GPT(**options)\n"
    (tmp_path / "own_gpt.py").write_text(code)
    sizes = "vocabulary=320, length=16, layers=1, heads=2, width=16, dropout=0.0"
    options = ["--set", "model.kind=own_gpt:gpt", "--set", f"model.options={{{sizes}}}"]
    assert millrace(["train", config, "--store", str(tokens), "--run", "run", *options]) == 0
    made = sys.modules["own_gpt"].made
    made.clear()
    assert millrace(["generate", "run", "--tokens", "3"]) == 1
    assert "if you trust it, name it: --model own_gpt:gpt" in capsys.readouterr().err
    assert made == []
    millrace(["generate", "run", "--tokens", "3", "--model", "own_gpt:gpt"])
    assert made == [1]


TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--", "millrace", "train",
]  # fmt: skip


def test_a_batch_that_memory_cannot_hold_is_one_line(config, waves, tmp_path):
    limited = (  # the estimate at the start is too low, as for rows of any length
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)); from millrace import native; "
        "native.memory_bytes = lambda: 1 << 62; from millrace.cli import main; main()"
    )
    changes = ("model.kind=lstm", "data.lookback=150", "train.batch=5_000_000")  # 9 GB
    options = [option for change in changes for option in ("--set", change)]
    command = [sys.executable, "-c", limited, "train", config, "--store", str(waves), "--run", str(tmp_path / "r")]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=100, env=environment())
    expected = (
        "error: out of memory for the batch of step 1; set a smaller train.batch, then run the same command again\n"
    )
    assert (done.returncode, done.stderr) == (1, expected)


def test_ranks_tell_an_error_once(config, tokens, tmp_path):
    """One that all find before they have met; ``test_launch`` has one of later."""
    command = [*TORCHRUN, config, "--store", str(tokens), "--run", str(tmp_path / "run"), "--set", "model.width=-3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment())
    told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(told) == 1, done.stderr
    assert "model.width = -3; expected 1 or more" in told[0]
    assert "millrace/train" not in done.stderr.replace("\\", "/").replace(told[0], "")  # no traceback of ours


def test_a_signal_under_torchrun_says_once_how_to_continue(config, tokens, tmp_path):
    command = [*TORCHRUN, config, "--store", str(tokens), "--run", str(tmp_path / "run")]
    command += ["--set", "train.max_steps=1000000", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while not losses(tmp_path / "run"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=60)
    assert error.count("continue with: torchrun ... -m -- millrace train") == 1, error
    assert "broadcast_buffers" not in error
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last:08d}\n"


def test_training_goes_on_when_nobody_reads_its_output(config, tokens, tmp_path):
    """As with `| head -1`: the reader is gone before the first step."""
    command = [
        sys.executable,
        "-m",
        "millrace",
        "train",
        config,
        "--store",
        str(tokens),
        "--run",
        str(tmp_path / "run"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    assert (process.returncode, error) == (0, "")
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_on_a_terminal_one_line_is_replaced_and_the_last_stays(config, tokens, tmp_path):
    """On a real one of 60 columns: what a person reads at the end, and every progress line on the way."""
    command = [sys.executable, "-m", "millrace", "train", config, "--store", str(tokens), "--run", str(tmp_path / "r")]
    mine, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 60, 0, 0))
    variables = {key: value for key, value in environment().items() if key != "COLUMNS"}
    process = subprocess.Popen(command, stdout=theirs, env=variables)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(mine, 4096):
            shown += piece
    os.close(mine)
    assert process.wait() == 0
    written = [line.split("\r") for line in shown.decode().replace("\r\n", "\n").split("\n")]
    progress = [part for parts in written for part in parts if part.startswith("step ") and ", loss" in part]
    assert [part.partition("/")[0] for part in progress] == [f"step {step}" for step in range(1, 7)]
    assert max(map(len, progress[:-1])) < 60  # one that wraps is not replaced
    parts = [part.rstrip() for parts in written for part in parts]
    assert next(part for part in parts if "evaluation" in part) == "step 6: evaluation, batch 1/1"
    left = [parts[-1].rstrip() for parts in written]
    assert not any("evaluation" in line for line in left)  # the result stands in its place
    assert [line.partition(", ")[0] for line in left if ", loss" in line] == ["step 6/6"]
    assert [line for line in left if line.startswith("saved step")][-1].startswith("saved step 6: training paused")
    for parts in written:  # nothing of a longer line shines through
        assert all(len(after) >= len(before) for before, after in pairwise(parts))


def test_torchrun_as_is(config, tokens, tmp_path):
    """Behind ``--``, since torchrun would take ``--run`` for a prefix of its own ``--run-path``."""
    done = subprocess.run(
        [*TORCHRUN, config, "--store", str(tokens), "--run", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=100, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout
    assert done.stdout.count("step 6/6") == 1
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.soak), (signal.SIGTERM, 143)]
)
def test_a_signal_saves_and_says_how_to_continue(number, code, config, tokens, tmp_path):
    command = [
        sys.executable,
        "-m",
        "millrace",
        "train",
        config,
        "--store",
        str(tokens),
        "--run",
        str(tmp_path / "run"),
    ]
    command += ["--set", "train.max_steps=1000000", "--set", "checkpoint.every=0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        while not losses(tmp_path / "run"):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == code, error
    assert "millrace train" in error
    assert "Traceback" not in error
    last = max(losses(tmp_path / "run"))
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last:08d}\n"
