"""``--where``: the rows pandas would give, whether a row group was read or left out by its statistics."""

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr
from millrace.prepare.table.read import csv_files
from millrace.prepare.table.read.where import check, columns_of, expression

SCHEMA = pa.schema(
    [
        ("x", pa.float64()),
        ("n", pa.int32()),
        ("s", pa.string()),
        ("d", pa.date32()),
        ("flag", pa.bool_()),
        ("when", pa.timestamp("ms", "UTC")),
    ]
)
CONSTANTS = {
    "x": ["-1", "0", "0.5", "3", "2.5e0"],
    "n": ["0", "2", "-1", "1.5"],
    "s": ["'a'", "'b'", "'it'"],
    "d": ["'2020-01-02'", "'2020-01-04'"],
}


def leaves():
    def compare(name):
        return st.one_of(
            st.tuples(
                st.just("cmp"),
                st.just(name),
                st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
                st.sampled_from(CONSTANTS[name]),
            ),
            st.tuples(
                st.just("in"),
                st.just(name),
                st.sampled_from(["in", "not in"]),
                st.lists(st.sampled_from(CONSTANTS[name]), min_size=1, max_size=2),
            ),
        )

    return st.one_of(
        *(compare(name) for name in CONSTANTS),
        st.just(("columns", "x", ">", "n")),
        st.just(("columns", "x", "!=", "n")),
        st.just(("name", "flag")),
    )


TREES = st.recursive(
    leaves(),
    lambda inner: st.one_of(st.tuples(st.just("not"), inner), st.tuples(st.sampled_from(["and", "or"]), inner, inner)),
    max_leaves=5,
)


def text(tree):
    kind = tree[0]
    if kind in ("cmp", "columns"):
        return f"{tree[1]} {tree[2]} {tree[3]}"
    if kind == "in":
        return f"{tree[1]} {tree[2]} ({', '.join(tree[3])},)"
    if kind == "name":
        return tree[1]
    return f"not ({text(tree[1])})" if kind == "not" else f"({text(tree[1])}) {kind} ({text(tree[2])})"


def holds(tree, row):
    """True, False, or None where a value is missing, as in SQL."""
    kind = tree[0]
    if kind == "not":
        inner = holds(tree[1], row)
        return None if inner is None else not inner
    if kind in ("and", "or"):
        both = [holds(tree[1], row), holds(tree[2], row)]
        decisive = kind == "or"
        return decisive if decisive in both else None if None in both else not decisive
    value = row[tree[1]]
    if value is None:
        return None
    if kind == "name":
        return value
    if kind == "in":
        inside = value in [constant(item) for item in tree[3]]
        return inside == (tree[2] == "in")
    other = row[tree[3]] if kind == "columns" else constant(tree[3])
    if other is None:
        return None
    return {
        "<": value < other,
        "<=": value <= other,
        ">": value > other,
        ">=": value >= other,
        "==": value == other,
        "!=": value != other,
    }[tree[2]]


def constant(written):
    return written.strip("'") if written.startswith("'") else float(written)


def plain(row):
    row = {key: None if value is None or value != value else value for key, value in row.items()}
    row["d"] = None if row["d"] is None else str(row["d"])
    return row


@pytest.fixture(scope="module")
def table():
    rng = np.random.default_rng(11)
    rows = 90
    sorted_x = np.sort(np.round(rng.normal(1, 2, rows), 1))
    sorted_x[10:20] = 3.0  # a row group of one value, and of NaN
    columns = {
        "t": np.arange(rows),
        "x": np.where(rng.random(rows) < 0.15, np.nan, sorted_x),
        "n": rng.integers(-2, 4, rows),
        "s": rng.choice(["a", "b", "it", ""], rows),
        "flag": rng.random(rows) < 0.5,
    }
    arrays = {name: pa.array(values, mask=(rng.random(rows) < 0.1) & (name != "t")) for name, values in columns.items()}
    arrays["n"] = arrays["n"].cast(pa.int32())
    days = pa.array(18262 + rng.integers(0, 6, rows), mask=rng.random(rows) < 0.1)
    return pa.table({**arrays, "d": days.cast(pa.int32()).cast(pa.date32()), "v": np.arange(float(rows))})


@pytest.fixture(scope="module")
def sources(table, memory_folder):
    """The table with row groups of 10, and in one group without statistics."""
    for name, options in (("groups", {"row_group_size": 10}), ("one", {"write_statistics": False})):
        parquet.write_table(table, memory_folder / f"{name}.parquet", **options)
    return {name: str(memory_folder / f"{name}.parquet") for name in ("groups", "one")}


@settings(max_examples=60)
@given(tree=TREES)
def test_rows_are_those_that_a_row_by_row_evaluation_takes(twin, sources, table, tree):
    expected = [row["v"] for row in table.to_pylist() if holds(tree, plain(row))]
    with twin.folder() as folder:
        for name, source in sources.items():
            options = {"time": "t", "features": "v", "scale": "none", "workers": 1, "where": text(tree)}
            if not expected:
                with pytest.raises(mr.SourceError, match=r"no rows are left: .* look at where="):
                    mr.prepare_table(source, folder / name, **options)
                assert not (folder / f"{name}.partial").exists()
                continue
            report = mr.prepare_table(source, folder / name, **options)
            assert report.open().columns["values"][:].ravel().tolist() == expected
            gone = report.dropped.get("where", 0) + report.dropped.get("where, by row group", 0)
            assert (report.rows_read, gone) == (90, 90 - len(expected))


def test_row_groups_that_cannot_hold_such_rows_are_not_read_and_counted(tmp_path, monkeypatch):
    from millrace.prepare.table.read import chunks

    frame = pd.DataFrame(
        {"t": range(1000), "year": np.repeat(range(2010, 2020), 100), "x": np.random.default_rng(1).normal(size=1000)}
    )
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "a.parquet", row_group_size=100)
    seen = []
    selected = chunks.Reader._selected
    monkeypatch.setattr(
        chunks.Reader, "_selected", lambda self, source, table: seen.append(len(table)) or selected(self, source, table)
    )
    where = "year >= 2015 and not x > 0"
    report = mr.prepare_table(
        str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", features="x", where=where
    )
    kept = frame.query(where)
    assert sum(seen) == 500
    assert report.rows == {"train": len(kept)}
    assert report.dropped == {"where": 500 - len(kept), "where, by row group": 500}
    np.testing.assert_allclose(report.open().inverse(report.open().columns["values"][:])[:, 0], kept["x"], atol=1e-6)


def test_conditions_on_text_paths_and_csv(twin, tmp_path):
    frame = twin.random_frame(3, rows=40, kinds=["float64"], categories=1, missing=0)
    for form in ("parquet", "csv"):
        written = twin.write(frame, tmp_path / form, layout="hive", form=form)
        where = "name in ('A', 'B') and c0 != 'red'"
        report = mr.prepare_table(
            written.paths, tmp_path / f"{form}-out", workers=1, where=where, features="f0", **written.options
        )
        kept = frame.query(where)
        assert report.rows == {"train": len(kept)}
        assert np.asarray(report.open().columns["name"][:]).tolist() == sorted(set(kept["name"]))


def test_csv_files_whose_path_is_ruled_out_are_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_files, "CSV_BLOCK", 64)
    for year in (2014, 2015, 2016):
        venue = "a" if year == 2016 else "__HIVE_DEFAULT_PARTITION__"
        folder = tmp_path / "in" / f"year={year}" / f"venue={venue}"
        folder.mkdir(parents=True)
        lines = ["t,x", *(f"{k},{k}.5" for k in range(40)), *(["40,damaged"] if year == 2014 else [])]
        (folder / f"A{year}.csv").write_text("\n".join(lines))

    def prepared(where):
        out = tmp_path / f"out{len(list(tmp_path.glob('out*')))}"
        return mr.prepare_table(str(tmp_path / "in"), out, workers=1, time="t", features="x", where=where)

    for where in ("year >= 2015", "year != 2014 and x >= 0", "venue == 'a' or year > 2014"):
        report = prepared(where)
        assert (report.rows, report.rows_read) == ({"train": 80}, 80)
        assert "CSV files not read, since where= rules out their paths: 1" in report.notes
    report = prepared("year == 2015 and x > 20")
    assert (report.rows_read, report.dropped) == (40, {"where": 20})
    with pytest.raises(mr.SourceError, match=r"A2014\.csv', line 42: column 'x' holds 'damaged'"):
        prepared("year >= 2015 or x > 3")
    with pytest.raises(mr.SourceError, match="no rows are left"):
        prepared("year > 2020")


def test_categories_are_those_of_the_rows_that_were_taken(tmp_path):
    """The dictionary of a column chunk has them all."""
    frame = pd.DataFrame({"t": range(6), "x": 1.0, "kind": list("abcabc"), "sort": list("uvwuvw"), "name": "A"})
    frame.to_parquet(tmp_path / "a.parquet")
    report = mr.prepare_table(
        str(tmp_path / "a.parquet"),
        tmp_path / "out",
        workers=1,
        time="t",
        categorical=["kind", "sort"],
        where="kind in ('c', 'a')",
    )
    assert report.open().meta["categories"] == {"kind": ["a", "c"], "sort": ["u", "w"]}
    assert report.open().columns["categorical"][:].tolist() == [[1, 1], [2, 2], [1, 1], [2, 2]]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("x >", r"cannot be read .*; expected comparisons"),
        ("", r"cannot be read"),
        ("__import__('os').system('true')", "is not understood"),
        ("x.real > 0", "is not understood"),
        ("x + 1 > 0", "is not understood"),
        ("3 > 2", "is not understood"),
        ("x", r"does not fit the columns: x is double|compared with True"),
        ("x is None", "is not understood"),
        ("x == None", "is not understood"),
        ("lambda: x", "is not understood"),
        ("y > 0", r"column 'y' is unknown; there are x, n, s, d, flag, when"),
        ("s > 3", r"does not fit the columns: s is string"),
        ("x > 'much'", r"x is double, compared with 'much'"),
        ("d > 'soon'", r"d is date32\[day\], compared with 'soon'"),
        (f"s in ({'0.5, ' * 65})", "compares a column of string with 65 numbers; at most 64"),
        (f"n > 1{'0' * 30}", r"n is int32, compared with 10"),
        ("d > 5", r"d is date32\[day\], compared with 5 .*is no time"),
        ("not " * 5000 + "flag", "has 5000 parts; at most 500|cannot be read"),
        ("(" * 300 + "flag" + ")" * 300, "cannot be read"),
        ("x > 1" + " and x > 1" * 20000, "has 20002 parts; at most 500"),
    ],
)
def test_what_is_no_condition_is_refused_with_the_part_that_is_not(where, said):
    with pytest.raises(mr.ConfigError, match=said):
        check(where, SCHEMA)


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.int64(), pa.uint8()])
def test_as_many_values_as_one_likes_are_compared(kind):
    """A chain of 10,000 comparisons overflowed the stack, which ended the process."""
    whole = [0, 1, 2, 200] if pa.types.is_integer(kind) else [0.0, -0.0, 1.0, 2.5, 200.0, math.inf, math.nan]
    table = pa.table({"x": pa.array([*whole, None], kind)})
    others = [f"{k}.5" for k in range(3, 20_000)]
    for values in (["0", "2.5", "1e999"], ["1", "200.0", "1e30"], []):
        among = {float(value) for value in values}
        inside, outside = (
            table.filter(expression(f"x {sign} ({', '.join([*values, *others])})", {"x": kind})).column("x").to_pylist()
            for sign in ("in", "not in")
        )
        assert inside == [x for x in whole if x in among]
        assert outside == [x for x in whole if x not in among and x == x]  # neither NaN nor null


def test_conditions_on_times_with_a_zone_are_in_utc():
    table = pa.table(
        {"when": pa.array([0, 3_600_000, 7_200_000]).cast(pa.timestamp("ms")).cast(pa.timestamp("ms", "Asia/Tokyo"))}
    )
    kept = table.filter(
        expression("'1970-01-01 01:00' <= when < '1970-01-01T02:00:00'", {"when": table.schema.field("when").type})
    )
    assert kept["when"].cast(pa.int64()).to_pylist() == [3_600_000]
    assert columns_of("a > 1 and (b in ('x',) or not c)") == ["a", "b", "c"]


def write_years(folder, *, without: str | None = None) -> None:
    """Three years of one entity in row groups of 5 rows, one folder each; ``without`` is the name of a year that has none."""
    for year in (2014, 2015, 2016):
        name = without if without is not None and year == 2014 else str(year)
        (folder / f"year={name}").mkdir(parents=True)
        t = np.arange(20) + 100 * year
        tag = pa.nulls(20) if year == 2014 else pa.array(["a", "b"] * 10)
        table = pa.table({"t": t, "x": np.arange(20.0), "tag": tag})
        parquet.write_table(table, folder / f"year={name}" / f"{year}.parquet", row_group_size=5)


@pytest.mark.parametrize(
    ("where", "kept", "pruned"),
    [
        ("year >= 2015", [(2015, k) for k in range(20)] + [(2016, k) for k in range(20)], 20),
        ("year == 2015 and x >= 12", [(2015, k) for k in range(12, 20)], 50),
        ("year in (2014,) or x >= 19", [(2014, k) for k in range(20)] + [(2015, 19), (2016, 19)], 30),
        ("not year < 2016 and x < 5", [(2016, k) for k in range(5)], 55),
    ],
)
def test_folders_of_partitions_are_left_out_by_their_names(tmp_path, where, kept, pruned):
    write_years(tmp_path / "data")
    options = {"entity": "year", "time": "t", "features": "x", "scale": "none"}
    report = mr.prepare_table(str(tmp_path / "data"), tmp_path / "store", where=where, **options)
    store = report.open()
    found = list(zip((store.columns["time"][:] // 100).tolist(), store.columns["values"][:, 0].tolist(), strict=True))
    assert found == kept
    assert report.dropped["where, by row group"] == pruned
    assert sum(report.dropped.values()) == 60 - len(kept)
    assert report.rows_read == 60


@pytest.mark.parametrize("where", ["tag == 'a'", "tag in ('a', 'c')", "not (tag != 'a')"])
def test_a_text_that_one_file_has_only_nulls_of(tmp_path, where):
    write_years(tmp_path / "data")
    report = mr.prepare_table(
        str(tmp_path / "data"), tmp_path / "store", entity="year", time="t", features="x", where=where
    )
    assert report.rows == {"train": 20}
    assert sum(report.dropped.values()) == 40


@pytest.mark.parametrize("where", ["year == 'y2015'", "year in ('y2015',)", "x >= 0 and year != 'y2016'"])
def test_a_partition_without_a_value(tmp_path, where):
    write_years(tmp_path / "data", without="__HIVE_DEFAULT_PARTITION__")
    for year in (2015, 2016):
        (tmp_path / "data" / f"year={year}").rename(tmp_path / "data" / f"year=y{year}")
    report = mr.prepare_table(
        str(tmp_path / "data"), tmp_path / "store", entity="year", time="t", features="x", where=where
    )
    assert report.open().columns["name"][:].tolist() == ["y2015"]
    assert report.dropped == {"where, by row group": 40}
