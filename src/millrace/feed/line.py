"""Line: which positions each batch of one rank holds, and which samples those are, many batches at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.order.orders import MAX_POSITION, Order
from millrace.order.share import share
from millrace.ragged import Array, Int64s, as_integer
from millrace.view.view import View

PLAN_BATCHES = 64  # planned per call: one batch at a time cost a factor of four on small batches
PLAN_POSITIONS = 8192  # and at least this many positions
MAX_BYTES = 1 << 47  # what a process can address
MAX_POSITIONS = 1 << 22  # but not more: a plan keeps about 50 bytes of each


@dataclass(frozen=True)
class Line:
    """Batches of ``batch`` positions from ``start`` to ``stop`` (None: endless), as rank ``rank`` of ``world`` sees them.

    With ``epoch`` (its number of samples) every epoch ends with a batch of its own, as passes of ``by_epoch`` do; such a
    line counts batches, it does not plan them.
    """

    view: View
    order: Order
    batch: int
    rank: int
    world: int
    start: int
    stop: int | None
    epoch: int | None = None

    @cached_property
    def share(self) -> tuple[int, int]:
        return share(self.batch, self.rank, self.world)

    @cached_property
    def size(self) -> int:
        """Rows of every batch of this rank."""
        first, last = self.share
        return last - first

    @property
    def num_batches(self) -> int | None:
        if self.stop is None or self.stop <= self.start:
            return None if self.stop is None else 0
        return int(self.number_of(self.stop - 1)) + 1

    @property
    def _first_pass(self) -> tuple[int, int]:
        """Where the first pass ends, and its batches."""
        assert self.epoch is not None
        end = (self.start // self.epoch + 1) * self.epoch
        return end, -(-(end - self.start) // self.batch)

    def end(self, batches: int) -> int:
        """The position after this many batches."""
        position = self.start + batches * self.batch
        if self.epoch is not None:
            first_end, first_batches = self._first_pass
            passes, inside = divmod(batches - first_batches, -(-self.epoch // self.batch))
            later = first_end + passes * self.epoch + inside * self.batch
            position = min(position, first_end) if batches <= first_batches else later
        return position if self.stop is None else min(position, max(self.stop, self.start))

    def number_of(self, position: Any) -> Any:
        """Which batch holds a position; negative for those before the start."""
        if self.epoch is None:
            return (position - self.start) // self.batch
        first_end, first_batches = self._first_pass
        passes, inside = np.divmod(position - first_end, self.epoch)
        later = first_batches + passes * -(-self.epoch // self.batch) + inside // self.batch
        return np.where(np.asarray(position) < first_end, (position - self.start) // self.batch, later)[()]

    def plan_size(self) -> int:
        """Batches per plan."""
        wanted = max(PLAN_BATCHES, PLAN_POSITIONS // self.size)
        return max(1, min(wanted, MAX_POSITIONS // self.size))

    def plan(self, first: int, last: int) -> Plan:
        """Batches [first, last): their samples, found in their shards."""
        begin, end = self.share
        last = min(last, (MAX_POSITION - self.start) // self.batch)
        if first >= last:
            raise passed(first)
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


def passed(batch: int) -> ConfigError:
    return ConfigError(f"batch {batch} passes position 2^63 - 1, where every line ends")


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
        if (batch - self.first) * size >= len(self.positions):
            raise passed(batch)
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
    if as_integer("batch", batch) < 1:
        raise ConfigError(f"batch={batch}; expected 1 or more samples")
    num_bytes = sum(math.prod(n or 0 for n in field.shape) * field.dtype.itemsize for field in view.fields) * batch
    if num_bytes > MAX_BYTES:
        raise ConfigError(f"batch={batch} takes {num_bytes:,} bytes, more than any memory; lower batch, pad or lengths")
