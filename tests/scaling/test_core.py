"""What the core does to rows of tables, against numpy: the same bytes, and errors rather than crashes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.native import core
from millrace.prepare.table.read import part
from millrace.scaling import moments, scaler

needs_core = pytest.mark.needs_core
seeds = st.integers(0, 99)
shapes = st.tuples(st.integers(1, 300), st.integers(1, 19))


def rows(shape, dtype, seed, scale=1.0):
    return (np.random.default_rng(seed).normal(3, 2, shape) * scale).astype(dtype)


@needs_core
@given(
    shape=shapes,
    dtype=st.sampled_from(["f4", "f8"]),
    block=st.integers(1, 64),
    seed=seeds,
    scale=st.sampled_from([1, 1e30]),
    gaps=st.sampled_from([0, 0.1, 0.9, 1]),
)
def test_moments_are_the_same_bytes(shape, dtype, block, seed, scale, gaps):
    given_rows = rows(shape, dtype, seed, scale)
    given_rows[np.random.default_rng(seed).random(shape) < gaps] = np.nan
    found = np.empty((2, -(-shape[0] // block), 6, shape[1]))
    starts = np.arange(0, shape[0], block)
    stops = np.minimum(starts + block, shape[0])
    for k, measure in enumerate((core.measure_rows, moments.measure_rows_numpy)):
        measure(given_rows, shape[1], starts, stops, found[k])
    assert found[0].tobytes() == found[1].tobytes()


@needs_core
@given(shape=shapes, dtype=st.sampled_from(["f4", "f8"]), seed=seeds, bad=st.sampled_from([None, np.nan, np.inf]))
def test_scaled_rows_are_the_same_bytes(shape, dtype, seed, bad):
    given_rows = rows(shape, dtype, seed)
    center, scale = np.random.default_rng(seed).normal(0, 5, (2, shape[1]))
    scale = np.abs(scale) + 0.1
    if bad is not None:
        given_rows[seed % shape[0], seed % shape[1]] = bad
    mine, twin = np.empty((2, *shape), np.float32)
    is_finite = core.scale_rows(given_rows, center, scale, mine)
    assert scaler.scale_rows_numpy(given_rows, center, scale, twin) == is_finite == (bad is None)
    assert mine.tobytes() == twin.tobytes()


@needs_core
@given(
    shape=shapes,
    wide=st.booleans(),
    seed=seeds,
    bad=st.sampled_from([None, np.nan, np.inf, -np.inf]),
    mixed=st.booleans(),
)
def test_columns_turned_into_rows_are_the_same_bytes(shape, wide, seed, bad, mixed):
    columns = [np.ascontiguousarray(column) for column in rows(shape, "f8" if wide else "f4", seed).T]
    if wide and mixed:
        columns[::2] = [column.astype(np.float32) for column in columns[::2]]
    if bad is not None:
        columns[seed % shape[1]][seed % shape[0]] = bad
    mine, twin = np.empty((2, *shape), np.float64 if wide else np.float32)
    assert core.rows_of(columns, mine) == part.turn_columns_numpy(columns, twin) == (bad is None)
    assert mine.tobytes() == twin.tobytes()


@needs_core
def test_what_does_not_fit_is_an_error():
    good = np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match="as long as the rows"):
        core.rows_of([np.zeros(4, np.float32), np.zeros(5, np.float32), np.zeros(4, np.float32)], good)
    with pytest.raises(ValueError, match="not wider"):
        core.rows_of([np.zeros(4)] * 3, good)
    with pytest.raises(TypeError, match="expected float32 or float64"):
        core.rows_of([np.zeros(4, np.int32)] * 3, good)
    with pytest.raises(ValueError, match="rows of the width"):
        core.measure_rows(good, 5, np.array([0]), np.array([2]), np.empty((1, 6, 5)))
    for start, stop, spans in ((0, 4, 2), (-1, 4, 1), (0, 5, 1), (3, 2, 1)):
        with pytest.raises(ValueError, match="rows of the width"):
            core.measure_rows(good, 3, np.array([start]), np.array([stop]), np.empty((spans, 6, 3)))
    with pytest.raises(ValueError, match="of their width"):
        core.scale_rows(good, np.zeros(3), np.zeros(2), good)
    read_only = np.zeros((4, 3), np.float32)
    read_only.flags.writeable = False
    with pytest.raises((ValueError, BufferError)):
        core.scale_rows(good, np.zeros(3), np.ones(3), read_only)
