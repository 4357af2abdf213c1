"""Which rank this process is, of how many: as the caller says, as its process group says, or the only one.

A feed asks when iteration starts, in the process that iterates. So you may construct it before the process group, or in
another process.
"""

from __future__ import annotations

import os
import sys

from millrace.errors import ConfigError

# The tasks of a job, as torchrun, srun, Open MPI and MPICH count them. SLURM_NTASKS is none of them: sbatch and salloc set it
# for a script that runs once.
LAUNCHERS = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


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
    if (launched := launched_world()) is not None:
        raise ConfigError(
            f"{launched}, but there is no process group; call init_process_group first, or give rank=, world= (rank=0, world=1 "
            "where this process runs by itself)"
        )
    return 0, 1


def launched_world() -> str | None:
    """What the launcher of this process says about a job of several, such as ``SLURM_STEP_NUM_TASKS=4``; None if it is alone."""
    sizes = ((name, os.environ.get(name, "")) for name in LAUNCHERS)
    return next((f"{name}={size}" for name, size in sizes if size.isdigit() and int(size) > 1), None)


def check_loader_worker() -> None:
    """Refuses the workers of a torch ``DataLoader``: each of them would deliver every batch of the feed."""
    data = sys.modules.get("torch.utils.data")  # every worker has imported it
    worker_info = getattr(data, "get_worker_info", None)  # another thread may be importing it
    info = None if worker_info is None else worker_info()
    if info is not None and info.num_workers > 1:
        raise ConfigError(
            f"num_workers={info.num_workers}: each worker of the DataLoader would deliver every batch of this feed; set "
            "num_workers=0 and loop over millrace.torch.IterableDataset(feed), and give the feed transform= and workers="
        )


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
