"""Appending keeps to what the store was made with; what it refuses leaves nothing behind."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import millrace as mr
from millrace.cli import run
from millrace.prepare.table.table import Table


def hours(first: int, last: int, sym: str = "A", **columns) -> pd.DataFrame:
    times = pd.date_range("2020-01-01", periods=last, freq="h")[first:]
    x = np.arange(first, last, dtype=float)
    return pd.DataFrame({"sym": sym, "t": times, "x": x, **columns})


@pytest.fixture
def put(tmp_path):
    def write(name: str, *frames: pd.DataFrame) -> str:
        pd.concat(frames).to_parquet(tmp_path / f"{name}.parquet")
        return str(tmp_path / f"{name}.parquet")

    return write


def append(files, out, **options):
    return mr.prepare_table(files, out, append=True, **options)


def test_the_stores_condition_and_function_stay(put, tmp_path, monkeypatch):
    (tmp_path / "mine_kept.py").write_text(
        "import pyarrow.compute as pc\n"
        "def double(t):\n"
        "    return t.set_column(t.schema.get_field_index('x'), 'x', pc.multiply(t.column('x'), 2.0))\n"
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "store"
    options = {"entity": "sym", "time": "t", "where": "x != 22", "transform": "mine_kept:double", "workers": 1}
    mr.prepare_table(put("a", hours(0, 10)), out, **options)
    report = append(put("b", hours(10, 20)), out, workers=1)
    store = report.open()
    values = store.inverse(store.columns["values"][:], features=[0], entity=0)[:, 0]
    np.testing.assert_allclose(values, [2.0 * k for k in range(20) if k != 11], atol=1e-5)
    assert report.dropped == {"where": 1}
    assert not any("--where" in note or "--transform" in note for note in report.notes)


def test_another_condition_is_used_and_told(put, tmp_path):
    out = tmp_path / "store"
    mr.prepare_table(put("a", hours(0, 10)), out, entity="sym", time="t", where="x > 2")
    report = append(put("b", hours(10, 20)), out, where="x > 15")
    assert report.dropped["where, by row group" if "where" not in report.dropped else "where"] == 6
    assert any("'x > 15'" in note and "'x > 2'" in note for note in report.notes)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        ({"scale": "minmax"}, {"scale": "standard"}),
        ({"val_last": 0.2}, {"val_last": 0.0}),
        ({"min_rows": 3}, {"min_rows": 1}),
        ({"val_last": 0.2}, {"val_from": "2020-01-02"}),
        ({"nulls": "drop"}, {"nulls": {}}),
    ],
)
def test_an_option_that_is_given_must_be_the_stores_also_where_it_is_the_default(put, tmp_path, made, given):
    out = tmp_path / "store"
    mr.prepare_table(put("a", hours(0, 10)), out, entity="sym", time="t", **made)
    name = next(iter(given))
    with pytest.raises(mr.ConfigError, match=f"was made with {name}="):
        append(put("b", hours(10, 20)), out, **given)
    append(put("b", hours(10, 20)), out, **made)


def test_the_command_line_passes_only_what_was_written(put, tmp_path, capsys):
    out = str(tmp_path / "store")
    a, b = put("a", hours(0, 10)), put("b", hours(10, 20))
    first = [
        "prepare",
        "table",
        a,
        "--out",
        out,
        "--entity",
        "sym",
        "--time",
        "t",
        "--scale",
        "minmax",
        "--min-rows",
        "2",
    ]
    assert run(first) == 0
    more = ["prepare", "table", b, "--out", out, "--time", "t", "--append"]
    assert run([*more, "--scale", "standard"]) != 0
    assert "was made with scale='minmax'" in capsys.readouterr().err
    assert run(more) == 0
    said = capsys.readouterr().out
    assert "added 10 rows to 1 entity, 0 new entities\n" in said
    assert "the store now has\n" in said
    assert "1 entity in 1 shard" in said
    assert "1 entity is shorter than a window" in said


@pytest.mark.parametrize("new", ["red", 2.5])
def test_what_is_static_of_a_known_entity_cannot_change(put, tmp_path, new):
    out = tmp_path / "store"
    old = "blue" if isinstance(new, str) else 1.5
    mr.prepare_table(put("a", hours(0, 10, w=old)), out, entity="sym", time="t", static="w")
    with pytest.raises(mr.SourceError, match=r"static column 'w' of entity 'A' is not what the store has"):
        append(put("b", hours(10, 20, w=new)), out)
    store = append(put("c", hours(10, 20, w=old), hours(0, 5, "B", w=old)), out).open()
    assert store.meta.get("categories", {}) in ({}, {"w": ["blue"]})


def test_a_refused_append_stands_in_nobodys_way(put, tmp_path, monkeypatch):
    out = tmp_path / "store"
    mr.prepare_table(put("a", hours(0, 10)), out, entity="sym", time="t", scale="robust")
    with pytest.raises(mr.SourceError, match="has rows from"):
        append(put("overlap", hours(5, 15)), out)
    assert not Path(f"{out}.partial").exists()
    with monkeypatch.context() as patch:
        patch.setattr(Table, "make_part", None)  # nothing may be read
        with pytest.raises(mr.ConfigError, match="refit=True needs all rows"):
            append(put("b", hours(10, 15)), out, refit=True)
    assert not Path(f"{out}.partial").exists()
    with pytest.raises(mr.ConfigError, match="is no column"):
        append(put("other", hours(10, 15).rename(columns={"x": "y"})), out)
    assert not Path(f"{out}.partial").exists()
    assert append(put("b", hours(10, 20)), out).open().num_rows == 20


def test_refit_is_for_appends(put, tmp_path):
    with pytest.raises(mr.ConfigError, match="refit=True is for append=True"):
        mr.prepare_table(put("a", hours(0, 10)), tmp_path / "store", entity="sym", time="t", refit=True)


def test_the_store_says_what_it_is_after_an_append(put, tmp_path):
    out = tmp_path / "store"
    first, more = hours(0, 10), pd.concat([hours(10, 20), hours(0, 6, "B")])
    first.loc[3, "x"] = np.nan
    more = more.reset_index(drop=True)
    more.loc[[1, 2], "x"] = np.nan
    made = mr.prepare_table(put("a", first), out, entity="sym", time="t", where="t > '2020-01-01T00:00:00'")
    report = append(put("b", more), out, refit=True)
    store = report.open()
    assert store.manifest.scaling["statistics"]["nulls"] == [3]
    assert report.added == {"rows": 15, "entities": 1, "new entities": 1}
    kept = store.meta["report"]
    assert kept["rows"] == report.rows == {"train": 24}
    assert kept["entities"] == report.entities == 2
    assert kept["shards"] == report.shards == store.num_shards
    assert kept["bytes"] == report.bytes == made.bytes // 9 * 24
    assert kept["columns"]["x"]["nulls"] == report.columns["x"]["nulls"] == 3
    assert kept["rows_read"] == 26
    assert report.rows_read == 16
    assert kept["dropped"] == {"where": 2}
    assert report.dropped == {"where": 1}
    assert kept["append"]["added"] == report.added


def write_times(path: Path, times: pa.Array) -> str:
    parquet.write_table(pa.table({"t": times, "x": np.arange(len(times), dtype=float)}), path)
    return str(path)


def test_dates_are_appended_to_a_store_of_timestamps(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = pa.array([0, 1, 2], pa.int32()).cast(pa.date32()).cast(pa.timestamp("us"))
    mr.prepare_table(write_times(tmp_path / "a" / "E.parquet", first), tmp_path / "store", time="t")
    later = pa.array([3, 4], pa.int32()).cast(pa.date32())
    store = append(write_times(tmp_path / "b" / "E.parquet", later), tmp_path / "store").open()
    assert store.columns["time"][:].tolist() == [day * 86_400_000_000 for day in range(5)]


def test_times_of_day_are_not_cut_off_for_a_store_of_dates(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = pa.array([0, 1, 2], pa.int32()).cast(pa.date32())
    mr.prepare_table(write_times(tmp_path / "a" / "E.parquet", first), tmp_path / "store", time="t")
    later = pa.array([3 * 86400, 4 * 86400 + 3600], pa.timestamp("s")).cast(pa.timestamp("ms"))
    with pytest.raises(mr.SourceError, match=r"'t' has 1970-01-05 01:00:00.* dates"):
        append(write_times(tmp_path / "b" / "E.parquet", later), tmp_path / "store")
    whole = pa.array([3 * 86400, 4 * 86400], pa.timestamp("s")).cast(pa.timestamp("ms"))
    store = append(write_times(tmp_path / "b" / "E.parquet", whole), tmp_path / "store").open()
    assert store.columns["time"][:].tolist() == [0, 1, 2, 3, 4]
