"""Which rank this process is, of how many: as the caller says, as its process group says, or the only one.

A feed asks when iteration starts, in the process that iterates. So you may construct it before the process group, or in
another process.
"""

from __future__ import annotations

import os
import sys

from millrace.errors import ConfigError


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """The data-parallel rank and world size. In a job of several it is never silently rank 0 of 1."""
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
            f"WORLD_SIZE={size}, but there is no process group; call init_process_group first, or give rank=, world="
        )
    return 0, 1


def _group() -> tuple[int, int] | None:
    """Rank and size of the process group of torch or JAX that this process has joined."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    jax = sys.modules.get("jax")
    is_joined = getattr(getattr(jax, "distributed", None), "is_initialized", None)
    if jax is None or is_joined is None or not is_joined():
        return None
    return jax.process_index(), jax.process_count()
