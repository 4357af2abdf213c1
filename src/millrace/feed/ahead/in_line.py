"""No thread: the loop makes each batch when it asks for it."""

from __future__ import annotations

import math
from typing import Any

from millrace.feed.stages import Counters, Make


class InLine:
    """Batches that the loop makes itself."""

    def __init__(self, make: Make[Any], *, count: int | None) -> None:
        self._make, self._count, self._taken = make.make, math.inf if count is None else count, 0

    def take(self, batch: int, wait: bool = True) -> Any:
        if not wait or batch >= self._count:
            return None
        self._taken += 1
        return self._make(batch)

    def report(self) -> Counters:
        return Counters(taken=self._taken, made_here=self._taken)

    def close(self) -> None:
        self._count = 0
