"""Maker: any batch of a line, with or without the core, and what the transform makes of it."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.errors import ConfigError, StageFailed
from millrace.feed.batch import MARKS, Batch, check_names
from millrace.feed.line import Line, Plan
from millrace.feed.program import Program, Unmapped
from millrace.feed.rng import Rng
from millrace.feed.slots import Slot, Slots

if TYPE_CHECKING:
    from millrace.feed.feed import Transform


class Maker:
    """Makes any batch of a line: gathers it into a slot, then runs the transform on it."""

    def __init__(
        self, line: Line, transform: Transform | None, seed: int, program: Program | None = None, *, slots: int
    ) -> None:
        self._line, self._transform, self._seed, self.program = line, transform, seed, program
        self._slots = Slots(slots)
        self._lock = threading.Lock()
        self._plans: dict[int, Plan] = {}

    def make(self, batch: int) -> Batch:
        slot = self._slots.take()
        try:
            filled = self._programmed(batch, slot) or self._planned(batch, slot)
        finally:
            slot.is_filling = False
        if self._transform is None:
            return filled
        # Marks of their own go on: the transform may change those it is given.
        return self._transformed(batch, filled, {name: getattr(filled, name).copy() for name in MARKS})

    def is_cold(self) -> bool | None:
        """Whether rows are asked for ahead of the copy; None where that is not known."""
        if self.program is not None:
            return bool(self.program.core.is_cold())
        with self._lock:
            plan = self._plans.get(max(self._plans, default=-1))
        return None if plan is None else plan.located.is_cold()

    def _planned(self, batch: int, slot: Slot) -> Batch:
        plan = self._plan(batch)
        rows = plan.rows(batch)
        return Batch(plan.located.fill(rows.start, rows.stop, slot.array), **plan.marks(batch))

    def _programmed(self, batch: int, slot: Slot) -> Batch | None:
        """The batch by the C core, or None where only Python can make it."""
        if (program := self.program) is None:
            return None
        needed = program.layout.fixed_bytes
        try:
            while True:
                memory = slot.array("batch", (needed,), np.dtype(np.uint8))
                used = program.core.fill(batch, memory)
                if used >= 0:
                    return program.layout.batch(program.layout.views(memory), memory)
                needed = -used
        except Unmapped:
            self.program = None
            return None

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
