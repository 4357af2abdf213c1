"""What counting costs a batch, and how near ``millrace bench --autotune`` comes to a search over all settings.

    python -m benchmarks.meter [--rounds 5] [--no-save]

"counters": ``Iteration.__next__`` as it is against the same code without its counters, on a feed that does nothing else;
and the clock calls of the core for a batch, each at the price of a Python call that asks the same clock.
"""

from __future__ import annotations

import argparse
import inspect
import statistics
import textwrap
import time
from typing import Any

import numpy as np

import millrace as mr
from benchmarks.common import save, verdict
from millrace.feed import iteration, speed

CORE_CLOCKS = 6  # at most, for a batch: taking it, waiting, opening its slot, filling it
COUNTERS = ("began = perf_counter()", "self._next_s += perf_counter() - began")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    figures = {"counters": counters(), "autotune": autotune(options.rounds)}
    if not options.no_save:
        save("meter", figures)


def counters(rounds: int = 15, batches: int = 20_000) -> dict[str, Any]:
    source = textwrap.dedent(inspect.getsource(iteration.Iteration.__next__))
    for line in COUNTERS:
        assert line in source
        source = source.replace(line, "pass")
    names = dict(vars(iteration))
    exec(source, names)
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(4096, dtype=np.uint16)}), length=1)
    kinds = {"with": iteration.Iteration.__next__, "without": names["__next__"]}
    found: dict[str, list[float]] = {name: [] for name in kinds}
    with mr.Feed(view, batch=2, device="numpy") as feed:
        taken = iter(feed)
        for _ in range(rounds):
            for name, take in kinds.items():
                began = time.perf_counter()
                for _ in range(batches):
                    take(taken)
                found[name].append((time.perf_counter() - began) / batches)
    python_s = statistics.median(a - b for a, b in zip(found["with"], found["without"], strict=True))
    clock_s = min(_clock() for _ in range(5))
    total_us = 1e6 * (max(python_s, 0) + CORE_CLOCKS * clock_s)
    print(f"  Python {python_s * 1e9:.0f} ns, a clock {clock_s * 1e9:.0f} ns, batch {min(found['with']) * 1e6:.2f} us")
    return {
        "python_ns": python_s * 1e9, "clock_ns": clock_s * 1e9, "core_clocks": CORE_CLOCKS, "us_per_batch": found,
        "promise": verdict("counters, us per batch", total_us, 0.5, at_least=False),
    }  # fmt: skip


def _clock(count: int = 200_000) -> float:
    clock, numbers = time.perf_counter_ns, range(count)
    began = time.perf_counter()
    for _ in numbers:
        clock()
    return (time.perf_counter() - began) / count


def autotune(rounds: int) -> dict[str, Any]:
    rows = np.random.default_rng(0).normal(size=(400_000, 16)).astype(np.float32)
    view = mr.Windows(mr.from_arrays({"values": rows}, kind="series"), lookback=64, horizon=8)
    batch, ratios, each = 1024, [], []
    for _ in range(rounds):
        best, _ = speed.autotune(view, batch=batch, within_s=8)
        grid = speed.choices(0.0, has_functions=False)
        rates: list[list[float]] = [[] for _ in grid]
        for _ in range(3):
            for setting, own in zip(grid, rates, strict=True):
                own.append(speed.speed(view, batch=batch, seconds=0.3, **setting))
        medians = [statistics.median(own) for own in rates]
        ratios.append(medians[grid.index(best)] / max(medians))
        each.append(
            {
                "found": best,
                "grid": grid[int(np.argmax(medians))],
                "ratio": ratios[-1],
                "spread": min(medians) / max(medians),
            }
        )
    print("  found, best of the grid:", [(e["found"], e["grid"]) for e in each])
    return {"rounds": each, "promise": verdict("autotune, of the best of the grid", statistics.median(ratios), 0.9)}


if __name__ == "__main__":
    main()
