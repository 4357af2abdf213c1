"""Feeding through Redis: what a batch costs on its way, what more workers give, and whether a loop waits.

    python -m benchmarks.queue [--seconds 3] [--rounds 5]

1. Batches of 0.5 MiB from one worker, against a bare redis-py SET + GET of the same values between two processes.
2. With a transform that sleeps 20 ms: two workers against one.
3. At depth 4 with workers that keep up: how much of its time a loop of 20 ms steps waits.

Server, workers and trainer are processes of this machine; those that take turns are measured in turn.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict
from millrace.testing.servers import RedisServer

LENGTH, BATCH = 1024, 32  # x and y as int64: 0.5 MiB a batch
ROOT = Path(__file__).parents[1]


def sleep_20_ms(batch: Any, rng: Any) -> Any:
    time.sleep(0.02)
    return batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--put", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.put:
        put_values(options.put)
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-queue-"))
    try:
        with RedisServer() as server:
            figures = measure(server, make_view(folder), folder, options)
    finally:
        shutil.rmtree(folder)
    save("queue", figures)


def make_view(folder: Path) -> Any:
    with mr.StoreWriter(folder / "store", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": np.random.default_rng(0).integers(0, 50_000, 20_000_000, np.uint16)})
    return mr.Blocks(mr.open_store(folder / "store"), length=LENGTH)


def measure(server: RedisServer, view: Any, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    def through(workers: int, **feed: Any) -> float:
        return batches_per_s(server, view, folder, options.seconds, workers, **feed)

    rates = interleave({"bare": lambda: bare(server, options.seconds), "queue": lambda: through(1)}, options.rounds)
    shares = [ours / theirs for ours, theirs in zip(rates["queue"], rates["bare"], strict=True)]
    slow = interleave({f"{n} workers": lambda n=n: through(n, transform=sleep_20_ms) for n in (1, 2)}, 3)  # type: ignore[misc]
    gain = [two / one for one, two in zip(slow["1 workers"], slow["2 workers"], strict=True)]
    wait = statistics.median(data_wait(server, view, folder, options.seconds) for _ in range(3))
    found = medians({**rates, **slow})
    for name, rate in found.items():
        print(f"  {name}: {rate:,.0f} batches/s")
    return {
        "batch_bytes": BATCH * LENGTH * 16,
        "batches_per_s": found,
        "verdicts": [
            verdict("one worker against bare redis-py SET + GET", statistics.median(shares), 0.7),
            verdict("two workers against one, 20 ms a batch", statistics.median(gain), 1.8),
            verdict("share of its time that a loop of 20 ms steps waits, depth 4", wait, 0.01, at_least=False),
        ],
    }


@contextlib.contextmanager
def working(server: RedisServer, workers: int, *arguments: str) -> Iterator[None]:
    """Workers of run exp1 that wait for it."""
    command = [sys.executable, "-m", "millrace", "worker", server.url, "--run", "exp1", *arguments]
    started = [subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=ROOT) for _ in range(workers)]
    client = server.client()
    try:
        while client.zcard("w:exp1") < workers:
            time.sleep(0.01)
        yield
    finally:
        for process in started:
            process.terminate()
            process.wait()
        client.flushall()


def batches_per_s(server: RedisServer, view: Any, folder: Path, seconds: float, workers: int, **feed: Any) -> float:
    named = ["--transform", "benchmarks.queue:sleep_20_ms"] if feed else []
    with working(server, workers, *named), queue_feed(server, view, folder, **feed) as own:
        batches = iter(own)
        for _ in range(10):
            next(batches)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            next(batches)
            count += 1
        rate = count / (time.perf_counter() - began)
        report = own.report()
        assert report is not None
        assert report.made_by_workers > 0.95 * report.batches, report  # type: ignore[operator]
        return rate


def queue_feed(server: RedisServer, view: Any, folder: Path, **feed: Any) -> mr.Feed:
    return mr.Feed(view, batch=BATCH, device="numpy", queue=server.url, run=folder / "exp1", **feed)


def data_wait(server: RedisServer, view: Any, folder: Path, seconds: float) -> float:
    """The share of its time that a loop spends in ``next()``."""
    with working(server, 1), queue_feed(server, view, folder) as own:
        batches, waited = iter(own), 0.0
        for _ in range(10):
            next(batches)
            time.sleep(0.02)
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            asked = time.perf_counter()
            next(batches)
            waited += time.perf_counter() - asked
            time.sleep(0.02)
        return waited / (time.perf_counter() - began)


def bare(server: RedisServer, seconds: float) -> float:
    """Values per second: another process sets them, four ahead, and this one gets and deletes them."""
    client = server.client()
    client.delete("credits", "ready")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    other = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.queue", "--put", str(server.port)], cwd=ROOT, env=environment
    )
    try:
        client.rpush("credits", *range(4))
        for k in range(10):
            client.blpop("ready")
            client.rpush("credits", 4 + k)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            _, number = client.blpop("ready")
            value = client.get(b"v:" + number)
            assert len(value) == BATCH * LENGTH * 16
            client.unlink(b"v:" + number)
            client.rpush("credits", 14 + count)
            count += 1
        return count / (time.perf_counter() - began)
    finally:
        other.kill()
        other.wait()
        client.flushall()


def put_values(port: int) -> None:
    import redis

    client: Any = redis.Redis(port=port, protocol=2)
    value = np.random.default_rng(0).integers(0, 50_000, BATCH * LENGTH * 2).tobytes()
    while True:
        _, number = client.blpop("credits")
        client.set(b"v:" + number, value, nx=True, px=300_000)
        client.rpush("ready", number)


if __name__ == "__main__":
    main()
