"""Verdicts on loops that something known slows down: how often are they right?

    python -m benchmarks.verdicts [--seed 7] [--cases 120] [--no-save]

Each case slows one stage down: by 1.2 to 5 times what the rest needs. ``millrace.testing`` does that and knows nothing of
verdicts. A quarter or more of the cases are slow in their training step alone. Stages mostly sleep, so cases do not
disturb each other; ``disk`` reads from a store that was dropped from memory.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import millrace as mr
from benchmarks.common import save, verdict
from millrace.meter.interval import Interval
from millrace.meter.verdict import judge
from millrace.testing.device import paced_gpu
from millrace.testing.servers import RedisServer
from millrace.testing.slow import (
    Ranks,
    holding_transform,
    python_transform,
    queue_worker,
    same,
    slow_disk,
    slow_gather,
    slow_transform,
)

WARM, COUNTED = 10, 60  # batches
BOUND = {
    stage: f"input-bound: {stage}" for stage in ("disk", "transform", "gather", "transfer", "queue", "straggler rank")
}
STAGES = {**BOUND, "compute": "compute-bound"}
FORMS = {
    "disk": ("cold",), "gather": ("sleep",), "transform": ("one thread", "threads", "process", "holds the GIL", "plain Python"),
    "transfer": ("simulated GPU",), "queue": ("Redis",), "straggler rank": ("its compute", "its data"),
    "compute": ("one thread", "process", "simulated GPU", "Redis", "ranks", "cold"),
}  # fmt: skip


class Case(NamedTuple):
    stage: str
    form: str
    severity: float
    step_s: float  # of the training, except where that is what is slow


def cases(seed: int, count: int = 120) -> list[Case]:
    """A quarter and two are compute-bound; the others go round the stages."""
    rng = random.Random(seed)
    compute = max(1, count // 4 + 2) if count > 7 else 1
    names = ["compute"] * compute + [list(BOUND)[k % len(BOUND)] for k in range(count - compute)]
    turn: Counter[str] = Counter()
    found = []
    for stage in names:
        form = FORMS[stage][turn[stage] % len(FORMS[stage])]
        turn[stage] += 1
        found.append(Case(stage, form, round(1.2 * (5 / 1.2) ** rng.random(), 2), rng.uniform(0.004, 0.008)))
    rng.shuffle(found)
    return found


@dataclass
class Bench:
    """Stores and a server that all cases share."""

    folder: Path
    hot: mr.View
    url: str | None
    number: int = 0

    @classmethod
    @contextlib.contextmanager
    def open(cls, *, with_redis: bool = True, rows: int = 1_000_000) -> Iterator[Bench]:
        values = np.random.default_rng(0).normal(size=(rows, 16)).astype(np.float32)
        with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
            with mr.StoreWriter(
                f"{name}/cold", kind="series", columns={"values": mr.Column("float32", (16,))}
            ) as writer:
                writer.extend({"values": values}, np.array([0, rows]))
            server = stack.enter_context(RedisServer()) if with_redis else None
            hot = windows(mr.from_arrays({"values": values}, kind="series"))
            yield cls(Path(name), hot, None if server is None else server.url)

    def measure(self, case: Case) -> Interval:
        self.number += 1
        slow_s = case.step_s * case.severity
        fast_s = case.step_s / case.severity
        make_s = fast_s if case.stage == "compute" else slow_s
        if case.stage == "straggler rank" or case.form == "ranks":
            return self._ranks(case)
        form = case.form
        if form == "simulated GPU":
            return self._on_gpu(case.step_s, make_s)
        if form == "Redis":
            return self._queued(case.step_s, make_s)
        if form == "cold":
            gc.collect()  # pages that are mapped would stay
            path = self.folder / "cold"
            with slow_disk(path, make_s):
                return self._loop(case.step_s, view=windows(mr.open_store(path)), transform=same, workers=1)
        if form == "sleep":
            with slow_gather(make_s):
                return self._loop(case.step_s, transform=same, workers=1)
        if form == "holds the GIL":
            return self._loop(case.step_s, transform=holding_transform(make_s), workers=2)
        if form == "plain Python":
            return self._loop(case.step_s, transform=python_transform(make_s), workers=2)
        workers = 2 if form == "threads" else 1
        options = {"workers": workers, "processes": form == "process"}
        return self._loop(case.step_s, transform=slow_transform(make_s * workers), **options)

    def _loop(self, step_s: float, *, view: Any = None, batch: int = 32, **options: Any) -> Interval:
        with mr.Feed(view or self.hot, batch=batch, seed=self.number, device="numpy", **options) as feed:
            return watch(feed, lambda: time.sleep(step_s))

    def _on_gpu(self, step_s: float, copy_s: float) -> Interval:
        with paced_gpu(copy_s) as gpu, mr.Feed(self.hot, batch=32, device="cuda", transform=same, workers=1) as feed:
            return watch(feed, lambda: gpu.run_kernel(step_s))

    def _queued(self, step_s: float, make_s: float) -> Interval:
        assert self.url is not None
        url, run = f"{self.url}?deadline_s=60&lease_s=5&alive_s=60&timeout_s=20", self.folder / f"run{self.number}"
        transform, view = slow_transform(make_s), windows(mr.open_store(self.folder / "cold"))
        with (
            mr.Feed(view, batch=32, device="numpy", transform=transform, queue=url, run=run) as feed,
            queue_worker(url, run.name, {"transform": transform}),
        ):
            return watch(feed, lambda: time.sleep(step_s))

    def _ranks(self, case: Case, count: int = 3) -> Interval:
        late = self.number % count if case.stage == "straggler rank" else -1
        slow_s = case.step_s * case.severity
        feeds = []
        for rank in range(count):
            is_late = rank == late and case.form == "its data"
            make_s = slow_s if is_late else case.step_s / 4
            feeds.append(
                mr.Feed(
                    self.hot,
                    batch=96,
                    rank=rank,
                    world=count,
                    device="numpy",
                    workers=1,
                    transform=slow_transform(make_s),
                )
            )
        batches = [iter(feed) for feed in feeds]

        def step(rank: int) -> None:
            next(batches[rank])
            time.sleep(slow_s if rank == late and case.form == "its compute" else case.step_s)

        ranks = Ranks(count, step)
        ranks.run(WARM)
        before = replace(interval(feeds[0]), rank_s=tuple(ranks.own_s))
        ranks.run(COUNTED)
        after = replace(interval(feeds[0]), rank_s=tuple(ranks.own_s))
        for feed in feeds:
            feed.close()
        return after - before


def windows(store: Any) -> mr.View:
    return mr.Windows(store, lookback=64, horizon=1)


def interval(feed: mr.Feed) -> Interval:
    report = feed.report()
    assert report is not None
    return report.interval()


def watch(feed: mr.Feed, step: Callable[[], Any]) -> Interval:
    """What a loop counted, after its start."""
    for number, _ in enumerate(feed, start=1):
        step()
        if number == WARM:
            before = interval(feed)
        if number == WARM + COUNTED:
            break
    return interval(feed) - before


def run(seed: int, count: int = 120, say: Callable[[str], None] = print) -> dict[str, Any]:
    """The confusion matrix: for each stage, how often each verdict was given."""
    say(f"seed {seed}")
    wrong, given = [], {name: Counter[str]() for name in STAGES}
    with Bench.open() as bench:
        for case in cases(seed, count):
            found = judge(bench.measure(case))
            name = "none" if found is None else found.name
            given[case.stage][name] += 1
            if name != STAGES[case.stage]:
                wrong.append({**case._asdict(), "verdict": str(found)})
                say(f"  wrong: {case}: {found}")
    right = sum(counts[STAGES[stage]] for stage, counts in given.items())
    return {
        "seed": seed, "cases": count, "right": right, "share": right / count,
        "confusion": {stage: dict(counts) for stage, counts in given.items()}, "wrong": wrong,
    }  # fmt: skip


def table(confusion: dict[str, dict[str, int]]) -> list[str]:
    """The matrix as the guide shows it."""
    columns = [*STAGES.values(), "balanced"]
    short = [column.removeprefix("input-bound: ") for column in columns]
    lines = [f"| slowed down | {' | '.join(short)} |", f"|---|{'---|' * len(columns)}"]
    lines += [f"| {s} | {' | '.join(str(c.get(name) or '') for name in columns)} |" for s, c in confusion.items()]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 16))
    parser.add_argument("--cases", type=int, default=120)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    found = run(options.seed, options.cases)
    print("\n".join(table(found["confusion"])))
    found["promise"] = verdict("right verdicts", found["share"], 0.95)
    if not options.no_save:
        save("verdicts", found)


if __name__ == "__main__":
    main()
