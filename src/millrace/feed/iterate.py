"""Iteration: one pass over a line of batches, in line or through the threads of a stage."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.errors import ConfigError, FeedError, StageFailed
from millrace.feed.batch import Batch, check_names
from millrace.feed.line import Line, Plan
from millrace.feed.ring import Slots
from millrace.feed.rng import Rng
from millrace.feed.stage import Stage
from millrace.ragged import Array, Ragged

if TYPE_CHECKING:
    from millrace.feed.feed import Feed, Transform

DEVICES = ("cpu", "numpy")


class Iteration:
    """The iterator of a feed. It ends by exhaustion, ``close()`` or garbage collection."""

    def __init__(self, feed: Feed, line: Line) -> None:
        self._feed, self.line, self._count = feed, line, 0
        self.total = line.num_batches
        self._process = os.getpid()
        self._convert = _to_torch if feed.device == "cpu" else None
        self.is_closed = False
        maker = _Maker(line, feed.transform, feed.seed, slots=feed.depth + 2)
        self._make = maker.make
        self._stage: Stage | None = None
        if feed.transform is not None:
            self._stage = Stage(maker.make, workers=min(feed.workers, feed.depth), depth=feed.depth, count=self.total)

    def __iter__(self) -> Iteration:
        return self

    def __len__(self) -> int:
        if self.total is None:
            raise TypeError("an endless feed has no length")
        return self.total - self._count

    def __next__(self) -> Batch:
        if self._process != os.getpid():
            raise FeedError("this feed was started in another process; a forked child must make its own")
        if self.is_closed or self._count == self.total:
            self.close()
            raise StopIteration
        try:
            batch = self._make(self._count) if self._stage is None else self._stage.take(self._count)
            if self._convert is not None:
                batch = self._convert(batch)
        except BaseException:
            self.close()
            raise
        self._count += 1
        self._feed.position = self.line.end(self._count)
        return batch

    def close(self) -> None:
        self.is_closed = True
        if self._stage is not None:
            self._stage.close()

    def __del__(self) -> None:
        if getattr(self, "_stage", None) is not None:
            self.close()


class _Maker:
    """Makes any batch of a line: gathers it into a slot, then runs the transform on it."""

    def __init__(self, line: Line, transform: Transform | None, seed: int, *, slots: int) -> None:
        self._line, self._transform, self._seed = line, transform, seed
        self._slots = Slots(slots)
        self._lock = threading.Lock()
        self._plans: dict[int, Plan] = {}

    def make(self, batch: int) -> Batch:
        plan = self._plan(batch)
        rows = plan.rows(batch)
        slot = self._slots.take()
        try:
            filled = Batch(plan.located.fill(rows.start, rows.stop, slot.array), **plan.marks(batch))
        finally:
            slot.is_filling = False
        # Marks of their own go on: the transform may change those it is given.
        return filled if self._transform is None else self._transformed(batch, filled, plan.marks(batch))

    def _plan(self, batch: int) -> Plan:
        size = self._line.plan_size()
        number = batch // size
        with self._lock:
            plan = self._plans.get(number)
            if plan is None:
                # Threads may still be on the one before; those before that are done with, or made again.
                needed = number if self._transform is None else number - 1
                for old in [known for known in self._plans if known < needed]:
                    del self._plans[old]
                total = self._line.num_batches
                last = (number + 1) * size if total is None else min((number + 1) * size, total)
                plan = self._plans[number] = self._line.plan(number * size, last)
            return plan

    def _transformed(self, number: int, batch: Batch, marks: dict[str, Any]) -> Batch:
        assert self._transform is not None
        try:
            result = self._transform(batch, Rng(self._seed, marks["positions"]))
            _check_result(result, len(marks["positions"]))
        except Exception as error:
            # Where the share is padding alone, its sample is the first of the global batch.
            first = int(marks["positions"][0]) if marks["valid"][0] else self._line.end(number)
            cause = f"{type(error).__name__}: {error}"
            raise StageFailed(
                f"the transform raised at position {first} (samples {marks['samples'][:4]}...): {cause}",
                stage="transform", position=first,
            ) from error  # fmt: skip
        return Batch(result, **marks)


def _check_result(result: Any, num_samples: int) -> None:
    if not isinstance(result, Mapping):
        raise ConfigError(f"it returned {type(result).__name__}; expected a mapping of arrays")
    check_names(list(result))
    for name, value in result.items():
        if not hasattr(value, "__len__") or len(value) != num_samples:
            found = len(value) if hasattr(value, "__len__") else "no"
            raise ConfigError(f"it returned {found} rows in {name!r}; expected {num_samples}, one per sample")


def _to_torch(batch: Batch) -> Batch:
    """The same memory as tensors; text stays as it is."""
    try:
        import torch
    except ImportError as error:
        raise ConfigError('device="cpu" delivers torch tensors, and torch is not installed; pip install millrace[torch], '
                          'or take device="numpy"') from error  # fmt: skip

    def tensor(array: Array) -> Any:
        # torch takes no negative strides (a flip in a transform) and warns of read-only memory.
        is_plain = array.flags.writeable and min(array.strides, default=0) >= 0
        return torch.from_numpy(array if is_plain else array.copy())

    def convert(value: Any) -> Any:
        if isinstance(value, Ragged):
            return value.map(tensor)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
            return tensor(value)
        return value

    return Batch({name: convert(value) for name, value in batch.items()},
                 positions=batch.positions, samples=batch.samples, valid=batch.valid)  # fmt: skip
