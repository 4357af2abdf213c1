"""What ``feed.report()`` says: who waited for whom, and by which way batches were made."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Report:
    """Counted since the iterator began; times in seconds.

    ``get_s`` is what the loop spent inside ``next()``: near zero, the feed keeps up. What it waited there for a GPU that
    was still busy with earlier steps is ``behind_s`` and not part of it. ``fill_s`` is the work of making
    batches, ``fill_wait_s`` how long threads had nothing to do because enough lay ready: if that is near zero too, and
    ``get_s`` is not, the feed is what limits the run. ``depth_seen`` is how many batches lay ready, on average, when one was
    asked for.
    """

    way: str  # "ring", "in line", "numpy", "transform"
    workers: int
    batches: int
    samples: int
    seconds: float
    get_s: float
    fill_s: float | None = None
    fill_wait_s: float | None = None
    depth_seen: float | None = None
    made_in_line: int | None = None  # by the loop itself
    num_bytes: int | None = None
    is_cold: bool | None = None  # rows are asked for ahead of the copy; None where numpy copies
    past_cache: int | None = None  # samples read past the page cache: of columns much larger than memory
    behind_s: float | None = None  # the GPU was that far behind the loop

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        share = self.get_s / self.seconds if self.seconds else 0.0
        rate = self.samples / self.seconds if self.seconds else 0.0
        lines = [
            f"{self.batches:,} batches, {self.samples:,} samples in {self.seconds:.3g} s ({rate:,.0f} samples/s), way: {self.way}",
            f"the loop spent {self.get_s:.3g} s in next() ({share:.1%})",
        ]
        if self.behind_s:
            lines.append(
                f"and {self.behind_s:.3g} s there until the GPU had caught up ({self.behind_s / self.seconds:.1%})"
            )
        if self.fill_s is not None and self.fill_wait_s is not None:
            lines.append(
                f"making batches took {self.fill_s:.3g} s; {self.workers} threads waited {self.fill_wait_s:.3g} s"
            )
        if self.depth_seen is not None:
            lines.append(f"{self.depth_seen:.1f} batches lay ready when one was asked for")
        if self.num_bytes is not None:
            lines.append(f"{self.num_bytes:,} bytes")
        if self.is_cold:
            past = f"; {self.past_cache:,} samples were read past the page cache" if self.past_cache else ""
            lines.append(f"the data is cold, rows are asked for ahead{past}")
        return "\n".join(lines)
