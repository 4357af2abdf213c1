"""Tools to test a data pipeline with: example stores, hypothesis strategies, and faults on demand.

Shipped, because whoever prepares data with millrace has the same questions we have: does it survive kill -9, a
full disk, a second writer? Names load when first used; only ``strategies`` needs hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_MODULES = {
    "compare": ("assert_same_store", "tree_digest"),
    "disk": ("NotPossibleHere", "small_disk"),
    "faults": ("Fault", "count_steps", "iofault", "run_forked", "stopped"),
    "kill": ("kill_loop",),
    "leaks": ("expect_no_leaks",),
    "tiny": ("tiny_records", "tiny_series", "tiny_store", "tiny_text"),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_NAMES)

if TYPE_CHECKING:
    from millrace.testing.compare import assert_same_store as assert_same_store
    from millrace.testing.compare import tree_digest as tree_digest
    from millrace.testing.disk import NotPossibleHere as NotPossibleHere
    from millrace.testing.disk import small_disk as small_disk
    from millrace.testing.faults import Fault as Fault
    from millrace.testing.faults import count_steps as count_steps
    from millrace.testing.faults import iofault as iofault
    from millrace.testing.faults import run_forked as run_forked
    from millrace.testing.faults import stopped as stopped
    from millrace.testing.kill import kill_loop as kill_loop
    from millrace.testing.leaks import expect_no_leaks as expect_no_leaks
    from millrace.testing.tiny import tiny_records as tiny_records
    from millrace.testing.tiny import tiny_series as tiny_series
    from millrace.testing.tiny import tiny_store as tiny_store
    from millrace.testing.tiny import tiny_text as tiny_text


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'millrace.testing' has no attribute {name!r}")
    value = getattr(import_module(f"millrace.testing.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
