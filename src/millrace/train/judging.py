"""Judging: the verdict on each stretch of steps between two log lines, and on the whole run."""

from __future__ import annotations

from dataclasses import replace

from millrace.feed.feed import Feed
from millrace.meter.interval import Interval
from millrace.meter.verdict import LEAST_BATCHES, Verdict, judge
from millrace.train.dist import World
from millrace.train.pace import Pace
from millrace.train.stepper import Stepper

# Forward and backward pass, in times of the forward pass: only the forward pass is sure not to wait for other ranks.
PASSES = 3


class Judging:
    """Reads the counters of this rank's feed, and of all ranks their own times. Evaluations and saves are left out."""

    def __init__(self, feed: Feed, pace: Pace, stepper: Stepper, world: World) -> None:
        self._feed, self._pace, self._stepper, self._world = feed, pace, stepper, world
        # On a GPU the passes only queue kernels; the parts of a sharded model meet within them.
        computes_here = world.device.type == "cpu" and stepper.config.train.parallel == "ddp"
        self._passes = PASSES if computes_here else 0
        self._readings: list[Interval] = []
        self._first: Interval | None = None  # after the start of the pipeline
        self._deaths = 0

    def stretch(self) -> Verdict | None:
        """The verdict since the last log line; over as many lines as it takes to have enough batches.

        All ranks call it together.
        """
        own_s = self._pace.data_s + self._passes * self._stepper.forward_s
        ranks = self._world.gather(own_s)
        report = self._feed.report()
        if report is None:
            return None
        now = replace(report.interval(), seconds=self._pace.seconds, rank_s=ranks)
        while len(self._readings) > 1 and now.batches - self._readings[1].batches >= LEAST_BATCHES:
            self._readings.pop(0)
        before = self._readings[0] if self._readings else None
        self._readings.append(now)
        if self._first is None and now.batches >= LEAST_BATCHES:
            self._first = now
        if before is None or now.batches - before.batches < LEAST_BATCHES:
            return judge(now)
        return judge(now - before)

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
        later = judge(last - self._first) if self._first is not None else None
        return judge(last) if later is None else later
