"""The C core, or None: without a compiler at install time, or where ``MILLRACE_NATIVE=0`` asks for the numpy twins."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path
from typing import Any, cast


def num_cores() -> int:
    """Cores this process may use, which containers and schedulers make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def memory_bytes() -> int:
    """Memory this process may use: the machine's, or less where a cgroup of either version says so."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            mount, limit = ("memory", "memory.limit_in_bytes") if controllers else ("", "memory.max")
            own = Path("/sys/fs/cgroup", mount, group.lstrip("/"))
            for folder in (own, *own.parents):
                text = (folder / limit).read_text().strip() if (folder / limit).is_file() else "max"
                found = found if text == "max" else min(found, int(text))
    return found


core: Any = None
if os.environ.get("MILLRACE_NATIVE", "1") != "0" and sys.byteorder == "little":
    try:
        from millrace import _core

        core = _core if hasattr(_core, "Gather") else None  # a folder of C sources alone is not the core
    except ImportError:
        core = cast(Any, None)
