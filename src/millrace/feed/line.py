"""Line: which positions each batch of one rank holds, and which samples those are, many batches at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.order.orders import MAX_POSITION, Order, share
from millrace.ragged import Array, Int64s
from millrace.view.view import View

PLAN_BATCHES = 64  # planned per call: one batch at a time took four times as long for small batches
PLAN_POSITIONS = 8192  # and at least this many positions
MAX_POSITIONS = 1 << 22  # but no more: a plan keeps about 50 bytes for each
LAST = ("pad", "drop", "short")  # what becomes of a last batch that is not full


@dataclass(frozen=True)
class Line:
    """Batches of ``batch`` positions from ``start`` to ``stop`` (None: endless), as rank ``rank`` of ``world`` sees them.

    With ``epoch`` (samples of an epoch) every epoch ends with its own last batch, as in ``by_epoch``. Such a line only
    counts batches. ``last="drop"`` leaves out a last batch that is not full.
    """

    view: View
    order: Order
    batch: int
    rank: int
    world: int
    start: int
    stop: int | None
    epoch: int | None = None
    last: str = "pad"

    @cached_property
    def share(self) -> tuple[int, int]:
        return share(self.batch, self.rank, self.world)

    @cached_property
    def size(self) -> int:
        """Rows of every batch of this rank."""
        first, last = self.share
        return last - first

    def count(self, positions: int) -> int:
        """Batches in so many positions up to the end of a pass or of the line."""
        return positions // self.batch if self.last == "drop" else -(-positions // self.batch)

    @property
    def num_batches(self) -> int | None:
        if self.stop is None or self.stop <= self.start:
            return None if self.stop is None else 0
        if self.epoch is None:
            return self.count(self.stop - self.start)
        first_end, first_batches = self._first_pass
        return first_batches + (self.stop - first_end) // self.epoch * self.count(self.epoch)

    @property
    def _first_pass(self) -> tuple[int, int]:
        """Where the first pass ends, and its batches."""
        assert self.epoch is not None
        end = (self.start // self.epoch + 1) * self.epoch
        return end, self.count(end - self.start)

    def end(self, batches: int) -> int:
        """The position after this many batches; one more than there are is the end of the pass or line.

        What ``last="drop"`` leaves out comes after the last batch: nobody got it, and a smaller batch may still deliver it.
        """
        if not batches:
            return self.start
        end = self.begin(batches)
        return end if self.last != "drop" else min(self.begin(batches - 1) + self.batch, end)

    def begin(self, batch: int) -> int:
        """Where a batch begins; behind the last one it is the end of the line."""
        position = self.start + batch * self.batch
        if self.epoch is not None:
            first_end, first_batches = self._first_pass
            passes, inside = divmod(batch - first_batches, self.count(self.epoch))
            if batch >= first_batches:
                position = first_end + passes * self.epoch + inside * self.batch
        if self.stop is None:
            return position
        is_over = self.last == "drop" and batch >= (self.num_batches or 0)
        return max(self.stop, self.start) if is_over else min(position, max(self.stop, self.start))

    def after(self, batches: int) -> Line:
        """The rest of the line after so many batches."""
        return replace(self, start=self.end(batches))

    def place(self, batches: int) -> dict[str, int]:
        """Where the line goes on after so many batches, as a cursor keeps it."""
        return {"position": self.end(batches)}

    def positions_of(self, batch: int) -> Int64s:
        """The positions of one batch, over all ranks."""
        return np.arange(*self.span(batch), dtype=np.int64)

    def first_position(self, batch: int) -> int:
        """Where a batch begins, over all ranks: its first sample stands in where this rank has none."""
        return int(self.positions_of(batch)[0])

    def read_positions(self, batch: int) -> Int64s:
        """The positions whose samples this rank reads for a batch; padding repeats the first sample of all ranks."""
        first, stop = self.span(batch)
        positions = first + np.arange(*self.share, dtype=np.int64)
        return np.where(positions < stop, positions, first)

    def marked_positions(self, batch: int) -> Int64s:
        """The positions of this rank as batches carry them: padding is -1."""
        first, stop = self.span(batch)
        positions = first + np.arange(*self.share, dtype=np.int64)
        return np.where(positions < stop, positions, -1)

    def span(self, batch: int) -> tuple[int, int]:
        """The positions [first, last) of one batch, over all ranks."""
        first = self.begin(batch)
        return first, min(first + self.batch, self.begin(batch + 1))

    def number_of(self, position: Any) -> Any:
        """The batch that holds a position; negative before the start."""
        numbers = inside = (position - self.start) // self.batch
        most: Any = self.num_batches
        if self.epoch is not None:
            first_end, first_batches = self._first_pass
            most = self.count(self.epoch)
            passes, places = np.divmod(position - first_end, self.epoch)
            is_first = np.asarray(position) < first_end
            later = first_batches + passes * most + places // self.batch
            numbers = np.where(is_first, numbers, later)[()]
            inside, most = np.where(is_first, inside, places // self.batch), np.where(is_first, first_batches, most)
        if self.last == "drop" and most is not None and np.any(np.asarray(inside) >= most):
            raise ConfigError("some of these samples are in no batch of this epoch: last='drop' leaves them out")
        return numbers

    def plan_size(self) -> int:
        """Batches per plan."""
        wanted = max(PLAN_BATCHES, PLAN_POSITIONS // self.size)
        return max(1, min(wanted, MAX_POSITIONS // self.size))

    def plan(self, first: int, last: int) -> Plan:
        """Batches [first, last): their samples, found in their shards."""
        begin, end = self.share
        last = min(last, (MAX_POSITION - self.start) // self.batch)
        if first >= last:
            raise beyond_end(first)
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


def beyond_end(batch: int) -> ConfigError:
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
            raise beyond_end(batch)
        return slice((batch - self.first) * size, (batch - self.first + 1) * size)

    def marks(self, batch: int) -> dict[str, Any]:
        """Positions, samples and validity of one batch, as arrays of its own."""
        rows = self.rows(batch)
        valid = np.ones(self.line.size, bool) if self.valid is None else self.valid[rows].copy()
        return {"positions": self.positions[rows].copy(), "samples": self.samples[rows].copy(), "valid": valid}
