"""Interval: what the stages of a run counted in a stretch of it. ``verdict.py`` says what that means."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

COUNTED = (
    "seconds", "batches", "get_s", "make_s", "function_s", "put_wait_s", "gil_wait_s", "made_here", "num_bytes",
    "transfer_s", "behind_s",
)  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """Counters of one rank; None where no stage counts it. Times in seconds, over all workers where they make batches."""

    seconds: float
    """The whole stretch, without evaluations and saves."""
    batches: int
    """Batches that the loop got. With few of them the start of the pipeline hides what limits the run."""
    get_s: float
    """Waiting to get: the loop stood in ``next()``. A large share of ``seconds``: the feed limits the run."""
    make_s: float | None = None
    """Making batches. Without ``function_s`` it is gather, or the disk if ``is_cold``."""
    function_s: float | None = None
    """In your ``decode`` and ``transform``. More than half of ``make_s``: these functions are what to make faster."""
    put_wait_s: float | None = None
    """Waiting to put: workers rested, as enough batches lay ready. Near zero: the feed has no room to spare.
    Large while the loop waits: batches are made in bursts, and a larger depth helps."""
    made_here: int | None = None
    """Batches that the loop made itself, since none was ready. Many: a loop that waits does not wait for bursts."""
    gil_asked: int | None = None
    """How often since the start the loop let go of Python's lock (the GIL) for a moment, where functions run in threads."""
    gil_held: int | None = None
    """Of these, how often a function kept the lock as long as it may. Half or more: meanwhile the loop's own Python stands
    still, so run the functions in processes. Near zero: they sleep, or compute without the lock, so more threads help."""
    gil_wait_s: float | None = None
    """Workers that had copied their rows waited for the GIL: nobody's work, so not part of ``make_s``. Large beside
    ``function_s``: functions of other threads hold the lock while they run, and processes have one each."""
    workers: int = 0
    """Threads or processes that make batches. 0: the loop makes them, so making is part of ``get_s``."""
    is_processes: bool = False
    """Whether those are processes. If not, Python functions of several threads share one GIL."""
    is_cold: bool = False
    """Rows come from the disk: the time to gather them is the disk's."""
    is_queued: bool = False
    """Batches come through a queue: waiting to get is waiting for its workers."""
    missed: float | None = None
    """With ``tier="device"``: the share of samples whose rows did not lie on the GPU. None without it."""
    num_bytes: int | None = None
    """Of the batches made. With ``seconds`` it gives the rate to compare with memory, disk or bus."""
    transfer_s: float | None = None
    """The loop waited for copies to a device that was idle: the bus is the limit. Not part of ``get_s``."""
    behind_s: float | None = None
    """The loop waited for a device busy with earlier steps: it computes as fast as it can. Not part of ``get_s``."""
    rank_s: tuple[float, ...] = ()
    """Of each rank: time of its own, before it met the others. One that is far above the rest holds them all up."""
    rank_data_s: tuple[float, ...] = ()
    """Of each rank: the part of that time in which it waited for data. If that is little, its disk is not the reason."""

    def rates(self) -> dict[str, float]:
        """The counters of the feed per second, as ``feed_NAME``; ``feed_rest`` is the share of their time that workers rested."""
        rates = {name: getattr(self, name) for name in ("make_s", "function_s", "transfer_s", "behind_s")}
        found = {f"feed_{name.removesuffix('_s')}": value for name, value in rates.items() if value is not None}
        if self.num_bytes is not None:
            found["feed_bytes_per_s"] = self.num_bytes
        found = {name: value / max(self.seconds, 1e-9) for name, value in found.items()}
        worked = (self.put_wait_s or 0.0) + (self.make_s or 0.0)
        if self.put_wait_s is not None and worked > 0:
            found["feed_rest"] = self.put_wait_s / worked
        if self.gil_asked and self.gil_held is not None:
            found["feed_gil_held"] = self.gil_held / self.gil_asked
        return found

    def __sub__(self, earlier: Interval) -> Interval:
        """What was counted after ``earlier``, a reading of the same run."""
        changes: dict[str, Any] = {}
        for name in COUNTED:
            now, before = getattr(self, name), getattr(earlier, name)
            changes[name] = now if now is None or before is None else now - before
        for name in ("rank_s", "rank_data_s"):
            times, were = getattr(self, name), getattr(earlier, name)
            if len(were) == len(times):
                changes[name] = tuple(now - before for now, before in zip(times, were, strict=True))
        return replace(self, **changes)
