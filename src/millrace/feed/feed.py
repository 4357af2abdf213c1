"""Feed: batches of a view in an order, exact, resumable and explainable.

Threads of the C core keep ``depth`` batches ready, without the GIL; tiny batches the loop makes itself. With a
transform, Python threads run it ahead. Whichever way, batch k is a pure function of k.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from millrace.errors import ConfigError
from millrace.feed import cursor, journal
from millrace.feed.batch import Batch, last_span
from millrace.feed.callers import check_feed
from millrace.feed.explain import Explanation, describe
from millrace.feed.iteration import Iteration, Place
from millrace.feed.lightning import Hand
from millrace.feed.line import Line, check_line, check_view
from millrace.feed.options import check_options, warn_of_batch
from millrace.feed.passes import Pass, Passes, not_by_number
from millrace.feed.report import Report
from millrace.feed.world import rank_and_world
from millrace.native import num_cores
from millrace.order.orders import MAX_POSITION, Order, Shuffled
from millrace.order.share import share
from millrace.ragged import Int64s, as_integer
from millrace.view.view import View

Transform = Callable[[Batch, Any], Mapping[str, Any]]


class Feed:
    """Endless or finite batches of a view, for one rank of a training run.

    ``batch`` is the size over all ranks; a rank receives its share. ``epochs=None`` never ends. Iterating continues where
    the feed stands. ``state_dict()`` counts what the loop got. Restored with any world size, batch, depth or workers, the
    remaining samples are the same. Rank and world are found when iteration starts, so a feed may be made before its
    process group. ``rename`` gives columns other names, after the transform. ``last`` decides about a last batch that is
    not full: ``"pad"`` (marked by ``valid``), ``"drop"`` or ``"short"``.

    >>> from millrace import Blocks, from_arrays
    >>> import numpy as np
    >>> view = Blocks(from_arrays({"tokens": np.arange(100, dtype=np.uint16)}), length=4)
    >>> feed = Feed(view, batch=8, seed=7, epochs=1, device="numpy")
    >>> len(feed), [batch.num_samples for batch in feed], feed.state_dict()["position"]
    (3, [8, 8, 8], 24)
    """

    def __init__(
        self,
        view: View,
        *,
        batch: int,
        order: Order | None = None,
        seed: int = 0,
        epochs: int | None = None,
        rank: int | None = None,
        world: int | None = None,
        device: Any = "cpu",
        transform: Transform | None = None,
        rename: Mapping[str, str] | None = None,
        last: str = "pad",
        workers: int | None = None,
        depth: int = 4,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        check_view(view)
        if order is None and len(view):
            order = view.default_order(seed) if hasattr(view, "default_order") else Shuffled(len(view), seed)
        check_line(view, order or Shuffled(1), batch)
        assert order is not None
        self.view, self.order, self.batch, self.seed = view, order, int(batch), as_integer("seed", seed)
        self.epochs = None if epochs is None else as_integer("epochs", epochs)
        self.device, self.transform, self.depth, self.last = str(device), transform, depth, last
        self.rename, self.run = dict(rename or {}), run
        self.given, self._workers = (rank, world), workers
        check_options(self, workers)
        warn_of_batch(self)
        self.workers = workers or min(4, num_cores())
        # Without a transform the loop makes batches itself rather than wait, so one core is its own.
        self.fillers = workers or max(1, min(4, num_cores() - 1))
        self._position = 0  # where it was begun or restored
        self.place: Place | None = None  # of the last iterator since then
        self._origin = 0  # p0: where batch 0 of explain and state_at begins
        self._in_passes = False  # whether batches end with their epoch, as by_epoch() makes them
        self.least = 0  # where the pass begins, at the earliest, that a framework says it is in
        self.is_restored = False  # since its last iterator
        self.hand: Hand | None = None  # what Lightning has taken, while it reads this feed
        self._live: weakref.ref[Iteration | Pass] | None = None
        self._report: Report | None = None  # of the last iterator

    # The line.

    @property
    def position(self) -> int:
        """Where the feed stands: what the loop got, not what was prefetched."""
        return self._position if self.place is None else self.place.position

    @property
    def stop(self) -> int | None:
        """The position at which a finite feed ends."""
        return None if self.epochs is None else self.epochs * self.order.n

    @property
    def rank(self) -> int:
        return self._share[0]

    @property
    def world(self) -> int:
        return self._share[1]

    @property
    def _share(self) -> tuple[int, int]:
        """Rank and world: those of the last iterator, or those that the next one will have."""
        return rank_and_world(*self.given) if self.place is None else (self.place.line.rank, self.place.line.world)

    def line(self, start: int, stop: int | None, rank: int = 0, world: int = 1) -> Line:
        return Line(self.view, self.order, self.batch, rank, world, start, stop, last=self.last)

    def line_here(self, start: int, stop: int | None) -> Line:
        """The line for the rank that this process is now."""
        rank, world = rank_and_world(*self.given)
        share(self.batch, rank, world)
        if self.last == "short" and world > 1:
            raise ConfigError(
                f"last='short' with {world} ranks would leave some without a last batch; take 'pad' and batch.valid, or 'drop'"
            )
        return self.line(start, stop, rank, world)

    def __len__(self) -> int:
        """Batches of the whole feed, wherever it stands; ``remaining`` is what is left."""
        total = self.line(0, self.stop).num_batches
        if total is None:
            raise TypeError("an endless feed has no length; give epochs=, or use by_epoch()")
        return total

    @property
    def remaining(self) -> int:
        """Batches from where the feed stands to its end."""
        total = replace(self._counted, start=self.position).num_batches
        if total is None:
            raise TypeError("an endless feed has no end; give epochs=")
        return total

    @property
    def _counted(self) -> Line:
        """The line by which batches are counted: from p0, in passes where the feed is read by epoch."""
        line = self.line(self._origin, self.stop)
        return replace(line, epoch=self.order.n) if self._in_passes else line

    def count_passes(self, in_passes: bool) -> None:
        """Batches are counted again from here where the way of reading changes under way."""
        if in_passes != self._in_passes:
            self._in_passes, self._origin = in_passes, self.position

    # Iterators.

    def __iter__(self) -> Iteration:
        self.check_idle("iterate")
        self.check_unfinished(self.position)
        check_feed()
        self.count_passes(False)
        self.hand = None
        iteration = self.iterate(self.line_here(self.position, self.stop))
        self.hold(iteration)
        return iteration

    def iterate(self, line: Line, *, is_pass: bool = False) -> Iteration:
        """An iterator over a line, from which the feed takes its position."""
        if self.run is not None:
            journal.note_start(self.run, self, line)
        if line.start != self.position:  # passes that a loop left early: batches are counted again after them
            self._origin = line.start
        iteration = Iteration(self, line, is_pass=is_pass)
        self.place, self.is_restored = iteration.place, False
        return iteration

    def hold(self, iterator: Iteration | Pass) -> None:
        """Only one iterator may be live: this one, from now on."""
        self._live = weakref.ref(iterator)

    @property
    def live(self) -> Any:
        """The iterator that has not ended yet, if there is one."""
        live = None if self._live is None else self._live()
        return None if live is None or live.is_closed else live

    def check_idle(self, what: str) -> None:
        if self.live is not None:
            raise ConfigError(
                f"cannot {what} while an iterator of this feed is live; finish it, drop it, or call feed.close()"
            )

    def check_unfinished(self, start: int) -> None:
        """Refuses an iterator that begins at the end, unless the feed was restored there."""
        if self.stop is not None and start >= self.stop and self.place is not None and self.place.count:
            raise ConfigError(
                f"this feed has delivered all of its epochs={self.epochs} and would be empty; leave epochs= out and read it by "
                "feed.by_epoch(), or by feed.by_epoch(repeat=True) to evaluate"
            )

    def by_epoch(self, *, repeat: bool = False) -> Passes:
        """A loader for frameworks: sized, iterated once per epoch, with a state. See ``Passes``.

        With ``repeat`` every pass is the whole first epoch, for evaluation; the feed itself stays where it is.
        """
        if not repeat:
            self.count_passes(True)
        return Passes(self, repeat=repeat)

    def __getitem__(self, key: Any) -> Any:
        raise not_by_number("a feed has")

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the feed stands: what the loop got, not what was prefetched. JSON, under 1 KB."""
        return cursor.write(self._used, self.view, self.order, self.seed)

    @property
    def _used(self) -> int:
        """Where the feed stands, without the batch that Lightning took but has not used yet."""
        if self.hand is not None and self.hand.is_full and self.place is not None:
            return self.place.line.end(self.place.count - 1)
        return self.position

    def state_at(self, batches: int) -> dict[str, Any]:
        """The state after this many batches since construction or restore, for frameworks that read ahead."""
        if as_integer("batches", batches) < 0:
            raise ConfigError(f"state_at({batches}); expected 0 or more batches")
        position = self._counted.end(batches)
        return cursor.write(position, self.view, self.order, self.seed)

    def state_before(self, batch: Batch) -> dict[str, Any]:
        """The state of a loop that has this batch but has not used it yet, for loops that read ahead."""
        span, positions, place = last_span(batch), batch.positions, self.place
        start = None if span is None else span[0]
        if start is None:
            if place is None or positions is None or len(positions) != place.line.size:
                raise ConfigError(
                    "state_before() wants a whole batch as this feed delivered it; this one is a part of it, or lost its positions"
                )
            start = int(positions[0]) - place.line.share[0]
        return cursor.write(start, self.view, self.order, self.seed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another store, view, order or seed."""
        self.check_idle("load a state")
        self._position = self._origin = cursor.read(state, self.view, self.order, self.seed)
        self.place, self.hand, self.least, self.is_restored = None, None, 0, True

    # Explanations.

    def explain(self, batch: int) -> Explanation:
        """What batch number ``batch`` since construction or restore holds, over all ranks: samples, rows, sources."""
        line = self._counted
        if as_integer("batch", batch) < 0 or (line.num_batches is not None and batch >= line.num_batches):
            raise ConfigError(f"batch {batch} is outside the feed; it has {line.num_batches} batches")
        if line.end(batch + 1) > MAX_POSITION:
            raise ConfigError(f"batch {batch} lies beyond position 2^63 - 1, where every line ends")
        found = describe(self.view, self.order, *line.span(batch), batch)
        return Explanation(found, rename=self.rename) if self.rename else found

    def steps_of(self, samples: Any, epoch: int | None = None) -> Int64s:
        """The inverse of ``explain``: in which batch each sample stands in an epoch (default: the current one).

        Batches before construction or restore are negative.
        """
        epoch = self.position // self.order.n if epoch is None else as_integer("epoch", epoch)
        if epoch < 0 or (self.epochs is not None and epoch >= self.epochs):
            raise ConfigError(
                f"epoch={epoch}; this feed has epochs 0 to {'any' if self.epochs is None else self.epochs - 1}"
            )
        steps: Int64s = self._counted.number_of(self.order.positions(samples, epoch))
        return steps

    # What it cost.

    def report(self) -> Report | None:
        """Who waited for whom since the live iterator began, else of the last one; None before the first."""
        return self._report if self.live is None else self.live.report()

    def note_report(self, report: Report) -> None:
        self._report = report

    # The end.

    def close(self) -> None:
        """Ends the live iterator and its threads; the feed stands where the loop left it."""
        live = self.live
        if live is not None:
            live.close()
        self._live = None

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """As its options and where it stands, so that it may be sent to another process: neither maps nor threads go along."""
        rank, world = self.given
        options = {
            "batch": self.batch, "order": self.order, "seed": self.seed, "epochs": self.epochs, "rank": rank, "world": world,
            "device": self.device, "transform": self.transform, "rename": self.rename, "last": self.last,
            "workers": self._workers, "depth": self.depth, "run": self.run,
        }  # fmt: skip
        is_left = self.place is not None and self.place.is_pass and self.place.count > 0
        least = self.place.line.stop if is_left and self.place is not None else self.least
        return _unpickled, (type(self), self.view, options, (self.position, least, self._in_passes))

    def __repr__(self) -> str:
        known = self.given if self.place is None else self._share
        share = f" as rank {known[0]} of {known[1]}" if known[1] is not None else ""
        return f"<Feed of {self.view!r} in {self.order!r}: position {self.position:,}, batch {self.batch}{share}>"


def _unpickled(kind: type[Feed], view: View, options: dict[str, Any], where: tuple[int, int, bool]) -> Feed:
    feed = kind(view, **options)
    feed._position, feed.least, feed._in_passes = where
    feed._origin = feed._position
    return feed
