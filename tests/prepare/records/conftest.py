"""Shared by the tests of records: preparing with one worker, and records as plain Python values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace as mr


@pytest.fixture
def prepare(tmp_path: Path) -> Any:
    """Prepares into a new store each time, and returns it open, with its report."""
    made: list[Path] = []

    def run(source: Any, **options: Any) -> Any:
        out = tmp_path / f"store{len(made)}"
        made.append(out)
        report = mr.prepare_records(source, out, **{"workers": 1, **options})
        store = mr.open_store(out, check=True)
        assert report.fingerprint == store.fingerprint
        assert os.listdir(tmp_path).count(f"{out.name}.partial") == 0
        return store, report

    return run


@pytest.fixture
def plain() -> Any:
    """Every record of a store as lists, numbers and texts."""

    def records(store: Any) -> list[dict[str, Any]]:
        view = mr.Records(store)
        return [{name: _plain(value) for name, value in view[k].items()} for k in range(len(view))]

    return records


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
