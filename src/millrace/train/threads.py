"""How many threads torch takes on the CPU, and how they wait for each other.

Beside busy neighbours, two threads that spin while they wait made 9 steps/s, one thread 373, and two that sleep 334. So the
command line asks for threads that sleep, before torch is loaded. The number of threads depends on the configuration and the
machine, never on its load: it changes the last bits of a loss.
"""

from __future__ import annotations

import functools
import os


def wait_asleep() -> None:
    """Asks OpenMP for threads that sleep while they wait. OpenMP looks once, when torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_threads(asked: int, before: int | None) -> None:
    """Sets torch's threads: ``train.threads``, OMP_NUM_THREADS, those the run began with, or the cores of this rank."""
    import torch

    most = _default_threads()
    if not asked and "OMP_NUM_THREADS" not in os.environ:
        asked = before or max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(asked or most)


@functools.cache
def _default_threads() -> int:
    """Torch's own choice: the cores of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
