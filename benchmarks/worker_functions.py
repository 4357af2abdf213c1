"""What the benchmarks run in worker processes: a module that these import, and that imports little."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

_prepared: dict[int, dict[str, Any]] = {}


def arrays(num_bytes: int) -> dict[str, Any]:
    """x and y of 32 samples, together so many bytes, made once in each process: only their transport is measured."""
    if num_bytes not in _prepared:
        values = np.arange(num_bytes // 16, dtype=np.int64).reshape(32, -1)
        _prepared[num_bytes] = {"x": values, "y": values + 1}
    return _prepared[num_bytes]


def half_megabyte(batch: Any, rng: Any) -> dict[str, Any]:
    return arrays(1 << 19)


def fifty_megabytes(batch: Any, rng: Any) -> dict[str, Any]:
    return arrays(50 << 20)


def busy(batch: Any, rng: Any) -> Any:
    """20 ms of a core, as Python code takes it."""
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass
    return batch


def noisy(batch: Any, rng: Any) -> dict[str, Any]:
    return {**batch, "x": batch.x + np.float32(0.01) * rng.normal(1, 1).astype(np.float32)}


def same(batch: Any, rng: Any) -> Any:
    return batch
