"""Foresight: names the files of the next batches to tiers that ask for it, as the loop goes on.

The order is known, so a tier that is far away (``Shards.lookahead``) hears what to fetch, batch by batch, before its turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.feed.line import Line

MOST_SAMPLES = 16_384  # of a feed whose files are looked up at its start; a larger one reads whole files


def choose_ways(line: Line) -> None:
    """Tells tiers that are far away how much a line reads of them, before it reads."""
    if not any(store.lookahead for store in line.view.stores):
        return
    count = len(line.view) if line.stop is None else min(len(line.view), max(0, line.stop - line.start))
    is_small = count <= MOST_SAMPLES
    positions = np.arange(line.start, line.start + (count if is_small else 1), dtype=np.int64)
    files: dict[int, tuple[Any, set[tuple[int, int]]]] = {}
    for shards, own in line.view.files(line.order.samples(positions)):
        files.setdefault(id(shards), (shards, set()))[1].update(own)
    for shards, mine in files.values():
        shards.choose(count if is_small else None, mine)


class Foresight:
    """Of one line: ``reach(k)`` names the files of the batches up to ``lookahead`` after k, each batch once."""

    def __init__(self, line: Line, lookahead: int) -> None:
        self._line, self._lookahead, self._named = line, lookahead, 0

    @classmethod
    def of(cls, line: Line) -> Foresight | None:
        """Names the first batches at once, before any is made. None where no shards ask: then nothing is computed."""
        choose_ways(line)
        lookahead = max(store.lookahead for store in line.view.stores)
        foresight = cls(line, lookahead) if lookahead else None
        if foresight is not None:
            foresight.reach(0)
        return foresight

    def reach(self, batch: int) -> None:
        """The loop takes this batch now."""
        line, last = self._line, batch + 1 + self._lookahead
        if not any(store.lookahead for store in line.view.stores):
            return  # everything was named and stays
        last = last if line.num_batches is None else min(last, line.num_batches)
        for number in range(self._named, last):
            files: dict[int, tuple[Any, dict[tuple[int, int], None]]] = {}
            for shards, own in line.view.files(line.order.samples(line.read_positions(number))):
                files.setdefault(id(shards), (shards, {}))[1].update(dict.fromkeys(own))
            for shards, mine in files.values():
                if shards.lookahead:
                    shards.expect(list(mine))
        self._named = max(self._named, last)
