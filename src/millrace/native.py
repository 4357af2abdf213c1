"""The C core, or None: without a compiler at install time, or where ``MILLRACE_NATIVE=0`` asks for the numpy twins."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any, cast

PRIVATE = 0o700  # of folders of the cache: whoever can write there can change what is trained
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def num_cores() -> int:
    """Cores this process may use, which containers and schedulers make fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _core_limit())


@functools.cache
def _core_limit() -> int:
    """Time on the cores that cgroups allow, as whole cores."""
    found = 1 << 20
    for path, quota in _limits("cpu", "cpu.max", "cpu.cfs_quota_us"):
        if quota[0] not in ("max", "-1"):
            period = quota[1] if len(quota) > 1 else (path.parent / "cpu.cfs_period_us").read_text()
            found = min(found, max(1, -(-int(quota[0]) // int(period))))
    return found


@functools.cache
def memory_bytes() -> int:
    """Memory this process may use: the machine's, or less where a cgroup says so."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62
    limits = [limit[0] for _, limit in _limits("memory", "memory.max", "memory.limit_in_bytes")]
    return min([found, *(int(limit) for limit in limits if limit != "max")])


def free_memory() -> int:
    """Memory that is free, or that the kernel would free for a process."""
    import psutil

    return min(int(psutil.virtual_memory().available), memory_bytes())


def _limits(controller: str, new: str, old: str) -> list[tuple[Path, list[str]]]:
    """What the cgroups of this process say, of either version, and where."""
    found = []
    with contextlib.suppress(OSError):
        for line in OWN_CGROUPS.read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            own = CGROUPS / controllers / group.lstrip("/")
            files = [folder / (old if controllers else new) for folder in (own, *own.parents)]
            found += [(file, file.read_text().split()) for file in files if file.is_file()]
    return found


core: Any = None
if os.environ.get("MILLRACE_NATIVE", "1") != "0" and sys.byteorder == "little":
    try:
        from millrace import _core

        core = _core if hasattr(_core, "Gather") else None  # a folder of C sources alone is not the core
    except ImportError:
        core = cast(Any, None)


def cache_folder() -> Path:
    """Where things that can be made or fetched again are kept: ``MILLRACE_CACHE``, else the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(os.path.abspath(os.environ.get("MILLRACE_CACHE") or os.path.join(base, "millrace")))


def make_private(folder: Path) -> None:
    """Makes a folder of the cache, and those above it that are missing, which nobody else may enter."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_private(folder.parent)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(PRIVATE)
