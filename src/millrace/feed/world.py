"""Which rank this process is, of how many: said by the caller, by a process group, or one alone.

A feed asks when iteration starts, in the process that iterates: a feed may be made before its process group, or in
another process.
"""

from __future__ import annotations

import os
import sys

from millrace.errors import ConfigError
from millrace.order.share import share


def check_given(rank: int | None, world: int | None, batch: int) -> None:
    """Refuses a rank and world that cannot be, as soon as they are given."""
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank}, world={world}; give both or neither")
    if rank is not None and world is not None:
        share(batch, rank, world)


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """The data-parallel rank and world size; never silently rank 0 of 1 in a job of several."""
    group = _group()
    if rank is not None and world is not None:
        if group is not None and group[1] % world:
            raise ConfigError(
                f"world={world}, but the process group has {group[1]} processes, which is no multiple of it; give the number of "
                "data-parallel ranks, or leave rank= and world= out"
            )
        return rank, world
    if group is not None:
        return group
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE={size} but torch.distributed is not initialised; call init_process_group first, or give rank= and world="
        )
    return 0, 1


def _group() -> tuple[int, int] | None:
    """Rank and size of the process group of torch or JAX, whichever this process has joined."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    jax = sys.modules.get("jax")
    is_joined = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    return (
        (jax.process_index(), jax.process_count())
        if jax is not None and is_joined is not None and is_joined()
        else None
    )
