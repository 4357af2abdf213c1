"""What the values are scaled by: scikit-learn's numbers, a long double's where those fail, and the way back."""

import contextlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr

FEATURES = ["f0", "f1", "f2"]
SPLIT = {"val_from": "2020-01-01T01:30:00"}


def train_values(twin, entities, cut):
    return np.concatenate([entity.values[entity.time < cut] for entity in entities])


def scaling_of(store):
    body = store.manifest.scaling
    return np.array(body["center"]), np.array(body["scale"])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32), method=st.sampled_from(["standard", "minmax", "robust", "none"]),
    kinds=st.lists(st.sampled_from(["float64", "float32", "int64"]), min_size=3, max_size=3),
    fit_on=st.sampled_from(["train", "all"]), is_small=st.booleans(), missing=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_statistics_and_values_are_those_of_scikit_learn(twin, seed, method, kinds, fit_on, is_small, missing):
    frame = twin.random_frame(seed, rows=80, kinds=kinds, missing=missing)
    with twin.folder() as folder:
        written = twin.write(
            frame, folder / "in", layout="spread", kinds=dict(zip(FEATURES, kinds, strict=True)), seed=seed
        )
        with twin.small() if is_small else contextlib.nullcontext():
            report = mr.prepare_table(
                written.paths, folder / "out", workers=1, scale=method, fit_on=fit_on, **SPLIT, **written.options
            )
        store = mr.open_store(folder / "out")
        entities = twin.cleaned(written.frame, FEATURES)
        cut = (twin.START + 5400) * 1000 if fit_on == "train" else np.inf
        seen = train_values(twin, entities, cut)
        center, scale = twin.fitted(method, seen)
        ours, our_scale = scaling_of(store)
        np.testing.assert_allclose(ours, center, rtol=1e-10, atol=1e-10 * scale.max())
        np.testing.assert_allclose(our_scale, scale, rtol=1e-10)
        stored = twin.read(store)
        for entity in entities:
            full = twin.filled(entity, FEATURES, None, center)
            np.testing.assert_allclose(
                stored[entity.name]["values"], (full - center) / scale, rtol=2.0**-23, atol=1e-7, err_msg=entity.name
            )
        check_facts(report, store, seen, fit_on)
        # What is new is scaled like what is stored, and back to half a unit in the last place of the stored value.
        new = np.random.default_rng(seed).normal(0, 30, (5, 3))
        scaled = store.scale(new)
        np.testing.assert_array_equal(scaled, ((new - ours) / our_scale).astype(np.float32))
        allowed = np.spacing(np.abs(scaled)).astype(float) / 2 * our_scale
        assert (
            np.abs(store.inverse(scaled) - new) <= allowed * (1 + 1e-9) + 4e-16 * (np.abs(new) + np.abs(ours))
        ).all()


def check_facts(report, store, seen, fit_on):
    """Mean, deviation, smallest and largest value of the rows that were measured, and how many are missing in them."""
    body = store.manifest.scaling
    facts = body["statistics"]
    assert (body["fit_on"], any('fit_on="all"' in note for note in report.notes)) == (fit_on, fit_on == "all")
    for k, name in enumerate(FEATURES):
        known = seen[:, k][~np.isnan(seen[:, k])]
        assert facts["count"][k] == len(known)
        assert facts["nulls"][k] == len(seen) - len(known)
        if len(known):
            expected = {"mean": known.mean(), "std": known.std(), "min": known.min(), "max": known.max()}
            for key, value in expected.items():
                assert facts[key][k] == report.columns[name][key] == pytest.approx(value, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("method", ["standard", "minmax", "robust"])
def test_a_mean_of_a_billion_spreads_keeps_the_digits_of_the_spread(twin, tmp_path, method):
    rng = np.random.default_rng(7)
    values = 1e9 + rng.normal(0, 1, 5000)
    frame = pd.DataFrame({"name": rng.choice(["A", "B", "C"], 5000), "t": twin.START + np.arange(5000), "f0": values})
    written = twin.write(frame, tmp_path / "in", layout="spread", group_rows=500)
    with twin.small(slices=100, chunk_rows=1000, batch_rows=300, part_bytes=5000, group_rows=500):
        mr.prepare_table(written.paths, tmp_path / "out", workers=1, scale=method, **written.options)
    center, scale = scaling_of(mr.open_store(tmp_path / "out"))
    long = values.astype(np.longdouble)
    mean = long.mean()
    expected = {
        "standard": (mean, np.sqrt(((long - mean) ** 2).mean())),
        "minmax": (long.min(), long.max() - long.min()),
        "robust": (np.median(values), np.quantile(values, 0.75) - np.quantile(values, 0.25)),
    }[method]
    assert center[0] == float(expected[0])
    assert scale[0] == pytest.approx(float(expected[1]), rel=1e-12)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32), method=st.sampled_from(["standard", "minmax", "robust"]), is_small=st.booleans(),
    missing=st.sampled_from([0.0, 0.5]), split=st.sampled_from(["time", "entity"]),
)  # fmt: skip
def test_every_entity_by_its_own_statistics(twin, seed, method, is_small, missing, split):
    """One that has fewer than 2 train values of a feature takes there the statistics of all, and is counted."""
    frame = twin.random_frame(seed, rows=50, names=twin.NAMES[:8], kinds=["float64"] * 3, missing=missing)
    held_out = sorted(set(frame["name"]))[:2]
    options = SPLIT if split == "time" else {"split_by": "entity", "val_entities": held_out}
    with twin.folder() as folder:
        written = twin.write(frame, folder / "in", layout="spread", seed=seed)
        with twin.small() if is_small else contextlib.nullcontext():
            report = mr.prepare_table(
                written.paths, folder / "out", workers=1, scale=method, per_entity=True, **options, **written.options
            )
        store = mr.open_store(folder / "out")
        entities = twin.cleaned(written.frame, FEATURES)
        cut = (twin.START + 5400) * 1000

        def of_train(entity):
            if split == "entity":
                return entity.values[: 0 if entity.name in held_out else None]
            return entity.values[entity.time < cut]

        whole = twin.fitted(method, np.concatenate([of_train(entity) for entity in entities]))
        stored = twin.read(store)
        borrowed = 0
        for entity in entities:
            center, scale = (array.copy() for array in whole)
            enough = (~np.isnan(of_train(entity))).sum(axis=0) >= 2
            if enough.any():
                own = twin.fitted(method, of_train(entity)[:, enough])
                center[enough], scale[enough] = own
            borrowed += not enough.all()
            mine = stored[entity.name]
            np.testing.assert_allclose(mine["scaling"], [center, scale], rtol=1e-10, atol=1e-10)
            full = twin.filled(entity, FEATURES, None, mine["scaling"][0])
            expected = ((full - mine["scaling"][0]) / mine["scaling"][1]).astype(np.float32)
            np.testing.assert_array_equal(mine["values"], expected)
            back = store.inverse(mine["values"], entity=entity.name)
            np.testing.assert_allclose(back, full, rtol=1e-5, atol=1e-4)
        notes = [note for note in report.notes if "fewer than 2 train values" in note]
        assert notes == ([] if not borrowed else [notes[0]])
        if borrowed:
            assert notes[0].startswith(f"{borrowed} entities have")


def test_columns_without_spread_or_without_values_have_stated_rules(tmp_path):
    rows = 20
    table = pa.table(
        {
            "t": pa.array(range(rows)), "same": [7.5] * rows, "none": pa.nulls(rows), "nan": [np.nan] * rows,
            "x": np.arange(float(rows)), "late": pa.array([None] * 10 + [3.0] * 10, pa.float64()),
        }
    )  # fmt: skip
    parquet.write_table(table, tmp_path / "a.parquet")
    for method in ("standard", "minmax", "robust"):
        report = mr.prepare_table(
            str(tmp_path / "a.parquet"), tmp_path / method, workers=1, time="t", scale=method, val_from=10,
            features=["same", "none", "nan", "x", "late"],
        )  # fmt: skip
        store = mr.open_store(tmp_path / method)
        body = store.manifest.scaling
        assert (body["constant"], body["empty"]) == (["same"], ["none", "nan", "late"])
        assert body["center"][:3] + body["center"][4:] == [7.5, 0, 0, 0]
        assert body["scale"][:3] + body["scale"][4:] == [1, 1, 1, 1]
        values = store.columns["values"][:]
        assert (values[:, [0, 1, 2]] == 0).all()
        assert values[:, 4].tolist() == [0] * 10 + [3] * 10  # of no train value: 0 and as it is
        assert report.columns["none"]["mean"] is None
        assert report.columns["none"]["nulls"] == rows
        assert [note for note in report.notes if "'none', 'nan', 'late'" in note]
        assert [note for note in report.notes if "'same'" in note]
        np.testing.assert_allclose(store.inverse(values)[:, 0], 7.5)


@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8), ("float32", 24)])
def test_narrow_dtypes_round_once(twin, tmp_path, dtype, bits):
    frame = twin.random_frame(3, rows=200, kinds=["float64"], missing=0, infinite=0)
    written = twin.write(frame, tmp_path / "in")
    report = mr.prepare_table(written.paths, tmp_path / "out", workers=1, dtype=dtype, **written.options)
    store = mr.open_store(tmp_path / "out")
    assert report.bytes == 200 * (8 + (4 if dtype == "float32" else 2))
    center, scale = scaling_of(store)
    expected = np.concatenate([entity.values for entity in twin.cleaned(written.frame, ["f0"])])
    scaled = (expected - center) / scale
    found = np.asarray(store.columns["values"][:], np.float64)
    _, exponent = np.frexp(scaled)
    unit = np.ldexp(1.0, np.maximum(exponent - bits, -24 if dtype == "float16" else -140))
    assert (np.abs(found - scaled) <= unit / 2 * (1 + 1e-6)).all()
    back = np.abs(store.inverse(found) - expected)
    assert (back <= unit / 2 * scale * (1 + 1e-6) + 1e-9).all()


def test_a_value_beyond_the_dtype_is_told_before_anything_is_there(tmp_path):
    pd.DataFrame({"t": range(4), "x": [1.0, 2.0, 1e6, 3.0]}).to_parquet(tmp_path / "a.parquet")
    options = {"workers": 1, "time": "t", "scale": "none"}
    with pytest.raises(mr.ConfigError, match=r"feature 'x' scaled is 1e\+06, which float16 cannot hold"):
        mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", dtype="float16", **options)
    assert not (tmp_path / "out").exists()
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", dtype="bfloat16", **options)
    assert mr.open_store(tmp_path / "out").columns["values"][:].ravel().tolist() == pytest.approx(
        [1, 2, 1e6, 3], rel=0.01
    )


def test_values_near_the_ends_of_float64_are_refused_by_name(tmp_path):
    pd.DataFrame({"t": range(3), "x": [1.7e308, -1.7e308, 0.0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(mr.ConfigError, match=r"feature 'x' has values too large for standard scaling"):
        mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t")


def test_static_numbers_of_dropped_and_held_out_entities_are_not_measured(tmp_path):
    frame = pd.DataFrame(
        {
            "name": list("AAABBBCCCD"),
            "t": [1, 2, 3] * 3 + [1],
            "x": np.arange(10.0),
            "w": [1.0] * 3 + [3.0] * 3 + [50.0] * 3 + [900.0],
        }
    )
    frame.to_parquet(tmp_path / "a.parquet")
    options = {
        "workers": 1,
        "time": "t",
        "entity": "name",
        "static": "w",
        "min_rows": 2,
        "split_by": "entity",
        "val_entities": ["C"],
    }
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", **options)
    assert mr.open_store(tmp_path / "out").meta["static_scaling"] == {"center": [2.0], "scale": [1.0]}
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "all", fit_on="all", **options)
    assert mr.open_store(tmp_path / "all").meta["static_scaling"]["center"] == [18.0]


def test_an_infinite_static_number_is_missing(tmp_path):
    pd.DataFrame({"name": list("AB"), "t": [1, 1], "x": [1.0, 2.0], "w": [np.inf, 4.0]}).to_parquet(
        tmp_path / "a.parquet"
    )
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", entity="name", static="w")
    store = mr.open_store(tmp_path / "out")
    assert store.columns["static"][:].tolist() == [[0.0], [0.0]]
    assert store.meta["static_scaling"] == {"center": [4.0], "scale": [1.0]}
