"""The trainer: a step on fed batches against the same step on a batch that is there already, and what optimisers keep.

    python -m benchmarks.train [--pairs 21] [--seconds 0.5]

On a GPU: GPT-124M, bf16, 32 x 1024 tokens, and the forecasters of 64 rows x 16 features, batches 512 and 4096. Without one:
the nano GPT and small forecasters, so that the script itself can be tried. Both kinds of step run in turns, for a short time
each, in turn first: steps of a few milliseconds differ by a tenth from one second to the next. The figure is the median over
the pairs. The same once more through the whole loop of ``millrace train``, by its own metrics, with a feed that goes on or
gives its first batch again, in turns. ``command_s`` is a step of the command in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millrace as mr
from benchmarks.common import save
from millrace.train.config import Config, as_dict, parse_config
from millrace.train.dist import World
from millrace.train.memory import memory_by_part, peak_flops
from millrace.train.metrics import read_metrics
from millrace.train.trainer import Trainer

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
WARM = 10  # steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=0.5, help="per kind and pair")
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)  # optimiser and folder, in a process of its own
    options = parser.parse_args()
    if options.memory:
        print(json.dumps(memory(options.memory[0], Path(options.memory[1]))))
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_stores(folder)
        figures: dict[str, Any] = {
            "device": torch.cuda.get_device_name() if IS_GPU else "cpu",
            "torch": torch.__version__,
        }
        for name in ("gpt", "lstm-512", "lstm-4096", "transformer-512", "transformer-4096"):
            figures[name] = compare(name, folder, options)
        figures["memory"] = {name: memory_apart(name, folder) for name in ("adamw", "adafactor")}
        save("train", figures)
    finally:
        shutil.rmtree(folder)


def make_stores(folder: Path) -> None:
    rng = np.random.default_rng(0)
    size = 100_000_000 if IS_GPU else 2_000_000
    columns = {"tokens": mr.Column("uint16")}
    with mr.StoreWriter(
        folder / "gpt", kind="text", columns=columns, meta={"vocabulary": 50257 if IS_GPU else 256}
    ) as writer:
        for _ in range(10):
            ids = rng.integers(0, 50257 if IS_GPU else 256, size // 10).astype(np.uint16)
            writer.extend({"tokens": ids}, [0, len(ids)])
    rows = rng.normal(size=(size // 20, 16)).astype(np.float32)
    with mr.StoreWriter(folder / "series", kind="series", columns={"values": mr.Column("float32", (16,))}) as writer:
        writer.extend({"values": rows}, np.linspace(0, len(rows), 1001).astype(np.int64))


def config_of(name: str, folder: Path, optimizer: str = "adamw") -> Config:
    if name == "gpt":
        sizes = {"layers": 12, "heads": 12, "width": 768} if IS_GPU else {"layers": 2, "heads": 2, "width": 64}
        values: dict[str, Any] = {"data": {"store": str(folder / "gpt"), "length": 1024 if IS_GPU else 64}}
        values["model"] = {"kind": "gpt", **sizes}
        values["train"] = {"batch": 32, "precision": "bf16" if IS_GPU else "fp32", "compile": IS_GPU}
    else:
        values = {"data": {"store": str(folder / "series"), "lookback": 64, "horizon": 8}}
        kind, batch = name.split("-")
        values["model"] = {"kind": kind, "layers": 2, "heads": 4, "width": 128 if IS_GPU else 32}
        values["train"] = {"batch": int(batch) if IS_GPU else int(batch) // 16}
    values["train"] |= {"max_steps": 10**9, "tensorboard": False}
    return parse_config({**values, "optimizer": {"lr": 1e-4, "name": optimizer}})


def trainer_of(name: str, folder: Path, optimizer: str = "adamw") -> Trainer:
    run = Path(tempfile.mkdtemp(dir=folder, prefix="run-"))
    return Trainer(config_of(name, folder, optimizer), run, World(0, 1, DEVICE))


def settle() -> float:
    if IS_GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def compare(name: str, folder: Path, options: Any) -> dict[str, Any]:
    """Seconds per step from the feed and on one resident batch, in turns."""
    trainer = trainer_of(name, folder)
    fed = iter(trainer.feed)
    there = trainer.to_device(next(fed))
    resident = mr.Batch({name: value.clone() for name, value in there.items()})
    steps = itertools.count(1)

    def run(is_fed: bool, count: int) -> float:
        began = settle()
        for _ in range(count):
            trainer.stepper.step(trainer.to_device(next(fed)) if is_fed else resident, next(steps))
        return (settle() - began) / count

    run(True, WARM)  # compiles
    count = max(WARM, int(options.seconds / run(True, WARM)))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(options.pairs):
        for is_fed in turn(number):
            seconds[is_fed].append(run(is_fed, count))
    flops = trainer.model.flops(resident) if hasattr(trainer.model, "flops") else 0.0
    trainer.close()
    figures = told(seconds)
    step_s, peak = figures["fed_s"], peak_flops(DEVICE)
    figures |= {
        "samples_per_s": resident.num_samples / step_s,
        "mfu": flops / step_s / peak if peak and flops else None,
    }
    figures |= {"command_s": command(name, folder, count), "steps": count}
    line = f"{name}: fed {step_s * 1e3:.3f} ms, {figures['share_of_resident']:.1%} of resident"
    if name != "gpt":  # which compiles for minutes
        figures["loop"] = by_loop(name, folder, count, options.pairs)
        line += f"; by the loop {figures['loop']['share_of_resident']:.1%}"
    print(f"{line}; millrace train {figures['command_s'] * 1e3:.3f} ms", flush=True)
    return figures


def turn(number: int) -> tuple[bool, bool]:
    return number % 2 == 0, number % 2 == 1


def told(seconds: dict[bool, list[float]]) -> dict[str, Any]:
    """Of pairs of fed and resident steps."""
    shares = [resident / fed for fed, resident in zip(seconds[True], seconds[False], strict=True)]
    return {
        "fed_s": statistics.median(seconds[True]), "resident_s": statistics.median(seconds[False]),
        "share_of_resident": statistics.median(shares), "shares": [round(share, 4) for share in shares],
    }  # fmt: skip


class Turns:
    """A feed that goes on, and one that gives its first batch again, for ``steps`` batches each in turn."""

    behind_s = 0.0

    def __init__(self, feed: mr.Feed, steps: int) -> None:
        self._feed, self._steps, self._count = feed, steps, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._feed, name)

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, *error: object) -> None:
        self._feed.close()

    def __iter__(self) -> Turns:
        self._batches = iter(self._feed)
        self._batch = mr.Batch({name: value.clone() for name, value in next(self._batches).items()})
        return self

    def is_fed(self, block: int) -> bool:
        return turn(block // 2)[block % 2]

    def __next__(self) -> mr.Batch:
        block = self._count // self._steps
        self._count += 1
        return next(self._batches) if self.is_fed(block) else self._batch


def by_loop(name: str, folder: Path, steps: int, pairs: int) -> dict[str, Any]:
    """What the loop of the command says of its steps; the first pair warms up."""
    config = config_of(name, folder)
    loop = replace(config.train, max_steps=2 * (pairs + 1) * steps, log_every=steps)
    config = replace(config, train=loop, checkpoint=replace(config.checkpoint, every=0))
    run = Path(tempfile.mkdtemp(dir=folder, prefix="loop-"))
    trainer = Trainer(config, run, World(0, 1, DEVICE))
    turns = Turns(trainer.feed, steps)
    trainer.feed = turns  # type: ignore[assignment]
    trainer.run()
    trainer.close()
    found = [line["step_s"] for line in read_metrics(run) if "step_s" in line]
    shutil.rmtree(run)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block, step_s in list(enumerate(found))[2:]:
        seconds[turns.is_fed(block)].append(step_s)
    return told(seconds)


def command(name: str, folder: Path, steps: int) -> float:
    """The median of what ``millrace train`` says of its steps, the first rounds left out."""
    run = Path(tempfile.mkdtemp(dir=folder, prefix="command-"))
    config = config_of(name, folder)
    path = run / "config.toml"
    path.write_text(toml(as_dict(config)))
    changes = [f"train.max_steps={steps * 8}", f"train.log_every={steps}", "checkpoint.every=0"]
    arguments = [argument for change in changes for argument in ("--set", change)]
    command = [sys.executable, "-m", "millrace", "train", str(path), "--run", str(run / "run"), *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    found = [line["step_s"] for line in read_metrics(run / "run") if "step_s" in line]
    return statistics.median(found[1:])


def toml(values: dict[str, Any]) -> str:
    lines = []
    for section, entries in values.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in entries.items() if not isinstance(value, dict)]
    return "\n".join(lines) + "\n"


def memory_apart(optimizer: str, folder: Path) -> dict[str, int]:
    command = [sys.executable, "-m", "benchmarks.train", "--memory", optimizer, str(folder)]
    found: dict[str, int] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{optimizer}: {found}")
    return found


def memory(optimizer: str, folder: Path) -> dict[str, int]:
    """Bytes by part, and the GPU's peak during a step that finds the optimiser's state there."""
    trainer = trainer_of("gpt", folder, optimizer)
    batches = iter(trainer.feed)
    for step in (1, 2, 3):
        if IS_GPU:
            torch.cuda.reset_peak_memory_stats()
        trainer.stepper.step(trainer.to_device(next(batches)), step)
    found = memory_by_part(trainer.model, trainer.optimizer)
    if IS_GPU:
        found["peak"] = torch.cuda.max_memory_allocated()
    trainer.close()
    return found


if __name__ == "__main__":
    main()
