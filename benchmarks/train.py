"""The trainer: a step on fed batches against the same step on a batch that is there already, and what optimisers keep.

    python -m benchmarks.train [--quick]

On a GPU: GPT-124M, bf16, 32 x 1024 tokens, and the forecasters of benchmarks/gpu.py, batches 512 and 4096. Without one: the
nano GPT and small forecasters, so that the script itself can be tried. The steps are those of ``millrace train``, by its own
metrics, on a feed that goes on or gives its first batch again, in turns of two looks at the losses, of which the first is not
counted: what lay ready is gone by then. The figure is the median of the pairs; each is reported, and between which the median
lies at 95 %. ``--quick`` takes a tenth of the pairs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millrace as mr
from benchmarks.common import save, share, verdict
from millrace.train.config import Config, parse_config
from millrace.train.dist import World
from millrace.train.metrics import read_metrics
from millrace.train.pace import memory_by_part
from millrace.train.trainer import Trainer

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")
# By name: steps between two looks at the losses, more than batches lie ready; pairs; and the share that is promised.
CASES = {
    "gpt": (40, 9, 0.98), "lstm-512": (80, 41, 0.97), "lstm-4096": (20, 21, 0.97), "transformer-512": (60, 41, 0.97),
    "transformer-4096": (20, 21, 0.97),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
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
        for name, (steps, pairs, limit) in CASES.items():
            figures[name] = by_loop(name, folder, steps, pairs // 10 if options.quick else pairs)
            told, between = figures[name]["share_of_resident"], figures[name]["share_of_resident"]["between"]
            print(
                f"{name}: {1e3 * figures[name]['fed_s']:.3f} ms, between {between[0]:.3f} and {between[1]:.3f}",
                flush=True,
            )
            figures[name]["promise"] = verdict(f"{name}: steps/s of those on a resident batch", told["median"], limit)
        figures["memory"] = {name: memory_apart(name, folder) for name in ("adamw", "adafactor")}
        save("train" if IS_GPU else "train_cpu", figures)
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
    series = {"values": mr.Column("float32", (16,))}
    meta = {"features": [f"f{k}" for k in range(16)], "target": ["f3"]}
    with mr.StoreWriter(folder / "series", kind="series", columns=series, meta=meta) as writer:
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
        layers = 1 if kind == "lstm" else 4
        values["model"] = {"kind": kind, "layers": layers, "heads": 4, "width": 128 if IS_GPU else 32}
        values["train"] = {"batch": int(batch) if IS_GPU else int(batch) // 16}
    values["train"] |= {"max_steps": 10**9, "tensorboard": False}
    return parse_config({**values, "optimizer": {"lr": 1e-4, "name": optimizer}})


def trainer_of(name: str, folder: Path, optimizer: str = "adamw") -> Trainer:
    run = Path(tempfile.mkdtemp(dir=folder, prefix="run-"))
    return Trainer(config_of(name, folder, optimizer), run, World(0, 1, DEVICE))


class Turns:
    """A feed that goes on, and one that gives its first batch again, in turns of two blocks of ``steps`` batches."""

    def __init__(self, feed: mr.Feed, steps: int) -> None:
        self._feed, self._steps, self._count = feed, steps, 0

    @property
    def behind_s(self) -> float:
        return float(self._batches.behind_s)

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
        return block // 2 % 4 in (0, 3)  # fed and resident, resident and fed

    def __next__(self) -> mr.Batch:
        block = self._count // self._steps
        self._count += 1
        return next(self._batches) if self.is_fed(block) else self._batch


def by_loop(name: str, folder: Path, steps: int, pairs: int) -> dict[str, Any]:
    """Of the steps of ``millrace train``, fed and on a resident batch; two pairs of turns warm up and compile."""
    config, warm = config_of(name, folder), 2
    loop = replace(config.train, max_steps=4 * (pairs + warm) * steps, log_every=steps)
    config = replace(config, train=loop, checkpoint=replace(config.checkpoint, every=0))
    run = Path(tempfile.mkdtemp(dir=folder, prefix="loop-"))
    trainer = Trainer(config, run, World(0, 1, DEVICE))
    turns = Turns(trainer.feed, steps)
    trainer.feed = turns  # type: ignore[assignment]
    trainer.run()
    trainer.close()
    lines = [line for line in read_metrics(run) if "step_s" in line][4 * warm :]
    shutil.rmtree(run)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for block, line in enumerate(lines):
        if block % 2:
            seconds[turns.is_fed(block)].append(line["step_s"])
    shares = [resident / fed for fed, resident in zip(seconds[True], seconds[False], strict=True)]
    return {
        "fed_s": statistics.median(seconds[True]), "resident_s": statistics.median(seconds[False]),
        "share_of_resident": share(shares), "steps": steps, "mfu": lines[-1].get("mfu"), "wait": lines[1]["wait"],
    }  # fmt: skip


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
        trainer.stepper.step(trainer.precision.to_device(next(batches)), step)
    found = memory_by_part(trainer.model, trainer.optimizer)
    if IS_GPU:
        found["peak"] = torch.cuda.max_memory_allocated()
    trainer.close()
    return found


if __name__ == "__main__":
    main()
