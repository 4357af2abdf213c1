"""The C core, or None: without a compiler at install time, or where ``MILLRACE_NATIVE=0`` asks for the numpy twins."""

from __future__ import annotations

import os
import sys
from typing import Any, cast


def num_cores() -> int:
    """Cores this process may use, which containers and schedulers make fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


core: Any = None
if os.environ.get("MILLRACE_NATIVE", "1") != "0" and sys.byteorder == "little":
    try:
        from millrace import _core

        core = _core if hasattr(_core, "Gather") else None  # a folder of C sources alone is not the core
    except ImportError:
        core = cast(Any, None)
