"""No static number, no code and no map on a disk tells of what comes after the cut, or stays after the run."""

import numpy as np
import pandas as pd
import pytest

import millrace as mr

BASE = {"entity": "sym", "time": "date", "val_from": "2020-01-31", "features": ["v"]}


def frame(names=("a", "b"), start="2020-01-01", rows=40, **columns):
    rng = np.random.default_rng(0)
    parts = [
        pd.DataFrame({"sym": name, "date": pd.date_range(start, periods=rows), "v": rng.normal(10, 2, rows)})
        for name in names
    ]
    return pd.concat(parts, ignore_index=True).assign(**columns)


def train_bytes(folder, table, **options):
    folder.mkdir()
    table.to_parquet(folder / "table.parquet")
    store = mr.prepare_table(str(folder / "table.parquet"), folder / "store", **BASE, **options).open()
    include = [name for name in ("categorical", "static", "static_categorical") if name in store.layout.columns]
    view = mr.Windows(store.split("train"), lookback=4, horizon=1, include=include)
    return {name: np.asarray(value).tobytes() for name, value in view[np.arange(len(view))].items()}, store


def test_static_numbers_are_fitted_on_entities_with_train_rows(tmp_path):
    known = frame(cap=1.0)
    known.loc[known["sym"] == "b", "cap"] = 2.0
    found = []
    for number, cap in enumerate((5.0, 5000.0)):
        late = frame(names=("z",), start="2020-03-01", cap=cap)
        found.append(train_bytes(tmp_path / str(number), pd.concat([known, late]), static="cap")[0])
    assert found[0] == found[1]


@pytest.mark.parametrize("role", ["categorical", "static"])
def test_codes_of_train_rows_do_not_depend_on_later_categories(tmp_path, role):
    known = frame(kind="m")
    known.loc[known["sym"] == "b", "kind"] = "n"
    found = []
    for number, label in enumerate(("m", "AAA")):
        late = frame(names=("z",), start="2020-03-01", kind=label)
        same, store = train_bytes(tmp_path / str(number), pd.concat([known, late]), **{role: "kind"})
        found.append(same)
    assert found[0] == found[1]
    assert store.meta["categories"]["kind"] == ["m", "n", "AAA"]
    codes = store.columns["categorical" if role == "categorical" else "static_categorical"][:][:, 0]
    named = np.array(["?", *store.meta["categories"]["kind"]])[codes]
    assert set(named) == {"m", "n", "AAA"}


def test_what_is_missing_in_labels_and_static_numbers_is_counted(tmp_path):
    table = frame(names=("a", "b", "c"), cap=1.0, kind="m")
    table.loc[table["sym"] == "a", "cap"] = np.inf
    table.loc[table["sym"] == "c", "cap"] = np.nan
    table.loc[table.index[:7], "kind"] = None
    table.to_parquet(tmp_path / "t.parquet")
    report = mr.prepare_table(str(tmp_path / "t.parquet"), tmp_path / "s", **BASE, static="cap", categorical="kind")
    assert report.missing == {"kind": 7, "cap": 2}
    assert report.open().meta["report"]["missing"] == report.missing


def test_nothing_of_the_parts_stays_mapped(tmp_path):
    frame().to_parquet(tmp_path / "t.parquet")
    mr.prepare_table(str(tmp_path / "t.parquet"), tmp_path / "s", **BASE)
    with open("/proc/self/maps") as file:
        assert [line for line in file if f"{tmp_path}/s.partial" in line] == []  # errors of other tests hold theirs
