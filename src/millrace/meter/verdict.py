"""From an interval of counters to a verdict: what limits the run, how we know, and what to change."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from millrace.meter.interval import Interval

LEAST_ASKED = 4  # times that the loop let go of the GIL: fewer may be chance
LEAST_BATCHES = 8  # fewer are mostly the start: the first batches wait for an empty pipeline
INPUT_SHARE = 0.08  # of the time spent waiting: above, the feed limits. A feed 1.2x too slow waits 17 %
COMPUTE_SHARE = 0.04  # below, the loop hardly waits
REST_SHARE = 0.05  # of their time that workers rest: below, the feed is as fast as the loop, with nothing to spare
BURST_SHARE = 0.3  # workers that rest so much while the loop waits make batches in bursts

HELD_SHARE = 0.4  # of the moments in which the loop let go of the GIL: above, functions hold it while they run
WAIT_SHARE = 0.25  # of the time in functions that other threads wait for the GIL: above, they hold it
FUNCTION_SHARE = 0.8  # of the time that such functions run: above, they limit a loop that needs the GIL itself

REMEDIES = {
    "disk": "copy the store to a faster disk (millrace stage), or read runs of samples: order=BlockShuffled(...)",
    "gather": "raise workers=, or give a sample fewer bytes: a smaller type, fewer columns",
    "transform": "raise workers=, or make decode= and transform= cheaper",
    "transfer": "give a sample fewer bytes: a smaller type, or convert on the device",
    "queue": "start more `millrace worker`, or raise depth=",
}
MISSES = "raise device_bytes=, so that more rows lie on the GPU; or raise workers= for the others"
ON_DEVICE = "raise batch=: all rows lie on the GPU, and each group of batches costs the loop a few kernels"
THREADS = "take processes=True: threads share one GIL; or make decode= and transform= cheaper"
FASTER = "make the model faster; the feed keeps up"
BOTH = "make the model faster; and try processes=True: decode= and transform= hold the GIL, which the loop's own Python needs"
BURSTS = "raise depth=: batches are made in bursts"


@dataclass(frozen=True)
class Verdict:
    """What limits a run. ``gain`` is how many times faster it can become at most by the remedy.

    >>> print(judge(Interval(seconds=10, batches=100, get_s=4, make_s=18, function_s=15, put_wait_s=0, workers=2)))
    input-bound: transform (the loop waited 40% of the time; 83% of making batches was decode and transform); \
take processes=True: threads share one GIL; or make decode= and transform= cheaper: up to 1.7x faster
    """

    name: str  # "input-bound: disk|gather|transform|transfer|queue|straggler rank", "compute-bound" or "balanced"
    evidence: str
    remedy: str | None = None
    gain: float | None = None

    @property
    def is_input_bound(self) -> bool:
        return self.name.startswith("input-bound")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        remedy = "" if self.remedy is None else f"; {self.remedy}"
        gain = "" if self.gain is None else f": up to {self.gain:.{1 if self.gain < 10 else 0}f}x faster"
        return f"{self.name} ({self.evidence}){remedy}{gain}"


def judge(found: Interval) -> Verdict | None:
    """The verdict on an interval; None if it has too few batches to say."""
    if found.batches < LEAST_BATCHES or found.seconds <= 0:
        return None
    transfer_s = found.transfer_s or 0.0
    waited, moved = found.get_s / found.seconds, transfer_s / found.seconds
    straggler = _straggler(found)
    if straggler is not None:
        return straggler
    if moved >= INPUT_SHARE and moved > waited and transfer_s > (found.behind_s or 0.0):
        # No gain: while the loop waits for a copy, the device may compute an earlier step.
        evidence = f"the loop waited {moved:.0%} of the time for copies, which earlier steps did not hold up"
        return Verdict("input-bound: transfer", evidence, REMEDIES["transfer"])
    if waited >= INPUT_SHARE:
        return _stage(found, waited)
    rested, held = _rested(found), _held(found) or 0.0
    function_share = (found.function_s or 0.0) / found.seconds if held >= HELD_SHARE else 0.0
    if function_share >= FUNCTION_SHARE:
        evidence = (
            f"decode and transform held the GIL in {held:.0%} of the checks, so the loop's own Python stood still"
        )
        return Verdict("input-bound: transform", evidence, THREADS)
    evidence = f"the loop waited {waited:.0%} of the time for data"
    # Workers that mostly rest could give more: then what is left of the waiting is the cost of next() itself.
    if (waited >= COMPUTE_SHARE and (rested is None or rested <= 0.5)) or (rested is not None and rested < REST_SHARE):
        spare = "" if rested is None else f"; workers rested {rested:.0%}"
        return Verdict("balanced", f"{evidence}{spare}", "a faster model would wait for data")
    return Verdict("compute-bound", evidence, BOTH if function_share >= INPUT_SHARE else FASTER)


def _stage(found: Interval, waited: float) -> Verdict:
    """Which stage it was that the loop waited for."""
    evidence = f"the loop waited {waited:.0%} of the time"
    if found.is_queued:
        return _input_bound("queue", waited, f"{evidence} for batches of a queue")
    if found.missed is not None:
        return _on_device(found.missed, waited, evidence)
    made = found.get_s if found.make_s is None else found.make_s
    share = min(1.0, (found.function_s or 0.0) / made) if made > 0 else 0.0
    rested = _rested(found)
    # A loop that makes batches itself does not wait for bursts, however long its threads rest meanwhile.
    is_bursts = rested is not None and rested >= BURST_SHARE and (found.made_here or 0) < BURST_SHARE * found.batches
    bursts = BURSTS if is_bursts else None
    if share > 0.5:
        evidence += f"; {share:.0%} of making batches was decode and transform"
        held = _held(found)
        if (
            held is not None and held >= HELD_SHARE
        ):  # no gain: nobody counts how long the loop's own Python stands still
            return Verdict("input-bound: transform", f"{evidence}, which held the GIL", THREADS)
        may_hold = held is None and found.workers > 1 and not found.is_processes
        return _input_bound("transform", waited, evidence, bursts or (THREADS if may_hold else None))
    if (
        found.is_cold
    ):  # rows are asked for far ahead whatever the depth: 250 batches/s at 4 and at 16, 2,000 by BlockShuffled
        return _input_bound(
            "disk", waited, f"{evidence}; {1 - share:.0%} of making batches was reading rows from the disk"
        )
    return _input_bound(
        "gather", waited, f"{evidence}; {1 - share:.0%} of making batches was copying rows in memory", bursts
    )


def _on_device(missed: float, waited: float, evidence: str) -> Verdict:
    """A feed whose rows lie on the GPU: threads bring only the rows that do not."""
    if missed > 0:
        return _input_bound(
            "gather", waited, f"{evidence}; rows of {missed:.0%} of the samples were not on the GPU", MISSES
        )
    return _input_bound("gather", waited, f"{evidence} although all rows lie on the GPU", ON_DEVICE)


def _input_bound(stage: str, waited: float, evidence: str, remedy: str | None = None) -> Verdict:
    gain = 1 / max(1 - waited, 0.01)
    return Verdict(f"input-bound: {stage}", evidence, remedy or REMEDIES[stage], gain)


def _straggler(found: Interval) -> Verdict | None:
    if len(found.rank_s) < 2:
        return None
    slowest = max(found.rank_s)
    rank, usual = found.rank_s.index(slowest), statistics.median_low(found.rank_s)
    slowest = min(slowest, found.seconds)
    lost = (slowest - usual) / found.seconds
    if lost < INPUT_SHARE:
        return None
    evidence = f"rank {rank} took {slowest / found.batches:.3g} s per step of its own, the usual rank {usual / found.batches:.3g} s"
    causes = "its disk, cores and heat"
    if len(found.rank_data_s) == len(found.rank_s):
        waited = found.rank_data_s[rank]
        # More than half of what it takes longer: then it is the data that it waits for.
        is_late = waited - statistics.median_low(found.rank_data_s) > (slowest - usual) / 2
        evidence += f", of which it waited {waited / found.batches:.3g} s for data"
        causes = "its disk, or what its feed waits for" if is_late else "its cores and heat, not its data"
    return _input_bound("straggler rank", lost, evidence, f"look at the machine of rank {rank}: {causes}")


def _held(found: Interval) -> float | None:
    """How often functions held the GIL when the loop had let go of it; None where that is not known."""
    if not found.is_processes and (found.gil_wait_s or 0.0) > WAIT_SHARE * (found.function_s or 0.0) > 0:
        return 1.0
    if found.is_processes or not found.gil_asked or found.gil_asked < LEAST_ASKED or found.gil_held is None:
        return None
    return found.gil_held / found.gil_asked


def _rested(found: Interval) -> float | None:
    """The share of their time that workers rested."""
    if found.put_wait_s is None or found.make_s is None or not found.workers:
        return None
    total = found.put_wait_s + found.make_s
    return found.put_wait_s / total if total > 0 else None
