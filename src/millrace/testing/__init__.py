"""Tools to test a data pipeline with: example stores, hypothesis strategies, and faults on demand.

Shipped, because whoever prepares data with millrace has the same questions we have: does it survive kill -9, a
full disk, a second writer? Names load when first used; only ``strategies`` needs hypothesis.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millrace.testing.compare import assert_same_store, tree_digest
    from millrace.testing.faults import Fault, NotPossibleHere, count_steps, iofault, run_forked, small_disk, stopped
    from millrace.testing.kill import kill_loop
    from millrace.testing.leaks import expect_no_leaks
    from millrace.testing.tiny import tiny_records, tiny_series, tiny_store, tiny_text

__all__ = [
    "Fault", "NotPossibleHere", "assert_same_store", "count_steps", "expect_no_leaks", "iofault", "kill_loop", "run_forked",
    "small_disk", "stopped", "tiny_records", "tiny_series", "tiny_store", "tiny_text", "tree_digest",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for module in ("compare", "faults", "kill", "leaks", "tiny") if name in __all__ else ():
        found = import_module(f"millrace.testing.{module}")
        if hasattr(found, name):
            return getattr(found, name)
    raise AttributeError(f"module 'millrace.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
