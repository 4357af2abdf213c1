"""Records against the records that were written: every dtype, several axes, padding, and what is left unread."""

import json
import warnings
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr

# dtype stored -> dtype delivered: frameworks compute in these
DELIVERED = {
    "bool": "bool", "int8": "int8", "uint8": "uint8", "int16": "int16", "uint16": "int64", "int32": "int32",
    "uint32": "int64", "int64": "int64", "uint64": "uint64", "float16": "float32", "bfloat16": "float32",
    "float32": "float32", "float64": "float64", "dictionary": "int32",
}  # fmt: skip
WORDS = ("cat", "dog", "otter")
CAPTIONS = ["", "a", "日本語", "\0", "x" * 30]


@st.composite
def columns(draw):
    """Row columns on one to three axes, record columns, strings, in any order of declaration."""
    dtypes = st.sampled_from(list(DELIVERED))
    tails = st.sampled_from([(), (2,), (2, 3)])
    places = [{"axis": axis} for axis in ("rows", "image", "sound")[: draw(st.integers(1, 3))]]
    places += draw(st.lists(st.sampled_from([*places, {"per": "record"}]), max_size=4))
    made = {"key": mr.Column("string", per="record")} if draw(st.booleans()) else {}
    for number, place in enumerate(places):
        dtype = draw(dtypes)
        values = WORDS if dtype == "dictionary" else None
        made[f"c{number}"] = mr.Column(dtype, draw(tails), values=values, **place)
    return dict(draw(st.permutations(list(made.items()))))


def value(column, count, rng):
    """Items to store, small enough to be exact in every dtype."""
    shape = (count, *column.shape)
    if column.dtype == "dictionary":
        return np.array(WORDS, object)[rng.integers(0, len(WORDS), shape)]
    numbers = rng.integers(0, 100, shape)
    if column.dtype == "bool":
        return numbers % 2 == 0
    return numbers.astype("float32" if column.dtype == "bfloat16" else column.dtype)


def make_records(columns, count, seed):
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = {axis: int(rng.integers(0, 5)) for axis in ("rows", "image", "sound")}
        record = {}
        for name, column in columns.items():
            if column.dtype == "string":
                record[name] = CAPTIONS[rng.integers(len(CAPTIONS))]
            elif column.axis is None:
                record[name] = value(column, 1, rng)[0]
            else:
                record[name] = value(column, lengths[column.axis], rng)
        made.append(record)
    return made


def delivered(column, stored):
    if column.dtype == "string":
        return stored
    if column.dtype == "dictionary":
        codes = np.array([WORDS.index(word) for word in np.asarray(stored, object).reshape(-1)], np.int32)
        return codes.reshape(np.shape(stored))
    return np.asarray(stored).astype(DELIVERED[column.dtype])


def expected(columns, records, names, pad=None, mask=False):
    """Items, row columns first; padded ones cut or filled with zeros, with how many rows are real, and which."""
    rows = [name for name in names if columns[name].axis is not None]
    first = {columns[name].axis: name for name in reversed(rows)}
    primary = next((column.axis for column in columns.values() if column.axis is not None), None)
    items = []
    for record in records:
        item = {name: delivered(columns[name], record[name]) for name in rows}
        for kind in ["lengths", *(["row_mask"] if mask else [])] if pad else ():
            for axis in dict.fromkeys(columns[name].axis for name in rows):
                count = min(len(record[first[axis]]), pad)
                value = np.int64(count) if kind == "lengths" else np.array([row < count for row in range(pad)])
                item[kind if axis == primary else f"{kind}_{axis}"] = value
        item |= {name: delivered(columns[name], record[name]) for name in names if name not in rows}
        for name in rows if pad else ():
            dense = np.zeros((pad, *columns[name].shape), item[name].dtype)
            kept = item[name][:pad]
            dense[: len(kept)] = kept
            item[name] = dense
        items.append(item)
    return items, rows


@given(
    columns=columns(),
    count=st.integers(0, 9),
    seed=st.integers(0, 99),
    pad=st.none() | st.integers(1, 6),
    mask=st.booleans(),
    data=st.data(),
)
def test_records_come_whole_ragged_or_padded(stores, check_view, columns, count, seed, pad, mask, data):
    records = make_records(columns, count, seed)
    store = stores.make(data.draw(st.sampled_from(stores.where)), columns, records)
    chosen = data.draw(st.none() | st.lists(st.sampled_from(list(columns)), min_size=1, unique=True))
    view = mr.Records(store, columns=chosen, pad=pad, mask=mask and pad is not None)
    items, rows = expected(columns, records, chosen or list(columns), pad, mask)
    axes = {column.axis: name for name, column in reversed(columns.items()) if column.axis is not None}
    ends = {axis: np.cumsum([0, *(len(record[name]) for record in records)]) for axis, name in axes.items()}
    first = next(column.axis for column in columns.values() if column.axis is not None)
    check_view(view, items, list(pairwise(ends[first].tolist())), ragged=() if pad else rows)
    for axis in axes:
        spans = view.spans(np.arange(count), axis)
        assert (spans.starts.tolist(), spans.stops.tolist()) == (ends[axis][:-1].tolist(), ends[axis][1:].tolist())
    assert view.records(np.arange(count)).tolist() == list(range(count))
    padded = {columns[name].axis for name in rows if pad}
    cut = {axis: np.maximum(np.diff(ends[axis]) - pad, 0) for axis in padded}
    assert f"; {cut[first].sum() if first in padded else 0:,} rows never delivered" in repr(view)
    assert view.num_cut == sum(any(cut[axis][k] for axis in padded) for k in range(count))
    assert (f"{view.num_cut} of {count} records cut to {pad} rows" in repr(view)) == (view.num_cut > 0)


@given(columns=columns(), splits=st.lists(st.sampled_from(["train", "val"]), max_size=8), data=st.data())
def test_records_of_a_split_are_its_own_numbered_from_0(stores, check_view, columns, splits, data):
    records = make_records(columns, len(splits), 1)
    store = stores.make(data.draw(st.sampled_from(stores.where)), columns, records, splits=splits)
    for name in store.splits:
        mine = [record for record, split in zip(records, splits, strict=True) if split == name]
        items, rows = expected(columns, mine, list(columns))
        check_view(mr.Records(store.split(name)), items, ragged=rows)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_half_float_is_widened_exactly(tmp_path, dtype):
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    with np.errstate(invalid="ignore"):
        if dtype == "float16":
            stored = bits.view(np.float16)
            wide = stored.astype(np.float32)
        else:
            wide = (bits.astype(np.uint32) << 16).view(np.float32)
            wide, stored = wide[~np.isnan(wide)], wide[~np.isnan(wide)]
    with mr.StoreWriter(tmp_path / "store", columns={"x": mr.Column(dtype)}) as writer:
        writer.append({"x": stored})
    found = mr.Records(mr.open_store(tmp_path / "store"))[0]["x"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, wide)
    assert np.array_equal(np.signbit(found), np.signbit(wide))


# Only what is asked for is read.

WIDE = {
    "hits": mr.Column("float32", (2,)),
    "image": mr.Column("uint8", axis="image"),
    "label": mr.Column("int64", per="record"),
    "key": mr.Column("string", per="record"),
    "class": mr.Column("dictionary", per="record", values=WORDS),
}


def open_then_delete(path, keep):
    """A store all of whose column and offsets files but these are gone, since it was opened."""
    records = make_records(WIDE, 12, 4)
    with mr.StoreWriter(path, columns=WIDE, shard_bytes=100) as writer:
        for record in records:
            writer.append(record)
    store = mr.open_store(path)
    assert store.num_shards > 3
    for file in (path / "shards").rglob("*.*"):
        if file.is_file() and file.name not in keep:
            file.unlink()
    return store, records


@pytest.mark.parametrize(
    ("chosen", "files"),
    [
        (["hits"], ["offsets.i64", "hits.f32"]),
        (["image"], ["offsets.image.i64", "image.u8"]),
        (["label", "class"], ["label.i64", "class.i32"]),
        (["key"], ["offsets.key.i64", "key.utf8"]),
        (["label", "hits"], ["offsets.i64", "hits.f32", "label.i64"]),
    ],
    ids=str,
)
def test_only_the_files_of_the_columns_asked_for_are_touched(tmp_path, check_view, chosen, files):
    store, records = open_then_delete(tmp_path / "store", files)
    items, rows = expected(WIDE, records, chosen)
    check_view(mr.Records(store, columns=chosen), items, ragged=rows)
    with pytest.raises(mr.StoreCorrupt):
        mr.Records(store)[:]


def test_windows_touch_their_column_and_offsets_only(tmp_path):
    store, records = open_then_delete(tmp_path / "store", {"offsets.i64", "hits.f32"})
    view = mr.Windows(store, lookback=1, horizon=1, column="hits")
    assert len(view[:]["x"]) == sum(max(0, len(record["hits"]) - 1) for record in records)


# What is refused.


def test_unknown_columns_none_and_no_padding_are_refused():
    store = mr.from_arrays({"x": np.zeros(3)})
    for wrong in ({"columns": ["x", "y"]}, {"columns": []}, {"pad": 0}, {"pad": -1}):
        with pytest.raises(mr.ConfigError):
            mr.Records(store, **wrong)


def test_a_split_by_time_has_no_whole_records():
    store = mr.from_arrays({"x": np.arange(6), "cuts": [[2], [1]]}, [0, 4, 6], cuts=mr.Cuts(("train", "val")))
    assert len(mr.Records(store)) == 2
    with pytest.raises(mr.ConfigError, match="split 'train' is a split by time"):
        mr.Records(store.split("train"))


HITS = {"hits": np.arange(8.0), "label": np.array([1, 2, 3])}
OFFSETS = [0, 5, 5, 8]


def padded(**options):
    return mr.Records(mr.from_arrays(HITS, OFFSETS), pad=4, **options)


def test_cut_records_are_counted_shown_and_warned_of():
    with pytest.warns(
        UserWarning, match=r"Records\(pad=4\) cuts 1 of 3 records: record 0 is the longest with 5"
    ) as caught:
        view = padded()
    assert [warning.filename for warning in caught] == [__file__]
    assert view.num_cut == 1
    assert "1 rows never delivered; 1 of 3 records cut to 4 rows>" in repr(view)
    assert "1 rows never delivered" in repr(mr.Subset(view, [0, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert mr.Records(view.store, pad=5).num_cut == 0
        assert mr.Records(view.store, columns=["label"], pad=1).num_cut == 0  # no rows, so none are cut


def test_cut_records_are_refused_where_asked():
    with pytest.raises(
        mr.ConfigError, match="1 of 3 records are longer than pad=4: record 0 is the longest with 5 rows"
    ):
        padded(cut="refuse")
    assert mr.Records(mr.from_arrays(HITS, OFFSETS), pad=5, cut="refuse")[[0, 1, 2]]["lengths"].tolist() == [5, 0, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cut": "yes"}, "cut='yes'; expected one of allow, refuse"),
        ({"pad": None, "mask": True}, "give pad= too"),
        ({"pad": None, "cut": "refuse"}, "give pad= too"),
        ({"pad": 0}, "pad=0"),
        ({"pad": 1 << 63}, "pad=9223372036854775808"),
        ({"pad": None, "fill": {"hits": 1}}, "give pad= too"),
        ({"fill": {}}, r"fill=\{\}; expected a number for each of some columns"),
        ({"fill": -100}, r"fill=-100; expected a number for each"),
        ({"fill": {"label": 1}}, "fill= names 'label', which is not padded; expected some of hits"),
        ({"fill": {"hit": 1}}, "fill= names 'hit', which is not padded"),
    ],
)
def test_padding_that_means_nothing_is_refused(options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.Records(mr.from_arrays(HITS, OFFSETS), **{"pad": 4, **options})


@pytest.mark.filterwarnings("ignore:Records:UserWarning")
def test_each_axis_may_have_its_own_padding(stores):
    columns = {
        name: mr.Column("float32", axis=axis) for name, axis in (("hits", "a"), ("time", "a"), ("p", "b"), ("q", "c"))
    }
    lengths = {"a": [5, 0, 3], "b": [1, 4, 0], "c": [2, 2, 2]}
    made = [{name: np.arange(lengths[own.axis][k]) + 1.0 for name, own in columns.items()} for k in range(3)]
    store = stores.make(stores.where[0], columns, made)
    view = mr.Records(store, pad={"b": 2, "a": 4}, mask=True)
    batch = view[[0, 1, 2]]
    assert {name: batch[name].shape for name in ("hits", "time", "p")} == {"hits": (3, 4), "time": (3, 4), "p": (3, 2)}
    assert batch["p"].tolist() == [[1, 0], [1, 2], [0, 0]]
    assert (batch["lengths"].tolist(), batch["lengths_b"].tolist()) == ([4, 0, 3], [1, 2, 0])
    assert batch["row_mask_b"].tolist() == [[True, False], [True, True], [False, False]]
    assert isinstance(batch["q"], mr.Ragged)
    assert "lengths_c" not in batch
    assert "2 of 3 records cut to {'a': 4, 'b': 2} rows" in repr(view)
    assert "; 1 rows never delivered" in repr(mr.Subset(view, [0, 1, 2]))
    again = mr.from_spec(json.loads(json.dumps(view.spec())), store)
    assert (again.spec(), again.fields) == (view.spec(), view.fields)
    with mr.Feed(view, batch=3, epochs=1, device="numpy", order=mr.Sequential(3)) as feed:
        (found,) = feed
    assert list(found) == list(batch)
    assert all(found[name].tolist() == batch[name].tolist() for name in found if name != "q")
    for pad, said in (
        ({"d": 3}, "pad= names the axis 'd'; expected one of a, b, c"),
        ({}, "pads nothing"),
        ({"a": 0}, "pad=0"),
    ):
        with pytest.raises(mr.ConfigError, match=said):
            mr.Records(store, pad=pad)


@pytest.mark.parametrize("name", ["lengths", "row_mask"])
def test_a_column_of_the_same_name_is_a_clash(name):
    store = mr.from_arrays({"hits": np.arange(8.0), name: np.array([1, 2, 3])}, OFFSETS)
    with pytest.raises(mr.ConfigError, match=f"pad=8 adds '{name}', which is also a column"):
        mr.Records(store, pad=8, mask=True)
    assert mr.Records(store, pad=8, mask=True, columns=["hits"])[0][name] is not None
    assert name in mr.Records(store)[0]


def test_new_keys_of_a_spec_are_left_out_at_their_defaults():
    """So that states of views made before they were there still fit."""
    view = padded()
    assert list(view.spec()) == ["view", "store", "split", "columns", "pad"]
    for options in ({}, {"mask": True}, {"cut": "refuse", "pad": 5}):
        view = mr.Records(view.store, **{"pad": 4, **options})
        again = mr.from_spec(view.spec(), view.store)
        assert (again.spec(), again.fields) == (view.spec(), view.fields)


@pytest.mark.parametrize(
    ("dtype", "fits", "others"),
    [
        ("bool", [True, 1, np.True_], [2, 0.5, None]),
        ("int8", [-128, np.int64(7), 3.0], [128, -129, 1.5, "nan", float("nan"), [1], "7"]),
        ("uint8", [255], [-1, 256]),
        ("uint16", [-100, 70_000], [2**63]),  # delivered as int64
        ("uint64", [2**64 - 1], [-1, 2**64]),
        ("float16", [1e38, "nan", float("inf"), -0.0], [1e39, 10**400, 1j]),  # as float32
        ("float64", [0.1, 1e300, "-inf"], ["x", None]),
        ("dictionary", [-1], [2**31, "cat"]),
    ],
)
def test_a_fill_fits_the_type_that_is_delivered(stores, dtype, fits, others):
    column = mr.Column(dtype, values=WORDS if dtype == "dictionary" else None)
    stored = value(column, 3, np.random.default_rng(1))
    store = stores.make(stores.where[0], {"labels": column}, [{"labels": stored[:1]}, {"labels": stored[1:]}])
    plain = mr.Records(store, pad=2)
    for number in fits:
        view = mr.Records(store, pad=2, fill={"labels": number})
        assert np.array_equal(view[0]["labels"][1], np.dtype(DELIVERED[dtype]).type(number), equal_nan=dtype != "bool")
        assert view[1]["labels"].tobytes() == plain[1]["labels"].tobytes()
        again = mr.from_spec(json.loads(json.dumps(view.spec())), store)
        assert (again.fingerprint, again[0]["labels"].tobytes()) == (view.fingerprint, view[0]["labels"].tobytes())
        assert view.fingerprint != plain.fingerprint
    for number in others:
        with pytest.raises(mr.ConfigError, match=rf"fill=\{{'labels': .*\}} is no {DELIVERED[dtype]}, as which"):
            mr.Records(store, pad=2, fill={"labels": number})
    assert mr.Records(store, pad=2, fill={"labels": 0}).spec() == plain.spec()  # zeros are what there is without it


def test_records_with_other_fills_are_not_put_together():
    store = mr.from_arrays(HITS, OFFSETS)
    fills = (None, {"hits": -1}, {"hits": "nan"}, {"hits": "nan"})
    views = [mr.Records(store, pad=5, fill=fill) for fill in fills]
    with pytest.raises(mr.ConfigError, match=r"view 1 delivers .*fill=-1"):
        mr.Concat(views[:2])
    assert np.isnan(mr.Concat(views[2:])[1]["hits"]).all()


def test_a_data_loader_gets_lengths_and_mask():
    from torch.utils.data import DataLoader

    from millrace.torch import Dataset

    view = padded(mask=True)
    (batch,) = DataLoader(Dataset(view), batch_size=3)
    assert batch["lengths"].tolist() == [4, 0, 3]
    assert batch["row_mask"].int().tolist() == [[1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0]]
    assert batch["hits"].shape == (3, 4)


def test_a_path_is_no_store_and_a_store_no_view():
    for view in (
        lambda: mr.Windows("path", lookback=1, horizon=1),
        lambda: mr.Blocks("path", length=1),
        lambda: mr.Records("path"),
    ):
        with pytest.raises(
            mr.ConfigError, match=r"a view reads a store, not 'path'; open it first: mr\.open_store\(path\)"
        ):
            view()
    with pytest.raises(mr.ConfigError, match=r"a feed reads a view, not .*; make one: mr"):
        mr.Feed(mr.from_arrays({"x": np.arange(3)}), batch=1)
