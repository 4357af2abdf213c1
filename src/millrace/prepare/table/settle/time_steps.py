"""The steps in time between the rows of entities: the most common one, and how many differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.prepare.table.options import STEPS_NS
from millrace.ragged import Array

MAX_STEPS = 1024  # different steps that are counted, the most common ones
ALL = 0  # the key of the number of all steps; no step is 0, since no time occurs twice


class Steps:
    """Counts steps between times that are whole numbers."""

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def merge(self, other: Steps) -> None:
        self.counts.update(other.counts)
        self._prune()

    def _prune(self) -> None:
        if len(self.counts) > 2 * MAX_STEPS:
            self.counts = Counter(dict(self.counts.most_common(MAX_STEPS)))

    def add(self, steps: Array) -> None:
        if not len(steps):
            return
        self.counts[ALL] += len(steps)
        if (steps == steps[0]).all():
            self.counts[int(steps[0])] += len(steps)
        else:
            values, numbers = np.unique(steps, return_counts=True)
            most = np.argsort(-numbers, kind="stable")[:MAX_STEPS]
            self.counts.update(dict(zip(values[most].tolist(), numbers[most].tolist(), strict=True)))
        self._prune()


def irregular_note(counts: Mapping[int, int], unit: str | None) -> str | None:
    """The note on times that are not all one step apart."""
    if not counts:
        return None
    step, number = min(((step, n) for step, n in counts.items() if step != ALL), key=lambda pair: (-pair[1], pair[0]))
    others = counts[ALL] - number
    if not others:
        return None
    shown = show_step(step, unit)
    how = "" if unit is None else f"; --freq {shown} makes a regular grid"
    return (
        f"irregular times: the most common step is {shown}, but {others:,} of {counts[ALL]:,} steps are others (gaps, or "
        f"extra rows), and a window counts rows, not time{how}"
    )


def show_step(step: int, unit: str | None) -> str:
    """A step as ``--freq`` takes it; a plain number where times have no unit."""
    if unit is None:
        return str(step)
    length: Any = step * STEPS_NS[unit]
    name = next(name for name in reversed(STEPS_NS) if length % STEPS_NS[name] == 0)
    return f"{length // STEPS_NS[name]}{name}"
