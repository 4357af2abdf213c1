"""Warmup: short blocks first, long ones later. The feed delivers long blocks; the loop cuts them.

The length is a function of the position, and cutting loses and repeats no token. So order, state and resume stay those
of the long blocks, and every step has as many tokens as the others.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.batch import Batch
from millrace.ragged import Ragged, as_integer


class Warmup:
    """Lengths of blocks by position: ``Warmup([(0, 128), (50_000, 512), (200_000, 1024)])``.

    ``warmup(batch)`` is the same batch as shorter blocks: columns (B, L, ...) become (B * L / length, length, ...), without
    a copy. Marks are repeated for each part of a sample. A batch has the length of its first sample: give positions that
    are multiples of ``batch``, and all ranks agree.

    >>> from millrace import Blocks, Feed, from_arrays
    >>> view = Blocks(from_arrays({"tokens": np.arange(1000, dtype=np.uint16)}), length=16)
    >>> warmup = Warmup([(0, 4), (8, 16)])
    >>> feed = Feed(view, batch=4, seed=7, device="numpy")
    >>> [warmup(batch)["x"].shape for _, batch in zip(range(3), feed)]
    [(16, 4), (16, 4), (4, 16)]
    """

    def __init__(self, schedule: Sequence[tuple[int, int]]) -> None:
        self.schedule = [(as_integer("position", at), as_integer("length", length)) for at, length in schedule]
        positions = [at for at, _ in self.schedule]
        if not positions or positions[0] != 0 or any(late <= early for early, late in pairwise(positions)):
            raise ConfigError(f"a warm-up with positions {positions[:8]}; expected 0 first, then larger ones")
        if min(length for _, length in self.schedule) < 1:
            raise ConfigError(f"a warm-up with lengths {[own for _, own in self.schedule][:8]}; expected 1 or more")

    def length_at(self, position: int) -> int:
        """The length of blocks at a position."""
        return self.schedule[bisect.bisect_right(self.schedule, position, key=lambda own: own[0]) - 1][1]

    def __call__(self, batch: Batch) -> Batch:
        positions = batch.positions
        if positions is None or not len(positions):
            raise ConfigError("a warm-up needs the positions of its batch; this one lost them, or holds no sample")
        long = _length_of(batch)
        length = self.length_at(max(0, int(positions[0])))
        if long % length:
            raise ConfigError(f"blocks of {long} cannot be cut into parts of {length}; give lengths that divide {long}")
        parts = long // length
        if parts == 1:
            return batch
        columns = {name: _cut(value, parts, length) for name, value in dict.items(batch)}
        repeated = [np.repeat(own, parts) for own in (positions, batch.samples, batch.valid)]  # type: ignore[arg-type]
        return Batch(columns, positions=repeated[0], samples=repeated[1], valid=repeated[2])

    def __repr__(self) -> str:
        return f"Warmup({self.schedule})"


def _cut(column: Any, parts: int, length: int) -> Any:
    return column.reshape(column.shape[0] * parts, length, *column.shape[2:])


def _length_of(batch: Batch) -> int:
    """The length that all columns have."""
    found = {}
    for name, value in dict.items(batch):
        if isinstance(value, Ragged) or len(getattr(value, "shape", ())) < 2:
            raise ConfigError(f"column {name!r} is not of blocks (B, L), so a warm-up cannot cut it; leave it out")
        found[name] = int(value.shape[1])
    if len(set(found.values())) != 1:
        raise ConfigError(f"columns have the lengths {found}; a warm-up cuts columns of one length")
    return next(iter(found.values()))
