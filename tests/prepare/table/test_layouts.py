"""Whatever way a table lies in its files, the store holds what pandas finds in the original frame."""

import contextlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr

KINDS = ("float64", "float32", "float16", "int64", "int16", "uint8", "bool", "decimal")
TIMES = (
    "timestamp[ms]", "timestamp[us, tz=UTC]", "timestamp[ns, tz=Asia/Tokyo]", "date32", "int64", "int32", "float64",
)  # fmt: skip


def check_values(twin, store, entities, features, nulls=None):
    """The store's rows are the oracle's, filled and scaled by the store's own center and scale; bit for bit."""
    stored = twin.read(store)
    scaling = store.manifest.scaling
    center, scale = np.array(scaling["center"]), np.array(scaling["scale"])
    assert list(stored) == [entity.name for entity in entities]
    for entity in entities:
        mine = stored[entity.name]
        assert mine["time"].tolist() == entity.time.tolist()
        own = mine["scaling"] if "scaling" in mine else np.stack((center, scale))
        full = twin.filled(entity, features, nulls, own[0])
        width = len(features)
        expected = ((full - own[0][:width]) / own[1][:width]).astype(mine["values"].dtype)
        np.testing.assert_array_equal(mine["values"][:, :width], expected, err_msg=entity.name)


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**32), layout=st.sampled_from(["file", "many", "spread", "hive", "columns", "mixed"]),
    form=st.sampled_from(["parquet", "parquet", "csv", "tsv", "csv.gz"]), rows=st.sampled_from([1, 2, 17, 60]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=4), time=st.sampled_from(TIMES),
    num_names=st.integers(1, 12), categories=st.integers(0, 2), is_small=st.booleans(),
)  # fmt: skip
def test_any_layout_and_any_types_make_the_same_rows(
    twin, seed, layout, form, rows, kinds, time, num_names, categories, is_small
):
    if form != "parquet":
        time = "int64" if time == "float64" else time  # a file of whole numbers would be another type
        kinds = [kind for kind in kinds if kind not in ("decimal", "float16", "float32")] or ["float64"]
    frame = twin.random_frame(
        seed, rows=rows, names=twin.NAMES[:num_names], kinds=kinds, categories=categories,
        step=86400 if time == "date32" else 60,
    )  # fmt: skip
    features = [f"f{k}" for k in range(len(kinds))]
    labels = [f"c{k}" for k in range(categories)]
    with twin.folder() as folder:
        written = twin.write(
            frame,
            folder / "in",
            layout=layout,
            form=form,
            kinds=dict(zip(features, kinds, strict=True)),
            time=time,
            seed=seed,
        )
        with twin.small() if is_small else contextlib.nullcontext():
            report = mr.prepare_table(
                written.paths, folder / "out", workers=1, features=features, categorical=labels, **written.options
            )
        store = mr.open_store(folder / "out", check=True)
        expected = written.frame
        if form != "parquet":  # a CSV file cannot tell an empty text from none
            expected[labels] = expected[labels].replace("", None)
        entities = twin.cleaned(expected, features, categorical=labels)
        check_values(twin, store, entities, features)
        check_labels(twin, store, entities, labels)
        assert report.rows_read == rows
        assert report.entities == len(entities)
        values = expected[features].to_numpy(float)
        assert [c["nulls"] for c in report.columns.values()] == np.isnan(values).sum(axis=0).tolist()
        assert [c["infinite"] for c in report.columns.values()] == np.isinf(values).sum(axis=0).tolist()


def check_labels(twin, store, entities, labels):
    """Code 0 is a missing value, k + 1 the k-th of the known ones, by their bytes."""
    if not labels:
        assert "categorical" not in store.columns
        return
    known = store.meta["categories"]
    for k, label in enumerate(labels):
        used = {row[k] for entity in entities for row in entity.labels} - {None}
        assert known[label] == sorted(used, key=str.encode)
    for entity in entities:
        codes = twin.read(store)[entity.name]["categorical"]
        decoded = [
            tuple(None if c == 0 else known[labels[k]][c - 1] for k, c in enumerate(row)) for row in codes.tolist()
        ]
        assert decoded == entity.labels


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32), is_small=st.booleans(), missing=st.sampled_from([0.0, 0.3]))
def test_static_columns_are_stored_once_per_entity(twin, seed, is_small, missing):
    rng = np.random.default_rng(seed)
    frame = twin.random_frame(seed, rows=50, kinds=["float64"])
    names = sorted(set(frame["name"]), key=str.encode)
    weight = {name: float(rng.normal(5, 3)) for name in names}
    sector = {name: str(rng.choice(["tech", "food"])) for name in names}
    gone = {name for name in names if rng.random() < missing}
    hidden = [name in gone or rng.random() < missing for name in frame["name"]]
    frame["weight"] = [np.nan if h else weight[name] for name, h in zip(frame["name"], hidden, strict=True)]
    frame["sector"] = [None if h else sector[name] for name, h in zip(frame["name"], hidden, strict=True)]
    with twin.folder() as folder:
        written = twin.write(
            frame, folder / "in", layout="spread", kinds={"f0": "float64", "weight": "float64"}, seed=seed
        )
        with twin.small() if is_small else contextlib.nullcontext():
            mr.prepare_table(
                written.paths, folder / "out", workers=1, features="f0", static=["sector", "weight"], **written.options
            )
        store = mr.open_store(folder / "out")
        stored = twin.read(store)
        seen = frame.dropna(subset="weight").groupby("name")["weight"].first()
        sectors = frame.dropna(subset="sector").groupby("name")["sector"].first()
        assert store.meta["static"] == ["weight"]
        assert store.meta["static_categorical"] == ["sector"]
        center, scale = twin.fitted("standard", seen.to_numpy()[:, None] if len(seen) else np.zeros((0, 1)))
        for name in names:
            expected = (seen[name] - center[0]) / scale[0] if name in seen else 0.0
            np.testing.assert_allclose(stored[name]["static"], [expected], rtol=1e-6, atol=1e-6)
            code = int(stored[name]["static_categorical"][0])
            known = store.meta["categories"]["sector"]
            assert (None if code == 0 else known[code - 1]) == (sectors.get(name))


def test_a_static_column_that_changes_is_refused(twin, tmp_path):
    for layout in ("many", "spread"):
        frame = twin.random_frame(1, rows=40, kinds=["float64"], names=["A"])
        frame["weight"] = [1.0] * 39 + [2.0]
        written = twin.write(frame, tmp_path / layout, layout=layout, kinds={"f0": "float64", "weight": "float64"})
        with (
            pytest.raises(mr.SourceError, match=r"static column 'weight' has more than one value for entity 'A'; give"),
            twin.small() if layout == "spread" else contextlib.nullcontext(),
        ):
            mr.prepare_table(written.paths, tmp_path / "out", workers=1, static="weight", **written.options)


def test_every_numeric_column_is_a_feature_and_those_of_the_path_are_not(twin, tmp_path):
    frame = twin.random_frame(2, kinds=["float64", "int64"])
    for year in (2019, 2020):
        folder = tmp_path / "in" / f"year={year}" / "month=01"
        folder.mkdir(parents=True)
        table = twin.to_arrow(frame[:30] if year == 2019 else frame[30:], {"f0": "float64", "f1": "int64"})
        parquet.write_table(table.append_column("note", pa.array(["x"] * len(table))), folder / "data.parquet")
    report = mr.prepare_table(str(tmp_path / "in"), tmp_path / "out", workers=1, time="t", entity="name")
    assert list(report.columns) == ["f0", "f1"]
    report = mr.prepare_table(
        str(tmp_path / "in"), tmp_path / "year", workers=1, time="t", entity=["year", "name"], features=["month", "f1"]
    )
    entities = twin.cleaned(
        frame.assign(t=frame["t"] * 1000, name=np.where(frame.index < 30, "2019|", "2020|") + frame["name"], month=1),
        ["month", "f1"],
    )
    check_values(twin, mr.open_store(tmp_path / "year"), entities, ["month", "f1"])
    assert report.columns["month"]["std"] == 0


def test_the_row_numbers_of_pandas_are_no_feature_unless_named(tmp_path):
    frame = pd.DataFrame({"t": [3, 1, 2], "x": [3.0, 1.0, 2.0]}, index=[7, 8, 9])
    frame.to_parquet(tmp_path / "a.parquet")
    assert "__index_level_0__" in parquet.read_schema(tmp_path / "a.parquet").names
    report = mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t")
    assert list(report.columns) == ["x"]
    report = mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "named", workers=1, time="__index_level_0__")
    assert report.open().columns["time"][:].tolist() == [7, 8, 9]


def test_a_partition_without_a_value_is_a_null(twin, tmp_path):
    frame = twin.random_frame(3, kinds=["float64"], rows=30, names=["only"])
    for k, year in enumerate(("2019", "__HIVE_DEFAULT_PARTITION__", "2020")):
        folder = tmp_path / "in" / f"year={year}"
        folder.mkdir(parents=True)
        parquet.write_table(twin.to_arrow(frame[k * 10 : k * 10 + 10], {"f0": "float64"}), folder / "x.parquet")
    report = mr.prepare_table(
        str(tmp_path / "in"), tmp_path / "out", workers=1, time="t", entity="name", features=["f0", "year"]
    )
    assert report.columns["year"]["nulls"] == 10
    report = mr.prepare_table(
        str(tmp_path / "in"),
        tmp_path / "where",
        workers=1,
        time="t",
        entity="name",
        features=["f0"],
        where="year >= 2020",
    )
    assert (report.rows, report.dropped) == ({"train": 10}, {"where, by row group": 20})
    with pytest.raises(mr.SourceError, match="column 'year' is null"):
        mr.prepare_table(str(tmp_path / "in"), tmp_path / "by", workers=1, time="t", entity="year")


def test_targets_outside_the_features_lie_behind_them(twin, tmp_path):
    frame = twin.random_frame(4, kinds=["float64"] * 3)
    written = twin.write(frame, tmp_path / "in")
    mr.prepare_table(
        written.paths, tmp_path / "out", workers=1, features=["f2", "f0"], target=["f1", "f0"], **written.options
    )
    store = mr.open_store(tmp_path / "out")
    assert store.meta["features"] == ["f2", "f0", "f1"]
    assert (store.meta["inputs"], store.meta["target"]) == (["f2", "f0"], ["f1", "f0"])
    check_values(twin, store, twin.cleaned(written.frame, ["f2", "f0", "f1"]), ["f2", "f0", "f1"])


def test_dictionary_columns_are_their_values(twin, tmp_path):
    """As entity, category and feature; plain in one file, dictionary in the other."""
    frame = twin.random_frame(5, kinds=["int64"], categories=1, missing=0, rows=40)
    table = twin.to_arrow(frame, {"f0": "int64"})
    (tmp_path / "in").mkdir()
    parquet.write_table(table[:20], tmp_path / "in" / "a.parquet")
    coded = table[20:].set_column(0, "name", table[20:]["name"].combine_chunks().dictionary_encode())
    coded = coded.set_column(2, "f0", coded["f0"].combine_chunks().dictionary_encode())
    coded = coded.set_column(
        3, "c0", coded["c0"].combine_chunks().dictionary_encode().cast(pa.dictionary(pa.int8(), pa.large_string()))
    )
    parquet.write_table(coded, tmp_path / "in" / "b.parquet")
    mr.prepare_table(str(tmp_path / "in"), tmp_path / "out", workers=1, time="t", entity="name", categorical="c0")
    store = mr.open_store(tmp_path / "out")
    entities = twin.cleaned(frame.assign(t=frame["t"] * 1000), ["f0"], categorical=["c0"])
    check_values(twin, store, entities, ["f0"])
    check_labels(twin, store, entities, ["c0"])


def test_csv_files_may_differ_in_what_their_numbers_and_names_look_like(tmp_path):
    (tmp_path / "a.csv").write_text("id,t,x,kind,flag\n7,1,1,3,true\n7,2,2,4,false\n")
    (tmp_path / "b.csv").write_text("id,t,x,kind,flag\nA7,1,,x,true\n007,2,2.5,,false\n")
    mr.prepare_table(
        [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], tmp_path / "out", workers=1, time="t", entity="id",
        features=["x", "flag"], categorical="kind", scale="none", nulls="value:-1",
    )  # fmt: skip
    store = mr.open_store(tmp_path / "out")
    assert np.asarray(store.columns["name"][:]).tolist() == ["007", "7", "A7"]
    assert store.columns["values"][:].tolist() == [[2.5, 0], [1, 1], [2, 0], [-1, 1]]
    assert store.meta["categories"] == {"kind": ["3", "4", "x"]}
    assert store.columns["categorical"][:].ravel().tolist() == [0, 1, 2, 3]


def test_integer_entities_are_named_by_their_digits_and_ordered_by_bytes(tmp_path):
    frame = pd.DataFrame({"id": [10, 9, 100, 9, 10], "t": [1, 1, 1, 2, 2], "x": [1.0, 2, 3, 4, 5]})
    frame.to_parquet(tmp_path / "a.parquet")
    mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", entity="id", scale="none")
    store = mr.open_store(tmp_path / "out")
    assert np.asarray(store.columns["name"][:]).tolist() == ["10", "100", "9"]
    assert store.columns["values"][:].ravel().tolist() == [1, 5, 3, 2, 4]


def test_a_name_with_the_separator_is_refused_where_columns_are_joined(tmp_path):
    pd.DataFrame({"a": ["x|y"], "b": ["z"], "t": [1], "v": [1.0]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(mr.SourceError, match=r"a value of 'a' holds '\|', which joins"):
        mr.prepare_table(str(tmp_path / "a.parquet"), tmp_path / "out", workers=1, time="t", entity=["a", "b"])


@pytest.mark.parametrize(
    ("given", "columns"),
    [
        (["run=3"], {"year"}),
        (["run=3/"], {"year"}),
        (["run=3/year=2015"], set()),
        (["run=3/year=*/*.parquet"], {"year"}),
        (["run=3/**/*.parquet"], {"year"}),
        (["run=*/year=2015/*.parquet"], {"run", "year"}),
        (["run=3/year=2015/a.parquet"], set()),
        (["run=3/year=2015/a.parquet", "run=3/year=2016/a.parquet"], {"year"}),  # as a shell hands on year=*/*.parquet
        (["."], {"run", "year"}),
    ],
)
def test_only_folders_below_what_was_given_are_columns(tmp_path, monkeypatch, given, columns):
    from millrace.prepare.table.options import make_options
    from millrace.prepare.table.sources import survey

    for year in (2015, 2016):
        (tmp_path / "run=3" / f"year={year}").mkdir(parents=True)
        pd.DataFrame({"sym": "A", "t": [year], "x": [1.0]}).to_parquet(
            tmp_path / "run=3" / f"year={year}" / "a.parquet"
        )
    monkeypatch.chdir(tmp_path)
    for paths in (given, [str(tmp_path / path) for path in given]):
        found = survey(paths, make_options({"entity": "sym", "time": "t"}))
        assert {name for source in found.sources for name, _ in source.partition} == columns
