"""Iteration: one pass over a line of batches, in line or through the threads of a stage."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING

from millrace.errors import ConfigError, FeedError, StoreError
from millrace.feed import core_ring as native
from millrace.feed.batch import Batch, part_of, renamed
from millrace.feed.callers import check_iterator
from millrace.feed.core_ring import NativeRing
from millrace.feed.cuda import CudaLanes
from millrace.feed.device import DeviceRing, group_of
from millrace.feed.line import Line
from millrace.feed.maker import Maker
from millrace.feed.parcel import InLine, Packer, Parcel, ParcelRing
from millrace.feed.program import Program, Unmapped
from millrace.feed.pytrees import torch_pytrees
from millrace.feed.report import Report
from millrace.feed.stage import Stage
from millrace.ragged import Ragged, is_numeric, tensor_maker

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

DEVICES = ("cpu", "numpy", "cuda")  # also "cuda:1"


_life = object()  # a forked child has another


def _note_fork() -> None:
    global _life
    _life = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)


class Place:
    """How far a loop is on its line. Its feed holds it too: an iterator may end in any way, also while it gives a batch."""

    __slots__ = ("count", "is_pass", "line")

    def __init__(self, line: Line, is_pass: bool = False) -> None:
        self.line, self.count, self.is_pass = line, 0, is_pass

    @property
    def position(self) -> int:
        """Where the line goes on after the batches that the loop got."""
        return self.line.end(self.count)


class Iteration:
    """The iterator of a feed. It ends with its last batch, by ``close()`` or garbage collection."""

    def __init__(self, feed: Feed, line: Line, *, is_pass: bool = False) -> None:
        self._feed, self.line, self.place = feed, line, Place(line, is_pass)
        self.total = line.num_batches
        self._process, self._life = os.getpid(), _life
        self._convert = _torch_converter() if feed.device != "numpy" else None
        self._rename = feed.rename or None
        self.is_closed = False
        self._takers: dict[str, object] = {}  # the call of next() under way; unlike a lock, it says whose it is
        self._began, self._next_s = perf_counter(), 0.0
        self._lanes = CudaLanes(feed.device) if feed.device.startswith("cuda") else None
        together = group_of(line, feed.depth) if self._lanes is not None and feed.transform is None else 1
        program = Program.of(line, together)
        self._maker = Maker(line, feed.transform, feed.seed, program, slots=feed.depth + 2)
        self._first = 0  # the batch that the stage counts from
        self._stage: Stage | NativeRing | DeviceRing | ParcelRing | None = None
        self._ring: DeviceRing | None = None  # the stage, if it is one
        self._stage = self._start() if self._lanes is None else self._start_on_device()

    def _start(self) -> Stage | NativeRing | None:
        feed, program = self._feed, self._maker.program
        if feed.transform is not None:
            workers = min(feed.workers, feed.depth)
            return Stage(self._maker.make, workers=workers, depth=feed.depth, count=self.total)
        if program is None:
            return None
        workers = min(feed.fillers, feed.depth) if program.batch_bytes >= native.IN_LINE_BYTES else 0
        return NativeRing(program, count=self.total, depth=feed.depth, workers=workers)

    def _start_on_device(self) -> DeviceRing | ParcelRing:
        """Always ahead, and in pinned memory."""
        feed, program, lanes, depth = self._feed, self._maker.program, self._lanes, self._feed.depth
        assert lanes is not None
        assert self._convert is not None
        if program is not None and feed.transform is None:
            return self._device_ring(program)
        # Ready or being made, under way, and one in hand.
        pack, convert, make = Packer(lanes, 2 * depth + 1).pack, self._convert, self._maker.make

        def parcel(batch: int) -> Parcel:  # it holds no iterator: threads run it
            return pack(convert(make(batch)))

        if feed.transform is None:
            return ParcelRing(InLine(parcel), lanes, depth=depth)
        stage = Stage(parcel, workers=min(feed.workers, depth), depth=depth, count=self.total)
        return ParcelRing(stage, lanes, depth=depth)

    def __iter__(self) -> Iteration:
        check_iterator()
        return self

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("an endless feed has no length")
        return self.total - self.place.count

    def __next__(self) -> Batch:
        """The next batch. The handler of a signal may raise at any step: then the batch does not count, and the iterator ends."""
        if self._life is not _life:
            self._check_process()
        mine, takers, place = object(), self._takers, self.place
        count = None
        try:
            if takers.setdefault("next", mine) is not mine:  # whoever has it goes on undisturbed
                raise FeedError(
                    "two threads take batches from one iterator at a time; give each thread a feed of its own"
                )
            count = place.count
            if self.is_closed or count == self.total:
                raise StopIteration
            began = perf_counter()
            ring = self._ring
            if ring is not None and ring.ready and ring.stream == ring.current():
                batch = ring.ready.pop()  # at once: a loop that queues short kernels feels every call
            else:
                batch = self._take()
            if self._rename is not None:
                batch = renamed(batch, self._rename)
            place.count = count + 1
            self._next_s += perf_counter() - began
            if count + 1 == self.total:
                batch = self._last(batch)
            del takers["next"]
            return batch
        except BaseException:
            if count is not None:
                place.count = count  # the loop did not get it
            if count is not None or takers.get("next") is mine:
                self.close()
                takers.clear()
            raise

    def _last(self, batch: Batch) -> Batch:
        """The last batch knows where it begins, since its share may be padding alone; with it the iterator ends."""
        first, last = self.line.span(self.place.count - 1)
        if self._feed.last == "short" and last - first < self.line.batch:
            batch = part_of(batch, slice(last - first))
        batch.__dict__["_span"] = first, last
        self.close()
        return batch

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise FeedError("this feed was started in another process; a forked child must make its own")

    @property
    def behind_s(self) -> float:
        """How long the loop has waited for the GPU, and not for data."""
        return self._stage.behind_s if isinstance(self._stage, (DeviceRing, ParcelRing)) else 0.0

    def _take(self) -> Batch:
        self._check_process()  # what was forked below Python was not noted; to ask the system takes microseconds
        batch = self._staged()
        return self._convert(batch) if self._convert is not None and self._lanes is None else batch

    def _staged(self) -> Batch:
        if self._stage is not None:
            try:
                found: Batch = self._stage.take(self.place.count - self._first)
                return found
            except Unmapped:  # too many shards to map: numpy reads them
                is_parted = False
            except (StoreError, ConfigError):  # about the data
                if not isinstance(self._stage, DeviceRing) or self._stage.group == 1:
                    raise
                is_parted = True
            if is_parted and self._part():
                return self._staged()
            self._stage.close()
            self._stage, self._ring, self._maker.program, self._first = None, None, None, 0
            if self._lanes is not None:
                self._stage = self._start_on_device()
                return self._stage.take(self.place.count)
        return self._maker.make(self.place.count)

    def _part(self) -> bool:
        """Of batches that share a slot one cannot be made, those before it can: from here on each has its own, if maps are left."""
        assert self._stage is not None
        self._stage.close()
        program = Program.of(replace(self.line, start=self.place.position))
        if program is None:
            return False
        self._first = self.place.count
        self._stage = self._device_ring(program)
        if self.is_closed:  # by another thread
            self._stage.close()
        return True

    def _device_ring(self, program: Program) -> DeviceRing:
        count, depth = None if self.total is None else self.total - self._first, self._feed.depth
        workers = min(self._feed.fillers, depth)
        self._ring = DeviceRing(program, self._lanes, count=count, depth=depth, workers=workers)
        return self._ring

    def report(self) -> Report:
        self._check_process()  # a thread that is not there may have held the ring's lock
        stage = self._stage
        workers, counted = (0, {}) if stage is None else (stage.num_workers, stage.report())
        way = "transform" if self._feed.transform is not None else "numpy" if self._maker.program is None else None
        way = way or ("ring" if workers else "in line")
        counted.setdefault("is_cold", self._maker.is_cold())
        count = self.place.count
        samples = min(self.place.position - self.line.start, count * self.line.size)
        get_s = self._next_s - self.behind_s
        return Report(way, workers, count, samples, perf_counter() - self._began, get_s, **counted)

    def close(self) -> None:
        is_mine = self._process == os.getpid()  # a forked child has neither the threads nor the GPU
        if is_mine and not self.is_closed:
            self._feed.note_report(self.report())
        self.is_closed = True
        if is_mine and self._stage is not None:
            self._stage.close()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_stage") and not _is_ending():  # at its very end the interpreter has no modules any more
            self.close()


def _torch_converter() -> Callable[[Batch], Batch]:
    """Makes tensors of a batch's arrays, in the same memory; text stays as it is."""
    try:
        tensor = tensor_maker()
    except ImportError as error:
        raise ConfigError('device="cpu" delivers torch tensors, and torch is not installed; pip install millrace[torch], '
                          'or take device="numpy"') from error  # fmt: skip
    torch_pytrees()

    def convert(batch: Batch) -> Batch:
        for name, value in dict.items(batch):
            if is_numeric(value):
                batch[name] = tensor(value)
            elif isinstance(value, Ragged):
                batch[name] = value.map(tensor)
        return batch

    return convert
