"""Batches that Python plans, many at a time, and numpy or the core's gather copies."""

from __future__ import annotations

import threading

from millrace.feed.batch import Batch
from millrace.feed.line import Line, Plan
from millrace.feed.make.slots import Slots
from millrace.feed.stages import Counters


class PlanMake:
    """Makes any batch of a line by a plan; ``in_threads`` says that several threads may ask for batches."""

    def __init__(self, line: Line, *, slots: int, in_threads: bool = False) -> None:
        self._line, self._slots, self._in_threads = line, Slots(slots), in_threads
        self._lock = threading.Lock()
        self._plans: dict[int, Plan] = {}
        # A plan holds the files of all its batches.
        self._is_limited = any(store.is_limited for store in line.view.stores)
        self._size = 1 if self._is_limited else line.plan_size()

    def make(self, batch: int) -> Batch:
        with self._slots.take() as slot:
            plan = self._plan(batch)
            rows = plan.rows(batch)
            return Batch(plan.located.fill(rows.start, rows.stop, slot.array), **plan.marks(batch))

    def _plan(self, batch: int) -> Plan:
        size = self._size
        number = batch // size
        with self._lock:
            plan = self._plans.get(number)
            if plan is None:
                # Other threads may still use the plan before. Older ones are dropped, and made again if needed.
                oldest = number - 1 if self._in_threads and not self._is_limited else number
                for old in [known for known in self._plans if known < oldest]:
                    del self._plans[old]
                total = self._line.num_batches
                last = (number + 1) * size if total is None else min((number + 1) * size, total)
                plan = self._plans[number] = self._line.plan(number * size, last)
            return plan

    def report(self) -> Counters:
        with self._lock:
            plan = self._plans.get(max(self._plans, default=-1))
        return Counters(is_cold=None if plan is None else plan.located.is_cold())
