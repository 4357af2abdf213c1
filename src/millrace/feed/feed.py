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
from millrace.feed.batch import Batch, check_names
from millrace.feed.explain import Explanation, describe
from millrace.feed.iterate import DEVICES, Iteration, Place
from millrace.feed.line import Line, check_line
from millrace.feed.report import Report
from millrace.feed.world import rank_and_world
from millrace.native import num_cores
from millrace.order.orders import MAX_POSITION, Order, Shuffled
from millrace.order.share import share
from millrace.ragged import Int64s, as_integer
from millrace.view.view import View

MOST_AHEAD = 4096  # batches kept ready, and threads that make them: more of them are memory and nothing else

Transform = Callable[[Batch, Any], Mapping[str, Any]]


class Feed:
    """Endless or finite batches of a view, for one rank of a training run.

    ``batch`` is global: a rank receives its share of it. ``epochs=None`` never ends. Iterating continues where
    the feed stands. ``state_dict()`` counts what the loop got; restored with any world size, batch, depth or
    workers, the remaining samples are the same.

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
        device: str = "cpu",
        transform: Transform | None = None,
        workers: int | None = None,
        depth: int = 4,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        if order is None and len(view):
            order = view.default_order(seed) if hasattr(view, "default_order") else Shuffled(len(view), seed)
        check_line(view, order or Shuffled(1), batch)
        assert order is not None
        if epochs is not None and not 1 <= as_integer("epochs", epochs) <= MAX_POSITION // order.n:
            raise ConfigError(
                f"epochs={epochs}; expected 1 or more within 2^63 - 1 positions, or None for an endless feed"
            )
        if device.split(":")[0] not in DEVICES:
            raise ConfigError(f"device={device!r}; expected one of {', '.join(DEVICES)}")
        for name, value in (("depth", depth), ("workers", 1 if workers is None else workers)):
            if not 1 <= as_integer(name, value) <= MOST_AHEAD:
                raise ConfigError(f"{name}={value}; expected 1 to {MOST_AHEAD}")
        if not 0 <= seed < 1 << 64:
            raise ConfigError(f"seed={seed}; expected 0 to 2^64 - 1")
        self.view, self.order, self.batch, self.seed = view, order, int(batch), int(seed)
        self.epochs = None if epochs is None else int(epochs)
        self.rank, self.world = rank_and_world(rank, world)
        share(self.batch, self.rank, self.world)
        check_names([field.name for field in view.fields])
        self.device, self.transform, self.depth = device, transform, depth
        self.workers = workers or min(4, num_cores())
        # Without a transform the loop makes batches itself rather than wait, so one core is its own.
        self.fillers = workers or max(1, min(4, num_cores() - 1))
        self.run = run
        self._position = 0  # where it was begun or restored
        self._place: Place | None = None  # of the last iterator since then
        self._origin = 0  # p0: where batch 0 of explain and state_at begins
        self._in_passes = False  # whether batches end with their epoch, as by_epoch() makes them
        self._live: weakref.ref[Iteration] | None = None
        self._report: Report | None = None  # of the last iterator

    # The line.

    @property
    def position(self) -> int:
        """Where the feed stands: what the loop got, not what was prefetched."""
        return self._position if self._place is None else self._place.position

    @property
    def stop(self) -> int | None:
        """The position at which a finite feed ends."""
        return None if self.epochs is None else self.epochs * self.order.n

    def line(self, start: int, stop: int | None) -> Line:
        return Line(self.view, self.order, self.batch, self.rank, self.world, start, stop)

    def __len__(self) -> int:
        """Batches from where it was constructed or restored to its end, however far the loop is."""
        total = self._counted.num_batches
        if total is None:
            raise TypeError("an endless feed has no length; give epochs=, or use by_epoch()")
        return total

    @property
    def _counted(self) -> Line:
        """The line by which batches are counted: from p0, in passes where the feed is read by epoch."""
        line = self.line(self._origin, self.stop)
        return replace(line, epoch=self.order.n) if self._in_passes else line

    def _count_passes(self, in_passes: bool) -> None:
        """Batches are counted anew from here where the way of reading changes under way."""
        if in_passes != self._in_passes:
            self._in_passes, self._origin = in_passes, self.position

    def __iter__(self) -> Iteration:
        self._check_idle("iterate")
        self._count_passes(False)
        return self.iterate(self.stop)

    def iterate(self, stop: int | None) -> Iteration:
        """An iterator from where the feed stands to ``stop``; only one may be live."""
        self._check_idle("iterate")
        if self.run is not None:
            journal.note_start(self.run, self, stop)
        iteration = Iteration(self, self.line(self.position, stop))
        self._live, self._place = weakref.ref(iteration), iteration.place
        return iteration

    @property
    def live(self) -> Iteration | None:
        """The iterator that has not ended yet, if there is one."""
        live = None if self._live is None else self._live()
        return None if live is None or live.is_closed else live

    def _check_idle(self, what: str) -> None:
        if self.live is not None:
            raise ConfigError(
                f"cannot {what} while an iterator of this feed is live; finish it, drop it, or call feed.close()"
            )

    def by_epoch(self) -> EpochLoader:
        """A sized loader that can be iterated again and again: each pass is the rest of one epoch."""
        self._count_passes(True)
        return EpochLoader(self)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Where the feed stands: what the loop got, not what was prefetched. JSON, under 1 KB."""
        return cursor.write(self.position, self.view, self.order, self.seed)

    def state_at(self, batches: int) -> dict[str, Any]:
        """The state after this many batches since construction or restore, for frameworks that read ahead."""
        if as_integer("batches", batches) < 0:
            raise ConfigError(f"state_at({batches}); expected 0 or more batches")
        position = self._counted.end(batches)
        return cursor.write(position, self.view, self.order, self.seed)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses one of another store, view, order or seed."""
        self._check_idle("load a state")
        self._position = self._origin = cursor.read(state, self.view, self.order, self.seed)
        self._place = None

    # Explanations.

    def explain(self, batch: int) -> Explanation:
        """What batch number ``batch`` since construction or restore holds, over all ranks: samples, rows, sources."""
        line = self._counted
        if as_integer("batch", batch) < 0 or (line.num_batches is not None and batch >= line.num_batches):
            raise ConfigError(f"batch {batch} is outside the feed; it has {line.num_batches} batches")
        if line.end(batch + 1) > MAX_POSITION:
            raise ConfigError(f"batch {batch} lies beyond position 2^63 - 1, where every line ends")
        return describe(self.view, self.order, line.end(batch), line.end(batch + 1), batch)

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

    def __repr__(self) -> str:
        where = f"position {self.position:,}, batch {self.batch} as rank {self.rank} of {self.world}"
        return f"<Feed of {self.view!r} in {self.order!r}: {where}>"


class EpochLoader:
    """One pass per epoch over a feed: sized and re-iterable, as frameworks want a loader."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    @property
    def _end(self) -> int:
        n, stop = self._feed.order.n, self._feed.stop
        end = (self._feed.position // n + 1) * n
        return end if stop is None else min(end, stop)

    def __len__(self) -> int:
        """Batches of the live pass, else of the one that comes next."""
        live = self._feed.live
        if live is not None and live.total is not None:
            return live.total
        return self._feed.line(self._feed.position, self._end).num_batches or 0

    def __iter__(self) -> Iteration:
        self._feed._check_idle("iterate")
        self._feed._count_passes(True)
        return self._feed.iterate(self._end)
