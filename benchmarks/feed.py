"""The feed against what people write themselves: samples per second on hot data, interleaved, ratios of medians.

    python -m benchmarks.feed [--workload W1] [--seconds 1.5] [--rounds 5] [--peers] [--name feed_peers] [--no-save]

Workloads (hot: the stores lie in /dev/shm; the consumer only touches each batch):
W1 windows: 1,000 ragged entities, 8,000,000 rows x 16 float32; 64 rows x 16 and 8 rows of one target; batch 512.
W2 tokens: 250,000,000 uint16 tokens in shards of 10M; 1,024 tokens as int64 x and shifted y; batch 32.

``--peers`` adds those other libraries that this Python can import (benchmarks/peers.py), as `make bench-peers`
does. DataLoaders and peers take part at the best number of workers in a short trial. With ``--workload`` the other
workload of the same result stays as it was. Cold data: benchmarks/cold.py.
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
from torch.utils.data import DataLoader

import millrace as mr
from benchmarks import peers
from benchmarks.common import cpu_seconds, interleave, machine, medians, save, verdict
from benchmarks.handmade import HORIZON, LENGTH, LOOKBACK, TARGET, WholeBatch, in_line


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", choices=sorted(BATCH), action="append", help="both when left out")
    parser.add_argument("--seconds", type=float, default=1.5, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--name", help="of the result; feed, or feed_peers")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    workloads = options.workload or sorted(BATCH)
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        figures: dict[str, Any] = {}
        for workload in workloads:
            make_store(workload, folder)
            figures[workload] = bench(workload, folder, options)
            if not options.peers:
                figures[workload]["first_batch"] = first_batch(workload, folder)
            shutil.rmtree(folder / workload)
        if not options.peers:
            figures["permutation"] = permutation()
        if not options.no_save:
            save(options.name or ("feed_peers" if options.peers else "feed"), figures, kept=len(workloads) == 1)
    finally:
        shutil.rmtree(folder)


def make_stores(folder: Path) -> None:
    for name in BATCH:
        make_store(name, folder)


def make_store(name: str, folder: Path) -> None:
    rng = np.random.default_rng(0)
    if name == "W1":
        rows = rng.standard_normal((8_000_000, 16), np.float32)
        cuts = np.sort(rng.choice(len(rows) - 1, 999, replace=False)) + 1
        with mr.StoreWriter(folder / "W1", kind="series", columns={"values": mr.Column("float32", (16,))}) as writer:
            writer.extend({"values": rows}, np.concatenate(([0], cuts, [len(rows)])))
        return
    with mr.StoreWriter(
        folder / "W2", kind="text", columns={"tokens": mr.Column("uint16")}, shard_bytes=21 << 20
    ) as writer:
        for _ in range(25):
            writer.extend({"tokens": rng.integers(0, 50_000, 10_000_000, np.uint16)}, [0, 10_000_000])


def view_of(name: str, folder: Path) -> mr.View:
    store = mr.open_store(folder / name)
    if name == "W1":
        return mr.Windows(store, lookback=LOOKBACK, horizon=HORIZON, target=[TARGET])
    return mr.Blocks(store, length=LENGTH)


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


# Against whom, by how much at least; "peer" is the best of the other libraries that load and shuffle samples.
PROMISES = {
    "W1": {"DataLoader per sample": 20, "DataLoader whole batch": 2, "numpy in line": 1, "SPDL": 2, "peer": 5},
    "W2": {"DataLoader per sample": 10, "DataLoader whole batch": 1.5, "numpy in line": 1, "SPDL": 2, "peer": 5},
}
BATCH = {"W1": 512, "W2": 32}


def contestants(name: str, folder: Path, with_peers: bool) -> peers.Field:
    batch = BATCH[name]
    whole = WholeBatch(name, folder, batch, own=True)
    field = peers.Field(name, folder, whole, lambda batches: rate(batches, batch, 1.0))
    field.batches["millrace"] = iter(mr.Feed(view_of(name, folder), batch=batch, seed=7))
    field.add("DataLoader per sample", peers.per_sample, (0, 1, 2))
    field.add("DataLoader whole batch", peers.whole_batch, (0, 1, 2))
    field.batches["numpy in line"] = in_line(WholeBatch(name, folder, batch, own=False))
    if with_peers:
        field.add_peers()
    return field


def bench(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    field = contestants(name, folder, options.peers)
    for iterator in field.batches.values():
        rate(iterator, BATCH[name], 0.3)
    measures: dict[str, Callable[[], float]] = {
        key: lambda iterator=iterator: settled(lambda: rate(iterator, BATCH[name], options.seconds), 2.0)
        for key, iterator in field.batches.items()
    }
    rounds = interleave(measures, options.rounds)
    found = medians(rounds)
    for key, value in sorted(found.items(), key=lambda item: -item[1]):
        print(f"  {name} {key}: {value:,.0f} samples/s")
    promises = []
    own = ("millrace", "DataLoader", "numpy", "SPDL")
    for against, limit in PROMISES[name].items():
        others = [
            value
            for key, value in found.items()
            if (not key.startswith(own) if against == "peer" else key.startswith(against))
        ]
        if others:
            promises.append(verdict(f"{name}, times {against}", found["millrace"] / max(others), limit))
    return {
        "machine": machine(), "versions": peers.versions(), "batch": BATCH[name], "samples_per_s": found,
        "rounds": rounds, "tried": field.tried, "failed": field.failed, "promises": promises,
    }  # fmt: skip


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
    deadline, used = time.perf_counter() + most_s, cpu_seconds()[1]
    while time.perf_counter() < deadline:
        time.sleep(0.1)
        if (now := cpu_seconds()[1]) - used < 0.02:
            break
        used = now
    return measure()


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


def first_batch(name: str, folder: Path) -> dict[str, Any]:
    """From opening the store to the first batch, in a fresh process with torch imported."""
    command = [sys.executable, "-c", FIRST, str(folder / name), str(BATCH[name])]
    runs = [
        float(subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout)
        for _ in range(5)
    ]
    return {
        "seconds": runs, "promise": verdict(f"{name}, first batch, s", sorted(runs)[2], 0.1, at_least=False)
    }  # fmt: skip


if __name__ == "__main__":
    main()
