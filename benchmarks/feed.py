"""The feed against what people write themselves: samples per second on hot data, interleaved, ratios of medians.

    python -m benchmarks.feed [--seconds 1.5] [--rounds 5]

Workloads (hot: the stores lie in /dev/shm; the consumer only touches each batch):
W1 windows: 1,000 ragged entities, 8,000,000 rows x 16 float32; 64 rows x 16 and 8 rows of one target; batch 512.
W2 tokens: 250,000,000 uint16 tokens in shards of 10M; 1,024 tokens as int64 x and shifted y; batch 32.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict

LOOKBACK, HORIZON, TARGET = 64, 8, 3
LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_stores(folder)
        figures = {name: bench(name, folder, options) for name in ("W1", "W2")}
        figures["first_batch"] = first_batch(folder)
        save("feed", figures)
    finally:
        shutil.rmtree(folder)


def make_stores(folder: Path) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8_000_000, 16)).astype(np.float32)
    cuts = np.sort(rng.choice(len(rows) - 1, 999, replace=False)) + 1
    with mr.StoreWriter(folder / "W1", kind="series", columns={"values": mr.Column("float32", (16,))}) as writer:
        writer.extend({"values": rows}, np.concatenate(([0], cuts, [len(rows)])))
    with mr.StoreWriter(
        folder / "W2", kind="text", columns={"tokens": mr.Column("uint16")}, shard_bytes=21 << 20
    ) as writer:
        for _ in range(25):
            writer.extend({"tokens": rng.integers(0, 50_000, 10_000_000).astype(np.uint16)}, [0, 10_000_000])


def view_of(name: str, folder: Path) -> mr.View:
    store = mr.open_store(folder / name)
    if name == "W1":
        return mr.Windows(store, lookback=LOOKBACK, horizon=HORIZON, target=[TARGET])
    return mr.Blocks(store, length=LENGTH)


class WindowPerSample(Dataset[Any]):
    """What one writes first: find the entity by searchsorted, slice the memmap."""

    def __init__(self, folder: Path) -> None:
        store = mr.open_store(folder / "W1")
        self._rows = [
            np.memmap(path, np.float32, "r").reshape(-1, 16) for path in sorted(folder.glob("W1/shards/*/values.f32"))
        ]
        self._firsts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        self._offsets = np.array(store.offsets)
        self._ends = np.cumsum(np.maximum(0, np.diff(self._offsets) - LOOKBACK - HORIZON + 1))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, sample: int) -> Any:
        entity = np.searchsorted(self._ends, sample, side="right")
        inside = sample - (self._ends[entity - 1] if entity else 0)
        start = self._offsets[entity] + inside
        shard = np.searchsorted(self._firsts, start, side="right") - 1
        rows, first = self._rows[shard], start - self._firsts[shard]
        y = rows[first + LOOKBACK : first + LOOKBACK + HORIZON, TARGET : TARGET + 1]
        return torch.from_numpy(np.array(rows[first : first + LOOKBACK])), torch.from_numpy(np.array(y))


class BlockPerSample(Dataset[Any]):
    """The same for tokens; samples stay inside one shard, which is kind to it."""

    def __init__(self, folder: Path) -> None:
        self._shards = [np.memmap(path, np.uint16, "r") for path in sorted(folder.glob("W2/shards/*/tokens.u16"))]
        self._per_shard = (len(self._shards[0]) - 1) // LENGTH

    def __len__(self) -> int:
        return self._per_shard * len(self._shards)

    def __getitem__(self, sample: int) -> Any:
        shard, inside = divmod(sample, self._per_shard)
        tokens = self._shards[shard][inside * LENGTH : inside * LENGTH + LENGTH + 1].astype(np.int64)
        return torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])


class WholeBatch(Dataset[Any]):
    """Hand-made: the dataset gathers a whole batch per item by the view, and the DataLoader adds its machinery."""

    def __init__(self, view: mr.View, batch: int) -> None:
        self._view, self._batch = view, batch

    def __len__(self) -> int:
        return len(self._view) // self._batch

    def __getitem__(self, number: int) -> Any:
        samples = np.random.default_rng(number).integers(0, len(self._view), self._batch)
        found = self._view[samples]
        return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def contestants(name: str, folder: Path, batch: int) -> dict[str, Iterator[Any]]:
    dataset: Dataset[Any] = WindowPerSample(folder) if name == "W1" else BlockPerSample(folder)
    found: dict[str, Iterator[Any]] = {"millrace": iter(mr.Feed(view_of(name, folder), batch=batch, seed=7))}
    for workers in (0, 1, 2):
        sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)
        found[f"DataLoader per sample, {workers} workers"] = endless(loader)
    found["DataLoader whole batch"] = endless(DataLoader(WholeBatch(view_of(name, folder), batch), batch_size=None))
    return found


def bench(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch = 512 if name == "W1" else 32
    iterators = contestants(name, folder, batch)
    for iterator in iterators.values():
        rate(iterator, batch, 0.3)
    measures: dict[str, Callable[[], float]] = {
        key: lambda iterator=iterator: rate(iterator, batch, options.seconds) for key, iterator in iterators.items()
    }
    rounds = interleave(measures, options.rounds)
    found = medians(rounds)
    for key, value in sorted(found.items(), key=lambda item: -item[1]):
        print(f"  {name} {key}: {value:,.0f} samples/s")
    best = max(value for key, value in found.items() if "per sample" in key)
    promise = verdict(
        f"{name}, times the per-sample DataLoader at its best", found["millrace"] / best, 8 if name == "W1" else 4
    )
    return {"samples_per_s": found, "rounds": rounds, "promise": promise}


def rate(iterator: Iterator[Any], batch: int, seconds: float) -> float:
    """Samples per second over about this long; each batch is touched."""
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        found = next(iterator)
        x = found["x"] if isinstance(found, dict) else found[0]
        x.ravel()[0].item()
        count += 1
    return count * batch / elapsed


FIRST = """
import sys, time, torch, millrace as mr
mr.open_store, mr.Feed, mr.Windows
started = time.perf_counter()
store = mr.open_store(sys.argv[1])
opened = time.perf_counter()
view = mr.Windows(store, lookback=64, horizon=8) if store.kind == "series" else mr.Blocks(store, length=1024)
next(iter(mr.Feed(view, batch=int(sys.argv[2]), seed=7)))
print(time.perf_counter() - opened)
"""


def first_batch(folder: Path) -> dict[str, Any]:
    """From an open store to the first batch, in a fresh process with torch imported."""
    found = {}
    for name, batch in (("W1", 512), ("W2", 32)):
        command = [sys.executable, "-c", FIRST, str(folder / name), str(batch)]
        runs = [
            float(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)
            for _ in range(5)
        ]
        found[name] = {
            "seconds": runs,
            "promise": verdict(f"{name}, first batch, s", sorted(runs)[2], 0.1, at_least=False),
        }
    return found


if __name__ == "__main__":
    main()
