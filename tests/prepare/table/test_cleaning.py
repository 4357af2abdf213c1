"""Missing values, repeated times, a regular grid, short entities: every policy against a twin that goes cell by cell."""

import contextlib

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr

POLICIES = ("ffill", "drop", "interpolate", "mask", "value:-7.5")
FEATURES = ["f0", "f1", "f2"]


def check(twin, store, entities, nulls, *, has_mask):
    """Rows, values and mask are the twin's."""
    stored = twin.read(store)
    scaling = store.manifest.scaling
    center, scale = np.array(scaling["center"]), np.array(scaling["scale"])
    assert list(stored) == [entity.name for entity in entities]
    assert ("mask" in store.columns) == has_mask
    leading = filled = np.zeros(3, int)
    for entity in entities:
        mine = stored[entity.name]
        assert mine["time"].tolist() == entity.time.tolist()
        full = twin.filled(entity, FEATURES, nulls, center)
        np.testing.assert_allclose(mine["values"], (full - center) / scale, rtol=2e-7, atol=1e-7, err_msg=entity.name)
        gone = np.isnan(entity.values)
        filled = filled + gone.sum(axis=0)
        leading = leading + np.minimum.accumulate(gone, axis=0).sum(axis=0)
        if has_mask:
            assert mine["mask"].tolist() == (~gone).astype(int).tolist()
        if entity.cuts:
            assert mine["cuts"].tolist() == entity.cuts
    return filled, leading


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32), nulls=st.lists(st.sampled_from(POLICIES), min_size=3, max_size=3),
    duplicates=st.sampled_from(["first", "last", "mean"]), has_grid=st.booleans(), min_rows=st.sampled_from([1, 4]),
    missing=st.sampled_from([0.05, 0.4, 0.9]), is_small=st.booleans(), split=st.sampled_from([None, "time", "last"]),
)  # fmt: skip
def test_every_policy_does_what_it_says(twin, seed, nulls, duplicates, has_grid, min_rows, missing, is_small, split):
    policies = dict(zip(FEATURES, nulls, strict=True))
    frame = twin.random_frame(
        seed, rows=60, names=["A", "B", "C", "D"], kinds=["float64"] * 3, missing=missing, categories=1, repeats=True
    )
    options = {"nulls": policies, "duplicates": duplicates, "min_rows": min_rows, "categorical": "c0"}
    if has_grid:
        options["freq"] = "1min"
    if split == "time":
        options["val_from"] = "2020-01-01T01:00:00"
    elif split == "last":
        options["val_last"] = 0.25
    with twin.folder() as folder:
        written = twin.write(frame, folder / "in", layout="spread", seed=seed)
        entities = twin.cleaned(
            written.frame, FEATURES, categorical=["c0"], nulls=policies, duplicates=duplicates,
            step=60_000 if has_grid else None, min_rows=min_rows,
        )  # fmt: skip
        for entity in entities:
            if split == "time":
                entity.cuts = [int((entity.time < (twin.START + 3600) * 1000).sum())]
            elif split == "last":
                entity.cuts = [len(entity.time) - len(entity.time) // 4]
        with twin.small() if is_small else contextlib.nullcontext():
            is_empty = split and any(all(not len(e.time[e.split(k)]) for e in entities) for k in (0, 1))
            if is_empty or not entities:
                with pytest.raises(mr.MillraceError, match=r"would be empty|no rows are left|no entity has min_rows="):
                    mr.prepare_table(written.paths, folder / "out", workers=1, **options, **written.options)
                return
            report = mr.prepare_table(written.paths, folder / "out", workers=1, **options, **written.options)
        store = mr.open_store(folder / "out", check=True)
        filled, leading = check(twin, store, entities, policies, has_mask=has_grid or "mask" in nulls)
        columns = report.columns.values()
        assert [column["filled"] for column in columns] == filled.tolist()
        uses_last = [kind in ("ffill", "interpolate", "drop") for kind in nulls]
        assert [column["leading"] for column in columns] == (leading * uses_last).tolist()
        counted(report, written.frame, entities, policies)


def counted(report, frame, entities, policies):
    """Everything that went or came is counted, and the counts add up."""
    dropped = dict(report.dropped)
    rows = sum(len(entity.time) for entity in entities)
    assert sum(report.rows.values()) == rows
    gone = sum(number for why, number in dropped.items() if "added" not in why and why != "entity with too few rows")
    added = dropped.get("grid rows added", 0)
    assert report.rows_read - gone + added == rows
    repeats = int(frame.duplicated(["name", "t"]).sum())
    assert dropped.get("duplicate time", 0) == repeats
    names = set(frame["name"])
    kept = {entity.name for entity in entities}
    short = dropped.get("entity with too few rows", 0)
    if not any(policy == "drop" for policy in policies.values()):
        assert short == len(names - kept)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32), nulls=st.sampled_from(POLICIES), has_grid=st.booleans(),
    scale=st.sampled_from(["standard", "robust"]), slices=st.integers(1, 20),
    chunk_rows=st.integers(1, 30), batch_rows=st.integers(1, 9),
    part_bytes=st.sampled_from([1, 500, 5000]),
)  # fmt: skip
def test_where_the_rows_are_cut_into_pieces_shows_nowhere(
    twin, seed, nulls, has_grid, scale, slices, chunk_rows, batch_rows, part_bytes
):
    """But in the last bits of mean and deviation, whose sums are those of other pieces; quartiles are exact."""
    frame = twin.random_frame(seed, rows=70, kinds=["float64"] * 3, categories=1, missing=0.3, repeats=True)
    with twin.folder() as folder:
        written = twin.write(frame, folder / "in", layout="spread", seed=seed, group_rows=9)
        options = {
            **written.options, "nulls": nulls, "duplicates": "mean", "categorical": "c0", "scale": scale, "val_last": 0.2,
            "freq": "1min" if has_grid else None, "workers": 1,
        }  # fmt: skip
        try:
            whole = mr.prepare_table(written.paths, folder / "whole", **options)
        except mr.MillraceError:
            return  # all rows were dropped, which is looked at above
        with twin.small(slices=slices, chunk_rows=chunk_rows, batch_rows=batch_rows, part_bytes=part_bytes):
            cut = mr.prepare_table(written.paths, folder / "cut", **options)
        one, other = twin.read(mr.open_store(folder / "whole")), twin.read(mr.open_store(folder / "cut"))
        assert list(one) == list(other)
        for name, columns in one.items():
            for column, expected in columns.items():
                if column == "values" and scale == "standard":
                    np.testing.assert_allclose(other[name][column], expected, rtol=1e-6, atol=1e-6)
                else:
                    np.testing.assert_array_equal(other[name][column], expected)
        assert (cut.rows, cut.dropped, cut.entities) == (whole.rows, whole.dropped, whole.entities)
        for name, column in whole.columns.items():
            assert cut.columns[name] == pytest.approx(column, rel=1e-12)


def one_entity(folder, times, **columns):
    frame = pd.DataFrame({"t": pd.to_datetime(times, format="ISO8601"), **columns})
    frame.to_parquet(folder / "a.parquet")
    return str(folder / "a.parquet")


def values(folder):
    return mr.open_store(folder).columns["values"][:]


def test_interpolation_looks_ahead_but_never_across_a_cut(tmp_path):
    nan = np.nan
    source = one_entity(tmp_path, pd.date_range("2020-01-01", periods=8), x=[nan, 1.0, nan, 3.0, nan, nan, 9.0, nan])
    mr.prepare_table(
        source, tmp_path / "out", workers=1, time="t", scale="none", nulls="interpolate", val_from="2020-01-06"
    )
    assert values(tmp_path / "out").ravel().tolist() == [0, 1, 2, 3, 3, 3, 9, 9]
    mr.prepare_table(source, tmp_path / "whole", workers=1, time="t", scale="none", nulls="interpolate")
    assert values(tmp_path / "whole").ravel().tolist() == [0, 1, 2, 3, 5, 7, 9, 9]


def test_interpolation_follows_the_clock_not_the_row_number(tmp_path):
    source = one_entity(tmp_path, ["2020-01-01", "2020-01-02", "2020-01-11"], x=[0.0, np.nan, 10.0])
    mr.prepare_table(source, tmp_path / "out", workers=1, time="t", scale="none", nulls="interpolate")
    assert values(tmp_path / "out").ravel().tolist() == [0, 1, 10]


def test_a_policy_per_column_and_one_for_the_rest(tmp_path):
    source = one_entity(
        tmp_path,
        pd.date_range("2020-01-01", periods=3),
        x=[1.0, np.nan, 2.0],
        y=[1.0, np.nan, 2.0],
        z=[1.0, np.nan, 5.0],
    )
    options = {"time": "t", "scale": "none", "workers": 1}
    mr.prepare_table(source, tmp_path / "out", nulls={"x": "value:0", "z": "interpolate", "*": "ffill"}, **options)
    assert values(tmp_path / "out").tolist() == [[1, 1, 1], [0, 1, 3], [2, 2, 5]]
    with pytest.raises(mr.ConfigError, match=r"nulls= names 'xx', which is no feature; .*x, y, z"):
        mr.prepare_table(source, tmp_path / "typo", nulls={"xx": "value:0"}, **options)


@pytest.mark.parametrize(("how", "expected"), [("first", [1, 4]), ("last", [3, 4]), ("mean", [2, 4])])
def test_repeated_times(tmp_path, how, expected):
    source = one_entity(tmp_path, ["2020-01-01"] * 3 + ["2020-01-02"], x=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(
        mr.SourceError, match=r"entity 'a' has 2020-01-01.* twice; keep one of such rows with duplicates="
    ):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t")
    report = mr.prepare_table(source, tmp_path / "out", workers=1, time="t", scale="none", duplicates=how)
    assert values(tmp_path / "out").ravel().tolist() == expected
    assert report.dropped == {"duplicate time": 2}


def test_a_mended_call_keeps_what_was_read(tmp_path, monkeypatch):
    """Options that are used after the first pass may change between two attempts."""
    from millrace.prepare.table.read import part

    source = one_entity(tmp_path, ["2020-01-01"] * 3 + ["2020-01-02"], x=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(mr.SourceError, match="twice"):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t")
    monkeypatch.setattr(part.PartMaker, "run", lambda self: pytest.fail("read again"))
    with pytest.raises(mr.ConfigError, match="'val' would be empty"):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t", duplicates="last", val_from="2021-01-01")
    report = mr.prepare_table(
        source, tmp_path / "out", workers=1, time="t", duplicates="last", val_from="2020-01-02", scale="none"
    )
    assert report.rows == {"train": 1, "val": 1}
    assert values(tmp_path / "out").ravel().tolist() == [3, 4]
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.parametrize("sign", [1, -1])
def test_a_mean_is_right_where_the_sum_is_too_large_for_a_float(tmp_path, sign):
    days = ["2020-01-01"] * 3 + ["2020-01-02"] * 3 + ["2020-01-03"]
    large = sign * np.array([1.6e308, 1.7e308, np.nan, 1.79e308, 1.79e308, 1.79e308, 1e308])
    source = one_entity(tmp_path, days, x=large, y=np.arange(7.0))
    store = mr.prepare_table(source, tmp_path / "out", workers=1, time="t", duplicates="mean", scale="minmax").open()
    stored = store.inverse(store.columns["values"][:])
    np.testing.assert_allclose(stored[:, 0], sign * np.array([1.65e308, 1.79e308, 1e308]), rtol=1e-6)
    np.testing.assert_allclose(stored[:, 1], [1, 4, 6], rtol=1e-6)


def test_a_mean_never_leaves_its_values(tmp_path):
    most = np.finfo(np.float64).max  # a third of it, three times, is more than a float can be
    source = one_entity(tmp_path, ["2020-01-01"] * 3 + ["2020-01-02"], x=[most, most, most, most / 2])
    given = {"workers": 1, "time": "t", "duplicates": "mean", "scale": "minmax"}
    report = mr.prepare_table(source, tmp_path / "out", **given)
    assert (report.columns["x"]["min"], report.columns["x"]["max"]) == (most / 2, most)


def test_a_grid_may_have_a_thousand_rows_for_each_that_was_read_and_a_thousand_more(tmp_path):
    options = {"workers": 1, "time": "t", "freq": "1s", "scale": "none"}
    start = pd.Timestamp("2020-01-01")
    for seconds in (2999, 3000):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        source = one_entity(folder, [start, start + pd.Timedelta(seconds, "s")], x=[1.0, 2.0])
        if seconds == 2999:
            assert mr.prepare_table(source, folder / "out", **options).rows == {"train": 3000}
        else:
            with pytest.raises(mr.SourceError, match="would have 3,001 rows on the grid"):
                mr.prepare_table(source, folder / "out", **options)


def test_what_decides_the_rows_that_are_read_may_not_change(tmp_path):
    source = one_entity(tmp_path, ["2020-01-01"] * 3 + ["2020-01-02"], x=[1.0, 2.0, 3.0, 4.0])
    with pytest.raises(mr.SourceError, match="twice"):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t")
    with pytest.raises(
        mr.ConfigError, match=r"was begun with other sources or options: options: where was null, now \"x > 1\""
    ):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t", where="x > 1")


def test_a_grid_that_does_not_fit_is_refused(tmp_path):
    source = one_entity(tmp_path, ["2020-01-01", "2020-01-02", "2020-01-02T12:00"], x=[1.0, 2.0, 3.0])
    with pytest.raises(mr.SourceError, match=r"2020-01-02T12:00:00.*, which is not on the grid of 1D from 2020-01-01"):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t", freq="1D")
    source = one_entity(tmp_path, ["2020-01-01", "2120-01-02"], x=[1.0, 2.0])
    with pytest.raises(mr.SourceError, match=r"would have 36,526 rows on the grid of D for 2 that were read; choose"):
        mr.prepare_table(source, tmp_path / "other", workers=1, time="t", freq="D")


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns", "D"])
def test_calendar_features_are_those_of_pandas(twin, tmp_path, unit):
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(5)
    seconds = np.sort(rng.choice(4 * 10**9, 300, replace=False)) - 10**9  # from 1938 to 2065
    when = pd.to_datetime(seconds, unit="s").to_series(index=range(300))
    kind = pa.date32() if unit == "D" else pa.timestamp("us" if unit == "s" else unit)
    if unit == "D":
        when = when.dt.floor("D").drop_duplicates()
    table = pa.table(
        {"t": pa.array(when.to_numpy("datetime64[us]")).cast(kind), "x": np.arange(len(when), dtype=float)}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    parts = ["minute", "hour", "dayofweek", "dayofmonth", "dayofyear", "month"]
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", calendar=parts, val_last=0.1)
    store = mr.open_store(tmp_path / "out")
    of = when.dt
    phases = {
        "minute": of.minute / 60, "hour": of.hour / 24, "dayofweek": of.day_of_week / 7, "dayofmonth": (of.day - 1) / 31,
        "dayofyear": (of.day_of_year - 1) / 366, "month": (of.month - 1) / 12,
    }  # fmt: skip
    names, stored = store.meta["features"], store.columns["values"][:]
    assert store.meta["known_future"] == names[1:]
    for part in parts:
        for wave, function in (("sin", np.sin), ("cos", np.cos)):
            expected = function(2 * np.pi * phases[part].to_numpy())
            np.testing.assert_allclose(stored[:, names.index(f"{part}_{wave}")], expected, atol=1e-6)
    back = store.inverse(stored)
    np.testing.assert_array_equal(back[:, 1:], stored[:, 1:].astype(float))


def test_calendar_features_beside_columns_of_their_names_are_refused(tmp_path):
    source = one_entity(tmp_path, ["2020-01-01", "2020-01-02"], hour_sin=[1.0, 2.0])
    with pytest.raises(mr.ConfigError, match=r"""calendar="hour" makes 'hour_sin', which is a column already"""):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t", calendar="hour")
    with pytest.raises(mr.ConfigError, match=r"calendar= names a part twice: hour,hour"):
        mr.prepare_table(source, tmp_path / "out", workers=1, time="t", calendar=["hour", "hour"])


@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York", "+05:30"])
def test_calendar_features_are_of_the_zones_own_clock(tmp_path, zone):
    import pyarrow as pa
    from pyarrow import parquet

    when = pd.date_range("2021-03-13", periods=80, freq="h", tz="UTC")  # over a change of clocks in New York
    times = pa.array(when.tz_localize(None).to_numpy("datetime64[ms]")).cast(pa.timestamp("ms", zone))
    parquet.write_table(pa.table({"t": times, "x": np.arange(80.0)}), tmp_path / "a.parquet")
    options = {"time": "t", "calendar": ["hour", "dayofweek"], "workers": 1}
    store = mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", **options).open()
    own = when.tz_convert(zone)
    angles = 2 * np.pi * np.stack((own.hour / 24, own.day_of_week / 7), axis=1)
    expected = np.stack((np.sin(angles), np.cos(angles)), axis=2).reshape(80, 4)
    np.testing.assert_allclose(store.columns["values"][:, 1:], expected, atol=1e-6)
    later = times.cast(pa.int64()).to_numpy() + 80 * 3_600_000
    (tmp_path / "more").mkdir()
    more = pa.table({"t": pa.array(later).cast(pa.timestamp("ms", "UTC")), "x": np.arange(80.0)})
    parquet.write_table(more, tmp_path / "more" / "a.parquet")
    store = mr.prepare_table(str(tmp_path / "more" / "a.parquet"), tmp_path / "out", append=True).open()
    own = (when + pd.Timedelta(hours=80)).tz_convert(zone)
    np.testing.assert_allclose(store.columns["values"][80:, 1], np.sin(2 * np.pi * own.hour / 24), atol=1e-6)


def test_a_zone_nobody_knows_is_told_before_any_work(tmp_path):
    import pyarrow as pa
    from pyarrow import parquet

    times = pa.array([0, 1], pa.timestamp("ms", "Mars/Olympus"))
    parquet.write_table(pa.table({"t": times, "x": [1.0, 2.0]}), tmp_path / "a.parquet")
    with pytest.raises(mr.ConfigError, match="zone 'Mars/Olympus' of the times is unknown here"):
        mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", time="t", calendar="hour")
    assert not (tmp_path / "out.partial").exists()


def test_a_repeated_time_is_told_with_a_file(tmp_path):
    for name, days in (("a", [1, 2]), ("b", [3, 3]), ("c", [5, 6])):
        pd.DataFrame({"s": "A", "t": days, "x": 1.0}).to_parquet(tmp_path / f"{name}.parquet")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("millrace.prepare.table.read.sources.PART_BYTES", 1)
        with pytest.raises(mr.SourceError, match=r"entity 'A' has 3 twice; .* \(look in '.*b\.parquet'\)$"):
            mr.prepare_table(str(tmp_path), tmp_path / "out", entity="s", time="t")
