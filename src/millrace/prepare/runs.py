"""Runs of records: offsets from lengths, and the values in some ranges one after the other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from millrace.native import core
from millrace.ragged import Array, Int64s


def copy_runs_core(values: Array, edges: Int64s, dtype: np.dtype[Any] | None = None) -> Array:
    dtype = dtype or values.dtype
    tail = values.shape[1:]
    runs = np.empty((int((edges[:, 1] - edges[:, 0]).sum()), *tail), dtype)
    core.copy_runs(values, values.itemsize * math.prod(tail), edges, runs, dtype.itemsize * math.prod(tail))
    return runs


def copy_runs_numpy(values: Array, edges: Int64s, dtype: np.dtype[Any] | None = None) -> Array:
    runs = [values[:0], *(values[first:last] for first, last in edges.tolist())]
    return np.concatenate(runs, dtype=dtype or values.dtype)


# The values in [first, last) of each run, one after the other. ``dtype`` may be wider: uint16 for uint8.
# By runs, since a slice for each document would be large itself.
copy_runs = copy_runs_core if core else copy_runs_numpy


def offsets_of(lengths: Int64s) -> Int64s:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
