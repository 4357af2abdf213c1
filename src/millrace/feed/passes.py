"""Passes: a feed as the sized loader that frameworks want, iterated once per epoch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from millrace.errors import ConfigError
from millrace.feed.batch import Batch
from millrace.feed.callers import check_caller, check_restore, check_trainer
from millrace.feed.iteration import Iteration
from millrace.feed.lightning import join, reads_whole
from millrace.feed.line import Line
from millrace.feed.options import warn_padded_training
from millrace.feed.report import Report
from millrace.ragged import as_integer

if TYPE_CHECKING:
    from millrace.feed.feed import Feed


class Passes:
    """One pass per ``iter()``: pass e is epoch e of the feed. ``len()`` counts a whole pass and never changes.

    ``iter()`` ends the pass before it and begins the next one. After a restore, or if the iterator before delivered
    nothing, it is the rest of the same pass. With ``repeat`` every pass is the whole first epoch.
    """

    def __init__(self, feed: Feed, *, repeat: bool = False) -> None:
        if not feed.order.has_epochs:
            raise ConfigError(
                "a mixture has no epochs, so it has no passes; iterate the feed, and evaluate each source"
            )
        if feed.budget is not None and not repeat and feed.order.n > feed.budget.window:
            raise ConfigError(
                f"by_epoch() with max_rows= of {feed.order.n:,} samples: beyond {feed.budget.window:,}, epochs differ in "
                "their number of batches, and len() may not change; iterate the feed itself, with epochs= for an end"
            )
        if feed.line(0, feed.order.n).num_batches == 0:
            raise ConfigError(f"{feed.order.n:,} samples are fewer than batch={feed.batch}; lower batch")
        self.feed, self.is_repeated = feed, repeat
        self._last_repeat: weakref.ref[Pass] | None = None  # the last pass, if they repeat
        self._epoch: int | None = None  # of the framework that calls set_epoch
        self.ended_epoch: int | None = None  # the framework's epoch in which nothing is left to deliver

    def __len__(self) -> int:
        check_trainer()
        return self.feed.line(0, self.feed.order.n).num_batches or 0

    def __iter__(self) -> Pass:
        _, fit, is_setup = check_caller("repeat" if self.is_repeated else "passes")
        new = Pass(self, is_counted=fit is not None)
        if self.is_repeated:
            before = None if self._last_repeat is None else self._last_repeat()
            if before is not None:
                before.leave()
            self._last_repeat = weakref.ref(new)
        else:
            if fit is None:
                self.ended_epoch = None
            self.feed.lightning_batch = None if fit is None else join(fit, self, is_setup)
            self._end_pass()
            self.feed.check_unfinished(self.next_start)
            if fit is not None and reads_whole(fit, self):
                warn_padded_training(self.feed, self.feed.order.n, "Lightning")
            self.feed.hold(new)
        return new

    def _end_pass(self) -> None:
        """Ends the pass before, also of another loader over the same feed; an iterator of the feed itself goes on."""
        if isinstance(self.feed.live, Pass):
            self.feed.live.leave()
        self.feed.check_idle("begin a pass")

    def begin(self) -> Iteration | None:
        """The iterator of the next pass, if there is one."""
        feed = self.feed
        if self.ended_epoch is not None and self.ended_epoch == self._epoch:
            return None
        if self.is_repeated:
            return Iteration(feed, feed.line_here(0, feed.order.n), keeps_workers=True)
        start, before = self.next_start, feed.progress
        if before is not None and before.is_pass and before.count == before.line.num_batches:
            before.is_exhausted = True  # whoever counts batches does not ask for one more
        feed.count_passes(True)
        line = self._pass_from(start)
        if not line.num_batches and line.stop != feed.stop:  # last="drop" leaves out all that is left
            line = self._pass_from(line.stop or 0)
        return feed.iterate(line, is_pass=True)

    @property
    def next_start(self) -> int:
        """Where the next pass begins: after the pass before, if that delivered anything."""
        progress, start = self.feed.progress, self.feed.position
        if progress is not None and progress.is_pass and progress.count:
            start = progress.line.stop or start
        return max(start, self.feed.earliest_pass)

    def _pass_from(self, start: int) -> Line:
        n, stop = self.feed.order.n, self.feed.stop
        start = start if stop is None else min(start, stop)
        end = (start // n + 1) * n
        return self.feed.line_here(start, end if stop is None else min(end, stop))

    def set_epoch(self, epoch: int) -> None:
        """Skips the passes before this one. Some frameworks call it, and restore no loader at the end of an epoch."""
        if self.is_repeated:
            return
        self._epoch = as_integer("epoch", epoch)
        if self.ended_epoch != self._epoch:
            self.ended_epoch = None
        self.feed.earliest_pass = max(self.feed.earliest_pass, self._epoch * self.feed.order.n)

    def end_epoch(self, epoch: int | None) -> None:
        """Ends the pass that was restored. In this epoch of the framework nothing more is delivered."""
        feed, n = self.feed, self.feed.order.n
        passes = feed.position // n + bool(feed.position % n or feed.bin)
        feed.earliest_pass, self.ended_epoch = passes * n, epoch

    @property
    def sampler(self) -> Passes:
        """Where Lightning looks for ``set_epoch``."""
        return self

    batch_sampler = sampler

    def state_dict(self) -> dict[str, Any]:
        """The state of the feed, and the batch size it counts with."""
        return {**self.feed.state_dict(), "batch": self.feed.batch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a state of the feed or of its passes; repeated passes have none."""
        if self.is_repeated:
            return
        self._end_pass()
        self.feed.load_state_dict(state)
        counted = state.get("batch", self.feed.batch)
        check_restore(self.feed.batch, counted, is_within_epoch(self.feed, counted))

    def __getitem__(self, key: Any) -> Any:
        raise not_by_number("passes over a feed have")

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last_repeat": None}

    def __repr__(self) -> str:
        kind = "the first epoch again and again" if self.is_repeated else "one epoch after the other"
        return f"<Passes over {self.feed!r}: {kind}, {len(self):,} batches each>"


def is_within_epoch(feed: Feed, batch: int) -> bool:
    """Whether an epoch has begun, and batches of it are left, of this size."""
    position, n = feed.position, feed.order.n
    line = replace(feed.line(position, (position // n + 1) * n, first_bin=feed.bin), batch=batch)
    return bool((position % n or feed.bin) and line.num_batches)


def not_by_number(what: str) -> ConfigError:
    return ConfigError(
        f"{what} batches in order, not samples by number; loop over it. For a DataLoader use millrace.torch.Dataset(view), "
        "for the Trainer of transformers millrace.transformers.FeedTrainer"
    )


class Pass:
    """An iterator that starts with its first batch: frameworks ask for iterators that they never use."""

    def __init__(self, passes: Passes, *, is_counted: bool) -> None:
        # Lightning counts its batches: it would take an early end for the end of the epoch.
        self._passes, self._is_counted = passes, is_counted
        self._iteration: Iteration | None = None
        self._is_ended = False
        self._is_left = False

    def __iter__(self) -> Pass:
        check_caller("iterator")
        return self

    def __next__(self) -> Batch:
        if self._is_left and self._is_counted:
            raise ConfigError(
                "another iter() of this loader ended the pass that Lightning reads; use another feed there"
            )
        if self._iteration is None:
            self._iteration = None if self._is_ended else self._passes.begin()
            if self._iteration is None:
                self._is_ended = True
                raise StopIteration
        progress = self._iteration.progress
        count = progress.count
        try:
            batch = next(self._iteration)
            if (last := self._passes.feed.lightning_batch) is not None and not self._passes.is_repeated:
                last.take()
            return batch
        except BaseException:  # also from a signal's handler: the loop did not get the batch
            progress.count = count
            self.close()
            raise

    def leave(self) -> None:
        """Ends the pass before its last batch, for another one."""
        self._is_left = not self.is_closed
        self.close()

    @property
    def is_closed(self) -> bool:
        return self._is_ended or (self._iteration is not None and self._iteration.is_closed)

    def report(self) -> Report | None:
        return None if self._iteration is None else self._iteration.report()

    def close(self) -> None:
        self._is_ended = True
        if self._iteration is not None:
            self._iteration.close()
