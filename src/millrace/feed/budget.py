"""Batches bounded by rows instead of samples: ``Feed(view, batch=8, max_rows=4096)`` delivers 8 bins a step.

A window of 65,536 positions is cut into bins at a time: its samples sorted by rows, cut where a bin would have more than
``max_rows``, the bins shuffled. So samples of about equal length share a bin. All of it is a function of (view, order,
budget), and the state is two integers: the position of a window, and the bins delivered of it.
"""

from __future__ import annotations

import bisect
import copy
import threading
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.line import Line, Plan
from millrace.lazy import cached_property
from millrace.order.orders import MAX_POSITION, Order, by_stream
from millrace.ragged import Array, Int64s, as_integer
from millrace.view.compose import is_even, rows_delivered
from millrace.view.view import View

WINDOW = 1 << 16  # positions that are cut into bins together
LANE = 3  # of the order of a window's bins
PLAN_BATCHES = 16
MAX_WINDOWS = 4  # kept: a plan may reach into the next one
CHUNK = 1 << 20  # samples whose rows are counted at a time


class Bins(NamedTuple):
    """The bins of one window: bin k is ``positions[offsets[k]:offsets[k + 1]]``."""

    positions: Int64s
    offsets: Int64s


class Budget:
    """Windows of positions cut into bins of at most ``max_rows`` rows."""

    def __init__(self, view: View, order: Order, max_rows: int) -> None:
        self.view, self.order, self.max_rows = view, order, as_integer("max_rows", max_rows)
        if self.max_rows < 1:
            raise ConfigError(f"max_rows={max_rows}; expected 1 or more rows")
        longest, sample = _longest(view)
        if self.max_rows < longest:
            raise ConfigError(
                f"max_rows={max_rows} is less than the {longest:,} rows of sample {sample}; raise it, or leave such samples out"
            )
        self.window = WINDOW
        # Windows end with an epoch. The line of a mixture has none: its sources have epochs of their own.
        self._epoch = order.n if order.has_epochs else MAX_POSITION - MAX_POSITION % self.window
        self._per_epoch = -(-self._epoch // self.window)
        self.lock = threading.RLock()  # threads that make batches and the loop ask at a time
        self._counts: dict[int, int] = {}  # bins of the windows seen so far
        self._windows: dict[int, Bins] = {}

    def window_at(self, position: Any) -> Any:
        """The window of a position, or of each of some."""
        epoch, inside = divmod(position, self._epoch)
        return epoch * self._per_epoch + inside // self.window

    def start_of(self, window: int) -> int:
        epoch, number = divmod(window, self._per_epoch)
        return epoch * self._epoch + number * self.window

    def end_of(self, position: int, bin_number: int) -> int:
        """Where the window that is under way ends; its bins are settled up to there."""
        return position if bin_number == 0 else self.start_of(self.window_at(position) + 1)

    def check_place(self, position: int, bin_number: int) -> None:
        """Refuses a place at which no batch of this budget ends."""
        window = self.window_at(position)
        if position != self.start_of(window) or (bin_number and bin_number >= self.num_bins(window)):
            raise ConfigError(
                f"this is not a state of a feed with max_rows: position {position:,} and bin {bin_number:,} lead nowhere"
            )

    def resumed(self, order: Order) -> Budget:
        """The same budget over an order that has changed, as the weights of a mixture may."""
        if order is self.order:
            return self
        new = copy.copy(self)
        new.order, new._counts = order, {}
        return new

    def num_bins(self, window: int) -> int:
        if window not in self._counts:
            self.bins(window)
        return self._counts[window]

    def bins(self, window: int) -> Bins:
        with self.lock:
            known = self._windows.get(window)
            if known is None:
                known = self._cut(window)
                while len(self._windows) >= MAX_WINDOWS:
                    del self._windows[next(iter(self._windows))]
                self._windows[window] = known
                self._counts[window] = len(known.offsets) - 1
            return known

    def _cut(self, window: int) -> Bins:
        positions = np.arange(self.start_of(window), self.start_of(window + 1), dtype=np.int64)
        rows = np.maximum(rows_delivered(self.view, self.order.samples(positions)), 1)
        # 16 bits are sorted by radix: a finite feed cuts all its windows when it begins, and took twice as long.
        by_rows = np.argsort(rows.astype(np.uint16) if self.max_rows < 1 << 16 else rows, kind="stable")
        ends = np.cumsum(rows[by_rows])
        cuts, before = [0], 0
        while cuts[-1] < len(ends):
            cuts.append(int(np.searchsorted(ends, before + self.max_rows, side="right")))
            before = int(ends[cuts[-1] - 1])
        count = len(cuts) - 1
        shuffled = by_stream(np.arange(count), np.full(count, window), count, int(self.order.seed or 0), LANE)
        edges = np.array(cuts, np.int64)
        parts = [positions[by_rows[edges[k] : edges[k + 1]]] for k in shuffled.tolist()]
        sizes = np.diff(edges)[shuffled]
        return Bins(np.concatenate(parts), np.concatenate(([0], np.cumsum(sizes))).astype(np.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**{name: value for name, value in vars(self).items() if name != "lock"}, "_windows": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, lock=threading.RLock())


def _longest(view: View) -> tuple[int, int]:
    """The most rows of a sample, and which sample that is."""
    if is_even(view):
        return int(view.spans([0]).lengths[0]), 0
    best = (0, 0)
    for first in range(0, len(view), CHUNK):
        lengths = rows_delivered(view, np.arange(first, min(first + CHUNK, len(view))))
        at = int(lengths.argmax())
        best = max(best, (int(lengths[at]), first + at), key=lambda own: own[0])
    return best


@dataclass(frozen=True)
class BudgetLine(Line):
    """Batches of ``batch`` bins, from bin ``first_bin`` of the window at ``start`` on."""

    first_bin: int = 0
    budget: Any = None
    _ends: list[int] = field(
        default_factory=list, init=False, compare=False, repr=False
    )  # bins up to the end of each window

    @cached_property
    def _first_window(self) -> int:
        return int(self.budget.window_at(self.start))

    @cached_property
    def _by_epoch(self) -> Line | None:
        """With ``epoch``: the line whose positions are bins. Every epoch is one window, with equally many bins."""
        if self.epoch is None:
            return None
        bins = self.budget.num_bins(self._first_window)
        stop = None if self.stop is None else self.budget.window_at(self.stop) * bins
        start = self._first_window * bins + self.first_bin
        return Line(self.view, self.order, self.batch, self.rank, self.world, start, stop, bins, self.last)

    def _window_of(self, number: int) -> tuple[int, int]:
        """The window that holds bin ``number`` of the line, or the one after the last; and the bin's number there."""
        ends = self._ends
        with self.budget.lock:
            while not ends or ends[-1] <= number:
                window = self._first_window + len(ends)
                if self.stop is not None and self.budget.start_of(window) >= self.stop:
                    return window, 0
                ends.append((ends[-1] if ends else -self.first_bin) + self.budget.num_bins(window))
        at = bisect.bisect_right(ends, number)
        return self._first_window + at, number - (ends[at - 1] if at else -self.first_bin)

    @property
    def num_batches(self) -> int | None:
        if self.stop is None or self.stop <= self.start:
            return None if self.stop is None else 0
        if self._by_epoch is not None:
            return self._by_epoch.num_batches
        self._window_of(MAX_POSITION)
        return self.count(max(0, self._ends[-1]))

    def _bins_before(self, batches: int) -> int:
        most = self.num_batches
        is_over = most is not None and batches >= most + (self.last == "drop")  # which leaves some bins to nobody
        return MAX_POSITION if is_over else batches * self.batch

    def end(self, batches: int) -> int:
        """The window in which the line goes on after so many batches; ``place`` says where in it."""
        return self.place(batches)["position"]

    def begin(self, batch: int) -> int:
        return self.end(batch)

    def place(self, batches: int) -> dict[str, int]:
        if self._by_epoch is None:
            window, inside = self._window_of(self._bins_before(batches))
        else:
            window, inside = divmod(self._by_epoch.end(batches), self._by_epoch.epoch or 1)
        return {"position": int(self.budget.start_of(window)), "bin": inside}

    def batches_to(self, position: int, bin_number: int) -> int:
        """Batches of the line before a place of it."""
        batches = -(-(self._bins_to(self.budget.window_at(position)) + bin_number) // self.batch)
        return batches if self.num_batches is None else min(batches, self.num_batches)

    def after(self, batches: int) -> Line:
        place = self.place(batches)
        return replace(self, start=place["position"], first_bin=place["bin"])

    def _bins_of(self, batch: int, first: int, last: int) -> tuple[Int64s, Int64s]:
        """Positions and offsets of bins [first, last) of a batch; those after the end of the line are empty."""
        parts, sizes = [np.zeros(0, np.int64)], []
        for number in range(batch * self.batch + first, batch * self.batch + last):
            window, inside = self._window_of(number)
            if self.stop is not None and self.budget.start_of(window) >= self.stop:
                sizes.append(0)
                continue
            bins = self.budget.bins(window)
            parts.append(bins.positions[bins.offsets[inside] : bins.offsets[inside + 1]])
            sizes.append(len(parts[-1]))
        return np.concatenate(parts), np.concatenate(([0], np.cumsum(sizes, dtype=np.int64))).astype(np.int64)

    def positions_of(self, batch: int) -> Int64s:
        if self._by_epoch is None:
            return self._bins_of(batch, 0, self.batch)[0]
        first, last = self._by_epoch.span(batch)
        window, inside = divmod(first, self._by_epoch.epoch or 1)
        bins = self.budget.bins(window)
        return np.array(bins.positions[bins.offsets[inside] : bins.offsets[inside + last - first]])

    def read_positions(self, batch: int) -> Int64s:
        return self._bins_of(batch, *self.share)[0]

    def offsets_of(self, batch: int) -> Int64s:
        """Where each bin of this rank begins among the samples of a batch."""
        return self._bins_of(batch, *self.share)[1]

    def number_of(self, position: Any) -> Any:
        wanted = np.asarray(position, np.int64)
        found, windows = np.empty(wanted.shape, np.int64), np.asarray(self.budget.window_at(wanted))
        for window in np.unique(windows).tolist():
            mine, bins = windows == window, self.budget.bins(window)
            places = np.argsort(bins.positions)[wanted[mine] - self.budget.start_of(window)]
            inside = np.searchsorted(bins.offsets, places, side="right") - 1
            if self._by_epoch is None:
                found[mine] = (self._bins_to(window) + inside) // self.batch
            else:
                found[mine] = self._by_epoch.number_of(window * (self._by_epoch.epoch or 1) + inside)
        if self._by_epoch is None and self.last == "drop" and np.any(found >= (self.num_batches or MAX_POSITION)):
            raise ConfigError("some of these samples are in no batch of this feed: last='drop' leaves them out")
        return found[()]

    def _bins_to(self, window: int) -> int:
        """Bins of the line before a window; negative for one before its start."""
        before = sum(self.budget.num_bins(own) for own in range(self._first_window, window))
        after = sum(self.budget.num_bins(own) for own in range(window, self._first_window))
        return int(before - after - self.first_bin)

    def plan_size(self) -> int:
        return PLAN_BATCHES

    def plan(self, first: int, last: int) -> Plan:
        each = [self._bins_of(batch, *self.share)[0] for batch in range(first, last)]
        positions = np.concatenate(each)
        samples = self.order.samples(positions)
        edges = np.concatenate(([0], np.cumsum([len(own) for own in each])))
        return BudgetPlan(self, first, positions, samples, None, self.view.located(samples), edges)


@dataclass
class BudgetPlan(Plan):
    edges: Array

    def rows(self, batch: int) -> slice:
        return slice(int(self.edges[batch - self.first]), int(self.edges[batch - self.first + 1]))

    def marks(self, batch: int) -> dict[str, Any]:
        rows = self.rows(batch)
        valid = np.ones(rows.stop - rows.start, bool)
        return {"positions": self.positions[rows].copy(), "samples": self.samples[rows].copy(), "valid": valid}
