"""The steps of ``millrace demo``. Each training run is its own process, as a user would start it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from millrace.cli.options import training_extras
from millrace.distribution import install_command
from millrace.errors import ConfigError, TrainError
from millrace.train.metrics import read_metrics
from millrace.train.open_run import load_model

STEP = re.compile(r"step ([0-9,]+)/")
FEATURES = ["temperature", "pressure", "flow", "load"]
TARGET = ["temperature"]
VAL = 0.1  # share of each sensor's last rows for val


class Demo:
    """Writes everything into ``folder`` and reports through ``say``."""

    def __init__(self, folder: str, say: Callable[..., None]) -> None:
        self._folder, self._say = folder, say
        needed = {"torch": "torch", "safetensors": "torch", "pyarrow": "table", "matplotlib": "report"}
        for name, extra in needed.items():
            with training_extras():
                try:
                    importlib.import_module(name)
                except ImportError as error:
                    raise ConfigError(f"the demo needs {name}; {install_command(extra)}") from error

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    # Text.

    def text(self, config: Sequence[str], kill_at: int) -> dict[str, Any]:
        """Tokenises the standard library, trains a GPT, kills it half-way, continues it, compares the losses."""
        from millrace.prepare.text.text import prepare_text

        self._say("1. The source of Python's standard library, as a token store")
        sources = os.path.join(sysconfig.get_path("stdlib"), "*.py")
        options: dict[str, Any] = {"tokenizer": "bytes", "normalize": False, "document": "file", "val": 0.05}
        report = prepare_text(sources, self._path("corpus"), **options)
        counts = f"{sum(report.documents.values())} files, {sum(report.tokens.values()):,} tokens"
        self._say(f"   {counts} in {report.seconds:.1f} s: {self._path('corpus')}")

        self._say("2. A small GPT, killed with SIGKILL half-way")
        run = self._path("gpt")
        killed_at = self._train("gpt", config, self._path("corpus"), kill_at)
        before = self._losses(run)
        self._say(f"   killed at step {killed_at}")
        self._say("3. The same command again")
        self._train("gpt", config, self._path("corpus"), None)
        return self._compare(run, killed_at, before)

    def _compare(self, run: str, killed_at: int, before: dict[int, float]) -> dict[str, Any]:
        from millrace.feed.journal import starts
        from millrace.store.open import open_store
        from millrace.train.generate import generate

        after, resumed_from = self._losses(run), starts(run)[-1]["step"] - 1
        repeated = [step for step in sorted(before) if step > resumed_from]
        for step in repeated:
            mark = "the same" if before[step] == after[step] else "DIFFERENT"
            self._say(f"   step {step}: loss {before[step]!r} before the kill, {after[step]!r} after it: {mark}")
        tokens = np.asarray(open_store(self._path("corpus")).split("train").columns["tokens"][:])
        shares = np.bincount(tokens) / len(tokens)
        entropy = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
        loss = statistics.fmean(list(after.values())[-5:])
        self._say("   what it writes: " + repr(generate(load_model(Path(run)), "def ", tokens=80)))
        return {
            "killed_at": killed_at, "resumed_from": resumed_from, "compared": len(repeated),
            "is_exact": bool(repeated) and all(before[step] == after[step] for step in repeated),
            "entropy": entropy, "loss": loss, "below": entropy - loss, "wait": self._wait(run), "pictures": [f"{run}/loss.png"],
        }  # fmt: skip

    # Sensors.

    def sensors(self, config: Sequence[str]) -> dict[str, Any]:
        """Prepares a Parquet table, trains an LSTM, and draws its forecasts against what happened."""
        from millrace.train.backtest import backtest, plot_backtest

        self._say("4. A table of sensors, as a series store")
        table = self._path("sensors.parquet")
        rows = write_table(table)
        store = prepare_sensors(table, self._path("sensors"))
        self._say(f"   {rows:,} rows of {store.num_records} sensors: {self._path('sensors')}")
        self._say("5. An LSTM that forecasts the next 12 hours")
        self._train("lstm", config, self._path("sensors"), None)
        run = Path(self._path("lstm"))
        last = [line for line in read_metrics(run) if "val_loss" in line][-1]
        plot_backtest(backtest(load_model(run), "sensor-007", windows=5), run / "forecast.png")
        return {
            "val_loss": last["val_loss"], "baseline": last["val_baseline"], "ratio": last["val_loss"] / last["val_baseline"],
            "wait": self._wait(str(run)), "pictures": [str(run / "loss.png"), str(run / "forecast.png")],
        }  # fmt: skip

    # Runs.

    def _train(self, name: str, config: Sequence[str], store: str, kill_at: int | None) -> int:
        """Runs ``millrace train`` in its own process, and kills it at step ``kill_at``; returns the last step it printed."""
        command = [sys.executable, "-m", "millrace", "train", config[0], "--store", store, "--run", self._path(name)]
        command += [part for change in config[1:] for part in ("--set", change)]
        step, last_line = 0, ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                last_line = line.rstrip()
                match = STEP.match(line)
                step = int(match[1].replace(",", "")) if match else step
                if match is None or step % 50 == 0:
                    self._say(f"   {last_line}")
                if kill_at is not None and step >= kill_at:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
            raise TrainError(f"{' '.join(command)} ended with {process.returncode}: {last_line}")
        return step

    def _losses(self, run: str) -> dict[int, float]:
        return {line["step"]: line["loss"] for line in read_metrics(Path(run)) if "loss" in line}

    def _wait(self, run: str) -> float:
        return statistics.median(float(line["wait"]) for line in read_metrics(Path(run)) if "wait" in line)


def write_table(path: str, sensors: int = 60, rows: int = 1200) -> int:
    """Writes sensors with daily and weekly waves, drift and noise, one row per hour, shuffled; returns the rows."""
    import pyarrow
    from pyarrow import parquet

    rng = np.random.default_rng(7)
    hours = np.arange(rows)
    columns: dict[str, list[Any]] = {name: [] for name in ("sensor", "time", *FEATURES)}
    for sensor in range(sensors):
        phase, level = rng.uniform(0, 24), rng.uniform(10, 30)
        day = np.sin((hours + phase) * 2 * np.pi / 24)
        week = np.sin((hours + phase) * 2 * np.pi / 168)
        drift = np.cumsum(rng.normal(size=rows)) * 0.05
        load = 50 + 20 * day + rng.normal(size=rows) * 2
        columns["sensor"] += [f"sensor-{sensor:03d}"] * rows
        columns["time"].append(np.datetime64("2026-01-01T00", "h") + hours)
        columns["temperature"].append(level + 4 * day + 2 * week + drift + rng.normal(size=rows) * 0.3)
        columns["pressure"].append(1000 + 3 * week + rng.normal(size=rows) * 0.5)
        columns["flow"].append(load * 0.2 + rng.normal(size=rows))
        columns["load"].append(load)
    order = rng.permutation(sensors * rows)
    join = {"sensor": np.asarray}
    arrays = {name: join.get(name, np.concatenate)(values) for name, values in columns.items()}
    arrays["time"] = arrays["time"].astype("datetime64[s]")
    parquet.write_table(pyarrow.table({name: pyarrow.array(values[order]) for name, values in arrays.items()}), path)
    return sensors * rows


def prepare_sensors(table: str, out: str) -> Any:
    """Prepares the table: sorted, scaled, with the last rows of each sensor for val."""
    from millrace.prepare.table.table import prepare_table

    options: dict[str, Any] = {"entity": ("sensor",), "time": "time", "features": FEATURES, "target": TARGET}
    return prepare_table([table], out, **options, val_last=VAL, scale="standard").open()
