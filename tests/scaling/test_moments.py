"""Moments against scikit-learn and against sums in long double; merging, NaN."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.preprocessing import StandardScaler

from millrace.errors import ConfigError
from millrace.scaling.moments import BLOCK, ROWS, Moments, merge_all

SIZES = [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 5, 9 * BLOCK + 3]
FIELDS = ("count", "mean", "m2", "low", "high", "rest")


def same_bits(a, b):
    return all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in FIELDS)


def two_pass(values):
    """Mean and population standard deviation in long double."""
    wide = values.astype(np.longdouble)
    mean = wide.mean()
    return mean, np.sqrt(((wide - mean) ** 2).mean())


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "uint8", "float16"])
@pytest.mark.parametrize("size", SIZES)
def test_equal_to_scikit_learn_on_benign_data(size, dtype):
    rng = np.random.default_rng(size)
    columns = [(rng.normal(40, 3, size) + k).astype(dtype) for k in range(3)]
    found = Moments.of(columns)
    expected = StandardScaler().fit(np.stack(columns, axis=1).astype(np.float64))
    np.testing.assert_allclose(found.mean, expected.mean_, rtol=1e-10)
    np.testing.assert_allclose(found.std**2, expected.var_, rtol=1e-10, atol=1e-25)
    assert found.count.tolist() == [size] * 3
    assert found.low.tolist() == [float(column.min()) for column in columns]
    assert found.high.tolist() == [float(column.max()) for column in columns]


@pytest.mark.parametrize("size", [100, 3 * BLOCK + 17, 300_000])
@pytest.mark.parametrize("shape", ["normal", "trend", "steps"])
def test_a_mean_of_a_billion_spreads_costs_no_precision(size, shape):
    rng = np.random.default_rng(size)
    noise = rng.normal(0, 1, size)
    noise += {"normal": 0, "trend": np.linspace(-2, 2, size), "steps": np.arange(size) // 1000 % 5}[shape]
    values = 1e9 + noise
    mean, std = two_pass(values)
    cut = np.array_split(values, 7)
    for found in (Moments.of([values]), merge_all([Moments.of([part]) for part in cut])):
        assert abs(found.std[0] / std - 1) < 1e-14
        assert abs(found.mean[0] - mean) <= np.spacing(1e9) / 2


def test_one_block_that_lies_far_from_the_rest():
    values = np.concatenate((np.zeros(BLOCK), np.full(BLOCK, 1e12), np.random.default_rng(0).normal(size=BLOCK)))
    mean, std = two_pass(values)
    found = Moments.of([values])
    assert abs(found.std[0] / std - 1) < 1e-14
    assert abs(found.mean[0] / mean - 1) < 1e-14


sizes = st.floats(1e-100, 1e100)  # their squares are numbers too
floats = sizes | sizes.map(lambda size: -size) | st.sampled_from([float("nan"), 0.0, -0.0])


@given(
    values=hnp.arrays(np.float64, st.integers(0, 60), elements=floats), cuts=st.lists(st.integers(0, 60), max_size=6)
)
def test_merged_chunks_are_near_the_whole_and_nan_is_left_out(values, cuts):
    edges = sorted(min(cut, len(values)) for cut in cuts)
    found = merge_all([Moments.of([part]) for part in np.split(values, edges)])
    known = values[~np.isnan(values)]
    assert found.count[0] == len(known)
    if len(known):
        mean, std = two_pass(known)
        size = np.abs(known).max()
        assert abs(found.mean[0] - mean) <= 1e-14 * size
        assert abs(found.std[0] - std) <= 1e-14 * size
        assert (found.low[0], found.high[0]) == (known.min(), known.max())
        assert not np.signbit(found.low[found.low == 0]).any()
    else:
        assert same_bits(found, Moments.empty(1))


@given(values=hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(-9, 9)), nan=hnp.arrays(bool, 40))
def test_nan_in_a_block_changes_nothing_but_the_count(values, nan):
    """The slow way round NaN gives the bits of the fast way without them, within one block."""
    mixed = np.full(len(values) + int(nan.sum()), np.nan)
    places = np.sort(np.random.default_rng(len(values)).permutation(len(mixed))[: len(values)])
    mixed[places] = values
    assert same_bits(Moments.of([mixed]), Moments.of([values]))


def test_columns_do_not_know_each_other_and_may_differ_in_length():
    rng = np.random.default_rng(3)
    columns = [rng.normal(size=n).astype(dtype) for n, dtype in ((0, "f8"), (5, "f4"), (3 * BLOCK, "f8"), (9, "f4"))]
    columns.append(np.full(20, np.nan))
    together = Moments.of(columns)
    for k, column in enumerate(columns):
        assert same_bits(together[k : k + 1], Moments.of([column]))
    assert len(Moments.of([])) == 0


def test_bits_depend_on_values_in_order_only():
    """Not on strides, byte order or what the array lies in."""
    rng = np.random.default_rng(4)
    values = rng.normal(7, 2, 5 * BLOCK + 100)
    base = Moments.of([values])
    spread = np.zeros((len(values), 3))
    spread[:, 1] = values
    for same in (spread[:, 1], values.astype(">f8"), np.ascontiguousarray(values[::-1])[::-1]):
        assert same_bits(Moments.of([same]), base)


def test_equal_values_are_their_own_mean_and_have_no_spread():
    for value in (0.1, 1e9 + 0.1, -1 / 3, 5e-324):
        found = Moments.of([np.full(3 * BLOCK + 7, value)])
        assert (found.mean[0], found.m2[0], found.std[0]) == (value, 0, 0)
        merged = merge_all([found] * 5)
        assert (merged.mean[0], merged.m2[0]) == (value, 0)


def test_merging_with_nothing_is_exact():
    some, none = Moments.of([np.array([1e200, 3.7]), np.array([0.1])]), Moments.empty(2)
    assert same_bits(Moments.merge(some, none), some)
    assert same_bits(Moments.merge(none, some), some)
    assert same_bits(Moments.merge(none, none), none)


def test_the_tree_is_fixed_by_the_number_of_parts():
    rng = np.random.default_rng(5)
    parts = [Moments.of([rng.normal(size=50)]) for _ in range(5)]
    a, b, c, d, e = parts
    merge = Moments.merge
    assert same_bits(merge_all(parts), merge(merge(merge(a, b), merge(c, d)), e))
    with pytest.raises(ConfigError, match="no moments"):
        merge_all([])


@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 3, 40, ROWS, ROWS + 1, 3 * ROWS - 1, 5 * ROWS]), min_size=1, max_size=6),
    dtype=st.sampled_from(["f4", "f8"]),
    gaps=st.sampled_from([0, 0.3, 1]),
)
def test_spans_measured_together_are_those_measured_alone(lengths, dtype, gaps):
    rng = np.random.default_rng(len(lengths))
    edges = np.cumsum([3, *lengths])
    rows = rng.normal(5, 1, (int(edges[-1]) + 2, 3)).astype(dtype)
    rows[rng.random(rows.shape) < gaps] = np.nan
    found = Moments.of_spans(rows, edges[:-1], edges[1:])
    alone = [Moments.of_rows(rows[a:b]) for a, b in itertools.pairwise(edges)]
    for k, one in enumerate(alone):
        assert same_bits(found[:, k], one)
        columns = [column[~np.isnan(column)] for column in rows[edges[k] : edges[k + 1]].T]
        assert one.count.tolist() == list(map(len, columns))
        for mean, std, column in zip(one.mean, one.std, columns, strict=True):
            if len(column):
                np.testing.assert_allclose((mean, std), two_pass(column), rtol=1e-12, atol=1e-12)
    assert same_bits(found.merged, merge_all(alone))


@pytest.mark.parametrize("wrong", [np.zeros((2, 2)), np.array(["a"]), np.array(1.0), np.array([1j])])
def test_what_is_no_column_of_numbers_is_refused(wrong):
    with pytest.raises(ConfigError, match="expected one dimension of numbers"):
        Moments.of([wrong])
