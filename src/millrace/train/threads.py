"""How many threads torch takes on the CPU.

Threads that wait for a core hold up all others: on a busy machine one thread was 4 to 5 times faster than one per core. The
number changes the last bits of a loss, so a run keeps the number it began with.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from millrace.native import num_cores
from millrace.train.dist import World

WATCH_S = 0.2  # 20 ticks of the system's clock a core
NEARLY = 0.3  # a core that is idle for 0.7 of the time counts
STAT = Path("/proc/stat")


def set_threads(asked: int, before: int | None, world: World, say: Callable[[str], None]) -> None:
    """Sets torch's threads: as ``train.threads`` asks, as OMP_NUM_THREADS says, as the run began, or one per idle core."""
    most = _default_threads()
    if asked:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(most)
    elif before is not None:
        torch.set_num_threads(before)
    elif world.device.type == "cpu" and most > 1:
        idle = idle_cores() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        chosen = -int(world.largest([-float(max(1, min(most, int(idle + NEARLY))))])[0])  # the same on all ranks
        torch.set_num_threads(chosen)
        if chosen < most:
            say(f"threads {chosen} of {most}: the other cores are busy; train.threads sets another number")


@functools.cache
def _default_threads() -> int:
    """What torch takes by itself: the cores of this process, or OMP_NUM_THREADS."""
    return torch.get_num_threads()


def idle_cores() -> float:
    """How many cores this process may use that nobody uses now."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    try:
        first = STAT.read_text()
        time.sleep(WATCH_S)
        idle = idle_between(first, STAT.read_text(), cores)
    except (OSError, ValueError):  # no Linux, or a sandbox
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
        idle = max(0.0, len(cores) - load)
    return min(idle, num_cores())


def idle_between(first: str, second: str, cores: set[int]) -> float:
    """The idle cores between two states of ``/proc/stat``.

    >>> idle_between("cpu0 5 0 5 100 0\\ncpu1 5 0 5 100 0", "cpu0 5 0 5 120 0\\ncpu1 20 0 5 105 0", {0, 1})
    1.25
    """
    before, after = _ticks(first), _ticks(second)
    total = 0.0
    for core in cores & before.keys() & after.keys():
        gone = [new - old for new, old in zip(after[core], before[core], strict=True)]
        total += (gone[3] + gone[4]) / max(sum(gone[:8]), 1)  # idle, and waiting for a disk
    return total


def _ticks(stat: str) -> dict[int, list[int]]:
    rows = [line.split() for line in stat.splitlines() if line.startswith("cpu") and not line.startswith("cpu ")]
    return {int(row[0][3:]): [int(tick) for tick in row[1:]] for row in rows}
