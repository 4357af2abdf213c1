"""Shared by the tests of records: preparing with one worker, and records as plain Python values."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millrace as mr
from millrace.testing import Fault, count_steps, run_forked, tree_digest


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


@pytest.fixture
def expect_same_after_kills(tmp_path: Path) -> Any:
    """Prepares once undisturbed, then again and again with a kill on the way, and expects the same bytes each time.

    Every run is a process of its own: some libraries leave threads behind, and other tests fork.
    """
    out, count = tmp_path / "killed", tmp_path / "count"

    def expect(source: Path, **options: Any) -> None:
        def run() -> None:
            mr.prepare_records(source, out, **{"workers": 1, "part_bytes": 40, "shard_bytes": 60, **options})

        def counted() -> None:
            with count_steps() as steps:
                run()
            count.write_text(str(len(steps)))

        assert run_forked(counted) == 0
        whole, steps = tree_digest(out), int(count.read_text())
        assert len(list((out / "shards").iterdir())) > 1
        for at in (steps // 4, steps // 2, steps - 2):
            shutil.rmtree(out)
            assert run_forked(run, fault=Fault(at, "kill")) == -signal.SIGKILL
            assert run_forked(run) == 0
            assert tree_digest(out) == whole, f"after a kill at step {at} of {steps}"

    return expect
