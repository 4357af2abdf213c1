"""What ``millrace demo`` does, step by step: each training run is a process of its own, as a user would start it."""

from __future__ import annotations

import importlib
import os
import re
import signal
import statistics
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from millrace.cli import demo_sensors
from millrace.errors import ConfigError, TrainError

STEP = re.compile(r"step ([0-9,]+)/")


class Demo:
    """Everything is written below ``folder`` and told through ``say``."""

    def __init__(self, folder: str, say: Callable[..., None]) -> None:
        self._folder, self._say = folder, say
        for name, extra in (
            ("torch", "torch"),
            ("safetensors", "torch"),
            ("pyarrow", "table"),
            ("matplotlib", "report"),
        ):
            try:
                importlib.import_module(name)
            except ImportError as error:
                raise ConfigError(f"the demo needs {name}: pip install 'millrace[{extra}]'") from error

    def _path(self, name: str) -> str:
        return os.path.join(self._folder, name)

    # Text.

    def text(self, config: str, kill_at: int) -> dict[str, Any]:
        """Tokenises the standard library, trains a GPT, kills it half-way, resumes, compares."""
        from millrace.prepare.text.text import prepare_text

        self._say("1. The source of Python's standard library, as a token store")
        sources = os.path.join(sysconfig.get_path("stdlib"), "*.py")
        report = prepare_text(
            sources, self._path("corpus"), tokenizer="bytes", normalize=False, document="file", val=0.05
        )
        tokens = sum(report.tokens.values())
        self._say(
            f"   {sum(report.documents.values())} files, {tokens:,} tokens in {report.seconds:.1f} s: {self._path('corpus')}"
        )

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
        from millrace.train.load import load_model

        after, resumed_from = self._losses(run), starts(run)[-1]["step"] - 1
        twice = [step for step in sorted(before) if step > resumed_from]
        for step in twice:
            mark = "the same" if before[step] == after[step] else "DIFFERENT"
            self._say(f"   step {step}: loss {before[step]!r} before the kill, {after[step]!r} after it: {mark}")
        tokens = np.asarray(open_store(self._path("corpus")).split("train").columns["tokens"][:])
        shares = np.bincount(tokens) / len(tokens)
        entropy = float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())
        loss = statistics.fmean(list(after.values())[-5:])
        self._say("   what it writes: " + repr(generate(load_model(Path(run)), "def ", tokens=80)))
        return {
            "killed_at": killed_at, "resumed_from": resumed_from, "compared": len(twice),
            "is_exact": bool(twice) and all(before[step] == after[step] for step in twice),
            "entropy": entropy, "loss": loss, "below": entropy - loss, "wait": self._wait(run), "pictures": [f"{run}/loss.png"],
        }  # fmt: skip

    # Sensors.

    def sensors(self, config: str) -> dict[str, Any]:
        """A table in Parquet, a series store, an LSTM, a forecast against what happened."""
        from millrace.train.forecast import forecast, plot_forecast
        from millrace.train.load import load_model
        from millrace.train.metrics import read_metrics

        self._say("4. A table of sensors, as a series store")
        table = self._path("sensors.parquet")
        rows = demo_sensors.write_table(table)
        store = demo_sensors.prepare_sensors(table, self._path("sensors"))
        self._say(f"   {rows:,} rows of {store.num_records} sensors: {self._path('sensors')}")
        self._say("5. An LSTM that forecasts the next 12 hours")
        self._train("lstm", config, self._path("sensors"), None)
        run = Path(self._path("lstm"))
        last = [line for line in read_metrics(run) if "val_loss" in line][-1]
        plot_forecast(forecast(load_model(run), "sensor-007", windows=5), run / "forecast.png")
        return {
            "val_loss": last["val_loss"], "baseline": last["val_baseline"], "ratio": last["val_loss"] / last["val_baseline"],
            "wait": self._wait(str(run)), "pictures": [str(run / "loss.png"), str(run / "forecast.png")],
        }  # fmt: skip

    # Runs.

    def _train(self, name: str, config: str, store: str, kill_at: int | None) -> int:
        """``millrace train`` in a process of its own, killed when it tells of step ``kill_at``; the last step it told."""
        path = self._path(f"{name}.toml")
        Path(path).write_text(config)
        command = [sys.executable, "-m", "millrace", "train", path, "--store", store, "--run", self._path(name)]
        step, said = 0, ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                said = line.rstrip()
                match = STEP.match(line)
                step = int(match[1].replace(",", "")) if match else step
                if match is None or step % 50 == 0:
                    self._say(f"   {said}")
                if kill_at is not None and step >= kill_at:
                    os.kill(process.pid, signal.SIGKILL)
                    break
        if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
            raise TrainError(f"{' '.join(command)} ended with {process.returncode}: {said}")
        return step

    def _losses(self, run: str) -> dict[int, float]:
        from millrace.train.metrics import read_metrics

        return {line["step"]: line["loss"] for line in read_metrics(Path(run)) if "loss" in line}

    def _wait(self, run: str) -> float:
        from millrace.train.metrics import read_metrics

        return statistics.median(float(line["wait"]) for line in read_metrics(Path(run)) if "wait" in line)
