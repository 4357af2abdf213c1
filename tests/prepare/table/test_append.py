"""Appending to a series store: later rows of entities it has, and new entities, against pandas on both frames together."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.store.verify import verify_store

OPTIONS = {
    "entity": "sym", "time": "t", "features": ["a", "b"], "target": ["b"], "static": ["w"], "categorical": ["k"],
    "shard_bytes": 4000,
}  # fmt: skip
SPLITS = {
    "from": {"val_from": "2020-01-03"},
    "share of the span": {"val": 0.25},
    "last rows": {"val_last": 0.2, "test_last": 0.1},
    "entity": {"split_by": "entity", "val": 0.3},
    "none": {},
}


def frame(entities, first: int, last: int, labels: str, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    times = pd.date_range("2020-01-01", periods=last, freq="h")[first:]
    parts = [
        pd.DataFrame({
            "sym": f"S{entity:02d}", "t": times, "a": rng.normal(5, 2, len(times)), "b": rng.normal(-3, 9, len(times)),
            "k": rng.choice(list(labels), len(times)), "w": float(entity),
        })
        for entity in entities
    ]  # fmt: skip
    return pd.concat(parts, ignore_index=True)


@pytest.fixture
def files(tmp_path):
    """Ten entities of 60 hours; then 30 hours more of some of them and of two new ones, some values missing."""
    first, more = frame(range(0, 20, 2), 0, 60, "xyz", 1), frame([2, 4, 5, 6, 7], 60, 90, "xwq", 2)
    more.loc[more.index[0:3], "a"] = np.nan  # the first new rows of S02: filled from the store's last
    first.to_parquet(tmp_path / "first.parquet")
    more.sample(frac=1, random_state=0).to_parquet(tmp_path / "more.parquet")
    whole = pd.concat([first, more]).sort_values(["sym", "t"]).reset_index(drop=True)
    whole["a"] = whole.groupby("sym")["a"].ffill()
    return str(tmp_path / "first.parquet"), str(tmp_path / "more.parquet"), whole


def check(store, whole: pd.DataFrame) -> None:
    names = store.columns["name"][:].tolist()
    assert sorted(names) == sorted(whole["sym"].unique())
    values, labels = store.columns["values"], np.array(["?", *store.meta["categories"]["k"]])
    for number, name in enumerate(names):
        mine = whole[whole["sym"] == name]
        rows = slice(*store.offsets[number : number + 2].tolist())
        unscaled = store.inverse(values[rows], features=[0, 1], entity=number)
        np.testing.assert_allclose(unscaled, mine[["a", "b"]].to_numpy(), atol=1e-5)
        unit = store.meta["time"]["unit"]
        assert np.array_equal(
            store.columns["time"][rows], mine["t"].to_numpy().astype(f"datetime64[{unit}]").astype(np.int64)
        )
        assert labels[store.columns["categorical"][rows][:, 0]].tolist() == mine["k"].tolist()
    assert not verify_store(store.path).damage


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("split", SPLITS)
def test_rows_and_entities_are_added_as_a_new_snapshot(files, tmp_path, split, workers):
    first, more, whole = files
    made = mr.prepare_table(first, tmp_path / "store", workers=workers, **OPTIONS, **SPLITS[split])
    before = made.open()
    cuts = before.columns["cuts"][:].tolist() if "cuts" in before.layout.columns else None
    report = mr.prepare_table(more, tmp_path / "store", append=True, workers=workers, **OPTIONS, **SPLITS[split])
    store = report.open()
    check(store, whole)
    assert store.manifest.scaling == before.manifest.scaling
    assert store.manifest.parent == before.fingerprint
    assert sum(report.rows.values()) == store.num_rows == len(whole)
    counted = {split: store.split(split) for split in report.rows}
    if store.time_cuts is not None:
        assert report.rows == {s: int((part.cuts[1] - part.cuts[0]).sum()) for s, part in counted.items()}
    else:
        assert report.rows == {s: part.num_rows for s, part in counted.items()}
    assert report.rewritten["new bytes"] == 150 * (8 + 8 + 4)
    assert 0 < report.rewritten["copied bytes"] < 600 * (8 + 8 + 4)  # untouched shards stay
    if cuts is not None:  # in the time they had and in their order
        assert store.columns["cuts"][: len(cuts)].tolist() == cuts
        names = store.columns["name"][:].tolist()
        assert names[: len(cuts)] == before.columns["name"][:].tolist()
    old = mr.open_store(tmp_path / "store", snapshot=before.fingerprint)
    assert old.num_rows == 600
    assert np.array_equal(np.asarray(old.columns["values"][:]), np.asarray(before.columns["values"][:]))


def test_later_rows_before_the_cut_are_train(files, tmp_path):
    first, more, _ = files
    options = {**OPTIONS, "val_from": "2020-01-04"}  # hour 72, in the middle of the new rows
    with pytest.raises(mr.ConfigError, match="split 'val' would be empty"):
        mr.prepare_table(first, tmp_path / "none", **options)
    frame([0], 70, 80, "x", 3).to_parquet(tmp_path / "late.parquet")
    mr.prepare_table([first, str(tmp_path / "late.parquet")], tmp_path / "store", **options)
    store = mr.prepare_table(more, tmp_path / "store", append=True, **options).open()
    names, cuts = store.columns["name"][:].tolist(), store.columns["cuts"][:, 0].tolist()
    assert cuts[names.index("S02")] == 72
    assert cuts[names.index("S00")] == 62
    assert cuts[names.index("S05")] == 12
    assert cuts[names.index("S08")] == 60


def test_a_scaling_for_each_entity_stays_and_new_ones_get_theirs(files, tmp_path):
    first, more, whole = files
    options = {**OPTIONS, "per_entity": True, "scale": "minmax"}
    before = mr.prepare_table(first, tmp_path / "store", **options).open()
    store = mr.prepare_table(more, tmp_path / "store", append=True, **options).open()
    check(store, whole)
    assert np.array_equal(store.columns["scaling"][:10], before.columns["scaling"][:])
    fresh = whole[whole["sym"] == "S07"]
    at = store.columns["name"][:].tolist().index("S07")
    np.testing.assert_allclose(store.columns["scaling"][at][0], fresh[["a", "b"]].min(), rtol=1e-12)


@pytest.mark.parametrize("scale", ["standard", "minmax"])
def test_refit_scales_all_rows_anew_on_train_rows(files, tmp_path, scale):
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    first, more, whole = files
    options = {**OPTIONS, "scale": scale}
    mr.prepare_table(first, tmp_path / "store", **options)
    store = mr.prepare_table(more, tmp_path / "store", append=True, refit=True, **options).open()
    check(store, whole)
    raw = pd.concat([pd.read_parquet(first), pd.read_parquet(more)])[["a", "b"]]
    if scale == "standard":
        expected = StandardScaler().fit(raw)
        np.testing.assert_allclose(store.scaling.center, expected.mean_, rtol=1e-10)
        np.testing.assert_allclose(store.scaling.scale, expected.scale_, rtol=1e-10)
    else:
        expected = MinMaxScaler().fit(raw)
        np.testing.assert_allclose(store.scaling.scale, expected.data_range_, rtol=1e-10)


def test_refit_that_would_need_all_rows_is_refused_and_changes_nothing(files, tmp_path):
    first, more, _ = files
    before = mr.prepare_table(first, tmp_path / "store", **OPTIONS, scale="robust").fingerprint
    with pytest.raises(mr.ConfigError, match="prepare the whole table again"):
        mr.prepare_table(more, tmp_path / "store", append=True, refit=True, **OPTIONS, scale="robust")
    assert mr.open_store(tmp_path / "store").fingerprint == before


def test_on_a_grid_the_rows_between_are_filled(tmp_path):
    frame([1], 0, 10, "x", 1).to_parquet(tmp_path / "first.parquet")
    frame([1], 14, 20, "x", 2).to_parquet(tmp_path / "more.parquet")
    options = {**OPTIONS, "freq": "1h", "nulls": "mask"}
    mr.prepare_table(str(tmp_path / "first.parquet"), tmp_path / "store", **options)
    store = mr.prepare_table(str(tmp_path / "more.parquet"), tmp_path / "store", append=True, **options).open()
    assert store.num_rows == 20
    assert store.columns["mask"][:, 0].tolist() == [1] * 10 + [0] * 4 + [1] * 6
    assert len(set(np.diff(store.columns["time"][:]).tolist())) == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale": "minmax"}, "was made with scale='standard'"),
        ({"features": ["a"]}, "was made with features="),
        ({"time": "hour"}, "was made with time='t'"),
        ({"val_from": "2021-01-01"}, "was made with val_from=None"),
    ],
)
def test_other_options_are_refused(files, tmp_path, change, said):
    first, more, _ = files
    mr.prepare_table(first, tmp_path / "store", **OPTIONS)
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_table(more, tmp_path / "store", append=True, **{**OPTIONS, **change})


def test_options_need_not_be_repeated(files, tmp_path):
    first, more, whole = files
    mr.prepare_table(first, tmp_path / "store", **OPTIONS)
    check(mr.prepare_table(more, tmp_path / "store", append=True).open(), whole)


def test_rows_the_store_has_and_other_stores_are_refused(files, tmp_path):
    first, more, _ = files
    mr.prepare_table(first, tmp_path / "store", **OPTIONS)
    pd.read_parquet(first)[::-1].to_parquet(tmp_path / "again.parquet")  # the rows of a file that is not the same
    with pytest.raises(mr.SourceError, match=r"'S00' has rows from 2020-01-01.* up to 2020-01-03T11"):
        mr.prepare_table(str(tmp_path / "again.parquet"), tmp_path / "store", append=True, **OPTIONS)
    with mr.StoreWriter(tmp_path / "other", columns={"values": mr.Column("float32", (2,))}) as writer:
        writer.append({"values": np.zeros((3, 2))})
    with pytest.raises(mr.ConfigError, match="not made by prepare table"):
        mr.prepare_table(more, tmp_path / "other", append=True)
    with pytest.raises(mr.StoreNotFound):
        mr.prepare_table(more, tmp_path / "nothing", append=True, **OPTIONS)


def test_the_same_append_again_is_already_complete(files, tmp_path):
    first, more, _ = files
    mr.prepare_table(first, tmp_path / "store", **OPTIONS)
    done = mr.prepare_table(more, tmp_path / "store", append=True, **OPTIONS)
    again = mr.prepare_table(more, tmp_path / "store", append=True, **OPTIONS)
    assert (again.is_new, again.fingerprint) == (False, done.fingerprint)
    assert not Path(f"{tmp_path}/store.partial").exists()


def test_an_append_whose_rows_are_all_dropped_says_why_and_changes_nothing(tmp_path):
    def write(name, entity, rows):
        frame = pd.DataFrame({"sym": entity, "t": np.arange(rows), "x": np.arange(float(rows))})
        frame.to_parquet(tmp_path / name)
        return str(tmp_path / name)

    before = mr.prepare_table(write("a.parquet", "A", 20), tmp_path / "out", entity="sym", time="t", min_rows=5)
    with pytest.raises(mr.SourceError, match=r"all were dropped \(.*too few.*: 3\); nothing was changed"):
        mr.prepare_table(write("b.parquet", "B", 3), tmp_path / "out", append=True)
    assert mr.open_store(tmp_path / "out").fingerprint == before.fingerprint
    assert not (tmp_path / "out.partial").exists()
