"""Stores in memory: which column an array becomes, frames of pandas, pickling, fingerprints, splits by time."""

import pickle

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr


def again(store: mr.Store) -> mr.Store:
    return pickle.loads(pickle.dumps(store))  # noqa: S301


# from_arrays: rows or records.


def test_as_many_items_as_rows_make_a_row_column_and_as_records_a_record_column():
    store = mr.from_arrays({"x": np.arange(12.0), "label": [7, 8, 9]}, [0, 5, 7, 12])
    assert (store.num_rows, store.num_records, store.num_shards) == (12, 3, 1)
    assert store.layout.columns["x"] == mr.Column("float64")
    assert store.layout.columns["label"] == mr.Column("int64", per="record")
    assert store.columns["label"][:].tolist() == [7, 8, 9]
    assert store.offsets.tolist() == [0, 5, 7, 12]


def test_where_both_fit_it_is_a_row_column_unless_per_says_otherwise():
    columns, offsets = {"x": [1, 2, 3], "y": [4, 5, 6]}, [0, 1, 2, 3]
    assert mr.from_arrays(columns, offsets).layout.columns["y"].per == "row"
    assert mr.from_arrays(columns, offsets, per={"y": "record"}).layout.columns["y"].per == "record"
    assert mr.from_arrays(columns, offsets, per={"y": "row"}).layout.columns["y"].per == "row"


def test_without_offsets_all_rows_are_one_record():
    store = mr.from_arrays({"tokens": np.arange(7, dtype=np.uint16)})
    assert store.offsets.tolist() == [0, 7]
    assert store.kind == "records"
    assert store.path is None
    assert store.split("train") is store
    assert store.splits == ()


def test_a_store_without_rows_or_records():
    store = mr.from_arrays({"x": np.zeros((0, 3), np.float32)}, [0])
    assert (store.num_rows, store.num_records) == (0, 0)
    assert store.columns["x"][:].shape == (0, 3)
    assert len(store.fingerprint) == 32


@pytest.mark.parametrize("dtype", ["bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"])
def test_numbers_keep_their_dtype_and_are_not_copied(dtype):
    values = np.ones((4, 2), dtype)
    store = mr.from_arrays({"x": values}, [0, 4])
    assert store.columns["x"].dtype == values.dtype
    assert np.shares_memory(store.columns["x"][:], values)
    with pytest.raises(ValueError, match="read-only"):
        store.columns["x"][:].fill(0)
    values[0, 0] = 0  # the caller's own array stays writable


def test_other_byte_orders_and_strides_are_read_right():
    values = np.arange(12, dtype=">f4").reshape(6, 2)[::-2]
    store = mr.from_arrays({"x": values})
    assert store.columns["x"].dtype == np.dtype("<f4")
    assert store.columns["x"][:].tolist() == values.tolist()
    plain = mr.from_arrays({"x": np.ascontiguousarray(values, "<f4")})
    assert plain.fingerprint == store.fingerprint


def test_strings_are_strings_per_record_and_a_dictionary_per_row():
    store = mr.from_arrays({"word": ["b", "a", "b", "ü"], "name": ["one", "zwö"]}, [0, 3, 4])
    assert store.layout.columns["name"] == mr.Column("string", per="record")
    assert store.layout.columns["word"] == mr.Column("dictionary", values=("b", "a", "ü"))
    assert list(store.columns["word"]) == ["b", "a", "b", "ü"]
    assert list(store.columns["name"]) == ["one", "zwö"]


@given(st.lists(st.text(max_size=6), min_size=1, max_size=20), st.data())
def test_any_text_comes_back(texts, data):
    words = data.draw(st.lists(st.sampled_from(texts), min_size=len(texts) + 1, max_size=30))
    store = mr.from_arrays({"word": words, "name": texts}, np.linspace(0, len(words), len(texts) + 1).astype(int))
    assert list(store.columns["name"]) == texts
    assert list(store.columns["word"]) == words


def test_text_keeps_its_nuls_and_numbers_do_not_become_text():
    store = mr.from_arrays({"word": ["a\0", "\0", ""], "name": ["b\0\0"]}, [0, 3])
    assert list(store.columns["word"]) == ["a\0", "\0", ""]
    assert list(store.columns["name"]) == ["b\0\0"]
    with pytest.raises(mr.ConfigError, match="got 1"):
        mr.from_arrays({"word": ["a", 1]})


# Ragged columns and their axes.


def test_a_ragged_brings_its_own_axis():
    hits = mr.Ragged(np.arange(4.0), np.array([0, 1, 4]))
    store = mr.from_arrays({"x": np.arange(6), "hits": hits, "label": [1, 2]}, [0, 2, 6])
    assert store.axes == ("rows", "hits")
    assert store.offsets.tolist() == [0, 2, 6]
    assert store.axis_offsets("hits").tolist() == [0, 1, 4]
    assert store.axis_rows("hits") == 4
    assert store.columns["hits"][:].tolist() == [0, 1, 2, 3]
    assert store.layout.columns["label"].per == "record"


def test_raggeds_with_equal_offsets_share_an_axis():
    offsets = np.array([0, 1, 4])
    store = mr.from_arrays(
        {
            "a": mr.Ragged(np.arange(4), offsets),
            "b": mr.Ragged(np.ones((4, 2)), offsets.copy()),
            "c": mr.Ragged(np.zeros(2), np.array([0, 2, 2])),
        }
    )
    assert store.axes == ("rows", "c")
    assert store.layout.columns["b"].axis == "rows"
    assert store.offsets.tolist() == [0, 1, 4]
    assert store.axis_offsets("c").tolist() == [0, 2, 2]


def test_the_axis_of_the_first_row_column_is_primary():
    hits = mr.Ragged(np.arange(4.0), np.array([0, 1, 4]))
    store = mr.from_arrays({"hits": hits, "x": np.arange(6)}, [0, 2, 6])
    assert store.axes == ("hits", "rows")
    assert store.num_rows == 4
    assert store.axis_offsets("rows").tolist() == [0, 2, 6]


def test_an_unknown_axis_is_refused():
    with pytest.raises(mr.ConfigError, match="axis 'hits' is unknown; this store has rows"):
        mr.from_arrays({"x": [1]}).axis_offsets("hits")


RAGGED = mr.Ragged(np.arange(4), np.array([0, 1, 4]))


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {}, "no columns"),
        ({"x": 5}, {}, "column 'x' is the single value 5"),
        ({"x": [1, 2, 3]}, {"offsets": [0, 2, 4]}, r"column 'x' has 3 items; expected 4 \(rows\) or 2 \(records\)"),
        ({"x": [1, 2, 3]}, {"offsets": [0, 2, 1, 3]}, "fall from 2 to 1"),
        ({"x": [1, 2, 3]}, {"offsets": [1, 3]}, "start at 1"),
        ({"x": [1, 2]}, {"kind": "tables"}, "kind='tables'; expected one of records, series, text"),
        ({"x": [1, 2]}, {"per": {"x": "shard"}}, "per='shard'"),
        ({"x": [1, 2]}, {"per": {"y": "row"}}, r"per= names \['y'\]"),
        ({"x": [1, 2], "y": [3]}, {"per": {"y": "row"}}, "column 'y' has 1 rows; the offsets make 2"),
        ({"x": [1, 2], "r": RAGGED}, {"offsets": [0, 2]}, "different numbers of records"),
        ({"r": RAGGED}, {"offsets": [0, 2, 9]}, "offsets= given, but no column has them"),
        ({"rows": RAGGED, "x": np.arange(4)}, {"offsets": [0, 2, 4]}, "'rows' brings its own axis"),
        ({"../x": [1, 2]}, {}, "column name '../x' is not usable"),
        ({"offsets": [1, 2]}, {}, "taken by the offsets"),
        ({"x": [1], "X": [1]}, {}, "differ only in case"),
        ({"x": np.zeros(2, complex)}, {}, "complex128"),
        ({"x": np.zeros(2, "M8[s]")}, {}, "M8"),
        ({"x": np.array([1, "a"], object)}, {}, "dictionary of strings; got 1"),
        ({"x": [1, 2], "n": ["a\ud800"]}, {"per": {"n": "record"}}, "not valid text"),
        ({"x": [1, 2]}, {"meta": {"a": float("nan")}}, "meta cannot be kept as JSON"),
        ({"x": [1, 2]}, {"meta": {"a": np.float32(1)}}, "meta cannot be kept as JSON"),
        ({"x": [1, 2]}, {"meta": {1: 2}}, "meta cannot be kept as JSON"),
    ],
)
def test_what_cannot_be_a_store_is_refused(columns, options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.from_arrays(columns, **options)


def test_records_may_have_no_rows_at_all(tmp_path):
    store = mr.from_arrays({"y": [3, 4], "z": np.zeros((2, 3))}, per={"y": "record", "z": "record"})
    columns = {"y": mr.Column("int64", per="record"), "z": mr.Column("float64", (3,), per="record")}
    with mr.StoreWriter(tmp_path / "disk", columns=columns) as writer:
        writer.append({"y": 3, "z": np.zeros(3)})
        writer.extend({"y": [4], "z": np.zeros((1, 3))}, [0, 0])
    for found in (store, mr.open_store(tmp_path / "disk", check=True)):
        assert (found.num_records, found.num_rows, found.offsets.tolist()) == (2, 0, [0, 0, 0])
        with mr.Feed(mr.Records(found), batch=2, order=mr.Sequential(2), epochs=1, device="numpy") as feed:
            batches = list(feed)
        assert [batch["y"].tolist() for batch in batches] == [[3, 4]]
        assert batches[0]["z"].shape == (2, 3)


def test_meta_nested_without_end_is_refused():
    endless: list = []
    endless.append(endless)
    with pytest.raises(mr.ConfigError, match="nest deeper"):
        mr.from_arrays({"x": [1]}, meta={"a": endless})


# from_pandas.


def frame(**columns):
    plain = {
        "name": ["b", "a", "b", "B", "a"],
        "day": [2, 9, 1, 5, 3],
        "open": [1.0, 2.0, 3.0, 4.0, 5.0],
        "volume": [10, 20, 30, 40, 50],
    }
    return pd.DataFrame({**plain, **columns})


def from_frame(data, **options):
    return mr.from_pandas(data, entity="name", time="day", **options)


def test_entities_are_in_the_order_of_their_names_bytes_and_rows_by_time():
    store = from_frame(frame())
    assert store.kind == "series"
    assert list(store.columns["name"]) == ["B", "a", "b"]
    assert store.offsets.tolist() == [0, 1, 3, 5]
    assert store.columns["time"][:].tolist() == [5, 3, 9, 1, 2]
    assert store.columns["values"][:].tolist() == [[4, 40], [5, 50], [2, 20], [3, 30], [1, 10]]
    assert store.columns["values"].dtype == np.float32
    assert store.meta == {"features": ["open", "volume"], "time": {"unit": None}}


def test_bytes_decide_the_order_of_names_not_the_alphabet_or_numbers():
    names = ["é", "z", "10", "9", "Z"]
    store = from_frame(frame(name=names))
    assert list(store.columns["name"]) == sorted(names, key=str.encode) == ["10", "9", "Z", "z", "é"]
    numbered = from_frame(frame(name=[10, 9, 10, 2, 9]))
    assert list(numbered.columns["name"]) == ["10", "2", "9"]


def test_rows_of_one_time_keep_their_order():
    store = from_frame(frame(name=["a"] * 5, day=[1, 0, 1, 0, 1]))
    assert store.columns["values"][:, 1].tolist() == [20, 40, 10, 30, 50]


def test_features_are_taken_in_the_order_given():
    store = from_frame(frame(), features=["volume", "open"], dtype="float64")
    assert store.columns["values"][0].tolist() == [40, 4]
    assert store.columns["values"].dtype == np.float64
    assert store.meta["features"] == ["volume", "open"]


def test_labels_that_are_numbers_are_features_too():
    store = from_frame(frame().rename(columns={"open": 0, "volume": 1}))
    assert store.meta["features"] == ["0", "1"]
    assert store.columns["values"][0].tolist() == [4, 40]


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_dates_are_nanoseconds(unit):
    days = np.array(["2020-01-03", "1969-12-31", "2020-01-01", "2020-01-05", "1970-01-01"], f"datetime64[{unit}]")
    store = from_frame(frame(day=days))
    assert store.columns["time"].dtype == np.int64
    assert store.columns["time"][:].tolist() == days[[3, 1, 4, 2, 0]].astype("datetime64[ns]").view(np.int64).tolist()
    assert store.meta["time"] == {"unit": "ns"}


def test_dates_with_a_zone_are_kept_in_utc():
    days = pd.to_datetime(["2020-07-01 02:00"] * 5).tz_localize("Europe/Berlin")
    times = from_frame(frame(day=days)).columns["time"][:]
    assert (times == np.datetime64("2020-07-01T00:00", "ns").view(np.int64)).all()


def test_missing_values_of_features_stay_missing():
    values = from_frame(frame(open=[1.0, np.nan, 3.0, 4.0, 5.0])).columns["values"][:, 0]
    assert np.array_equal(values, [4, 5, np.nan, 3, 1], equal_nan=True)
    nullable = frame(open=pd.array([1, None, 3, 4, 5], dtype="Int64"))
    assert np.array_equal(from_frame(nullable).columns["values"][:, 0], [4, 5, np.nan, 3, 1], equal_nan=True)


def test_whole_numbers_can_be_kept_whole():
    values = from_frame(frame(), features=["volume"], dtype="int16").columns["values"]
    assert values.dtype == np.int16
    assert values[:, 0].tolist() == [40, 50, 20, 30, 10]


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (frame().drop(columns="day"), {}, "column 'day' is not in the frame; it has name, open, volume"),
        (frame().drop(columns="name"), {}, "column 'name' is not in the frame"),
        (frame(name=["a", None, "b", "b", "b"]), {}, "column 'name' has a missing value in row 1"),
        (frame(day=[1, 2, np.nan, 4, 5]), {}, "column 'day' has a missing value in row 2"),
        (
            frame(day=pd.to_datetime(["2020-01-01", None, *["2020-01-02"] * 3])),
            {},
            "'day' has a missing value in row 1",
        ),
        (frame(day=list("abcde")), {}, "column 'day' is str; expected numbers or dates"),
        (frame(day=[True] * 5), {}, "column 'day' is bool"),
        (frame(day=np.array(["3000-01-01"] * 5, "M8[s]")), {}, "column 'day' has a date beyond int64 nanoseconds"),
        (frame(), {"features": ["close"]}, r"features \['close'\] are not in the frame"),
        (frame(open=list("abcde")), {"features": ["open"]}, "feature 'open' is str"),
        (frame()[["name", "day"]], {}, "no numeric columns besides"),
        (frame().rename(columns={"volume": "open"}), {}, "two columns of the frame have one name"),
        (frame(), {"dtype": "int32"}, "values cannot be stored in it without loss"),
        (frame(), {"dtype": "int8", "features": ["volume"]}, None),
        (frame(volume=[300] * 5), {"dtype": "int8", "features": ["volume"]}, "got 300: choose a wider dtype"),
        (frame(), {"dtype": "float12"}, "dtype 'float12' cannot be stored"),
        (frame(), {"dtype": "bfloat16"}, "dtype='bfloat16'; expected"),
    ],
)
def test_frames_that_cannot_be_stored_are_refused(data, options, message):
    if message is None:
        assert from_frame(data, **options).num_rows == 5
        return
    with pytest.raises(mr.ConfigError, match=message):
        from_frame(data, **options)


# Pickling and fingerprints.


def sample_store(change: str = "") -> mr.Store:
    x = np.arange(10, dtype=np.int16)
    hits = mr.Ragged(np.arange(3.0), np.array([0, 2, 3]))
    columns = {"x": x, "hits": hits, "name": ["a", "b"], "word": list("xyxyxyxyxy")}
    offsets, options = [0, 4, 10], {"kind": "records", "meta": {"a": [1]}}
    match change:
        case "a byte":
            columns["x"] = np.where(x == 9, 8, x)
        case "a dtype":
            columns["x"] = x.astype(np.uint16)
        case "a shape":
            columns["x"] = x[:, None]
        case "a name":
            columns = {"z" if name == "x" else name: value for name, value in columns.items()}
        case "offsets":
            offsets = [0, 5, 10]
        case "an axis":
            columns["hits"] = mr.Ragged(np.arange(3.0), np.array([0, 1, 3]))
        case "a string":
            columns["name"] = ["a", "c"]
        case "a dictionary":
            columns["word"] = list("xzxzxzxzxz")
        case "the kind":
            options["kind"] = "series"
        case "meta":
            options["meta"] = {"a": [2]}
    return mr.from_arrays(columns, offsets, **options)


CHANGES = ["a byte", "a dtype", "a shape", "a name", "offsets", "an axis", "a string", "a dictionary", "the kind"]


def test_the_same_content_has_the_same_fingerprint():
    assert sample_store().fingerprint == sample_store().fingerprint
    assert sample_store().fingerprint == sample_store("meta").fingerprint  # a note about the data is not the data
    assert len(sample_store().fingerprint) == 32


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_fingerprint(change):
    assert sample_store(change).fingerprint != sample_store().fingerprint


def test_a_store_in_memory_survives_pickling():
    store, copy = sample_store(), again(sample_store())
    assert copy.fingerprint == store.fingerprint
    assert (copy.kind, copy.meta, copy.axes) == (store.kind, store.meta, store.axes)
    assert copy.offsets.tolist() == store.offsets.tolist()
    for name, column in store.columns.items():
        assert np.array_equal(np.asarray(copy.columns[name]), np.asarray(column))
    with pytest.raises(ValueError, match="read-only"):
        copy.columns["x"][:].fill(0)


def test_a_store_on_disk_pickles_as_its_path_and_snapshot(rich):
    store = mr.open_store(rich.path)
    data = pickle.dumps(store)
    assert len(data) < 300 + len(str(rich.path))
    assert again(store).fingerprint == store.fingerprint
    part = again(store.split("val"))
    assert part.fingerprint == store.split("val").fingerprint
    assert part.columns["label"][:].tolist() == store.split("val").columns["label"][:].tolist()


def test_a_pickled_store_stays_at_its_snapshot(tmp_path):
    columns = {"x": mr.Column("int8")}
    with mr.StoreWriter(tmp_path / "s", columns=columns) as writer:
        writer.append({"x": [1]})
    first = mr.open_store(tmp_path / "s")
    with mr.StoreWriter(tmp_path / "s", append=True) as writer:
        writer.append({"x": [2, 3]})
    assert again(first).columns["x"][:].tolist() == [1]
    assert mr.open_store(tmp_path / "s").columns["x"][:].tolist() == [1, 2, 3]
    assert mr.open_store(tmp_path / "s", snapshot=first.fingerprint).num_rows == 1


# Splits.

CUTS = mr.Cuts(splits=("train", "val", "test"), gap=1)


def cut_store() -> mr.Store:
    columns = {"values": np.arange(10.0), "cuts": np.array([[2, 3], [0, 5], [1, 1]])}
    return mr.from_arrays(columns, [0, 4, 9, 10], kind="series", cuts=CUTS)


def test_a_split_by_time_keeps_the_rows_and_says_where_it_begins_and_ends_in_each_record():
    store = cut_store()
    assert store.splits == ("train", "val", "test")
    assert store.cuts is None
    found = {name: [array.tolist() for array in store.split(name).cuts] for name in store.splits}
    assert found == {
        "train": [[0, 0, 0], [2, 0, 1]],
        "val": [[2, 0, 1], [3, 5, 1]],
        "test": [[3, 5, 1], [4, 5, 1]],
    }
    for name in store.splits:
        part = store.split(name)
        assert part.split_name == name
        assert part.root is store
        assert (part.num_rows, part.num_records) == (10, 3)
        assert part.columns["values"][:].tolist() == store.columns["values"][:].tolist()
        assert part.time_cuts == CUTS


def test_every_split_has_its_own_fingerprint_that_follows_the_store(rich):
    for store in (cut_store(), mr.open_store(rich.path)):
        prints = [store.fingerprint, *(store.split(name).fingerprint for name in store.splits)]
        assert len(set(prints)) == len(prints)
        assert prints == [store.fingerprint, *(store.split(name).fingerprint for name in store.splits)]
    assert again(cut_store().split("val")).fingerprint == cut_store().split("val").fingerprint
    assert again(cut_store().split("val")).cuts[0].tolist() == [2, 0, 1]


def test_cuts_change_the_fingerprint():
    columns = {"values": np.arange(4.0), "cuts": np.array([[1]])}
    prints = {
        mr.from_arrays(columns, [0, 4], cuts=cuts).fingerprint
        for cuts in (None, mr.Cuts(("train", "val")), mr.Cuts(("train", "val"), gap=1), mr.Cuts(("train", "test")))
    }
    assert len(prints) == 4


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (mr.Cuts(("train",)), "two or more different names"),
        (mr.Cuts(("train", "train")), "two or more different names"),
        (mr.Cuts(("train", "val", "test")), r"expected a record column int64 of shape \(2,\)"),
        (mr.Cuts(("train", "val"), column="values"), r"\$.cuts.column is 'values'"),
        (mr.Cuts(("train", "val"), column="nowhere"), r"\$.cuts.column is 'nowhere'"),
        (mr.Cuts(("train", "../val")), "name '../val' is not usable"),
        (mr.Cuts(("train", "val"), gap=-1), r"\$.cuts.gap is -1"),
    ],
)
def test_cuts_that_do_not_fit_the_columns_are_refused(cuts, message):
    columns = {"values": np.arange(4.0), "cuts": np.array([[1]])}
    with pytest.raises(mr.ConfigError, match=message):
        mr.from_arrays(columns, [0, 4], cuts=cuts)


@pytest.mark.parametrize("cuts", [[3, 2], [-1, 2], [1, 5]])
def test_cuts_that_leave_their_record_are_refused_when_used(cuts):
    columns = {"values": np.arange(8.0), "cuts": np.array([[1, 2], cuts])}
    store = mr.from_arrays(columns, [0, 4, 8], cuts=CUTS)
    with pytest.raises(mr.StoreCorrupt, match="cuts of record 1") as caught:
        store.split("val").cuts  # noqa: B018
    assert caught.value.column == "cuts"


def test_a_split_answers_only_to_its_own_name(rich):
    for store in (cut_store(), mr.open_store(rich.path)):
        train, val = store.split("train"), store.split("val")
        assert train.split("train") is train
        for name in ("train", "val"):  # above all, "train" of the validation split is not validation data
            with pytest.raises(mr.ConfigError, match=f"split '{name}' is unknown; this is a split"):
                val.split(name)
        with pytest.raises(mr.ConfigError, match="split 'dev' is unknown; this store has train, val"):
            store.split("dev")
    with pytest.raises(mr.ConfigError, match="split 'val' is unknown; this is a split or has none"):
        mr.from_arrays({"x": [1]}).split("val")


def test_a_store_says_what_it_is_and_refuses_to_be_iterated():
    store = mr.from_arrays({"x": np.zeros((3, 2), np.float32), "n": ["a"]})
    assert repr(store) == "<Store in memory: 1 records, 3 rows; x float32[2], n string>"
    assert "split 'val'" in repr(cut_store().split("val"))
    assert len(store) == 1
    with pytest.raises(TypeError, match="make a view"):
        iter(store)
    assert store.num_bytes == 2 * 8 + 2 * 8 + 3 * 2 * 4 + 1
