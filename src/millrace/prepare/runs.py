"""Runs of records: offsets from lengths, and the values in some ranges one after the other."""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.native import core
from millrace.prepare.files import InputFile
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


def parquet_footer(file: InputFile) -> tuple[Any, Int64s]:
    """The footer of a Parquet file, and the row where each row group begins."""
    return _footer(file.location, file.size, file.mtime_ns)


@lru_cache(maxsize=1)  # a slice is a row group: to parse the footer for each would take their number squared
def _footer(location: str, size: int, mtime_ns: int) -> tuple[Any, Int64s]:
    import pyarrow
    from pyarrow import parquet

    with pyarrow.OSFile(os.fsencode(location)) as native, parquet.ParquetFile(native) as file:
        metadata = file.metadata
    rows = [metadata.row_group(k).num_rows for k in range(metadata.num_row_groups)]
    return metadata, offsets_of(np.array(rows, np.int64))
