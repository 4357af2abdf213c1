"""Which rank this process is, of how many: said by the caller, by torch.distributed, or one alone."""

from __future__ import annotations

import os
import sys

from millrace.errors import ConfigError


def rank_and_world(rank: int | None, world: int | None) -> tuple[int, int]:
    """The data-parallel rank and world size; never silently rank 0 of 1 in a job of several."""
    if (rank is None) != (world is None):
        raise ConfigError(f"rank={rank}, world={world}; give both or neither")
    if rank is not None and world is not None:
        if world < 1 or not 0 <= rank < world:
            raise ConfigError(f"rank={rank} of world={world}; expected 0 <= rank < world")
        return rank, world
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdigit() and int(size) > 1:
        raise ConfigError(
            f"WORLD_SIZE={size} but torch.distributed is not initialised; call init_process_group first, or give rank= and world="
        )
    return 0, 1
