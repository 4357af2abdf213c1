"""The rows of each split, as the report counts them; and limits that stop at exactly their number."""

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.settle import index
from millrace.store.layout import Column, Layout

ROWS = {"a": 3, "b": 5, "c": 7, "d": 11}


@pytest.fixture
def source(tmp_path):
    names = [name for name, rows in ROWS.items() for _ in range(rows)]
    times = [k for rows in ROWS.values() for k in range(rows)]
    pd.DataFrame({"name": names, "t": times, "x": np.arange(len(names)) * 1.0}).to_parquet(tmp_path / "in.parquet")
    return str(tmp_path / "in.parquet")


def prepare(source, out, **options):
    return mr.prepare_table(source, out, entity="name", time="t", workers=1, **options)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        (None, {"train": 26}),
        ("entities:b", {"train": 21, "val": 5}),
        ("entities:b,d", {"train": 10, "val": 16}),
        ("entities:;c", {"train": 19, "test": 7}),
        ("entities:a;d", {"train": 12, "val": 3, "test": 11}),
        ("tail:0.4,0.2", {"train": 12, "val": 10, "test": 4}),
        ("time:4", {"train": 15, "val": 11}),
    ],
)
def test_the_report_counts_the_rows_of_the_splits_that_were_asked_for(tmp_path, source, split, expected):
    report = prepare(source, tmp_path / "out", split=split)
    assert report.rows == expected
    store = report.open()
    whole = split is None or split.startswith(("tail", "time"))  # cut by rows: a split holds all rows of its parent
    for name, rows in expected.items():
        assert store.split(name).num_rows == (26 if whole else rows)


@pytest.mark.parametrize("split", ["entity:0.0000001", "entity:0.3,0.0000001"])
def test_a_split_by_entity_without_an_entity_is_refused(tmp_path, source, split):
    name = "test" if "," in split else "val"
    with pytest.raises(mr.ConfigError, match=f"split '{name}' would be empty; change the share .split=\"entity:0.2\""):
        prepare(source, tmp_path / "out", split=split)


@pytest.mark.parametrize(("at", "said"), [(0, "'train' .* at or before the first"), (11, "'val' .* after the last")])
def test_a_cut_at_an_end_of_the_times_is_refused_with_their_range(tmp_path, source, at, said):
    with pytest.raises(mr.ConfigError, match=f"split {said} row, as times run from 0 to 10"):
        prepare(source, tmp_path / "out", split=f"time:{at}")
    assert prepare(source, tmp_path / "out", split="time:10").rows == {"train": 25, "val": 1}


def test_a_category_may_have_so_many_values_and_no_more(tmp_path, source, monkeypatch):
    assert index.MAX_CATEGORIES == 100_000
    monkeypatch.setattr(index, "MAX_CATEGORIES", 4)
    pd.read_parquet(source).assign(kind=pd.read_parquet(source)["name"]).to_parquet(tmp_path / "b.parquet")
    given = str(tmp_path / "b.parquet")
    assert prepare(given, tmp_path / "out", categorical="kind").entities == 4
    monkeypatch.setattr(index, "MAX_CATEGORIES", 3)
    with pytest.raises(mr.ConfigError, match="column 'kind' has 4 different values; a category may have 3"):
        prepare(given, tmp_path / "more", categorical="kind")


def test_a_store_may_have_4096_columns_and_no_more():
    columns = {f"c{k}": Column("float32") for k in range(4096)}
    assert len(Layout(columns).columns) == 4096
    with pytest.raises(mr.ConfigError, match="4097 columns; at most 4096"):
        Layout({**columns, "one more": Column("float32")})
