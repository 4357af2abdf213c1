"""How many threads torch takes on the CPU, and how they wait for each other.

Threads that spin while another one has no core hold up all: beside busy neighbours two of them made 9 steps/s where one made 373.
Threads that sleep made 334. So the command line asks for those, before torch is loaded. The number of threads is a function of
the configuration and the machine, never of its load: it changes the last bits of a loss.
"""

from __future__ import annotations

import functools
import os


def wait_asleep() -> None:
    """Asks OpenMP for threads that sleep while they wait; it looks once, when torch is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def set_threads(asked: int, before: int | None) -> None:
    """Sets torch's threads: as ``train.threads`` asks, as OMP_NUM_THREADS says, as the run began, or the cores of this rank."""
    import torch

    most = _default_threads()
    if not asked and "OMP_NUM_THREADS" not in os.environ:
        asked = before or max(1, most // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    torch.set_num_threads(asked or most)


@functools.cache
def _default_threads() -> int:
    """What torch takes by itself: the cores of this process, or OMP_NUM_THREADS."""
    import torch

    return torch.get_num_threads()
