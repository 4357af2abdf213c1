"""Line: which positions each batch of one rank holds, and which samples those are, many batches at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.order.orders import Order
from millrace.order.share import share
from millrace.ragged import Array, Int64s
from millrace.view.view import View

PLAN_BATCHES = 64  # planned per call: one batch at a time cost a factor of four on small batches
PLAN_POSITIONS = 8192  # and at least this many positions
MAX_POSITIONS = 1 << 22  # but not more: a plan keeps about 50 bytes of each


@dataclass(frozen=True)
class Line:
    """Batches of ``batch`` positions from ``start`` to ``stop`` (None: endless), as rank ``rank`` of ``world`` sees them."""

    view: View
    order: Order
    batch: int
    rank: int
    world: int
    start: int
    stop: int | None

    @property
    def share(self) -> tuple[int, int]:
        return share(self.batch, self.rank, self.world)

    @property
    def size(self) -> int:
        """Rows of every batch of this rank."""
        first, last = self.share
        return last - first

    @property
    def num_batches(self) -> int | None:
        return None if self.stop is None else max(0, -(-(self.stop - self.start) // self.batch))

    def end(self, batches: int) -> int:
        """The position after this many batches."""
        position = self.start + batches * self.batch
        return position if self.stop is None else min(position, max(self.stop, self.start))

    def plan_size(self) -> int:
        """Batches per plan."""
        wanted = max(PLAN_BATCHES, PLAN_POSITIONS // self.size)
        return max(1, min(wanted, MAX_POSITIONS // self.size))

    def plan(self, first: int, last: int) -> Plan:
        """Batches [first, last): their samples, found in their shards."""
        begin, end = self.share
        starts = self.start + np.arange(first, last, dtype=np.int64) * self.batch
        positions = (starts[:, None] + np.arange(begin, end, dtype=np.int64)).reshape(-1)
        if self.stop is None or last * self.batch + self.start <= self.stop:
            samples = self.order.samples(positions)
            return Plan(self, first, positions, samples, None, self.view.located(samples))
        valid = positions < self.stop
        # Padding repeats the first sample of the global batch: real data, the same on every rank.
        real = np.where(valid, positions, np.repeat(starts, end - begin))
        samples = self.order.samples(real)
        located = self.view.located(samples)
        return Plan(self, first, np.where(valid, positions, -1), np.where(valid, samples, -1), valid, located)


@dataclass
class Plan:
    """Some batches of a line, planned."""

    line: Line
    first: int
    positions: Int64s
    samples: Int64s
    valid: Array | None
    located: Any

    def rows(self, batch: int) -> slice:
        size = self.line.size
        return slice((batch - self.first) * size, (batch - self.first + 1) * size)

    def marks(self, batch: int) -> dict[str, Any]:
        """Positions, samples and validity of one batch, as arrays of its own."""
        rows = self.rows(batch)
        valid = np.ones(self.line.size, bool) if self.valid is None else self.valid[rows].copy()
        return {"positions": self.positions[rows].copy(), "samples": self.samples[rows].copy(), "valid": valid}


def check_line(view: View, order: Order, batch: int) -> None:
    if len(view) == 0:
        raise ConfigError(f"the view has no samples: {view!r}; lower its lengths or choose another split")
    if order.n != len(view):
        raise ConfigError(f"the order is over {order.n} samples, the view has {len(view)}; make it Shuffled(len(view))")
    if batch < 1:
        raise ConfigError(f"batch={batch}; expected 1 or more samples")
