"""Threads, cores and busy machines: the ring over threads beside parallel memcpy, and beside numpy where cores are taken.

    python -m benchmarks.cores [--seconds 0.4] [--rounds 7] [--no-save]

threads: hot W1 (benchmarks/feed.py) over 1, 2, 4, 8, 16 threads, and as many threads that copy the same bytes.
latency: one batch of 50 MB (8,192 x 128 x 12 float32) over threads; nothing is made ahead.
busy:    W1 and W2 beside numpy in line: quiet, beside one and two processes that spin, and on one core. Each contestant
         is a process of its own; they are measured in turn. Numpy gathers from one array in memory, in large pages, and
         gives views; "own" gives x and y in arrays of their own, as a feed does. "ram" is a feed with tier="ram".
No more threads than cores make batches of hot data, so figures beyond the cores of a machine repeat the last one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict
from benchmarks.feed import make_stores, rate, view_of
from benchmarks.handmade import WholeBatch, in_line

THREADS = (1, 2, 4, 8, 16)
BATCHES = {"W1": 512, "W2": 32}
NUMPY = ("numpy", "own")
SPIN = "while True: pass"
PLACES: dict[str, tuple[int, str | None]] = {  # processes that spin; the cores of the contestant
    "quiet": (0, None), "one busy neighbour": (1, None), "two busy neighbours": (2, None), "one core": (0, "0"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.4, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument(
        "--contestant", nargs=2, help="a process of its own: ring, ram, numpy or own, and the folder of stores"
    )
    options = parser.parse_args()
    if options.contestant:
        return answer(options.contestant[0], Path(options.contestant[1]))
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_stores(folder)
        figures = {"threads": over_threads(folder, options), "latency": latency(options), "busy": busy(folder, options)}
        if not options.no_save:
            save("cores", figures)
    finally:
        shutil.rmtree(folder)


def copies(source: np.ndarray[Any, Any], num_threads: int, num_bytes: int, seconds: float) -> float:
    """Bytes per second of threads that copy runs of as many bytes as a batch, from an array as large as W1."""
    done, deadline = [0] * num_threads, time.perf_counter() + seconds

    def copy(k: int) -> None:
        rng, target = np.random.default_rng(k), np.empty(num_bytes, np.uint8)
        while time.perf_counter() < deadline:
            first = int(rng.integers(0, len(source) - num_bytes))
            np.copyto(target, source[first : first + num_bytes])
            done[k] += 1

    workers = [threading.Thread(target=copy, args=(k,)) for k in range(num_threads)]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) * num_bytes / (time.perf_counter() - started)


def over_threads(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    batch, view = BATCHES["W1"], view_of("W1", folder)
    feeds = {count: mr.Feed(view, batch=batch, seed=7, workers=count) for count in THREADS}
    iterators = {count: iter(feed) for count, feed in feeds.items()}
    first = next(iterators[1])
    num_bytes, source = first.x.nbytes + first.y.nbytes, np.ones(512_000_000, np.uint8)
    measures: dict[str, Callable[[], float]] = {}
    for count in THREADS:
        measures[f"ring, {count}"] = lambda c=count: rate(iterators[c], batch, options.seconds) / batch * num_bytes
        measures[f"memcpy, {count}"] = partial(copies, source, count, num_bytes, options.seconds)
    rounds = interleave(measures, options.rounds)
    found = medians(rounds)
    report = {count: feed.report() for count, feed in feeds.items()}
    for feed in feeds.values():
        feed.close()
    promises = []
    for count in THREADS:
        ring, copied = found[f"ring, {count}"], found[f"memcpy, {count}"]
        used = report[count].workers
        print(f"  W1, {count} threads ({used} used): {ring / 1e9:.2f} GB/s; memcpy {copied / 1e9:.2f} GB/s")
        promises.append(verdict(f"W1, {count} threads, of memcpy by as many", ring / copied, 0.6))
    best = max(found[f"ring, {count}"] for count in THREADS[:3])
    promises.append(verdict("W1, 16 threads of the best of fewer", found["ring, 16"] / best, 0.95))
    return {"bytes_per_s": found, "rounds": rounds, "promises": promises}


def latency(options: argparse.Namespace) -> dict[str, Any]:
    rows = np.random.default_rng(0).normal(size=(4_000_000, 12)).astype(np.float32)
    view = mr.Windows(mr.from_arrays({"values": rows}, kind="series"), lookback=128, horizon=1, target=[0])
    feeds = {count: mr.Feed(view, batch=8192, depth=1, seed=7, workers=count) for count in THREADS}
    iterators = {count: iter(feed) for count, feed in feeds.items()}

    def once(iterator: Iterator[Any]) -> float:
        next(iterator)  # what lay ready
        started = time.perf_counter()
        next(iterator)
        return time.perf_counter() - started

    for iterator in iterators.values():
        once(iterator)
    rounds = interleave({str(c): lambda i=i: once(i) for c, i in iterators.items()}, 3 * options.rounds)
    found = medians(rounds)
    for count, feed in feeds.items():
        print(f"  50 MB batch, {count} threads: {found[str(count)] * 1e3:.1f} ms, {feed.report().pieces} pieces")
        feed.close()
    return {"seconds": found, "rounds": rounds}


def answer(kind: str, folder: Path) -> None:
    """A contestant: for each line with a workload and seconds, its samples per second."""
    tier = "ram" if kind == "ram" else None
    feeds = {name: mr.Feed(view_of(name, folder), batch=batch, seed=7, tier=tier) for name, batch in BATCHES.items()}
    iterators = {
        name: in_line(WholeBatch(name, folder, batch, own=kind == "own")) if kind in NUMPY else iter(feeds[name])
        for name, batch in BATCHES.items()
    }
    for line in sys.stdin:
        name, seconds = line.split()
        found = rate(iterators[name], BATCHES[name], float(seconds))
        report = None if kind in NUMPY else feeds[name].report()
        print(found, report.made_in_line if report else 0, report.made_again if report else 0, flush=True)


class Contestant:
    def __init__(self, kind: str, folder: Path, cores: str | None) -> None:
        command = [sys.executable, "-m", "benchmarks.cores", "--contestant", kind, str(folder)]
        prefix = ["taskset", "-c", cores] if cores else []
        self.process = subprocess.Popen([*prefix, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.counted: list[int] = []

    def rate(self, name: str, seconds: float) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(name, seconds, file=self.process.stdin, flush=True)
        found, *counted = self.process.stdout.readline().split()
        self.counted = [int(number) for number in counted]
        return float(found)


def busy(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    seconds = options.seconds
    for place, (num_spinning, cores) in PLACES.items():
        contestants = {kind: Contestant(kind, folder, cores) for kind in ("ring", "ram", *NUMPY)}
        spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num_spinning)]
        try:
            for name in BATCHES:
                for contestant in contestants.values():
                    contestant.rate(name, 0.3)
                measures = {kind: partial(one.rate, name, seconds) for kind, one in contestants.items()}
                rounds = interleave(measures, options.rounds)
                here, again = contestants["ring"].counted
                print(f"  {name}, {place}: the loop made {here} batches itself, {again} of them again")
                case: dict[str, Any] = {"rounds": rounds, "made_here": here, "made_again": again}
                for kind, twin in (("ring", "numpy"), ("ring", "own"), ("ram", "numpy"), ("ram", "own")):
                    ratio = statistics.median(a / b for a, b in zip(rounds[kind], rounds[twin], strict=True))
                    what = f"{name}, {place}, {kind} times {'numpy' if twin == 'numpy' else 'numpy with arrays of its own'}"
                    case[f"{kind}/{twin}"] = verdict(what, ratio, 1)
                found[f"{name}, {place}"] = case
        finally:
            for process in (*spinning, *(one.process for one in contestants.values())):
                process.kill()
                process.wait()
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
