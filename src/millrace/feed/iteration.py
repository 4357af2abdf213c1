"""Iteration: the iterator of a feed over one line of batches. Its stages give the batches; here they are counted."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING

from millrace.errors import FeedError
from millrace.feed.batch import Batch, part_of, rename_columns
from millrace.feed.callers import check_caller
from millrace.feed.compose import Composer
from millrace.feed.foresight import Foresight
from millrace.feed.line import Line
from millrace.feed.report import Report
from millrace.feed.stages import Fallback
from millrace.meter.interval import Interval
from millrace.meter.verdict import LEAST_BATCHES

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

_life = object()  # a forked child has another


def _note_fork() -> None:
    global _life
    _life = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Progress:
    """How many batches of a line the loop got. The feed holds it too: an iterator may end at any moment."""

    __slots__ = ("count", "is_exhausted", "is_pass", "line")

    def __init__(self, line: Line, is_pass: bool = False) -> None:
        self.line, self.count, self.is_pass = line, 0, is_pass
        self.is_exhausted = False  # the loop asked for more: what last="drop" leaves out is behind it

    @property
    def place(self) -> dict[str, int]:
        """Where the line goes on after the batches that the loop got, as a cursor keeps it."""
        return self.line.place(self.count + self.is_exhausted)

    @property
    def position(self) -> int:
        return self.place["position"]


class Iteration:
    """The iterator of a feed. It ends with its last batch, by ``close()`` or garbage collection."""

    def __init__(self, feed: Feed, line: Line, *, is_pass: bool = False, keeps_workers: bool = False) -> None:
        self._feed, self.line, self.progress = feed, line, Progress(line, is_pass)
        self.total = line.num_batches
        self._process, self._life = os.getpid(), _life
        self._rename = feed.rename or None
        self._offsets_of = getattr(line, "offsets_of", None)  # of bins, with a budget
        self._num_samples = 0  # of batches with bins
        self.is_closed = False
        self._takers: dict[str, object] = {}  # the call of next() under way; unlike a lock, it says whose it is
        self._began, self._next_s = perf_counter(), 0.0
        self._composer = Composer(feed, keeps_workers=is_pass or keeps_workers)
        self._start(line)

    def _start(self, line: Line) -> None:
        """Composes the stages for a line that begins where the loop stands."""
        self._first = self.progress.count  # the stages count from this batch
        self._settled: Interval | None = (
            None  # the counters after the first batches, which wait for threads and processes
        )
        # With a queue workers read the files; what lies on a device is not read again.
        self._foresight = Foresight.of(self._composer.reads(line)) if self._feed.queue is None else None
        self._stages = self._composer.compose(line)
        self._place = self._stages.place

    def __iter__(self) -> Iteration:
        check_caller("iterator")
        return self

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("an endless feed has no length")
        return self.total - self.progress.count

    def __next__(self) -> Batch:
        """The next batch. If a signal's handler raises at any step, the batch does not count and the iterator ends."""
        if self._life is not _life:
            self._check_process()
        mine, takers, progress = object(), self._takers, self.progress
        count = None
        try:
            if takers.setdefault("next", mine) is not mine:  # the other thread goes on undisturbed
                raise FeedError("two threads take batches from one iterator at a time; give each thread its own feed")
            count = progress.count
            if self.is_closed or count == self.total:
                progress.is_exhausted = count == self.total
                raise StopIteration
            began = perf_counter()
            place = self._place
            if place.ready and place.stream == place.current():
                batch = place.ready.pop()  # at once: a loop that queues short kernels feels every call
            else:
                batch = self._take()
            if self._rename is not None:
                batch = rename_columns(batch, self._rename)
            progress.count = count + 1
            self._next_s += perf_counter() - began
            if self._offsets_of is not None:
                batch.__dict__["bins"] = self._offsets_of(count)
                self._num_samples += int(batch.__dict__["bins"][-1])
            if count + 1 == self.total:
                batch = self._last(batch)
            del takers["next"]
            return batch
        except BaseException:
            if count is not None:
                progress.count = count  # the loop did not get it
            if count is not None or takers.get("next") is mine:
                self.close()
                takers.clear()
            raise

    def _last(self, batch: Batch) -> Batch:
        """Notes in the last batch where it begins, since its share may be padding alone; ends the iterator."""
        first, last = self.line.span(self.progress.count - 1)
        if self._feed.last == "short" and last - first < self.line.batch:
            batch = part_of(batch, slice(last - first))
        batch.__dict__["_span"] = first, last
        self.close()
        return batch

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FeedError("this feed was started in another process; a forked child must make its own")

    def _take(self) -> Batch:
        self._check_process()  # a fork below Python was not noted; asking the system takes microseconds
        if self._settled is None and self.progress.count - self._first >= LEAST_BATCHES:
            self._settled = self.report().interval()
        if self._foresight is not None:
            self._foresight.reach(self.progress.count - self._first)
        try:
            return self._place.take(self.progress.count - self._first)
        except Fallback as reason:
            self._composer.leave_out(reason)
        self._place.close()
        self._start(self.line.after(self.progress.count))
        if self.is_closed:  # by another thread
            self._place.close()
        return self._take()

    @property
    def behind_s(self) -> float:
        """How long the loop has waited for the GPU or the bus, and not for data."""
        counters = self._place.report()
        return (counters.behind_s or 0.0) + (counters.transfer_s or 0.0)

    def report(self) -> Report:
        self._check_process()  # a thread that is not there may have held the ring's lock
        way, make, ahead, place = self._stages
        counters, placed, count = ahead.report(), place.report(), self.progress.count
        made = make.report()
        return Report(
            way, counters.workers, count, self._num_samples or self._samples_before(count),
            perf_counter() - self._began, self._next_s - self.behind_s, fill_s=counters.make_s,
            function_s=made.function_s if counters.function_s is None else counters.function_s,
            fill_wait_s=counters.put_wait_s, gil_asked=counters.gil_asked, gil_held=counters.gil_held,
            gil_wait_s=counters.gil_wait_s,
            depth_seen=counters.mean_ready, made_in_line=counters.made_here,
            made_again=counters.made_again, cores=counters.cores, pieces=counters.pieces,
            num_bytes=counters.num_bytes, is_cold=made.is_cold, past_cache=counters.past_cache, behind_s=placed.behind_s,
            transfer_s=placed.transfer_s,
            deaths=counters.deaths, ends=counters.ends, outgrown=counters.outgrown, made_by_workers=counters.made_by_workers,
            made_here=None if counters.made_by_workers is None else counters.made_here, refused=counters.refused,
            late=counters.late, slow_workers=counters.slow_workers,
            tiers=tuple(filter(None, (store.describe_tier() for store in self.line.view.stores))), choice=self._feed.choice,
            hit_rate=placed.hit_rate, held_bytes=placed.held_bytes, row_bytes=placed.row_bytes, settled=self._settled,
        )  # fmt: skip

    def _samples_before(self, count: int) -> int:
        return min(self.progress.position - self.line.start, count * self.line.size)

    def close(self) -> None:
        is_mine = self._process == os.getpid()  # a forked child has neither the threads nor the GPU
        if is_mine and not self.is_closed:
            self._feed.last_report = self.report()
        self.is_closed = True
        if is_mine:
            self._place.close()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_place") and not _is_ending():  # at the very end the interpreter has no modules any more
            self.close()
