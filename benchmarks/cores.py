"""Threads, cores and busy machines: the ring over threads beside parallel memcpy, and beside numpy where cores are taken.

    python -m benchmarks.cores [--seconds 0.4] [--rounds 7] [--no-save]

threads: hot W1 (benchmarks/feed.py) over 1, 2, 4, 8, 16 threads, and as many threads that copy the same bytes.
latency: one batch of 50 MB (8,192 x 128 x 12 float32) over threads; nothing is made ahead.
busy:    W1 and W2 beside numpy in line: quiet, beside one and two processes that spin, and on one core. Each contestant
         is a process of its own; they are measured in turn.
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
SPIN = "while True: pass"
PLACES: dict[str, tuple[int, str | None]] = {  # processes that spin; the cores of the contestant
    "quiet": (0, None), "one busy neighbour": (1, None), "two busy neighbours": (2, None), "one core": (0, "0"),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0.4, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-save", action="store_true")
    parser.add_argument("--contestant", nargs=2, help="a process of its own: ring or numpy, and the folder of stores")
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
    feeds = {name: mr.Feed(view_of(name, folder), batch=batch, seed=7) for name, batch in BATCHES.items()}
    iterators = {
        name: iter(feeds[name]) if kind == "ring" else in_line(WholeBatch(name, folder, batch, own=False))
        for name, batch in BATCHES.items()
    }
    for line in sys.stdin:
        name, seconds = line.split()
        found = rate(iterators[name], BATCHES[name], float(seconds))
        report = feeds[name].report() if kind == "ring" else None
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
        ring, numpy = (Contestant(kind, folder, cores) for kind in ("ring", "numpy"))
        spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(num_spinning)]
        try:
            for name in BATCHES:
                for contestant in (ring, numpy):
                    contestant.rate(name, 0.3)
                contestants = {"ring": partial(ring.rate, name, seconds), "numpy": partial(numpy.rate, name, seconds)}
                rounds = interleave(contestants, options.rounds)
                ratio = statistics.median(a / b for a, b in zip(rounds["ring"], rounds["numpy"], strict=True))
                here, again = ring.counted
                print(f"  {name}, {place}: the loop made {here} batches itself, {again} of them again")
                promise = verdict(f"{name}, {place}, times numpy in line", ratio, 1)
                found[f"{name}, {place}"] = {
                    "rounds": rounds,
                    "made_here": here,
                    "made_again": again,
                    "promise": promise,
                }
        finally:
            for process in (*spinning, ring.process, numpy.process):
                process.kill()
                process.wait()
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
