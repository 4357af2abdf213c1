"""Ray and Dask against processes of this machine, 2 workers each: start-up, the cost of a task, and tasks that work.

    python -m benchmarks.engines [--task-seconds 5]

A cluster is started once. Then rounds are interleaved: tasks that count, each about so many seconds of one core, and empty
tasks. Tasks of a preparation take 5 s and more, so that they cost relatively less than the shorter ones of the default.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import interleave, medians, save, verdict
from millrace.prepare.engines.choice import NAMES, open_engine
from millrace.prepare.engines.engine import Engine

WORKERS, TASKS, ROUNDS, EMPTY = 2, 8, 3, 200
TRIED_STEPS = 10_000_000  # to find how many a second takes


def count(steps: int) -> int:
    """Work of one core, without memory or disk."""
    total = 0
    for number in range(steps):
        total += number & 3
    return total


def steps_of(task_seconds: float) -> int:
    """Steps that take one core so long, by a try before clusters are started."""
    began = time.perf_counter()
    count(TRIED_STEPS)
    return int(TRIED_STEPS * task_seconds / (time.perf_counter() - began))


def seconds(engine: Engine, tasks: list[int]) -> float:
    from benchmarks import engines  # as workers know it

    began = time.perf_counter()
    results = list(engine.run(engines.count, tasks))
    assert len(results) == len(tasks)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task-seconds", type=float, default=1.5, help="how long one task works, about")
    steps = steps_of(parser.parse_args().task_seconds)
    engines = {name: open_engine(name, None, WORKERS, 0) for name in NAMES}
    try:
        start_s = {name: seconds(engine, [0] * WORKERS) for name, engine in engines.items()}
        found = medians(
            interleave({name: lambda e=engine: seconds(e, [steps] * TASKS) for name, engine in engines.items()}, ROUNDS)
        )
        empty = medians(
            interleave({name: lambda e=engine: seconds(e, [0] * EMPTY) for name, engine in engines.items()}, ROUNDS)
        )
    finally:
        for engine in engines.values():
            engine.close()
    figures: dict[str, Any] = {
        "start_s": start_s,
        "seconds_of_8_tasks": found,
        "seconds_of_one_task": found["local"] * WORKERS / TASKS,
        "ms_per_empty_task": {name: 1000 * value / EMPTY for name, value in empty.items()},
    }
    for name, value in figures.items():
        print(name, value)
    promises = [
        verdict(f"{name} against local processes, tasks that work", found[name] / found["local"], 1.25, at_least=False)
        for name in NAMES[1:]
    ]
    save("engines", {**figures, "promises": promises})


if __name__ == "__main__":
    main()
