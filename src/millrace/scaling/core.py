"""The C core, or what stands in for it where there is none."""

from __future__ import annotations

from typing import Any

try:
    from millrace import _core
except ImportError:  # no compiler at install time: the twins serve
    core: Any = None
else:
    core = _core
