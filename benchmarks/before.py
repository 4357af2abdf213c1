"""Hot feeds of this code beside those of an earlier one: is anything slower than before?

    git worktree add /tmp/before COMMIT && (cd /tmp/before && pip install --no-deps -e .)    # or only its src/, built
    python -m benchmarks.before /tmp/before/src [--pairs 31] [--seconds 0.5] [--workload W1] [--no-save]

Each code runs in a process of its own over the same stores in /dev/shm. They are measured in pairs, in turn, each first
in every other pair, so that drift of the machine hits both alike. The figure is the upper quartile of the ratios: a
busy neighbour makes single pairs worse, never better.

W1 and W2 are those of benchmarks/feed.py. W3: events of 1 to about 1,500 rows x 6 float32 and a label, batch 256.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

LIMIT = 0.97
# Runs with either code, so it may only use what both have.
MEASURE = """
import sys, time
import millrace as mr
name, folder, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
store = mr.open_store(f"{folder}/{name}")
if name == "W1":
    view, batch = mr.Windows(store, lookback=64, horizon=8, target=[3]), 512
elif name == "W2":
    view, batch = mr.Blocks(store, length=1024), 32
else:
    view, batch = mr.Records(store), 256
batches = iter(mr.Feed(view, batch=batch, seed=7))
for _ in sys.stdin:
    count, began = 0, time.perf_counter()
    while (passed := time.perf_counter() - began) < seconds:
        for _ in range(20):
            next(batches)
        count += 20
    print(count * batch / passed, flush=True)
"""


class Code:
    """A process that runs feeds with the code in ``source`` and measures when it is asked."""

    def __init__(self, source: Path, name: str, folder: Path, seconds: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", MEASURE, name, str(folder), str(seconds)], env={**os.environ, "PYTHONPATH": str(source)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def rate(self) -> float:
        """Samples per second over the next stretch."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    from benchmarks.common import machine, save, share, verdict

    parser = argparse.ArgumentParser()
    parser.add_argument("before", type=Path, help="the src folder of the earlier code, with its C core built")
    parser.add_argument("--workload", choices=("W1", "W2", "W3"), action="append", help="all when left out")
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    figures: dict[str, Any] = {}
    try:
        for name in options.workload or ("W1", "W2", "W3"):
            _make_store(name, folder)
            ratios = _ratios(options, name, folder)
            quartile = statistics.quantiles(ratios, n=4)[2]
            figures[name] = {
                **share(ratios), "promises": [verdict(f"{name}, times before, upper quartile", quartile, LIMIT)]
            }  # fmt: skip
            shutil.rmtree(folder / name)
    finally:
        shutil.rmtree(folder)
    if not options.no_save:
        save("before", {"machine": machine(), **figures})


def _make_store(name: str, folder: Path) -> None:
    import millrace as mr
    from benchmarks import feed

    if name != "W3":
        feed.make_store(name, folder)
        return
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(60), 0.8, 100_000).astype(np.int64), 1, 1500)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    columns = {"hits": mr.Column("float32", (6,)), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(folder / name, kind="records", columns=columns) as writer:
        writer.extend(
            {"hits": rng.standard_normal((int(offsets[-1]), 6), np.float32), "label": np.arange(len(lengths))}, offsets
        )


def _ratios(options: argparse.Namespace, name: str, folder: Path) -> list[float]:
    now = Path(__file__).parents[1] / "src"
    codes = [Code(source, name, folder, options.seconds) for source in (options.before, now)]
    try:
        for code in codes:
            code.rate()
        ratios = []
        for pair in range(options.pairs):
            rates = {number: codes[number].rate() for number in ((0, 1) if pair % 2 else (1, 0))}
            ratios.append(rates[1] / rates[0])
        return ratios
    finally:
        for code in codes:
            code.close()


if __name__ == "__main__":
    main()
