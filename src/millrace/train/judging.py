"""Judging: the verdict on each stretch of steps between two log lines, and on the whole run."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from millrace.feed.feed import Feed
from millrace.meter.interval import Interval
from millrace.meter.verdict import LEAST_BATCHES, Verdict, judge
from millrace.train.dist import World
from millrace.train.pace import Pace
from millrace.train.stepper import Stepper

# Forward and backward pass, in times of the forward pass: only the forward pass is sure not to wait for other ranks.
PASSES = 3
# What `millrace train` calls the settings that remedies name.
KEYS = {
    "raise workers=": "raise data.workers", "raise depth=": "raise data.depth", "processes=True": "data.processes = true",
    "decode= and transform=": "data.transform", ", or read runs of samples: order=BlockShuffled(...)": "",
    " hold the GIL": " holds the GIL",
}  # fmt: skip


class Judging:
    """Reads the counters of this rank's feed, and of all ranks their own times. Evaluations and saves are left out."""

    def __init__(self, feed: Feed, pace: Pace, stepper: Stepper, world: World) -> None:
        self._feed, self._pace, self._stepper, self._world = feed, pace, stepper, world
        # On a GPU the passes only queue kernels; the parts of a sharded model meet within them.
        computes_here = world.device.type == "cpu" and stepper.config.train.parallel == "ddp"
        self._passes = PASSES if computes_here else 0
        self._deaths = 0
        self._readings: list[Reading] = []
        self._first: Reading | None = None  # after the start of the pipeline
        self._last: Reading | None = None

    def stretch(self) -> Verdict | None:
        """The verdict since the last log line; over as many lines as it takes to have enough batches.

        All ranks call it together.
        """
        data, forward = self._world.gather(self._pace.data_s), self._world.gather(self._stepper.forward_s)
        report = self._feed.report()
        if report is None:
            return None
        now = Reading(replace(report.interval(), seconds=self._pace.seconds), data, forward)
        while len(self._readings) > 1 and now.batches - self._readings[1].batches >= LEAST_BATCHES:
            self._readings.pop(0)
        before = self._readings[0] if self._readings else None
        self._readings.append(now)
        if self._first is None and now.batches >= LEAST_BATCHES:
            self._first = now
        if before is None or now.batches - before.batches < LEAST_BATCHES:
            return self._judged(now, None)
        return self._judged(now, before)

    def rates(self) -> dict[str, float]:
        """What this rank's feed counted per second since the last call."""
        now, before = self._readings[-1] if self._readings else None, self._last
        self._last = now
        if now is None or now is before:
            return {}
        return (now.counted if before is None else now.counted - before.counted).rates()

    def ends(self) -> tuple[str, ...]:
        """How the last worker processes of this rank ended since it was asked before."""
        report = self._feed.report()
        deaths = 0 if report is None else report.deaths or 0
        new, self._deaths = deaths - self._deaths, deaths
        return () if report is None or new <= 0 else report.ends[-new:]

    def whole(self) -> Verdict | None:
        """The verdict on all steps up to the last log line, without the start where there are enough others."""
        if not self._readings:
            return None
        last = self._readings[-1]
        later = self._judged(last, self._first) if self._first is not None else None
        return self._judged(last, None) if later is None else later

    def _judged(self, last: Reading, before: Reading | None) -> Verdict | None:
        verdict = judge(last.since(before, self._passes))
        return None if verdict is None else in_keys(verdict)


def in_keys(verdict: Verdict) -> Verdict:
    """The verdict, with the settings as the configuration of a run names them."""
    remedy = verdict.remedy
    for word, key in KEYS.items():
        remedy = None if remedy is None else remedy.replace(word, key)
    return replace(verdict, remedy=remedy)


class Reading(NamedTuple):
    """The counters of this rank's feed at a moment, and of each rank its seconds of waiting for data and of forward passes."""

    counted: Interval
    data_s: tuple[float, ...]
    forward_s: tuple[float, ...]

    @property
    def batches(self) -> int:
        return self.counted.batches

    def since(self, before: Reading | None, passes: int) -> Interval:
        """What was counted since, with the own time of each rank; passes take at most the time that there was."""
        counted = self.counted if before is None else self.counted - before.counted
        data, forward = self.data_s, self.forward_s
        if before is not None:
            data = tuple(now - was for now, was in zip(data, before.data_s, strict=True))
            forward = tuple(now - was for now, was in zip(forward, before.forward_s, strict=True))
        fit = min((counted.seconds - d) / f for d, f in zip(data, forward, strict=True)) if all(forward) else passes
        times = min(passes, max(fit, 1.0)) if passes else 0
        own = tuple(d + times * f for d, f in zip(data, forward, strict=True))
        return replace(counted, rank_s=own, rank_data_s=data)
