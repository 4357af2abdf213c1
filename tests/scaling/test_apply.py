"""``store.scale`` and ``store.inverse``: on disk, in memory, in splits, with a scaling for each entity."""

import pickle

import numpy as np
import pytest

import millrace as mr
from millrace.scaling.moments import Moments
from millrace.scaling.scaler import Scaling

FEATURES = ["open", "close", "volume"]
NAMES = ["A", "B", "C", "D"]
COLUMNS = {
    "values": mr.Column("float32", (3,)),
    "name": mr.Column("string", per="record"),
    "scaling": mr.Column("float64", (2, 3), per="record"),
}


def raw_rows(seed=0):
    """Four entities in original units, each at its own level."""
    rng = np.random.default_rng(seed)
    return [rng.normal([10, 200, 1e6], [1, 20, 5e5], (30, 3)) * (k + 1) for k in range(4)]


def scaling_of(rows, **options):
    return Scaling.fit("standard", FEATURES, Moments.of(list(rows.T)), **options)


def write(path, *, per_entity=False, splits=None, meta=None):
    """A store as preparation writes it; returns it with the original rows."""
    raw = raw_rows()
    whole = scaling_of(np.concatenate(raw), per_entity=per_entity)
    meta = {"features": FEATURES, **(meta or {})}
    with mr.StoreWriter(path, kind="series", columns=COLUMNS, meta=meta, splits=tuple(splits or ())) as writer:
        writer._fields["scaling"] = whole.to_manifest()
        for k, rows in enumerate(raw):
            own = scaling_of(rows) if per_entity else whole
            both = np.stack((own.center, own.scale))
            record = {"values": own.transform(rows), "name": NAMES[k], "scaling": both}
            writer.append(record, split=["val", "train"][k % 2] if splits else "train")
    return mr.open_store(path), raw


def near(found, original):
    np.testing.assert_allclose(found, original, rtol=1e-5, atol=1e-3)
    assert found.dtype == np.float64


def test_new_rows_are_scaled_as_the_stored_ones_and_back(tmp_path):
    store, raw = write(tmp_path / "s")
    stored = np.asarray(store.columns["values"])
    found = store.scale(np.concatenate(raw))
    assert found.tobytes() == stored.tobytes()
    near(store.inverse(stored), np.concatenate(raw))
    near(store.inverse(stored.reshape(4, 30, 3)), np.stack(raw))
    assert store.scaling.method == "standard"
    assert store.inverse([0.0, 0, 0]).tolist() == store.scaling.center.tolist()
    other = pickle.loads(pickle.dumps(store))  # noqa: S301
    assert other.scale(raw[0]).tobytes() == stored[:30].tobytes()


def test_features_are_named_numbered_or_the_target(tmp_path):
    store, raw = write(tmp_path / "s", meta={"target": ["volume"]})
    stored, rows = np.asarray(store.columns["values"]), np.concatenate(raw)
    near(store.inverse(stored[:, [2]]), rows[:, [2]])  # the target, by its width
    for given, numbers in (
        (["close"], [1]),
        ("close", [1]),
        (1, [1]),
        ([2, "open"], [2, 0]),
        (np.array([2, 0]), [2, 0]),
    ):
        near(store.inverse(stored[:, numbers], given), rows[:, numbers])
    with pytest.raises(mr.ConfigError, match=r"values have 2 features, the store has 3; .*features="):
        store.inverse(stored[:, :2])
    with pytest.raises(mr.ConfigError, match="2 features for values of 1"):
        store.inverse(stored[:, :1], ["open", "close"])
    for unknown in ("high", 3, -1, 0.5):
        with pytest.raises(mr.ConfigError, match="is unknown; the store has open, close, volume"):
            store.inverse(stored[:, :1], [unknown])


def test_a_target_of_all_features_in_another_order_must_be_said(tmp_path):
    store, _ = write(tmp_path / "s", meta={"target": ["volume", "open", "close"]})
    with pytest.raises(mr.ConfigError, match="differ in order"):
        store.inverse(np.zeros((2, 3)))
    same, _ = write(tmp_path / "t", meta={"target": FEATURES})
    assert same.inverse(np.zeros((2, 3))).shape == (2, 3)


def test_each_entity_by_name_number_and_batch(tmp_path):
    store, raw = write(tmp_path / "s", per_entity=True)
    stored = np.asarray(store.columns["values"]).reshape(4, 30, 3)
    for k, name in enumerate(NAMES):
        for entity in (name, k, np.int64(k)):
            assert store.scale(raw[k], entity=entity).tobytes() == stored[k].tobytes()
            near(store.inverse(stored[k], entity=entity), raw[k])
            near(store.inverse(stored[k][:, [1]], ["close"], entity=entity), raw[k][:, [1]])
    batch = [2, 0, 0, 3, 1]
    near(store.inverse(stored[batch], entity=np.array(batch)), np.stack(raw)[batch])
    near(store.inverse(stored[batch][:, 5], entity=batch), np.stack(raw)[batch][:, 5])
    near(
        store.inverse(stored[batch][..., [2, 1]], [2, 1], entity=[NAMES[k] for k in batch]),
        np.stack(raw)[batch][..., [2, 1]],
    )
    assert store.scale(np.stack(raw), entity=range(4)).tobytes() == stored.tobytes()
    view = mr.Windows(store, lookback=4, horizon=2, target=["close"])
    samples = np.array([0, 99, 40])
    back = store.inverse(view[samples]["y"], ["close"], entity=view.records(samples))
    starts = view.spans(samples).starts
    near(back, np.stack([np.concatenate(raw)[start + 4 : start + 6, [1]] for start in starts]))


def test_an_entity_must_be_given_where_each_has_its_own_and_may_be_elsewhere(tmp_path):
    store, raw = write(tmp_path / "s", per_entity=True)
    for call in (store.scale, store.inverse):
        with pytest.raises(mr.ConfigError, match="give entity="):
            call(raw[0])
    for wrong, words in (
        ("E", "entity 'E' is unknown"), (4, "records 4 to 4; the store has 0 to 3"), (-1, "records -1"),
        (0.5, "expected a name or record numbers"), ([0, 1], "entity= has shape"),
        ([[0]], "entity= has shape"), ([0] * 29 + [9], "records 0 to 9"),
    ):  # fmt: skip
        with pytest.raises(mr.ConfigError, match=words):
            store.inverse(raw[0], entity=wrong)
    common, _ = write(tmp_path / "t")
    assert np.array_equal(common.scale(raw[0], entity="A"), common.scale(raw[0]))


def test_record_numbers_are_those_of_the_store_in_hand(tmp_path):
    store, raw = write(tmp_path / "s", per_entity=True, splits=("train", "val"))
    store.scale(raw[0], entity="B")  # what is kept for the store must not answer for its split
    val = store.split("val")
    assert np.asarray(val.columns["name"][:]).tolist() == ["A", "C"]
    for k, name in ((0, "A"), (1, "C")):
        stored = np.asarray(val.columns["values"][30 * k : 30 * k + 30])
        for entity in (k, name):
            near(val.inverse(stored, entity=entity), raw[NAMES.index(name)])
    with pytest.raises(mr.ConfigError, match="entity 'B' is unknown"):
        val.inverse(raw[0], entity="B")


def test_a_store_without_scaling_says_so():
    store = mr.from_arrays({"values": np.zeros((4, 2))})
    for call in (store.scale, store.inverse):
        with pytest.raises(mr.ConfigError, match=r"keeps no scaling.*prepare table"):
            call(np.zeros((1, 2)))


def test_a_store_in_memory_has_it_in_meta():
    rows = raw_rows()[0]
    meta = {"features": FEATURES, "scaling": scaling_of(rows).to_manifest()}
    store = mr.from_arrays({"values": rows}, meta=meta)
    near(store.inverse(store.scale(rows)), rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -1.0])
def test_a_damaged_scaling_of_an_entity_is_refused_by_record_and_feature(bad):
    rows, both = raw_rows()[0], np.ones((3, 2, 3))
    both[1, 1, 2] = bad
    meta = {"scaling": scaling_of(rows, per_entity=True).to_manifest()}
    store = mr.from_arrays({"values": rows, "scaling": both}, [0, 10, 20, 30], meta=meta)
    store.scale(rows[:10], entity=0)
    with pytest.raises(mr.StoreCorrupt, match="scale of feature 'volume' of record 1 is"):
        store.scale(rows.reshape(3, 10, 3), entity=[0, 1, 2])


def test_scaling_of_entities_without_its_column_is_refused():
    rows = raw_rows()[0]
    meta = {"scaling": scaling_of(rows, per_entity=True).to_manifest()}
    with pytest.raises(mr.StoreCorrupt, match=r"no record column 'scaling' of shape \(2, 3\)"):
        mr.from_arrays({"values": rows}, meta=meta).scale(rows, entity=0)
    wrong = {"values": rows, "scaling": np.ones((1, 2, 2))}
    with pytest.raises(mr.StoreCorrupt, match=r"no record column 'scaling' of shape \(2, 3\)"):
        mr.from_arrays(wrong, per={"scaling": "record"}, meta=meta).scale(rows, entity=0)
