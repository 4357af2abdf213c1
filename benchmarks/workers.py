"""Worker processes: how they scale, what it costs to hand over a batch, and how soon the first one comes.

    python -m benchmarks.workers [--seconds 1.0] [--rounds 5] [--no-save]

"transport": the same two arrays (0.5 MB as a W2 batch, or 50 MB) come from one worker process again and again. The limit
is what one would write by hand for this alone: slots in shared memory, and an eventfd in each direction. The others
are a feed, a DataLoader worker and a multiprocessing.Queue. Every consumer touches one number of each batch.
"pipeline" runs the two programs at the end of docs/guide/workers.md as they stand there.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

import millrace as mr
from benchmarks import worker_functions as functions
from benchmarks.common import interleave, medians, save, verdict

GUIDE = Path(__file__).parents[1] / "docs" / "guide" / "workers.md"
SLOTS = 4
fork = multiprocessing.get_context("fork")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=1.0, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    figures = {
        "scaling": scaling(options), "transport": transport(options, 1 << 19), "large": large(options),
        "first_batch": first_batch(options), "pipeline": pipeline(options),
    }  # fmt: skip
    if not options.no_save:
        save("workers", figures)


def feed_of(transform: Any, **options: Any) -> mr.Feed:
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(1025)}), length=1)  # as little as can be gathered
    return mr.Feed(view, batch=32, device="numpy", transform=transform, **{"processes": True, **options})


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Batches per second."""
    for _ in range(SLOTS + 2):  # those that lay ready
        next(batches)["x"][-1, -1]
    count, began = 0, time.perf_counter()
    while time.perf_counter() < began + seconds:
        next(batches)["x"][-1, -1]
        count += 1
    return count / (time.perf_counter() - began)


def scaling(options: argparse.Namespace) -> dict[str, Any]:
    with feed_of(functions.busy, workers=1) as one, feed_of(functions.busy, workers=2) as two:
        batches = {"1": iter(one), "2": iter(two)}
        # One at a time, and only as long as it is measured: workers fill their slots, and then rest.
        found = interleave(_rates(batches, options.seconds), options.rounds)
    best = medians(found)
    return {
        "batches_per_s": found,
        "promise": verdict("a 20 ms transform, 2 processes against 1", best["2"] / best["1"], 1.8),
    }


def _rates(contestants: dict[str, Iterator[Any]], seconds: float) -> dict[str, Callable[[], float]]:
    return {name: (lambda batches=batches: rate(batches, seconds)) for name, batches in contestants.items()}


def by_hand(num_bytes: int) -> Iterator[Any]:
    """Slots of shared memory, and two eventfds that count the free and the full ones."""
    half = num_bytes // 2
    area = mmap.mmap(-1, SLOTS * num_bytes)
    slots = np.frombuffer(area, np.int64).reshape(SLOTS, 2, 32, -1)
    free, full = os.eventfd(SLOTS, os.EFD_SEMAPHORE), os.eventfd(0, os.EFD_SEMAPHORE)

    def produce() -> None:
        made = functions.arrays(num_bytes)
        for number in itertools.count():
            os.eventfd_read(free)
            np.copyto(slots[number % SLOTS, 0], made["x"])
            np.copyto(slots[number % SLOTS, 1], made["y"])
            os.eventfd_write(full, 1)

    worker = fork.Process(target=produce, daemon=True)
    worker.start()
    try:
        assert slots[0, 0].nbytes == half
        for number in itertools.count():
            os.eventfd_read(full)
            yield {"x": slots[number % SLOTS, 0], "y": slots[number % SLOTS, 1]}
            os.eventfd_write(free, 1)
    finally:
        worker.kill()
        worker.join()


def by_queue(num_bytes: int) -> Iterator[Any]:
    batches: Any = fork.Queue(maxsize=SLOTS)

    def produce() -> None:
        while True:
            batches.put(functions.arrays(num_bytes))

    worker = fork.Process(target=produce, daemon=True)
    worker.start()
    try:
        while True:
            yield batches.get()
    finally:
        worker.kill()
        worker.join()


class Prepared(Dataset[Any]):
    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, number: int) -> Any:
        import torch

        return {name: torch.from_numpy(value) for name, value in functions.arrays(self._num_bytes).items()}


def by_dataloader(num_bytes: int) -> Iterator[Any]:
    return iter(DataLoader(Prepared(num_bytes), batch_size=None, num_workers=1, prefetch_factor=SLOTS))


def transport(options: argparse.Namespace, num_bytes: int) -> dict[str, Any]:
    with feed_of(functions.half_megabyte, workers=1, depth=SLOTS) as feed, _closing(num_bytes) as others:
        contestants = {"feed": iter(feed), **others}
        found = interleave(_rates(contestants, options.seconds), options.rounds)
    times = {name: 1e6 / value for name, value in medians(found).items()}
    print("  us per batch of 0.5 MB:", {name: round(value, 1) for name, value in times.items()})
    return {
        "us_per_batch": times, "rounds": found,
        "promise": verdict("transport, of the slot by hand", times["feed"] / times["by hand"], 2.0, at_least=False),
    }  # fmt: skip


@contextlib.contextmanager
def _closing(num_bytes: int) -> Iterator[dict[str, Iterator[Any]]]:
    makers = {"by hand": by_hand, "multiprocessing.Queue": by_queue, "DataLoader": by_dataloader}
    others = {name: make(num_bytes) for name, make in makers.items()}
    yield others
    others["by hand"].close()  # type: ignore[attr-defined]
    others["multiprocessing.Queue"].close()  # type: ignore[attr-defined]


def large(options: argparse.Namespace) -> dict[str, Any]:
    """50 MB at a time, against one copy of as many bytes within a process."""
    source = np.ones(50 << 20, np.uint8)
    target = np.ones_like(source)

    def copies() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() < began + options.seconds:
            np.copyto(target, source)
            count += 1
        return count / (time.perf_counter() - began)

    with feed_of(functions.fifty_megabytes, workers=1, depth=SLOTS) as feed:
        batches = iter(feed)
        found = interleave({"feed": lambda: rate(batches, options.seconds), "memcpy": copies}, options.rounds)
    best = medians(found)
    print("  50 MB batches per second:", {name: round(value, 1) for name, value in best.items()})
    return {
        "batches_per_s": found,
        "promise": verdict("50 MB batches, of the speed of memcpy", best["feed"] / best["memcpy"], 0.8),
    }


def first_batch(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"spawn": [], "forkserver": []}
    for _, method in itertools.product(range(options.rounds), found):
        began = time.perf_counter()
        with feed_of(functions.half_megabyte, workers=8, processes=method) as feed:
            next(iter(feed))
            found[method].append(time.perf_counter() - began)
    slowest = medians(found)
    print("  first batch of 8 processes, s:", {name: round(value, 3) for name, value in slowest.items()})
    return {
        "s": found,
        "promise": verdict("first batch of 8 spawned processes, s", slowest["spawn"], 2.0, at_least=False),
    }


def pipeline(options: argparse.Namespace) -> dict[str, Any]:
    """The two programs of the guide, each as a script with what comes before it there; only the loop is timed."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    setup, names = "\n".join(blocks[:2]), ("by hand", "feed")
    timed = "import time\nbegan = time.perf_counter()\n{}\nprint((time.perf_counter() - began, total))\n"
    lines = {name: len(block.strip().splitlines()) for name, block in zip(names, blocks[-2:], strict=True)}

    def run(block: str) -> float:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "pipeline.py"
            script.write_text(setup + timed.format(block))
            done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=True)
        seconds, total = (float(part) for part in done.stdout.strip("()\n").split(","))
        return total / seconds

    found = interleave(
        {name: (lambda block=block: run(block)) for name, block in zip(names, blocks[-2:], strict=True)}, options.rounds
    )
    best = medians(found)
    print(
        "  samples per second, from the start of the workers to the end:", {k: round(v) for k, v in best.items()}, lines
    )
    return {"samples_per_s": found, "lines": lines, "ratio": best["feed"] / best["by hand"]}


if __name__ == "__main__":
    main()
