"""Scaling against scikit-learn: fit, transform, inverse; the rules for constant and empty columns; what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler

from millrace.errors import ConfigError, StoreCorrupt
from millrace.scaling.moments import Moments
from millrace.scaling.quantiles import quartiles_of
from millrace.scaling.scaler import Scaling

ORACLES = {"standard": StandardScaler, "minmax": MinMaxScaler, "robust": RobustScaler}
NAMES = ["open", "close", "volume"]


def fitted(method, rows, **options):
    columns = list(rows.T)
    quantiles = np.array([quartiles_of(column) for column in columns])
    return Scaling.fit(method, [f"f{k}" for k in range(len(columns))], Moments.of(columns), quantiles, **options)


def some_rows(seed=0, count=3001):
    return np.random.default_rng(seed).normal([5, -300, 1e-5], [1, 40, 1e-6], (count, 3))


@pytest.mark.parametrize("method", ORACLES)
@pytest.mark.parametrize("with_nan", [False, True])
def test_transform_equals_scikit_learn_to_float32_rounding(method, with_nan):
    rows = some_rows()
    if with_nan:
        rows[np.random.default_rng(1).random(rows.shape) < 0.2] = np.nan
    scaling, oracle = fitted(method, rows), ORACLES[method]().fit(rows)
    found, expected = scaling.transform(rows), oracle.transform(rows)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=6e-8, atol=1e-13)
    np.testing.assert_allclose(scaling.transform(rows, "float64"), expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(scaling.inverse(expected), rows, rtol=1e-12)


def test_none_changes_nothing_and_still_tells_statistics():
    rows = some_rows()
    scaling = fitted("none", rows)
    assert np.array_equal(scaling.transform(rows), rows.astype(np.float32))
    assert np.array_equal(scaling.inverse(rows), rows)
    assert scaling.statistics["mean"] == Moments.of(list(rows.T)).mean.tolist()


# Not so small that an outlier is more spreads away than float32 reaches: that is refused, see below.
finite = st.just(0.0) | st.floats(1e-6, 1e12) | st.floats(-1e12, -1e-6)


@given(
    rows=hnp.arrays(np.float64, st.tuples(st.integers(2, 30), st.just(2)), elements=finite),
    method=st.sampled_from([*ORACLES, "none"]),
)
def test_inverse_is_exact_to_half_an_ulp_of_the_stored_value_times_the_scale(rows, method):
    scaling = fitted(method, rows)
    stored = scaling.transform(rows)
    back = scaling.inverse(stored)
    assert back.dtype == np.float64
    half_ulp = np.spacing(np.abs(stored)).astype(np.float64) / 2
    # Half an ulp of what is stored, and the few roundings that float64 itself makes.
    slack = 4 * np.finfo(np.float64).eps * np.maximum(np.abs(rows), np.abs(scaling.center))
    assert np.all(np.abs(back - rows) <= half_ulp * scaling.scale + slack)


@given(
    rows=hnp.arrays(np.float64, st.tuples(st.integers(0, 30), st.just(3)), elements=finite | st.just(float("nan"))),
    dtype=st.sampled_from(["float16", "float32", "float64"]),
)
def test_rows_in_place_give_the_same_bytes(rows, dtype):
    scaling = fitted("standard", rows)
    out = np.empty(rows.shape, dtype)
    scaling.scale_into(rows, out, scaling.center, scaling.scale)
    assert out.tobytes() == scaling.transform(rows, dtype).tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_longer_than_a_piece_give_the_same_bytes(dtype):
    rows = some_rows(count=10_001).astype(dtype)
    scaling, out = fitted("robust", rows), np.empty(rows.shape, np.float32)
    scaling.scale_into(rows, out, scaling.center, scaling.scale)
    assert out.tobytes() == scaling.transform(rows).tobytes()


@pytest.mark.parametrize("method", ORACLES)
def test_without_spread_the_scale_is_one_and_without_values_the_center_zero(method):
    rows = np.column_stack((np.full(9, 0.1), np.full(9, np.nan), np.arange(9.0)))
    scaling = fitted(method, rows)
    assert (scaling.constant, scaling.empty) == (("f0",), ("f1",))
    assert scaling.scale[:2].tolist() == [1, 1]
    assert scaling.center[:2].tolist() == [0.1, 0]
    found = scaling.transform(np.column_stack((rows[:, 0], np.arange(9.0), rows[:, 2])))
    assert not found[:, 0].any()
    assert np.array_equal(found[:, 1], np.arange(9.0))  # left as it is
    body = scaling.to_manifest()
    assert (body["constant"], body["empty"]) == (["f0"], ["f1"])
    assert [body["statistics"][key][1] for key in ("count", "mean", "std", "min", "max")] == [0, None, None, None, None]


def test_a_robust_scale_of_zero_is_the_same_rule_though_values_differ():
    scaling = fitted("robust", np.array([[0.0], [5], [5], [5], [5], [5], [9]]))
    assert (scaling.constant, scaling.scale.tolist(), scaling.center.tolist()) == (("f0",), [1.0], [5.0])


def test_a_tiny_spread_on_a_large_mean_is_no_constant():
    values = 1e9 + np.random.default_rng(0).normal(size=(100_000, 1))
    scaling = fitted("standard", values)
    assert scaling.constant == ()
    np.testing.assert_allclose(scaling.transform(values, "float64").std(), 1, rtol=1e-9)


# In the manifest.


@pytest.mark.parametrize("method", [*ORACLES, "none"])
def test_json_gives_the_same_scaling_back(method):
    rows = np.column_stack((some_rows(), np.full(3001, np.nan)))
    one = fitted(method, rows, dtype="float16", fit_on="all", per_entity=True, nulls=[0, 1, 2, 3001])
    other = Scaling.from_manifest(json.loads(json.dumps(one.to_manifest(), allow_nan=False)))
    assert other.to_manifest() == one.to_manifest()
    assert (other.center.tobytes(), other.scale.tobytes()) == (one.center.tobytes(), one.scale.tobytes())
    assert (other.dtype, other.fit_on, other.per_entity) == ("float16", "all", True)
    assert other.statistics["nulls"] == [0, 1, 2, 3001]


GOOD = {"method": "standard", "features": NAMES, "center": [0, 1, 2.5], "scale": [1, 2, 3.0]}


def test_only_what_is_needed_is_required():
    assert Scaling.from_manifest(GOOD).scale.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"method": "log"}, "method is 'log'"),
        ({"features": "open"}, "features are 'open'"),
        ({"features": ["open", "open", "x"]}, "feature 'open' is named twice"),
        ({"center": [0, 1]}, "center is 2 numbers, expected a list of 3"),
        ({"scale": None}, "scale is None"),
        ({"scale": [1, 0, 1]}, "scale of feature 'close' is 0.0, expected more than 0"),
        ({"scale": [1, 1, -2.0]}, "scale of feature 'volume' is -2.0"),
        ({"scale": [1, float("nan"), 1]}, "scale of feature 'close' is nan, expected a finite"),
        ({"center": [float("inf"), 0, 0]}, "center of feature 'open' is inf"),
        ({"center": [10**400, 0, 0]}, "center of feature 'open'"),
        ({"center": ["0", 0, 0]}, "center of feature 'open' is '0'"),
        ({"center": [True, 0, 0]}, "center of feature 'open' is True"),
        ({"per_entity": "yes"}, "per_entity is 'yes'"),
        ({"statistics": {"mean": [1]}}, "lists of 3"),
        ({"statistics": 3}, "statistics are 3"),
        ({"constant": "open"}, "constant is 'open'"),
        ({"empty": [3]}, "empty is"),
        ({"dtype": 4}, "dtype is 4"),
    ],
)
def test_a_scaling_that_was_tampered_with_is_refused_by_column(change, words):
    with pytest.raises(StoreCorrupt) as caught:
        Scaling.from_manifest({**GOOD, **change}, where="prices/store.json")
    assert words in str(caught.value)
    assert caught.value.path == "prices/store.json"


@pytest.mark.parametrize("body", [None, [], 3, "standard"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(StoreCorrupt, match="expected an object"):
        Scaling.from_manifest(body)


# What cannot be scaled.


def test_values_beyond_the_stored_dtype_are_refused_by_name_never_inf():
    scaling = Scaling.from_manifest(GOOD)
    for dtype, value in (("float16", 1e6), ("float32", 1e40), ("float32", -1.7e308)):
        with pytest.raises(ConfigError, match="feature 'close' scaled is"):
            scaling.transform([[0, value, 0]], dtype)
        with pytest.raises(ConfigError, match="feature 'close' scaled is"):
            scaling.scale_into(np.array([[0, value, 0]]), np.empty((1, 3), dtype), scaling.center, scaling.scale)
    assert np.isnan(scaling.transform([[0, np.nan, 0]])[0, 1])


@pytest.mark.parametrize("method", ORACLES)
def test_statistics_beyond_float64_are_refused_by_name(method):
    rows = np.column_stack((np.arange(4.0), [1.7e308, -1.7e308, 1.7e308, -1.7e308]))
    with pytest.raises(ConfigError, match=f"'f1' has values too large for {method}"), np.errstate(over="ignore"):
        fitted(method, rows)


def test_arguments_that_do_not_fit_are_refused():
    moments = Moments.of([np.arange(3.0)])
    with pytest.raises(ConfigError, match="scale='log'; expected one of standard"):
        Scaling.fit("log", ["a"], moments)
    with pytest.raises(ConfigError, match="needs the quartiles"):
        Scaling.fit("robust", ["a"], moments)
    with pytest.raises(ConfigError, match="1 columns for 2 features"):
        Scaling.fit("standard", ["a", "b"], moments)
    scaling = Scaling.fit("standard", ["a"], moments)
    for wrong in (3.0, [[1.0, 2.0]]):
        with pytest.raises(ConfigError, match=r"expected \(..., 1\)"):
            scaling.transform(wrong)
        with pytest.raises(ConfigError, match=r"expected \(..., 1\)"):
            scaling.inverse(wrong)
