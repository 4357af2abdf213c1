"""Which positions of a batch belong to which rank."""

from __future__ import annotations

from millrace.errors import ConfigError


def share(batch: int, rank: int, world: int) -> tuple[int, int]:
    """The contiguous part [first, last) of a global batch that rank ``rank`` of ``world`` takes.

    >>> [share(10, rank, 4) for rank in range(4)]
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    if world < 1 or not 0 <= rank < world:
        raise ConfigError(f"rank={rank} of world={world}; expected 0 <= rank < world")
    if batch < world:
        raise ConfigError(f"batch={batch} is smaller than world={world}; every rank needs a sample: raise batch")
    return rank * batch // world, (rank + 1) * batch // world
