"""``import millrace.testing`` is light; its names are all there."""

from __future__ import annotations

import subprocess
import sys

import millrace.testing


def imported_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout.split())


def test_importing_testing_loads_nothing_heavy():
    assert not {"numpy", "hypothesis", "psutil", "torch", "pytest"} & imported_by("import millrace.testing")


def test_only_strategies_needs_hypothesis():
    everything = "from millrace.testing import *; import millrace.testing.run_with_fault"
    assert not {"hypothesis", "pytest", "torch"} & imported_by(everything)
    assert "hypothesis" in imported_by("import millrace.testing.strategies")


def test_every_name_can_be_had():
    for name in millrace.testing.__all__:
        assert getattr(millrace.testing, name) is not None
        assert name in dir(millrace.testing)
