"""Feed: batches of a view in an order, exact, resumable and explainable.

Batch k is a pure function of k. ``compose.py`` chooses how batches are made, kept ahead and placed.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from millrace.errors import ConfigError
from millrace.feed import cursor, journal
from millrace.feed.batch import Batch, last_span
from millrace.feed.budget import Budget, BudgetLine
from millrace.feed.callers import check_caller, check_trainer
from millrace.feed.explain import Explanation, explain_batch
from millrace.feed.iteration import Iteration, Progress
from millrace.feed.lightning import LastBatch
from millrace.feed.line import Line
from millrace.feed.make.decode import Decode
from millrace.feed.make.transform import Transform
from millrace.feed.options import check_line, check_options, check_ranks, check_view, warn_large_batch
from millrace.feed.passes import Pass, Passes, is_within_epoch, not_by_number
from millrace.feed.processes.job import Job
from millrace.feed.processes.pool import Pool, close_all
from millrace.feed.processes.shared_slots import SharedSlots
from millrace.feed.remote.link import Link
from millrace.feed.report import Report
from millrace.feed.world import check_loader_worker, rank_and_world
from millrace.meter.verdict import Verdict
from millrace.native import num_cores
from millrace.order.orders import MAX_POSITION, Order, Shuffled
from millrace.ragged import Int64s, as_integer
from millrace.store.remote.cache import size_of
from millrace.view.view import View


class Feed:
    """Endless or finite batches of a view, for one rank of a training run.

    ``batch`` is the size over all ranks; a rank receives its share. ``epochs=None`` never ends. Iterating continues where
    the feed stands. ``state_dict()`` counts what the loop got. After a restore with any world size, batch, depth or
    workers, the remaining samples are the same. A feed finds its rank when iteration starts, so you may construct it
    before the process group. ``rename`` gives columns other names, after the transform. A last batch that is not full
    is padded and marked by ``valid`` (``last="pad"``, the default), left out (``"drop"``) or cut (``"short"``). With
    ``queue``, workers on other machines make the batches of this ``run``; those that do not come in time are made here.
    ``tier="ram"`` copies the columns of the view into memory first. ``tier="device"`` copies their rows into the memory of
    the GPU, at most ``device_bytes`` of them, and makes the batches there.

    ``decode(record, rng)`` gets each sample by itself, then ``transform(batch, rng)`` the whole batch. ``workers`` threads
    run them ahead of the loop, or processes: ``processes=True``, or "auto" to choose by measuring. The batches are the
    same, also if a worker dies. ``by_epoch`` keeps the processes from pass to pass, until ``close()``.

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
        decode: Decode | None = None,
        rename: Mapping[str, str] | None = None,
        last: str | None = None,
        workers: int | None = None,
        processes: bool | str = False,
        depth: int = 4,
        queue: str | None = None,
        max_rows: int | None = None,
        tier: str | None = None,
        device_bytes: int | str | None = None,
        run: str | os.PathLike[str] | None = None,
    ) -> None:
        check_view(view)
        if order is None and len(view):
            order = view.default_order(seed) if hasattr(view, "default_order") else Shuffled(len(view), seed)
        check_line(view, order or Shuffled(1), batch)
        assert order is not None
        self.view, self.order, self.batch, self.seed = view, order, int(batch), as_integer("seed", seed)
        self.epochs = None if epochs is None else as_integer("epochs", epochs)
        self.device, self.transform, self.depth, self.last = str(device), transform, depth, last or "pad"
        self.is_last_open = last is None  # a framework that trains on a padded batch is worth a warning
        self.rename, self.run = dict(rename or {}), run
        self.decode, self.processes, self.queue, self.tier = decode, processes, queue, tier
        self.device_bytes = None if device_bytes is None else size_of(device_bytes, "device_bytes")
        self.residency: Any = None  # with tier="device": the rows on the GPU
        self.uses_processes = bool(processes) and processes != "auto"
        self.choice: str | None = None  # what "auto" chose, and why
        self.rank_option, self._workers = (rank, world), workers
        self.budget = None if max_rows is None else Budget(view, order, max_rows)
        check_options(self, workers)
        warn_large_batch(self)
        self.fillers = workers  # without a transform; None: by cores and bytes, when an iterator starts
        self._position = self._bin = 0  # where it started or was restored
        self.progress: Progress | None = None  # of the last iterator since then
        self._origin = self._origin_bin = 0  # p0: where batch 0 of explain and state_at begins
        self._reached: int | None = None  # where the loop stood before it skipped
        self._in_passes = False  # whether batches end with their epoch, as in by_epoch()
        self.steps_before = 0  # of its run, where the journal holds no start from which to count them
        self.earliest_pass = 0  # the next pass does not begin before this: a framework set its epoch
        self.is_restored = False  # since its last iterator
        self.lightning_batch: LastBatch | None = None  # while Lightning reads this feed
        self._live: weakref.ref[Iteration | Pass] | None = None
        self.last_report: Report | None = None  # of the last iterator that ended
        self.link: Link | None = None  # to the queue, which stays from pass to pass
        self._pools: list[Pool] = []  # worker processes, likewise
        weakref.finalize(self, close_all, self._pools)  # also at interpreter exit

    @property
    def workers(self) -> int:
        """Threads or processes that run ``decode`` and ``transform``."""
        usual = max(1, min(8, num_cores() - 1)) if self.uses_processes else min(4, num_cores())
        return self._workers or usual

    @property
    def position(self) -> int:
        """Where the feed stands. It counts what the loop got, not what was made ahead."""
        return self._position if self.progress is None else self.progress.position

    @property
    def bin(self) -> int:
        """Of a feed with ``max_rows``: the bins delivered of the window at ``position``."""
        return self._bin if self.progress is None else self.progress.place.get("bin", 0)

    @property
    def is_within_epoch(self) -> bool:
        return is_within_epoch(self, self.batch)

    @property
    def reached(self) -> int:
        """Where the loop stands, before what it skipped and has not read past yet."""
        return self.position if self._reached is None or self.progress is not None else self._reached

    @property
    def stop(self) -> int | None:
        """The position at which a finite feed ends."""
        return None if self.epochs is None else self.epochs * self.order.n

    @property
    def rank(self) -> int:
        """Of the last iterator, or the one that the next iterator will have."""
        return rank_and_world(*self.rank_option)[0] if self.progress is None else self.progress.line.rank

    @property
    def world(self) -> int:
        return rank_and_world(*self.rank_option)[1] if self.progress is None else self.progress.line.world

    def line(self, start: int, stop: int | None, rank: int = 0, world: int = 1, first_bin: int = 0) -> Line:
        options = (self.view, self.order, self.batch, rank, world, start, stop)
        if self.budget is None:
            return Line(*options, last=self.last)
        return BudgetLine(*options, last=self.last, first_bin=first_bin, budget=self.budget)

    def line_here(self, start: int, stop: int | None) -> Line:
        """The line for the rank that this process is now."""
        check_loader_worker()
        rank, world = rank_and_world(*self.rank_option)
        check_ranks(self, rank, world)
        return self.line(start, stop, rank, world, self.bin if start == self.position else 0)

    def __len__(self) -> int:
        """Batches of the whole feed, wherever it stands; ``remaining`` counts those that are left."""
        check_trainer()
        return _finite(self.line(0, self.stop))

    @property
    def remaining(self) -> int:
        """Batches from where the feed stands to its end."""
        line = self.line(self.position, self.stop, first_bin=self.bin)
        return _finite(replace(line, epoch=self._count_line.epoch))

    @property
    def _count_line(self) -> Line:
        """The line that counts batches: from p0, and in passes if the feed is read by epoch."""
        line = self.line(self._origin, self.stop, first_bin=self._origin_bin)
        return replace(line, epoch=self.order.n) if self._in_passes else line

    def count_passes(self, in_passes: bool) -> None:
        """Counts batches from here if the loop changes between reading by epoch and reading on."""
        if in_passes != self._in_passes:
            self._in_passes, self._origin, self._origin_bin = in_passes, self.position, self.bin

    def __iter__(self) -> Iteration:
        self.check_idle("iterate")
        self.check_unfinished(self.position)
        check_caller("feed")
        self.count_passes(False)
        self.lightning_batch = None
        iteration = self.iterate(self.line_here(self.position, self.stop))
        self.hold(iteration)
        return iteration

    def iterate(self, line: Line, *, is_pass: bool = False) -> Iteration:
        """Starts an iterator over a line; the feed's position follows it."""
        if self.run is not None:
            journal.note_start(self.run, self, line)
        if line.start != self.position:  # the loop left a pass early: count batches from here
            self._origin, self._origin_bin = line.start, 0
        iteration = Iteration(self, line, is_pass=is_pass)
        self.progress, self.is_restored = iteration.progress, False
        return iteration

    def hold(self, iterator: Iteration | Pass) -> None:
        """Makes this the one iterator that may be live."""
        self._live = weakref.ref(iterator)

    @property
    def live(self) -> Any:
        """The iterator that has not ended yet, if there is one."""
        live = None if self._live is None else self._live()
        return None if live is None or live.is_closed else live

    def check_idle(self, what: str) -> None:
        if self.live is not None:
            raise ConfigError(f"cannot {what} while an iterator of this feed is live; finish it, or call feed.close()")

    def check_unfinished(self, start: int) -> None:
        """Refuses an iterator that would be empty, unless the feed was restored at its end."""
        if self.stop is None or self.progress is None or not self.progress.count:
            return
        first_bin = self.bin if start == self.position else 0
        if start >= self.stop or (
            self.last == "drop" and not self.line(start, self.stop, first_bin=first_bin).num_batches
        ):
            raise ConfigError(
                f"this feed has delivered all of its epochs={self.epochs} and would be empty; leave epochs= out and use "
                "feed.by_epoch(), or use feed.by_epoch(repeat=True) to evaluate"
            )

    def by_epoch(self, *, repeat: bool = False) -> Passes:
        """A loader for frameworks: sized, iterated once per epoch, with a state. See ``Passes``.

        With ``repeat`` every pass is the whole first epoch, for evaluation; the feed itself stays where it is.
        """
        passes = Passes(self, repeat=repeat)
        if not repeat:
            self.count_passes(True)
        return passes

    def __getitem__(self, key: Any) -> Any:
        raise not_by_number("a feed has")

    def state_dict(self) -> dict[str, Any]:
        """Where the feed stands, as JSON under 1 KB. It counts what the loop got, not what was made ahead."""
        is_unused = self.lightning_batch is not None and self.lightning_batch.is_unused
        if is_unused and self.progress is not None:  # a batch that Lightning took, but has not used yet
            return self._state(self.progress.line.place(self.progress.count - 1))
        return self._state({"position": self.position, "bin": self.bin})

    def _state(self, place: Mapping[str, int]) -> dict[str, Any]:
        budget = {} if self.budget is None else {"bin": place["bin"], "max_rows": self.budget.max_rows}
        return cursor.write({"position": place["position"], **budget}, self.view, self.order, self.seed)

    def state_at(self, batches: int) -> dict[str, Any]:
        """The state after this many batches since construction or restore, for frameworks that read ahead."""
        if as_integer("batches", batches) < 0:
            raise ConfigError(f"state_at({batches}); expected 0 or more batches")
        return self._state(self._count_line.place(batches))

    def state_before(self, batch: Batch) -> dict[str, Any]:
        """The state of a loop that has this batch but has not used it yet, for loops that read ahead."""
        span, positions, progress = last_span(batch), batch.positions, self.progress
        if self.budget is not None and positions is not None and len(positions):
            return self._state(self._count_line.place(int(self._count_line.number_of(positions[0]))))
        if (
            self.budget is not None and span is not None and progress is not None
        ):  # the last, of which this rank has none
            return self._state(progress.line.place((progress.line.num_batches or 1) - 1))
        start = None if span is None else span[0]
        if start is None:
            if progress is None or positions is None or len(positions) != progress.line.size:
                raise ConfigError(
                    "state_before() needs a whole batch of this feed; this is a part, or lost its positions"
                )
            start = int(positions[0]) - progress.line.share[0]
        return self._state({"position": start, "bin": 0})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; refuses the state of another store, view, order or seed."""
        self.check_idle("load a state")
        position = cursor.read(state, self.view, self.order, self.seed)
        bin_number = cursor.read_bin(state, None if self.budget is None else self.budget.max_rows)
        if self.budget is None:
            self.order = self.order.resumed(state, position)
        else:  # other weights begin with the next window
            order = self.order.resumed(state, self.budget.end_of(position, bin_number))
            budget = self.budget.resumed(order)
            budget.check_place(position, bin_number)
            self.order, self.budget = order, budget
        self._begin_at(position, bin_number)

    def skip(self, positions: int) -> None:
        """Leaves out the next ``positions`` samples of the whole run, such as those of a loss spike.

        The state counts them as delivered, so a resumed run leaves them out too.
        """
        self.check_idle("skip")
        if self.budget is not None:
            raise ConfigError(
                "skip() counts samples, and max_rows= delivers bins; to leave out k batches, load feed.state_at(k)"
            )
        if as_integer("positions", positions) < 0:
            raise ConfigError(f"skip({positions}); expected 0 or more positions")
        if self.position + positions > (MAX_POSITION if self.stop is None else self.stop):
            raise ConfigError(f"skip({positions}) from position {self.position:,} passes the end of the feed")
        reached = self.reached
        self._begin_at(self.position + positions)
        self._reached = reached

    def _begin_at(self, position: int, bin_number: int = 0) -> None:
        self._position, self._origin, self._reached = position, position, None
        self._bin = self._origin_bin = bin_number
        self.progress, self.lightning_batch, self.earliest_pass, self.is_restored = None, None, 0, True

    def explain(self, batch: int) -> Explanation:
        """What batch number ``batch`` since construction, restore or skip holds, over all ranks: samples, rows, sources."""
        return explain_batch(self._count_line, as_integer("batch", batch), self.rename)

    def steps_of(self, samples: Any, epoch: int | None = None) -> Int64s:
        """The batch of each sample in an epoch (default: the current one): the inverse of ``explain``.

        Batches before construction, restore or skip are negative.
        """
        if epoch is None:
            epoch = self.order.epochs_of(samples, self.position)
        elif as_integer("epoch", epoch) < 0 or (self.epochs is not None and epoch >= self.epochs):
            last = "any" if self.epochs is None else self.epochs - 1
            raise ConfigError(f"epoch={epoch}; this feed has epochs 0 to {last}")
        return self._count_line.number_of(self.order.positions(samples, epoch))  # type: ignore[no-any-return]

    def report(self) -> Report | None:
        """Who waited for whom, for the live or else the last iterator; None before the first."""
        return self.last_report if self.live is None else self.live.report()

    def verdict(self) -> Verdict | None:
        """What limits the loop, and what to change; None before the first iterator, or while it has too few batches."""
        report = self.report()
        return None if report is None else report.verdict()

    def pool_of_workers(self, depth: int, gpu: Any) -> Pool:
        """Worker processes for an iterator: those that an earlier pass has left, or new ones."""
        self._pools[:] = [pool for pool in self._pools if not pool.is_closed]
        if (idle := next((pool for pool in self._pools if pool.is_idle), None)) is not None:
            return idle
        # Slots that are ready or being made, one in hand and one before it; on a GPU those on their way.
        slots = SharedSlots(2 * depth + 2 if gpu is not None else depth + 2, gpu)
        method = None if self.processes in (True, "auto") else str(self.processes)
        self._pools.append(Pool(Job.of(self), self.workers, slots, method))
        return self._pools[-1]

    def close(self) -> None:
        """Ends the live iterator, its threads and worker processes; the feed stands where the loop left it."""
        live = self.live
        if live is not None:
            live.close()
        self._live = None
        close_all(self._pools)
        if self.link is not None:
            self.link.close()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """Its options and where it stands, for another process: maps and threads stay here."""
        rank, world = self.rank_option
        options = {
            "batch": self.batch, "order": self.order, "seed": self.seed, "epochs": self.epochs, "rank": rank, "world": world,
            "device": self.device, "transform": self.transform, "rename": self.rename,
            "last": None if self.is_last_open else self.last,
            "workers": self._workers, "depth": self.depth, "run": self.run, "decode": self.decode,
            "processes": self.processes, "queue": self.queue, "tier": self.tier, "device_bytes": self.device_bytes,
            "max_rows": None if self.budget is None else self.budget.max_rows,
        }  # fmt: skip
        earliest = self.earliest_pass
        if self.progress is not None and self.progress.is_pass and self.progress.count > 0:
            earliest = self.progress.line.stop or 0
        return _unpickle, (type(self), self.view, options, (self.position, self.bin, earliest, self._in_passes))

    def __repr__(self) -> str:
        rank, world = self.rank_option if self.progress is None else (self.rank, self.world)
        share = "" if world is None else f" as rank {rank} of {world}"
        return f"<Feed of {self.view!r} in {self.order!r}: position {self.position:,}, batch {self.batch}{share}>"


def _finite(line: Line) -> int:
    if line.num_batches is None:
        raise TypeError("an endless feed has no length; give epochs=, or use by_epoch()")
    return line.num_batches


def _unpickle(kind: type[Feed], view: View, options: dict[str, Any], where: tuple[int, int, int, bool]) -> Feed:
    feed = kind(view, **options)
    feed._position, feed._bin, feed.earliest_pass, feed._in_passes = where
    feed._origin, feed._origin_bin = feed._position, feed._bin
    return feed
