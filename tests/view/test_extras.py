"""What Windows includes beside x and y, by brute force on the frame the store was made of; and that nothing leaks."""

import json
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.view.extras import EXTRAS
from millrace.view.spec import view_arrays

FEATURES = ["open", "close", "volume", "weekday"]
CATEGORICAL, STATIC, STATIC_CATEGORICAL = ["venue", "holiday"], ["size", "age", "beta"], ["sector"]
COLUMNS = {
    "values": mr.Column("float32", (4,)), "time": mr.Column("int64"), "mask": mr.Column("uint8", (4,)),
    "categorical": mr.Column("int32", (2,)), "static": mr.Column("float32", (3,), per="record"),
    "static_categorical": mr.Column("int32", (1,), per="record"), "cuts": mr.Column("int64", (1,), per="record"),
}  # fmt: skip
META = {
    "features": FEATURES, "categorical": CATEGORICAL, "static": STATIC, "static_categorical": STATIC_CATEGORICAL,
    "known_future": ["holiday", "weekday"],
}  # fmt: skip


def make_frame(lengths, seed=0):
    """One row per entity and time, every number different."""
    count = sum(lengths)
    frame = pd.DataFrame({"entity": np.repeat(np.arange(len(lengths)), lengths)})
    frame["time"] = [1_000 * entity + 3 * row for entity, rows in enumerate(lengths) for row in range(rows)]
    rng = np.random.default_rng(seed)
    for k, name in enumerate(FEATURES):
        frame[name] = (np.arange(count) * 10 + k).astype(np.float32)
        frame[f"{name}_seen"] = rng.integers(0, 2, count).astype(np.uint8)
    for k, name in enumerate(CATEGORICAL):
        frame[name] = (np.arange(count) * 7 + k).astype(np.int32)
    return frame


def records_of(frame, num_entities, cuts):
    for entity in range(num_entities):
        own = frame[frame.entity == entity]
        yield {
            "values": own[FEATURES].to_numpy(np.float32), "time": own["time"].to_numpy(),
            "mask": own[[f"{name}_seen" for name in FEATURES]].to_numpy(), "categorical": own[CATEGORICAL].to_numpy(),
            "static": np.arange(3, dtype=np.float32) + 100 * entity, "static_categorical": np.array([entity], np.int32),
            "cuts": np.array([cuts[entity]]),
        }  # fmt: skip


def expected_items(frame, starts, options, include, inputs, target):
    """Each window cut out of the frame by hand."""
    lookback, after = options["lookback"], options["lookback"] + options["lead"]
    for entity, start in starts:
        own = frame[frame.entity == entity]
        past, future = own.iloc[start : start + lookback], own.iloc[start + after : start + after + options["horizon"]]
        item = {"x": past[inputs].to_numpy(np.float32), "y": future[target].to_numpy(np.float32)}
        if "time" in include:
            item |= {"time": past["time"].to_numpy(), "y_time": future["time"].to_numpy()}
        if "mask" in include:
            item["mask"] = past[[f"{name}_seen" for name in inputs]].to_numpy()
            item["y_mask"] = future[[f"{name}_seen" for name in target]].to_numpy()
        if "categorical" in include:
            item["categorical"] = past[CATEGORICAL].to_numpy()
        if "known_future" in include:
            item["known_future"] = future[["weekday"]].to_numpy(np.float32)
            item["known_categorical"] = future[["holiday"]].to_numpy()
        if "static" in include:
            item["static"] = np.arange(3, dtype=np.float32) + 100 * entity
        if "static_categorical" in include:
            item["static_categorical"] = np.array([entity], np.int32)
        yield item


def starts_of(lengths, cuts, split, gap, options):
    """Windows whose horizon rows are all of the split, asked row by row."""
    found = []
    for entity, (rows, cut) in enumerate(zip(lengths, cuts, strict=True)):
        first, after = None, options["lookback"] + options["lead"]
        for start in range(rows - after - options["horizon"] + 1):
            horizon = range(start + after, start + after + options["horizon"])
            if split is None:
                fits = True
            elif split == "train":
                fits = all(row < cut for row in horizon)
            else:
                fits = all(row >= cut + gap for row in horizon)
            if fits:
                first = start if first is None else first
                if (start - first) % options["stride"] == 0:
                    found.append((entity, start))
    return found


shapes = st.fixed_dictionaries(
    {
        "lookback": st.integers(1, 5),
        "horizon": st.integers(1, 4),
        "lead": st.integers(0, 3),
        "stride": st.integers(1, 6),
    }
)
some_features = st.lists(st.sampled_from(FEATURES), min_size=1, max_size=4, unique=True)


@given(
    lengths=st.lists(st.integers(0, 25), min_size=1, max_size=5), options=shapes, include=st.sets(st.sampled_from(EXTRAS)),
    inputs=st.none() | some_features, target=st.none() | some_features, gap=st.integers(0, 4), by_meta=st.booleans(),
    split=st.sampled_from([None, "train", "val"]), data=st.data(),
)  # fmt: skip
def test_every_field_is_the_rows_of_the_frame(
    stores, check_view, lengths, options, include, inputs, target, gap, by_meta, split, data
):
    cuts = [data.draw(st.integers(0, rows)) for rows in lengths]
    frame = make_frame(lengths)
    chosen = {key: names for key, names in (("inputs", inputs), ("target", target)) if names is not None}
    store = stores.make(
        data.draw(st.sampled_from(stores.where)), COLUMNS, list(records_of(frame, len(lengths), cuts)),
        cuts=mr.Cuts(("train", "val"), gap=gap), meta={**META, **(chosen if by_meta else {})},
    )  # fmt: skip
    part = store if split is None else store.split(split)
    view = mr.Windows(part, **options, include=sorted(include), **({} if by_meta else chosen))
    starts = starts_of(lengths, cuts, split, gap, options)
    items = list(expected_items(frame, starts, options, include, inputs or FEATURES, target or FEATURES))
    check_view(view, items)
    assert view.records(np.arange(len(view))).tolist() == [entity for entity, _ in starts]
    spec = json.loads(json.dumps(view.spec()))
    again = mr.from_spec(spec, store)
    assert again.fingerprint == view.fingerprint
    check_view(again, items)


def prices(seed=0, lengths=(30, 4, 41), cuts=(20, 2, 30), meta=META, frame=None):
    frame = make_frame(lengths, seed) if frame is None else frame
    records = list(records_of(frame, len(lengths), cuts))
    offsets = np.cumsum([0, *lengths])
    columns = {name: [record[name] for record in records] for name in COLUMNS}
    arrays = {
        name: np.concatenate(parts) if column.per == "row" else np.stack(parts)
        for (name, column), parts in zip(COLUMNS.items(), columns.values(), strict=True)
    }
    per = {name: column.per for name, column in COLUMNS.items()}
    return mr.from_arrays(arrays, offsets, per=per, meta=meta, cuts=mr.Cuts(("train", "val")))


WINDOW = {"lookback": 5, "horizon": 3, "lead": 2}


@pytest.mark.parametrize("stride", [1, 2])
def test_nothing_at_or_after_the_cut_reaches_a_train_sample(stride):
    """Every number of every row from the cut on is changed; no byte of any train sample is."""
    lengths, cuts = (30, 4, 41), (20, 2, 30)
    frame = make_frame(lengths)
    inside = frame.groupby("entity").cumcount().to_numpy()
    late = inside >= np.array(cuts)[frame.entity.to_numpy()]
    other = frame.copy()
    numbers = [name for name in frame.columns if name != "entity"]
    other.loc[late, numbers] = other.loc[late, numbers] + 1
    other = other.astype(frame.dtypes.to_dict())
    views = [
        mr.Windows(
            prices(frame=each, lengths=lengths, cuts=cuts).split("train"), **WINDOW, stride=stride, include=EXTRAS
        )
        for each in (frame, other)
    ]
    one, two = (view[:] for view in views)
    assert len(views[0]) == len(views[1]) > 0
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    # The rows that were changed do reach the other split, every field of rows among them.
    late_views = [
        mr.Windows(prices(frame=each, lengths=lengths, cuts=cuts).split("val"), **WINDOW, include=EXTRAS)
        for each in (frame, other)
    ]
    one, two = (view[:] for view in late_views)
    assert [name for name in one if one[name].tobytes() == two[name].tobytes()] == ["static", "static_categorical"]


def test_a_feed_delivers_them_all():
    view = mr.Windows(prices().split("train"), **WINDOW, include=EXTRAS)
    feed = mr.Feed(view, batch=7, seed=3, epochs=1, device="numpy")
    seen = 0
    for batch in feed:
        expected = view[batch.samples[batch.valid]]
        assert list(batch) == list(expected)
        for name, value in expected.items():
            assert batch[name][batch.valid].tobytes() == value.tobytes()
        seen += int(batch.valid.sum())
    assert seen == len(view)
    torch_batch = next(iter(mr.Feed(view, batch=4)))
    assert tuple(torch_batch["known_future"].shape) == (4, 3, 1)
    assert feed.explain(0).rows[0]["columns"]["static"][0] % 100 == 0


def test_subsets_and_concatenations_carry_them():
    view = mr.Windows(prices(), **WINDOW, include=["static", "time"])
    both = mr.Concat([mr.Subset(view, [5, 1]), view])
    batch = both[[1, 7, 0]]
    for name, value in view[[1, 5, 5]].items():
        assert batch[name].tobytes() == value.tobytes()
    again = mr.from_spec(both.spec(), view.store, arrays=view_arrays(both))
    assert again.fingerprint == both.fingerprint
    assert again[[1, 7, 0]]["static"].tobytes() == batch["static"].tobytes()


def test_concatenated_views_must_mean_the_same():
    view = mr.Windows(prices(), **WINDOW, include=["static"])
    other = prices(meta={**META, "static": ["beta", "age", "size"]})
    with pytest.raises(mr.ConfigError, match="Concat would mix them"):
        mr.Concat([view, mr.Windows(other, **WINDOW, include=["static"])])
    for more in ({"target": ["open"]}, {"inputs": ["open"]}):
        swapped = {key: ["close"] for key in more}
        with pytest.raises(mr.ConfigError, match="Concat would mix them"):
            mr.Concat([mr.Windows(prices(), **WINDOW, **more), mr.Windows(prices(), **WINDOW, **swapped)])


# Defaults, specs, fingerprints.


def test_without_include_and_meta_a_view_is_what_it_was():
    """The spec has the keys it always had, so that saved states go on to fit."""
    store = prices(meta={"features": FEATURES})
    spec = mr.Windows(store, **WINDOW, target=["close"]).spec()
    assert list(spec) == ["view", "store", "split", "column", "lookback", "horizon", "stride", "lead", "target"]
    assert spec["target"] == [1]
    assert mr.Windows(store, **WINDOW).spec()["target"] is None
    assert list(mr.Windows(store, **WINDOW)[0]) == ["x", "y"]


def test_a_spec_holds_what_meta_said_since_meta_is_no_part_of_a_fingerprint():
    one, other = prices(meta={**META, "inputs": ["open", "close"], "target": ["close"]}), prices(meta=META)
    assert one.fingerprint == other.fingerprint
    view = mr.Windows(one, **WINDOW)
    again = mr.from_spec(view.spec(), other)
    assert again.fingerprint == view.fingerprint != mr.Windows(other, **WINDOW).fingerprint
    assert again[3]["x"].tobytes() == view[3]["x"].tobytes()
    everything = mr.Windows(one, **WINDOW, inputs=FEATURES, target=FEATURES)
    assert mr.from_spec(everything.spec(), one)[0]["x"].shape == (5, 4)


def test_a_target_of_meta_is_the_default_and_may_be_a_name():
    view = mr.Windows(prices(meta={**META, "target": "close"}), **WINDOW)
    assert view[0]["y"].shape == (3, 1)
    assert mr.Windows(view.store, **WINDOW, target=[0, 1])[0]["y"].shape == (3, 2)
    # A name that is no feature, as metadata of others may hold, chooses nothing.
    assert mr.Windows(prices(meta={**META, "target": "return"}), **WINDOW)[0]["y"].shape == (3, 4)


def test_include_is_a_set_in_the_order_of_delivery():
    store = prices()
    names = ["static", "time", "static"]
    view = mr.Windows(store, **WINDOW, include=names)
    assert view.include == ("time", "static")
    assert list(view[0]) == ["x", "y", "time", "y_time", "static"]
    assert view.fingerprint == mr.Windows(store, **WINDOW, include=("time", "static")).fingerprint
    assert mr.Windows(store, **WINDOW, include="mask").include == ("mask",)


def test_fingerprints_differ_by_what_is_included():
    store = prices()
    views = [mr.Windows(store, **WINDOW, include=include) for include in ((), *[(name,) for name in EXTRAS], EXTRAS)]
    views.append(mr.Windows(store, **WINDOW, inputs=["close"]))
    assert len({view.fingerprint for view in views}) == len(views)


def test_single_numbers_per_row_are_rows_of_one():
    columns = {
        "close": np.arange(20.0),
        "mask": np.arange(20, dtype=np.uint8),
        "categorical": np.arange(20, dtype=np.int32),
    }
    meta = {"categorical": ["venue"], "known_future": ["close", "venue"]}
    store = mr.from_arrays(columns, meta=meta)
    view = mr.Windows(store, lookback=3, horizon=2, column="close", include=["mask", "categorical", "known_future"])
    item = view[4]
    for name, rows in (("x", [4, 5, 6]), ("mask", [4, 5, 6]), ("categorical", [4, 5, 6]), ("y", [7, 8]),
                       ("y_mask", [7, 8]), ("known_future", [7, 8]), ("known_categorical", [7, 8])):  # fmt: skip
        assert item[name].tolist() == [[row] for row in rows]


def test_float_times_and_names_in_a_dict_are_fine():
    store = mr.from_arrays(
        {"values": np.zeros((9, 1)), "time": np.arange(9) / 2, "categorical": np.zeros((9, 1), np.int32)},
        meta={"categorical": {"venue": ["NYSE", "LSE"]}, "known_future": ["venue"]},
    )
    item = mr.Windows(store, lookback=2, horizon=1, include=["time", "known_future"])[1]
    assert item["time"].tolist() == [0.5, 1.0]
    assert "known_future" not in item
    assert item["known_categorical"].shape == (1, 1)


# What is refused.


@pytest.mark.parametrize("name", ["time", "mask", "categorical", "static", "static_categorical"])
def test_an_extra_the_store_lacks_is_refused_with_what_it_has(name):
    store = mr.from_arrays({"values": np.zeros((9, 2)), "label": [1]}, per={"label": "record"})
    has = "label" if name.startswith("static") else "values"
    with pytest.raises(mr.ConfigError, match=rf"include='{name}' needs a \w+ column '{name}'; the store has {has}"):
        mr.Windows(store, lookback=2, horizon=1, include=[name])


@pytest.mark.parametrize(
    ("include", "columns", "meta", "words"),
    [
        ("future", {}, {}, "include='future' is unknown; expected some of time"),
        ("known_future", {}, {}, "names nothing"),
        ("known_future", {}, {"known_future": ["a"]}, "features without names and categorical nothing"),
        ("known_future", {}, {"known_future": ["c"], "features": ["a", "b"]}, "known_future names 'c'"),
        ("known_future", {}, {"known_future": ["c"], "categorical": ["c"]}, "needs a row column 'categorical'"),
        ("known_future", {"categorical": np.zeros((9, 1), np.int32)},
         {"known_future": ["d"], "categorical": ["c", "d"]}, "2 names for 1 columns"),
        ("mask", {"mask": np.zeros((9, 3), np.uint8)}, {}, r"'mask' has shape \(3,\)"),
        ("time", {"time": np.zeros((9, 2))}, {}, "'time' has shape"),
        ("time", {"time": mr.Ragged(np.zeros(4), [0, 4])}, {}, "'time' has axis 'time', 'values' has 'rows'"),
        ("categorical", {"categorical": np.zeros((9, 2, 2), np.int32)}, {}, "'categorical' has shape"),
        ("static", {"static": np.zeros(9)}, {}, "needs a record column 'static'"),
    ],
)  # fmt: skip
def test_extras_that_do_not_fit_are_refused(include, columns, meta, words):
    store = mr.from_arrays({"values": np.zeros((9, 2)), **columns}, [0, 9], meta=meta)
    with pytest.raises(mr.ConfigError, match=words):
        mr.Windows(store, lookback=2, horizon=1, include=include)


@pytest.mark.parametrize("inputs", [["high"], [4], [], [-1], [0.5]], ids=str)
def test_inputs_that_are_no_feature_are_refused(inputs):
    with pytest.raises(mr.ConfigError, match="inputs"):
        mr.Windows(prices(), **WINDOW, inputs=inputs)


def test_edges_are_kept_between_entities():
    """No window takes rows of two entities, whatever it includes."""
    lengths = (30, 4, 41)
    view = mr.Windows(prices(lengths=lengths), **WINDOW, include=["time"])
    batch = view[:]
    for (a, b), times in zip(pairwise(np.cumsum([0, *lengths])), (0, 1000, 2000), strict=True):
        mine = view.records(np.arange(len(view))) == times // 1000
        inside = np.concatenate((batch["time"][mine], batch["y_time"][mine]), axis=1)
        assert inside.size == 0 or (inside.min() >= times and inside.max() < times + 3 * (b - a))
