"""Windows against rows labelled one by one with their split; features, targets, dtypes, what is refused."""

import tracemalloc
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr

FEATURES = ["open", "close", "volume"]
# dtype stored -> dtype delivered; the values below are exact in all of them
DELIVERED = {
    "float32": "float32", "float64": "float64", "float16": "float32", "bfloat16": "float32",
    "uint16": "int64", "uint32": "int64", "int8": "int8", "int64": "int64",
}  # fmt: skip
lengths_of_entities = st.lists(st.integers(0, 6) | st.integers(0, 30), max_size=6)


def entities(lengths, width, stored, cuts=None):
    """Records whose rows all differ; ``width`` None is a column of single numbers."""
    ends = np.cumsum([0, *lengths])
    tail = () if width is None else (width,)
    size = int(ends[-1]) * (width or 1)
    values = (np.arange(size) % 128).reshape(-1, *tail)
    given = np.float32 if stored == "bfloat16" else stored
    records = [{"values": values[a:b].astype(given)} for a, b in pairwise(ends)]
    if cuts is not None:
        for record, inner in zip(records, cuts, strict=True):
            record["cuts"] = np.array(inner, np.int64)
    return records


def starts_in(rows, labels, split, view):
    """Starts within one record, by asking of every row whose it is."""
    lookback, lead, horizon, stride = view
    admissible = []
    for start in range(rows):
        wanted = range(start + lookback + lead, start + lookback + lead + horizon)
        if wanted[-1] < rows and all(labels[row] == split for row in wanted):
            admissible.append(start)
    return [start for start in admissible if (start - admissible[0]) % stride == 0]


def labels_of(rows, inner, names, gap):
    labels = [names[sum(cut <= row for cut in inner)] for row in range(rows)]
    for cut in inner:
        for row in range(cut, min(cut + gap, rows)):
            labels[row] = None  # holds no horizon
    return labels


def expected(records, starts, view, delivered, target):
    """Items and spans from the starts within each record."""
    lookback, lead, horizon, _ = view
    items, spans, before = [], [], 0
    for record, own in zip(records, starts, strict=True):
        values = record["values"].astype(delivered)
        values = values[:, None] if values.ndim == 1 else values
        for start in own:
            future = values[start + lookback + lead :][:horizon]
            y = future if target is None else np.stack([future[:, k] for k in target], axis=1)
            items.append({"x": values[start : start + lookback], "y": y})
            spans.append((before + start, before + start + lookback + lead + horizon))
        before += len(values)
    return items, spans


@st.composite
def shapes(draw):
    """(lookback, lead, horizon, stride)"""
    return tuple(draw(st.tuples(st.integers(1, 6), st.integers(0, 4), st.integers(1, 4), st.integers(1, 9))))


def options(shape):
    return dict(zip(("lookback", "lead", "horizon", "stride"), shape, strict=True))


@given(
    lengths=lengths_of_entities,
    shape=shapes(),
    width=st.sampled_from([None, 1, 3]),
    stored=st.sampled_from(list(DELIVERED)),
    data=st.data(),
)
def test_windows_are_the_runs_within_records(stores, check_view, lengths, shape, width, stored, data):
    numbers = st.lists(st.integers(0, (width or 1) - 1), min_size=1, max_size=4)
    target = data.draw(st.none() | (numbers if width else st.just([0])))
    records = entities(lengths, width, stored)
    where = data.draw(st.sampled_from(stores.where))
    store = stores.make(where, {"values": mr.Column(stored, () if width is None else (width,))}, records)
    view = mr.Windows(store, **options(shape), target=target)
    starts = [starts_in(rows, ["all"] * rows, "all", shape) for rows in lengths]
    items, spans = expected(records, starts, shape, DELIVERED[stored], target)
    check_view(view, items, spans)
    owners = [record for record, own in enumerate(starts) for _ in own]
    assert view.records(np.arange(len(view))).tolist() == owners
    assert f"{sum(lengths) - len(delivered_rows(spans, shape)):,} rows never delivered" in repr(view)


@given(lengths=lengths_of_entities, shape=shapes(), gap=st.integers(0, 12), data=st.data())
def test_a_window_belongs_to_the_split_that_holds_its_whole_horizon(stores, check_view, lengths, shape, gap, data):
    names = data.draw(st.sampled_from([("train", "val"), ("train", "val", "test")]))
    count = len(names) - 1
    inner = [sorted(data.draw(st.tuples(*[st.integers(0, rows)] * count))) for rows in lengths]
    records = entities(lengths, 2, "float32", inner)
    columns = {"values": mr.Column("float32", (2,)), "cuts": mr.Column("int64", (count,), per="record")}
    cuts = mr.Cuts(names, gap=gap)
    store = stores.make(data.draw(st.sampled_from(stores.where)), columns, records, cuts=cuts)
    taken = set()
    for name in names:
        labels = [labels_of(rows, own, names, gap) for rows, own in zip(lengths, inner, strict=True)]
        starts = [starts_in(rows, own, name, shape) for rows, own in zip(lengths, labels, strict=True)]
        items, spans = expected(records, starts, shape, "float32", None)
        view = mr.Windows(store.split(name), **options(shape))
        check_view(view, items, spans)
        assert taken.isdisjoint(spans)
        taken |= set(spans)
        assert view.unused_rows() == unused_of_split(lengths, inner, names.index(name), gap, shape, spans)
    whole = mr.Windows(store, **options(shape))  # the store itself knows no cuts
    assert len(whole) == sum(len(starts_in(rows, ["all"] * rows, "all", shape)) for rows in lengths)


def delivered_rows(spans, shape):
    """Rows in some lookback or some horizon; those between are in neither."""
    lookback, lead, _, _ = shape
    return {row for start, stop in spans for row in range(start, stop) if not 0 <= row - start - lookback < lead}


def unused_of_split(lengths, inner, k, gap, shape, spans):
    """Rows from where the first lookback may begin to the end of the split that no window delivers."""
    covered = delivered_rows(spans, shape)
    count, before = 0, 0
    for rows, own in zip(lengths, inner, strict=True):
        begin, end = [0, *own, rows][k : k + 2]
        first = max(0, begin + (gap if k else 0) - shape[0] - shape[1])
        count += sum(before + row not in covered for row in range(first, end))
        before += rows
    return count


def test_lookback_reaches_into_earlier_splits_and_the_gap_holds_no_horizon():
    columns = {"values": np.arange(10.0), "cuts": [[6]]}
    store = mr.from_arrays(columns, [0, 10], cuts=mr.Cuts(("train", "val"), gap=2), per={"cuts": "record"})
    train = mr.Windows(store.split("train"), lookback=3, horizon=1)
    val = mr.Windows(store.split("val"), lookback=3, horizon=1)
    assert train[:]["y"].ravel().tolist() == [3, 4, 5]
    assert val[:]["y"].ravel().tolist() == [8, 9]
    assert val[0]["x"].ravel().tolist() == [5, 6, 7]


def test_a_gap_follows_a_cut_and_the_first_split_has_none_before_it():
    columns = {"values": np.arange(20.0), "cuts": [[8]]}
    store = mr.from_arrays(columns, [0, 20], cuts=mr.Cuts(("train", "val"), gap=5), per={"cuts": "record"})
    train, val = (mr.Windows(store.split(name), lookback=2, horizon=1) for name in ("train", "val"))
    assert train.spans(np.arange(len(train))).starts.tolist() == [0, 1, 2, 3, 4, 5]
    assert val.spans(np.arange(len(val))).starts.tolist() == [11, 12, 13, 14, 15, 16, 17]


def test_starts_of_a_split_count_from_its_own_first():
    columns = {"values": np.arange(20.0), "cuts": [[11]]}
    store = mr.from_arrays(columns, [0, 20], cuts=mr.Cuts(("train", "val")), per={"cuts": "record"})
    val = mr.Windows(store.split("val"), lookback=4, horizon=2, stride=3)
    assert val.spans(np.arange(len(val))).starts.tolist() == [7, 10, 13]
    assert len(mr.Windows(store.split("train"), lookback=4, horizon=2, stride=3)) == 2


@pytest.mark.parametrize("cut", [-1, 11, 1 << 40])
def test_cuts_outside_their_record_are_refused_never_followed_into_the_next(cut):
    columns = {"values": np.arange(20.0), "cuts": [[5], [cut]]}
    store = mr.from_arrays(columns, [0, 10, 20], cuts=mr.Cuts(("train", "val")))
    for split in ("train", "val"):
        with pytest.raises(mr.StoreCorrupt, match="cuts of record 1"):
            len(mr.Windows(store.split(split), lookback=2, horizon=1))


def test_cuts_that_fall_are_refused():
    columns = {"values": np.arange(20.0), "cuts": [[3, 5], [6, 4]]}
    store = mr.from_arrays(columns, [0, 10, 20], cuts=mr.Cuts(("train", "val", "test")))
    with pytest.raises(mr.StoreCorrupt, match="cuts of record 1"):
        len(mr.Windows(store.split("val"), lookback=2, horizon=1))


# Features and targets.


@pytest.fixture(scope="module")
def prices():
    values = np.arange(60, dtype=np.float32).reshape(20, 3)
    return mr.from_arrays({"values": values}, [0, 20], meta={"features": FEATURES})


@pytest.mark.parametrize(
    ("target", "numbers"),
    [
        (None, [0, 1, 2]), (["close"], [1]), ("volume", [2]), (["volume", "open"], [2, 0]), ([2, "open"], [2, 0]),
        ([1], [1]), (0, [0]), ([1, 1], [1, 1]), ([np.int64(2)], [2]), (np.array([2, 0]), [2, 0]), (np.int64(1), [1]),
    ],
    ids=str,
)  # fmt: skip
def test_the_target_is_named_or_numbered_and_without_it_is_every_feature(prices, target, numbers):
    view = mr.Windows(prices, lookback=4, horizon=2, lead=1, target=target)
    rows = np.asarray(prices.columns["values"])
    batch = view[[0, 5]]
    assert batch["x"].shape == (2, 4, 3)
    assert np.array_equal(batch["x"][1], rows[5:9])
    assert np.array_equal(batch["y"], np.stack([rows[5:7], rows[10:12]])[:, :, numbers])
    assert batch["y"].flags.c_contiguous


@pytest.mark.parametrize("target", [["high"], "high", [3], [-1], 3, [], [0.5], [None]], ids=str)
def test_targets_that_are_no_feature_are_refused(prices, target):
    with pytest.raises(mr.ConfigError, match="target"):
        mr.Windows(prices, lookback=4, horizon=2, target=target)


def test_features_without_names_have_numbers_only():
    store = mr.from_arrays({"values": np.zeros((9, 2))}, [0, 9], meta={"features": ["only one"]})
    assert mr.Windows(store, lookback=2, horizon=1, target=[1])[0]["y"].shape == (1, 1)
    with pytest.raises(mr.ConfigError, match="names no features"):
        mr.Windows(store, lookback=2, horizon=1, target=["only one"])


def test_a_column_of_single_numbers_is_one_feature_named_like_it():
    store = mr.from_arrays({"close": np.arange(9.0)}, [0, 9])
    view = mr.Windows(store, lookback=3, horizon=2, target=["close"])
    assert view[0]["x"].tolist() == [[0], [1], [2]]
    assert view[0]["y"].tolist() == [[3], [4]]
    assert mr.Windows(store, lookback=3, horizon=2, target=[0, 0])[0]["y"].tolist() == [[3, 3], [4, 4]]
    with pytest.raises(mr.ConfigError, match="target 'values' is unknown"):
        mr.Windows(store, lookback=3, horizon=2, target=["values"])


def test_the_column_is_values_or_the_only_one_of_rows_or_the_one_named():
    columns = {"time": np.arange(6), "values": np.arange(6.0) * 2, "other": np.arange(6.0) * 3}
    for name, expected_x in ((None, [0, 2]), ("other", [0, 3]), ("time", [0, 1])):
        view = mr.Windows(mr.from_arrays(columns), lookback=2, horizon=1, column=name)
        assert view[0]["x"].ravel().tolist() == expected_x
    only = mr.from_arrays({"hits": np.arange(6), "label": [3, 1]}, [0, 4, 6])
    assert mr.Windows(only, lookback=2, horizon=1)[0]["x"].dtype == np.int64


@pytest.mark.parametrize(
    "make", [partial(mr.Windows, lookback=2, horizon=1), partial(mr.Blocks, length=2), partial(mr.Packed, length=2)]
)
def test_rows_that_nobody_chose_are_no_samples(make):
    events = mr.from_arrays({"hits": np.arange(6), "momenta": np.arange(6), "label": [3, 1]}, [0, 4, 6])
    with pytest.raises(mr.ConfigError, match=r"this store has hits, momenta; name one.*column='hits'"):
        make(events)
    images = mr.from_arrays({"image": np.arange(6, dtype=np.uint8), "label": [3, 1]}, [0, 4, 6])
    with pytest.raises(mr.ConfigError, match=r"'image' holds bytes.*Records.*column='image'"):
        make(images)
    for store, name in ((events, "momenta"), (images, "image")):
        named = make(store, column=name)
        again = mr.from_spec(named.spec(), store)  # a spec names the column, also one of a view that did not
        assert again.column == name
        assert again.fingerprint == named.fingerprint
    with pytest.raises(mr.ConfigError, match="this store has none"):
        make(mr.from_arrays({"label": [1, 2]}, per={"label": "record"}))


@pytest.mark.parametrize("name", ["label", "key", "cube", "gone"])
def test_columns_without_one_row_of_features_are_refused(name):
    columns = {"values": np.zeros(5), "cube": np.zeros((5, 2, 2)), "label": [1, 2], "key": ["a", "b"]}
    with pytest.raises(mr.ConfigError, match=repr(name)):
        mr.Windows(mr.from_arrays(columns, [0, 3, 5]), lookback=2, horizon=1, column=name)


@pytest.mark.parametrize("wrong", [{"lookback": 0}, {"horizon": 0}, {"stride": 0}, {"lead": -1}])
def test_sizes_that_are_none_are_refused(prices, wrong):
    with pytest.raises(mr.ConfigError, match="lookback="):
        mr.Windows(prices, **{"lookback": 4, "horizon": 2, **wrong})


def test_a_giant_record_needs_no_memory_per_sample():
    rows = 10**10 + 71
    values = np.broadcast_to(np.float32(7), (rows,))  # one number, however long
    store = mr.from_arrays({"values": values}, [0, rows])
    mr.Windows(store, lookback=2, horizon=1)[[0]]  # what is imported lazily is imported now
    tracemalloc.start()
    try:
        view = mr.Windows(store, lookback=64, horizon=8)
        assert len(view) == 10**10
        assert view.spans([-1]).stops.tolist() == [rows]
        assert view[[10**10 - 1, 0]]["x"].sum() == 2 * 64 * 7
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes"


def test_a_view_without_samples_says_what_is_too_long():
    store = mr.from_arrays({"values": np.arange(12.0)}, offsets=[0, 5, 12])
    with pytest.raises(
        mr.ConfigError, match="lookback=8, horizon=2 and lead=0 need 10 rows, and the longest record has 7"
    ):
        mr.Feed(mr.Windows(store, lookback=8, horizon=2), batch=1)
