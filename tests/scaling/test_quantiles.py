"""Quantiles found by counting bits are numpy's and scikit-learn's, however the values are cut into chunks."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.preprocessing import RobustScaler

from millrace.errors import ConfigError
from millrace.scaling.quantiles import QUARTILES, QuantileSearch, histogram, quartiles_of


def searched(columns, dtype="float64", num_chunks=3):
    """The result and the number of passes; the counts of chunks are added in reverse."""
    search, passes = QuantileSearch(len(columns), dtype), 0
    while (targets := search.next_pass()) is not None:
        passes += 1
        targets = pickle.loads(pickle.dumps(targets))  # noqa: S301 - they travel to worker processes
        each = zip(columns, targets, strict=True)
        search.update([sum(histogram(part, t) for part in np.array_split(c, num_chunks)[::-1]) for c, t in each])
    return search.result(), passes


def oracle(values):
    known = values[~np.isnan(values)].astype(np.float64)
    return np.quantile(known, QUARTILES) if len(known) else np.full(len(QUARTILES), np.nan)


values64 = st.floats(-1e300, 1e300) | st.sampled_from([0.0, -0.0, 5e-324, -5e-324, 1.5, float("nan")])
values32 = st.floats(-(2.0**120), 2.0**120, width=32) | st.sampled_from([0.0, -0.0, 1.5, float("nan")])
columns64 = hnp.arrays(np.float64, st.integers(0, 40), elements=values64)
columns32 = hnp.arrays(np.float32, st.integers(0, 40), elements=values32)


@given(values=columns64 | columns32, num_chunks=st.integers(1, 5))
def test_equal_to_numpy_bit_for_bit(values, num_chunks):
    found, passes = searched([values], str(values.dtype), num_chunks)
    expected = oracle(values)
    np.testing.assert_array_equal(found[0], expected)
    np.testing.assert_array_equal(quartiles_of(values), expected)
    assert passes <= (2 if values.dtype == np.float32 else 4)


def test_the_two_zeros_are_one_value():
    zeros = np.array([-0.0, 0.0, -0.0])
    assert not np.signbit(searched([zeros])[0]).any()
    assert not np.signbit(quartiles_of(zeros)).any()


@given(values=columns32)
def test_a_float32_column_may_be_searched_as_float64(values):
    np.testing.assert_array_equal(searched([values])[0][0], oracle(values))


def test_columns_are_searched_side_by_side_each_to_its_own_end():
    rng = np.random.default_rng(0)
    columns = [
        rng.normal(size=1000), rng.normal(size=50), np.zeros(0), np.full(9, np.nan),
        np.full(33, -2.5), rng.integers(-9, 9, 100), rng.lognormal(0, 9, 40_000),
    ]  # fmt: skip
    found, passes = searched(columns)
    assert passes == 4
    for row, column in zip(found, columns, strict=True):
        np.testing.assert_array_equal(row, oracle(column.astype(np.float64)))


def test_equal_to_scikit_learn():
    rng = np.random.default_rng(1)
    rows = rng.normal(5, [1, 100, 1e-6], (5001, 3))
    rows[rng.random(rows.shape) < 0.1] = np.nan
    found, _ = searched(list(rows.T))
    expected = RobustScaler().fit(rows)
    np.testing.assert_allclose(found[:, 1], expected.center_, rtol=1e-15)
    np.testing.assert_allclose(found[:, 2] - found[:, 0], expected.scale_, rtol=1e-15)


def test_memory_of_a_pass_is_bounded_by_what_is_sought():
    values = np.random.default_rng(2).normal(size=100_000)
    search = QuantileSearch(1)
    sizes = []
    while (targets := search.next_pass()) is not None:
        counts = histogram(values, targets[0])
        sizes.append(len(counts))
        search.update([counts])
    assert sizes[0] == 1
    assert max(sizes) <= 2 * len(QUARTILES)


def test_misuse_is_refused():
    search = QuantileSearch(2)
    with pytest.raises(ConfigError, match="not over"):
        search.result()
    with pytest.raises(ValueError, match="shorter"):
        search.update([np.zeros((1, 65536), np.int64)])
    (target,) = QuantileSearch(1, "float32").next_pass()
    with pytest.raises(ConfigError, match="is float64, but the search is for float32"):
        histogram(np.zeros(3), target)
