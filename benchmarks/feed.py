"""The feed against what people write themselves: samples per second on hot data, interleaved, ratios of medians.

    python -m benchmarks.feed [--seconds 1.5] [--rounds 5] [--peers] [--no-save]

Workloads (hot: the stores lie in /dev/shm; the consumer only touches each batch):
W1 windows: 1,000 ragged entities, 8,000,000 rows x 16 float32; 64 rows x 16 and 8 rows of one target; batch 512.
W2 tokens: 250,000,000 uint16 tokens in shards of 10M; 1,024 tokens as int64 x and shifted y; batch 32.

``--peers`` adds those other libraries that this Python can import (benchmarks/peers.py), as `make bench-peers`
does. Cold data: benchmarks/cold.py.
"""

from __future__ import annotations

import argparse
import contextlib
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
import psutil
from torch.utils.data import DataLoader, Dataset, RandomSampler

import millrace as mr
from benchmarks import peers
from benchmarks.common import interleave, medians, save, verdict
from benchmarks.handmade import HORIZON, LENGTH, LOOKBACK, TARGET, BlockPerSample, WholeBatch, WindowPerSample, in_line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--name", help="of the result; feed, or feed_peers")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_stores(folder)
        figures = {"first_batch": first_batch(folder), "permutation": permutation(), "versions": peers.versions()}
        figures |= {name: bench(name, folder, options) for name in ("W1", "W2")}
        if not options.no_save:
            save(options.name or ("feed_peers" if options.peers else "feed"), figures)
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


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def contestants(name: str, folder: Path, batch: int, with_peers: bool) -> dict[str, Iterator[Any]]:
    dataset: Dataset[Any] = WindowPerSample(folder) if name == "W1" else BlockPerSample(folder)
    found: dict[str, Iterator[Any]] = {"millrace": iter(mr.Feed(view_of(name, folder), batch=batch, seed=7))}
    for workers in (0, 1, 2):
        sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_size=batch, sampler=sampler, num_workers=workers)
        found[f"DataLoader per sample, {workers} workers"] = endless(loader)
    whole = WholeBatch(name, folder, batch, own=True)
    for workers in (0, 1, 2):
        found[f"DataLoader whole batch, {workers} workers"] = endless(
            DataLoader(whole, batch_size=None, num_workers=workers)
        )
    found["numpy in line"] = in_line(WholeBatch(name, folder, batch, own=False))
    if with_peers:
        found |= peers.contestants(name, folder, whole, lambda batches: rate(batches, batch, 1.0))
    return found


# Against whom, by how much at least; "peer" is the best of the other libraries by their documented use.
PROMISES = {
    "W1": {"DataLoader per sample": 20, "DataLoader whole batch": 2, "numpy in line": 1, "SPDL": 2, "peer": 5},
    "W2": {"DataLoader per sample": 10, "DataLoader whole batch": 1.5, "numpy in line": 1, "SPDL": 2, "peer": 5},
}


def bench(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch = 512 if name == "W1" else 32
    iterators = contestants(name, folder, batch, options.peers)
    for iterator in iterators.values():
        rate(iterator, batch, 0.3)
    measures: dict[str, Callable[[], float]] = {
        key: lambda iterator=iterator: settled(lambda: rate(iterator, batch, options.seconds))
        for key, iterator in iterators.items()
    }
    rounds = interleave(measures, options.rounds)
    found = medians(rounds)
    for key, value in sorted(found.items(), key=lambda item: -item[1]):
        print(f"  {name} {key}: {value:,.0f} samples/s")
    promises = []
    for against, limit in PROMISES[name].items():
        others = [value for key, value in found.items() if key.startswith(against)]
        if others:
            promises.append(verdict(f"{name}, times {against}", found["millrace"] / max(others), limit))
    return {"samples_per_s": found, "rounds": rounds, "promises": promises}


def permutation() -> dict[str, Any]:
    """Indices per second of one core at N = 1e12."""
    order, positions = mr.Shuffled(10**12, seed=7), np.arange(1 << 20) + 12345
    order.samples(positions)
    runs = []
    for _ in range(7):
        started = time.perf_counter()
        order.samples(positions)
        runs.append(len(positions) / (time.perf_counter() - started))
    return {"per_s": runs, "promise": verdict("permutation, M indices/s at 1e12", sorted(runs)[3] / 1e6, 40)}


def settled(measure: Callable[[], float], most_s: float = 5.0) -> float:
    """The figure, taken once the threads and processes of whoever came before have filled their buffers."""
    deadline, used = time.perf_counter() + most_s, _cpu_s()
    while time.perf_counter() < deadline:
        time.sleep(0.1)
        if (now := _cpu_s()) - used < 0.02:
            break
        used = now
    return measure()


def _cpu_s() -> float:
    found = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += sum(process.cpu_times()[:2])
    return found


def rate(iterator: Iterator[Any], batch: int, seconds: float) -> float:
    """Samples per second over about this long; each batch is touched. What lay ready before is not counted."""
    deadline = time.perf_counter() + seconds / 2
    for _ in range(peers.BUFFERED):
        next(iterator)
        if time.perf_counter() > deadline:
            break
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        found = next(iterator)
        x = found["x"] if isinstance(found, dict) else found[0]
        x[(0,) * x.ndim].item()  # one element: a ravel would copy the whole of a strided view
        count += 1
    return count * batch / elapsed


FIRST = """
import sys, time, torch, millrace as mr
mr.open_store, mr.Feed, mr.Windows
started = time.perf_counter()
store = mr.open_store(sys.argv[1])
view = mr.Windows(store, lookback=64, horizon=8) if store.kind == "series" else mr.Blocks(store, length=1024)
next(iter(mr.Feed(view, batch=int(sys.argv[2]), seed=7)))
print(time.perf_counter() - started)
"""


def first_batch(folder: Path) -> dict[str, Any]:
    """From opening the store to the first batch, in a fresh process with torch imported."""
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
