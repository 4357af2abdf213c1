"""Specs rebuild views exactly, name what does not match, and travel: as JSON, in pickles, to other processes."""

import json
import multiprocessing
import operator
import pickle

import numpy as np
import pytest

import millrace as mr
from millrace.view.spec import view_arrays

TEXT = {"tokens": mr.Column("uint16"), "source": mr.Column("dictionary", per="record", values=("a", "b"))}
SERIES = {"values": mr.Column("float32", (3,)), "cuts": mr.Column("int64", (1,), per="record")}


def text_records(seed=0):
    rng = np.random.default_rng(seed)
    return [{"tokens": rng.integers(0, 999, 13).astype(np.uint16), "source": "ab"[k % 2]} for k in range(9)]


@pytest.fixture(scope="module")
def text(stores):
    return stores.make("disk", TEXT, text_records(), splits=["train", "train", "val"] * 3)


@pytest.fixture(scope="module")
def series(stores):
    records = [{"values": np.arange(60.0).reshape(20, 3) + k, "cuts": [11]} for k in range(3)]
    cuts, meta = mr.Cuts(("train", "val"), gap=1), {"features": ["a", "b", "c"]}
    return stores.make("disk", SERIES, records, cuts=cuts, meta=meta)


VIEWS = {
    "blocks": lambda text, series: mr.Blocks(text.split("val"), length=5, stride=2),
    "blocks of all": lambda text, series: mr.Blocks(text, length=5),
    "windows": lambda text, series: mr.Windows(series, lookback=4, horizon=2, stride=2, lead=1),
    "windows of a split by time": lambda text, series: mr.Windows(
        series.split("val"), lookback=4, horizon=1, target=["c"]
    ),
    "records": lambda text, series: mr.Records(text.split("train")),
    "padded records": lambda text, series: mr.Records(text, columns=["tokens"], pad=4),
    "filled records": lambda text, series: mr.Records(text, columns=["tokens"], pad=4, fill={"tokens": -100}),
    "subset": lambda text, series: mr.Subset(mr.Records(text), [5, 5, 0]),
    "subset of a subset": lambda text, series: mr.Subset(
        mr.Subset(mr.Blocks(text, length=3), np.arange(0, 30, 2)), [4, 1]
    ),
    "concat": lambda text, series: mr.Concat(
        [mr.Records(text.split("val")), mr.Subset(mr.Records(text), np.arange(9) % 2 == 0)]
    ),
    "concat of two stores": lambda text, series: mr.Concat(
        [mr.Records(text, columns=["tokens"], pad=3), mr.Records(series_of_tokens(), columns=["tokens"], pad=3)]
    ),
}


def series_of_tokens():
    return mr.from_arrays({"tokens": np.arange(30, dtype=np.uint16)}, [0, 4, 30])


@pytest.fixture(params=VIEWS)
def view(request, text, series):
    return VIEWS[request.param](text, series)


def rebuilt(view):
    """The view from nothing but its spec as JSON, its stores by fingerprint and its arrays by hash."""
    spec = json.loads(json.dumps(view.spec()))
    return mr.from_spec(spec, {store.fingerprint: store for store in view.stores}, arrays=view_arrays(view))


def assert_same(one, other):
    assert type(one) is type(other)
    assert len(one) == len(other) > 0
    assert one.spec() == other.spec()
    assert one.fingerprint == other.fingerprint
    for name, value in one[:].items():
        found = other[:][name]
        if isinstance(value, mr.Ragged):
            assert value.offsets.tolist() == found.offsets.tolist()
            value, found = value.values, found.values
        assert value.dtype == found.dtype
        assert np.array_equal(value, found)


def test_the_spec_through_json_rebuilds_the_view(view):
    assert_same(rebuilt(view), view)


def test_a_view_pickles_small_and_is_the_same_afterwards(view):
    before = len(pickle.dumps(view))
    view[:]
    _ = view.fingerprint, view.stores
    assert len(pickle.dumps(view)) == before  # what can be computed again is not sent
    assert before < 3000
    assert_same(pickle.loads(pickle.dumps(view)), view)  # noqa: S301


def test_a_view_works_in_a_spawned_process(text):
    view = mr.Subset(mr.Blocks(text.split("val"), length=5), [3, 1])
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(operator.getitem, (view, 1))
    assert found["x"].tolist() == view[1]["x"].tolist()


def test_a_spec_finds_its_split_from_the_store_or_any_part_of_it(text):
    spec = mr.Blocks(text.split("val"), length=5).spec()
    assert (spec["store"], spec["split"]) == (text.fingerprint, "val")
    for given in (text, text.split("train"), {text.fingerprint: text.split("val")}):
        assert mr.from_spec(spec, given).store.split_name == "val"


def test_ids_are_held_by_hash(text):
    view = mr.Subset(mr.Blocks(text, length=1, stride=1), np.arange(100_000) % 50)
    assert len(json.dumps(view.spec())) < 400
    (known,) = view_arrays(view)
    assert view.spec()["ids"] == known
    mask = np.arange(len(view.view)) < 3
    assert mr.Subset(view.view, mask).fingerprint == mr.Subset(view.view, [0, 1, 2]).fingerprint
    assert mr.Subset(view.view, [0, 2, 1]).fingerprint != mr.Subset(view.view, [0, 1, 2]).fingerprint


def test_numbers_of_numpy_are_as_good_as_integers(text, series):
    number = np.int64
    pairs = [
        (mr.Blocks(text, length=number(5), stride=number(2)), mr.Blocks(text, length=5, stride=2)),
        (mr.Records(text, pad=number(3)), mr.Records(text, pad=3)),
        (
            mr.Windows(series, lookback=number(4), horizon=number(2), stride=number(3), lead=number(1)),
            mr.Windows(series, lookback=4, horizon=2, stride=3, lead=1),
        ),
        (
            mr.Windows(series, lookback=4, horizon=2, target=np.array([1])),
            mr.Windows(series, lookback=4, horizon=2, target=["b"]),
        ),
    ]
    for numpy_s, plain in pairs:
        assert json.dumps(numpy_s.spec()) == json.dumps(plain.spec())


@pytest.mark.parametrize(
    "make",
    [
        lambda n, text, series: mr.Blocks(text, length=n),
        lambda n, text, series: mr.Blocks(text, length=4, stride=n),
        lambda n, text, series: mr.Records(text, pad=n),
        lambda n, text, series: mr.Windows(series, lookback=n, horizon=1),
        lambda n, text, series: mr.Windows(series, lookback=1, horizon=1, lead=n),
    ],
)
@pytest.mark.parametrize("n", [4.0, "4", 2.5])
def test_numbers_that_are_no_integers_are_refused(text, series, make, n):
    with pytest.raises(mr.ConfigError, match="expected an integer"):
        make(n, text, series)


# Fingerprints say what differs.


def test_fingerprints_differ_by_every_option_and_by_split(text, series):
    views = [
        mr.Blocks(text, length=5), mr.Blocks(text, length=4), mr.Blocks(text, length=5, stride=1),
        mr.Blocks(text.split("train"), length=5), mr.Blocks(text.split("val"), length=5),
        mr.Records(text), mr.Records(text, pad=3), mr.Records(text, columns=["tokens"]),
        *(mr.Records(text, pad=3, fill={"tokens": fill}) for fill in (-1, -100)), mr.Subset(mr.Records(text), [1]),
        *(mr.Windows(series, **{"lookback": 4, "horizon": 2, **more})
          for more in ({}, {"lookback": 5}, {"horizon": 1}, {"stride": 2}, {"lead": 1}, {"target": [0]}, {"target": [1]})),
        mr.Windows(series.split("val"), lookback=4, horizon=2),
    ]  # fmt: skip
    assert len({view.fingerprint for view in views}) == len(views)


def test_the_path_of_a_store_is_no_part_of_a_fingerprint(stores, text):
    copy = stores.make("disk", TEXT, text_records(), splits=["train", "train", "val"] * 3)
    assert copy.path != text.path
    assert mr.Blocks(copy, length=5).fingerprint == mr.Blocks(text, length=5).fingerprint
    other = stores.make("disk", TEXT, text_records(1), splits=["train", "train", "val"] * 3)
    assert mr.Blocks(other, length=5).fingerprint != mr.Blocks(text, length=5).fingerprint


# What does not match is named.


def test_a_spec_of_another_store_is_a_mismatch(text, series):
    spec = mr.Blocks(text, length=5).spec()
    with pytest.raises(mr.ResumeMismatch) as caught:
        mr.from_spec(spec, series)
    assert (caught.value.part, caught.value.expected, caught.value.found) == (
        "store",
        text.fingerprint,
        series.fingerprint,
    )
    with pytest.raises(mr.ResumeMismatch) as caught:
        mr.from_spec(spec, {series.fingerprint: series})
    assert caught.value.part == "store"
    with pytest.raises(mr.ResumeMismatch):  # filed under a name that is not its own
        mr.from_spec(spec, {text.fingerprint: series})


def test_other_ids_are_a_mismatch_and_missing_ones_are_asked_for(text):
    view = mr.Subset(mr.Records(text), [1, 2])
    with pytest.raises(mr.ResumeMismatch) as caught:
        mr.from_spec(view.spec(), text, arrays={view.ids_hash: [2, 1]})
    assert caught.value.part == "view"
    for arrays in (None, {}, {"0" * 32: [1, 2]}):
        with pytest.raises(mr.ConfigError, match=view.ids_hash):
            mr.from_spec(view.spec(), text, arrays=arrays)
    assert len(mr.from_spec(view.spec(), text, arrays={view.ids_hash: [1, 2]})) == 2


@pytest.mark.parametrize(
    "change",
    [{"view": "mixture"}, {"view": None}, {"length": "5"}, {"surprise": 1}, {"split": "test"}, {"column": "gone"},
     {"view": "subset"}, {"view": "concat"}, {"view": "concat", "of": []}, {"view": "concat", "of": [3]},
     {"view": ["blocks"]}],
    ids=str,
)  # fmt: skip
def test_a_spec_of_no_view_is_refused(text, change):
    with pytest.raises(mr.ConfigError):
        mr.from_spec({**mr.Blocks(text, length=5).spec(), **change}, text)


def test_nothing_is_not_a_spec(text):
    for wrong in ({}, None, [], "blocks"):
        with pytest.raises(mr.ConfigError):
            mr.from_spec(wrong, text)


# What people see.


def test_repr_says_samples_fields_bytes_and_what_is_left_out(text, series):
    view = mr.Windows(series, lookback=4, horizon=2, target=["b"])
    assert repr(view) == (
        "<Windows: 45 samples; x float32(4, 3), y float32(2, 1); 56 bytes each; 0 rows never delivered>"
    )
    assert repr(mr.Blocks(text, length=10)) == (
        "<Blocks: 11 samples; x int64(10), y int64(10); 160 bytes each; 6 rows never delivered>"
    )
    assert (
        repr(mr.Records(text))
        == "<Records: 9 samples; tokens int64(any), source int32; ragged; 0 rows never delivered>"
    )
    assert "tokens int64(4), lengths int64, source int32; 44 bytes each" in repr(mr.Records(text, pad=4))
    assert "0 samples" in repr(mr.Subset(mr.Records(text), []))
