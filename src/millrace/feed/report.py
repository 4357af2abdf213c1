"""What ``feed.report()`` returns: who waited for whom, and how batches were made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from millrace.meter.interval import Interval
from millrace.meter.verdict import Verdict, judge


@dataclass(frozen=True)
class Report:
    """Counted since the iterator began; times in seconds.

    ``get_s`` is the time of the loop inside ``next()``. Near zero, the feed keeps up. If it is large and ``fill_wait_s`` is
    near zero, the feed limits the run. ``behind_s`` and ``transfer_s`` are not part of it.
    """

    way: str  # "ring", "in line", "numpy", "transform" (threads), "processes", "queue", "resident" (tier="device")
    workers: int  # threads or processes
    batches: int
    samples: int
    seconds: float
    get_s: float
    fill_s: float | None = None  # making batches, over all threads
    function_s: float | None = None  # of it, in decode and transform
    fill_wait_s: float | None = None  # threads rested, because enough batches lay ready
    gil_asked: int | None = None  # with functions in threads: how often the loop let go of Python's lock for a moment
    gil_held: int | None = None  # of these, how often a function kept the lock as long as it may
    gil_wait_s: float | None = None  # threads with copied rows waited for Python's lock: no work, so not in fill_s
    depth_seen: float | None = None  # batches that lay ready when one was taken, on average
    made_in_line: int | None = None  # batches that the loop made itself, or pieces that add up to them
    made_again: int | None = None  # batches that the loop made because a thread that had begun them got no core
    cores: int | None = None  # that this process may use; with the bytes ahead they give the number of threads
    pieces: int | None = None  # that a batch is divided into: threads make them side by side
    num_bytes: int | None = None
    is_cold: bool | None = None  # rows are requested from the disk ahead of the copy
    past_cache: int | None = None  # samples read past the page cache, from columns much larger than memory
    behind_s: float | None = None  # the loop waited for a GPU that was busy with earlier steps
    transfer_s: float | None = None  # the loop waited for copies to a GPU that had nothing else to do
    deaths: int | None = None  # worker processes that ended, and were replaced
    ends: tuple[str, ...] = ()  # how the last of them ended, and in which stage, at which position and samples
    outgrown: int | None = None  # batches that did not fit into their shared slot at first
    made_by_workers: int | None = None  # with a queue: batches that workers made
    made_here: int | None = None  # with a queue: batches that this process made, since no worker had
    refused: int | None = None  # with a queue: payloads that were not what was asked for
    late: int | None = None  # with a queue: batches that workers did not bring in time, since the feed began
    slow_workers: tuple[str, ...] = ()  # with a queue: workers that held one of them
    tiers: tuple[str, ...] = ()  # how files came from stores elsewhere
    choice: str | None = None  # what processes="auto" chose, and why
    hit_rate: float | None = None  # with tier="device": the share of samples whose rows lay on the GPU
    held_bytes: int | None = None  # of the rows that lie there
    row_bytes: int | None = None  # of all rows that the view reads
    settled: Interval | None = None  # what was counted when the first batches had come; a verdict leaves that out

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def interval(self) -> Interval:
        """These counters for ``judge``; the difference of two such intervals is what was counted between them."""
        return Interval(
            self.seconds, self.batches, self.get_s, make_s=self.fill_s, function_s=self.function_s,
            put_wait_s=self.fill_wait_s, made_here=self.made_in_line, gil_asked=self.gil_asked,
            gil_held=self.gil_held, gil_wait_s=self.gil_wait_s, workers=self.workers, is_processes=self.way == "processes",
            is_cold=bool(self.is_cold), is_queued=self.way == "queue", num_bytes=self.num_bytes, behind_s=self.behind_s,
            transfer_s=self.transfer_s,
            missed=(1.0 if self.hit_rate is None else 1.0 - self.hit_rate) if self.way == "resident" else None,
        )  # fmt: skip

    def verdict(self) -> Verdict | None:
        """What limits the loop, by the batches after the start where there are enough; None if there are too few."""
        now = self.interval()
        later = None if self.settled is None else judge(now - self.settled)
        return judge(now) if later is None else later

    def __str__(self) -> str:
        share = self.get_s / self.seconds if self.seconds else 0.0
        rate = self.samples / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.batches:,} batches, {self.samples:,} samples in {self.seconds:.3g} s ({rate:,.0f} samples/s), way: {self.way}",
            f"the loop spent {self.get_s:.3g} s in next() ({share:.1%})",
        ]
        if self.behind_s:
            lines.append(f"and waited {self.behind_s:.3g} s for a GPU that was behind")
        if self.transfer_s:
            lines.append(f"and waited {self.transfer_s:.3g} s for copies to a GPU that had nothing else to do")
        if self.fill_s is not None and self.fill_wait_s is not None:
            lines.append(
                f"making batches took {self.fill_s:.3g} s; {self.workers} "
                f"{'processes' if self.way == 'processes' else 'threads'} rested {self.fill_wait_s:.3g} s"
            )
        if self.gil_wait_s and self.fill_s and self.gil_wait_s > 0.1 * self.fill_s:
            lines.append(
                f"and {self.gil_wait_s:.3g} s more they waited for Python's lock, which functions of others held"
            )
        if self.pieces is not None and self.way == "ring":
            lines.append(f"{self.workers} threads on {self.cores} cores; a batch has {self.pieces} pieces")
        if self.made_in_line:
            again = f", {self.made_again:,} of them because a thread got no core" if self.made_again else ""
            lines.append(f"the loop made {self.made_in_line:,} batches itself{again}")
        if self.depth_seen is not None:
            lines.append(f"{self.depth_seen:.1f} batches lay ready when one was asked for")
        if self.num_bytes is not None:
            lines.append(f"{self.num_bytes:,} bytes")
        if self.is_cold:
            past = f"; {self.past_cache:,} samples were read past the page cache" if self.past_cache else ""
            lines.append(f"the data is cold: rows are requested ahead{past}")
        if self.deaths:
            one = self.deaths == 1
            lines.append(
                f"{self.deaths} worker {'process' if one else 'processes'} ended and {'was' if one else 'were'} replaced; "
                f"{'its batch was' if one else 'their batches were'} made again:"
            )
            lines.extend(self.ends)
        if self.outgrown:
            lines.append(f"{self.outgrown} batches were larger than their slot, and waited for a larger one")
        if self.made_by_workers is not None:
            refused = f"; {self.refused} payloads were refused" if self.refused else ""
            lines.append(
                f"workers made {self.made_by_workers:,} batches, this process made {self.made_here:,}{refused}"
            )
        if self.late:
            slow = f"; slow: {', '.join(self.slow_workers)}" if self.slow_workers else ""
            lines.append(f"workers were late with {self.late:,} batches, which this process made{slow}")
        if self.hit_rate is not None:
            lines.append(
                f"rows of {self.hit_rate:.1%} of the samples lay on the GPU, which holds {self.held_bytes:,} of "
                f"{self.row_bytes:,} bytes"
            )
        lines.extend(self.tiers)
        if self.choice:
            lines.append(f"processes='auto': {self.choice}")
        if (verdict := self.verdict()) is not None:
            lines.append(str(verdict))
        return "\n".join(lines)
