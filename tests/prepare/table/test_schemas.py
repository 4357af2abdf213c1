"""Files that do not fit together: reported before any work, grouped, with names; what can be widened is, on request."""

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import millrace as mr


def rows(number, **columns):
    base = {
        "symbol": pa.array([f"S{number}"] * 4), "date": pa.array([number * 10 + k for k in range(4)]).cast(pa.timestamp("us")),
        "open": pa.array([1.0, 2.0, 3.0, 4.0]), "volume": pa.array([1, 2, 3, 4], pa.int64()),
    }  # fmt: skip
    made = {**base, **columns}
    return pa.table({name: column for name, column in made.items() if column is not None})


DRIFTS = {  # what the eighth kind of file has instead
    "missing": {"open": None},
    "extra": {"comment": pa.array(["x"] * 4)},
    "int32": {"volume": pa.array([1, 2, 3, 4], pa.int32())},
    "float": {"volume": pa.array([1.5, 2, 3, 4])},
    "all null": {"volume": pa.nulls(4)},
    "zone": {"date": pa.array([70, 71, 72, 73]).cast(pa.timestamp("us", "UTC"))},
    "unit": {"date": pa.array([70, 71, 72, 73]).cast(pa.timestamp("ns"))},
    "dictionary": {"symbol": pa.array(["S7"] * 4).dictionary_encode()},
    "large text": {"symbol": pa.array(["S7"] * 4, pa.large_string())},
    "text": {"volume": pa.array(["1", "2", "3", "4"])},
    "number as name": {"symbol": pa.array([7, 7, 7, 7])},
}


@pytest.fixture
def files(tmp_path):
    def write(drift):
        folder = tmp_path / "in"
        folder.mkdir()
        for k in range(7):
            parquet.write_table(rows(k), folder / f"{k}.parquet")
        odd = rows(7, **drift)
        parquet.write_table(
            odd.select(odd.column_names[::-1]), folder / "7.parquet"
        )  # in another order, which is no drift
        return str(folder)

    return write


def prepare(source, out, **options):
    return mr.prepare_table(source, out, workers=1, entity="symbol", time="date", **options)


@pytest.mark.parametrize("drift", ["extra", "all null", "dictionary", "large text"])
def test_differences_without_a_meaning_are_none(files, tmp_path, drift):
    source = files(DRIFTS[drift])
    report = prepare(source, tmp_path / "out", scale="none")
    assert (report.entities, report.rows_read) == (8, 32)
    last = report.open().columns["values"][28:].tolist()
    assert last == [[k, 0.0 if drift == "all null" else k] for k in (1.0, 2.0, 3.0, 4.0)]
    assert report.columns["volume"]["nulls"] == (4 if drift == "all null" else 0)


@pytest.mark.parametrize(
    ("drift", "groups", "widened"),
    [
        ("int32", ["7 files (", "volume int64", "1 file ('", "7.parquet'): volume int32"], "volume as int64"),
        ("float", ["volume int64", "volume double"], "volume as double"),
        ("unit", ["date timestamp[us]", "date timestamp[ns]"], "date as timestamp[ns]"),
    ],
)
def test_a_safe_difference_is_told_and_taken_on_request(files, tmp_path, drift, groups, widened, monkeypatch):
    source = files(DRIFTS[drift])
    with monkeypatch.context() as patch:
        patch.setattr(
            "millrace.prepare.table.read.chunks.Reader.read", lambda *_: pytest.fail("work before the report")
        )
        with pytest.raises(mr.SourceError, match=r"the files differ in the types of ") as told:
            prepare(source, tmp_path / "out")
    for group in groups:
        assert group in str(told.value)
    assert f"widen=True takes {widened}, which loses nothing" in str(told.value)
    assert not list(tmp_path.glob("out*"))
    report = prepare(source, tmp_path / "out", widen=True, scale="none")
    assert (report.entities, report.rows_read) == (8, 32)
    store = report.open()
    unit = 1000 if drift == "unit" else 1
    expected = [unit * (number * 10 + k) for number in range(7) for k in range(4)]
    assert store.columns["time"][:28].tolist() == expected
    assert store.columns["values"][28:, 1].tolist() == [1.5 if drift == "float" else 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("drift", "said"),
    [
        ("zone", r"date timestamp\[us\] \| 1 file .*date timestamp\[us, tz=UTC\]; date cannot be one type: fix"),
        (
            "text",
            r"volume int64 \| 1 file .*volume string; volume cannot be one type: fix those files, or leave the column out",
        ),
        ("number as name", r"symbol string \| 1 file .*symbol int64; symbol cannot be one type"),
        ("missing", r"columns are missing in 1 of 8 files: 1 file \('.*7\.parquet'\) lacks open; leave"),
    ],
)
def test_a_difference_that_cannot_be_bridged_is_refused_with_and_without_widen(files, tmp_path, drift, said):
    source = files(DRIFTS[drift])
    for widen in (False, True):
        with pytest.raises(mr.SourceError, match=said):
            prepare(source, tmp_path / "out", widen=widen)
    assert not list(tmp_path.glob("out*"))


def test_a_column_nobody_uses_may_differ(files, tmp_path):
    assert prepare(files(DRIFTS["text"]), tmp_path / "out", features="open").entities == 8


def test_zones_of_one_instant_are_one_time(tmp_path):
    for k, zone in enumerate(("UTC", "Asia/Tokyo", "America/New_York")):
        date = pa.array([k * 10 + 1, k * 10 + 2]).cast(pa.timestamp("s")).cast(pa.timestamp("ms", zone))
        parquet.write_table(
            pa.table({"date": date, "x": [float(k), k + 0.5]}).append_column("symbol", pa.array(["A"] * 2)),
            tmp_path / f"{k}.parquet",
        )
    source = str(tmp_path / "*.parquet")
    with pytest.raises(mr.SourceError, match=r"widen=True takes date as timestamp\[ms, tz=UTC\]"):
        prepare(source, tmp_path / "out")
    report = prepare(source, tmp_path / "out", widen=True)
    assert report.open().columns["time"][:].tolist() == [1000, 2000, 11000, 12000, 21000, 22000]
    assert report.open().meta["time"] == {"column": "date", "unit": "ms", "zone": "UTC"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"time": "when"}, r"time='when' is no column; there are symbol, date, open, volume"),
        ({"entity": "who"}, r"entity='who' is no column"),
        ({"features": ["open", "high"]}, r"features='high' is no column"),
        ({"target": "close"}, r"target='close' is no column"),
        ({"features": "symbol", "entity": None}, r"column 'symbol' is string; a feature is a number: leave it out, or give"),
        ({"time": "symbol", "entity": None}, r"time='symbol' is string; expected timestamps, dates or numbers"),
        ({"known_future": "volumes"}, r"known_future='volumes' is neither a feature nor categorical"),
        ({"categorical": "volume", "features": "volume"}, r"column 'volume' is given as features and as categorical; choose one"),
        ({"features": "open", "target": "date"}, r"target='date' is also time; a target is a number per row"),
        ({"static": "tags"}, r"static='tags' is no column"),
    ],
)  # fmt: skip
def test_columns_that_are_not_there_or_not_fit(tmp_path, options, said):
    parquet.write_table(rows(0), tmp_path / "a.parquet")
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_table(
            str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, **{"entity": "symbol", "time": "date", **options}
        )


@pytest.mark.parametrize("part", ["categorical", "static", "entity"])
def test_lists_and_structs_have_no_place(tmp_path, part):
    table = rows(0, tags=pa.array([[1], [2], [3], [4]]), pair=pa.array([{"a": 1}] * 4))
    parquet.write_table(table, tmp_path / "a.parquet")
    assert (
        mr.prepare_table(
            str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, entity="symbol", time="date"
        ).entities
        == 1
    )
    for name in ("tags", "pair"):
        with pytest.raises(mr.ConfigError, match=rf"{part}='{name}' is (list|struct)<.*>; expected texts or numbers"):
            mr.prepare_table(
                str(tmp_path / "a.parquet"),
                tmp_path / "no",
                workers=1,
                **{"entity": "symbol", "time": "date", part: name},
            )


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.table([pa.array([1, 2]), pa.array([1.0, 2]), pa.array([1.0, 2])], names=["t", "x", "x"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(mr.SourceError, match="has two columns named 'x'; rename one"):
        mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t")


def test_dates_and_other_times_are_categories_by_their_text(tmp_path):
    table = rows(
        0, day=pa.array([1, 2, 1, None], pa.int32()).cast(pa.date32()), flag=pa.array([True, False, None, True])
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    report = mr.prepare_table(
        str(tmp_path / "a.parquet"),
        tmp_path / "out",
        workers=1,
        entity="symbol",
        time="date",
        categorical=["day", "flag"],
    )
    store = report.open()
    assert store.meta["categories"] == {"day": ["1970-01-02", "1970-01-03"], "flag": ["false", "true"]}
    assert np.asarray(store.columns["categorical"][:]).tolist() == [[1, 2], [2, 1], [1, 0], [0, 2]]
