"""``store.where`` against a row-by-row evaluation in Python, and views of what it chooses."""

import json
import math
import pickle
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.condition import parse

COUNT = 40


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """A store of several shards and two splits: records with two axes, numbers, text and NaN."""
    rng = np.random.default_rng(5)
    columns = {
        "hits": mr.Column("float32", (2,)),
        "energy": mr.Column("float32"),
        "tracks": mr.Column("int16", axis="tracks"),
        "label": mr.Column("int8", per="record"),
        "weight": mr.Column("float64", per="record"),
        "good": mr.Column("bool", per="record"),
        "kind": mr.Column("dictionary", per="record", values=("muon", "pion")),
        "key": mr.Column("string", per="record"),
        "pair": mr.Column("int64", (2,), per="record"),
    }
    path = tmp_path_factory.mktemp("where") / "store"
    with mr.StoreWriter(path, columns=columns, splits=("train", "val"), shard_bytes=600) as writer:
        for k in range(COUNT):
            hits = int(rng.integers(0, 6))
            record = {
                "hits": rng.normal(size=(hits, 2)), "energy": rng.normal(size=hits),
                "tracks": rng.integers(0, 9, rng.integers(0, 3)), "label": k % 4,
                "weight": math.nan if k % 7 == 0 else k / 10, "good": k % 3 == 0, "kind": ("muon", "pion")[k % 2],
                "key": f"é{k % 5}", "pair": [k, k],
            }  # fmt: skip
            writer.append(record, split="val" if k % 5 == 4 else "train")
    store = mr.open_store(path)
    assert store.num_shards > 3
    return store


LEAVES = [
    ("label == 3", lambda r: r["label"] == 3), ("label != 2", lambda r: r["label"] != 2),
    ("1 <= label < 3", lambda r: 1 <= r["label"] < 3), ("label in (0, 3)", lambda r: r["label"] in (0, 3)),
    ("label not in [1]", lambda r: r["label"] != 1), ("-1.5 < label", lambda r: True),
    ("weight > 1.5", lambda r: r["weight"] > 1.5), ("weight != 0.8", lambda r: r["weight"] == r["weight"] != 0.8),
    ("weight not in (0.8, 0.9)", lambda r: r["weight"] == r["weight"] and r["weight"] not in (0.8, 0.9)),
    ("good", lambda r: r["good"]), ("kind == 'muon'", lambda r: r["kind"] == "muon"),
    ("key in ('é1', 'é3')", lambda r: r["key"] in ("é1", "é3")), ("key > 'é2'", lambda r: r["key"] > "é2"),
    ("n_hits > 2", lambda r: r["n_hits"] > 2), ("n_tracks == 0", lambda r: r["n_tracks"] == 0),
    ("n_energy >= n_tracks", lambda r: r["n_hits"] >= r["n_tracks"]), ("weight < label", lambda r: r["weight"] < r["label"]),
    ("label == 300", lambda r: False), ("label in (300, -1e999, 3.0, 2.5, -1, 1e30)", lambda r: r["label"] == 3),
    ("weight in (2, 0.8, 1e999)", lambda r: r["weight"] in (2, 0.8)), ("good in (1, 7)", lambda r: r["good"]),
    ("kind not in ('muon', 'tau')", lambda r: r["kind"] == "pion"),
]  # fmt: skip
NEGATED = {2: lambda r: not 1 <= r["label"] < 3}


def trees():
    return st.recursive(
        st.integers(0, len(LEAVES) - 1).map(lambda k: ("leaf", k)),
        lambda inner: st.tuples(st.just("not"), inner) | st.tuples(st.sampled_from(["and", "or"]), inner, inner),
        max_leaves=4,
    )


def spelled(tree):
    if tree[0] == "leaf":
        return LEAVES[tree[1]][0]
    return f"not ({spelled(tree[1])})" if tree[0] == "not" else f"({spelled(tree[1])}) {tree[0]} ({spelled(tree[2])})"


def holds(tree, record):
    """True, False, or None where a value is missing, as in SQL."""
    if tree[0] == "leaf":
        is_missing = "weight" in LEAVES[tree[1]][0] and math.isnan(record["weight"])
        return None if is_missing else bool(LEAVES[tree[1]][1](record))
    if tree[0] == "not":
        inner = holds(tree[1], record)
        return None if inner is None else not inner
    both = [holds(tree[1], record), holds(tree[2], record)]
    decisive = tree[0] == "or"
    return decisive if decisive in both else None if None in both else not decisive


def records_of(store):
    names = ("label", "weight", "good", "kind", "key")
    found = [{name: store.columns[name][k] for name in names} for k in range(store.num_records)]
    for axis, name in (("rows", "n_hits"), ("tracks", "n_tracks")):
        for record, length in zip(found, np.diff(store.axis_offsets(axis)), strict=True):
            record[name] = int(length)
    return found


@settings(max_examples=80)
@given(tree=trees(), split=st.sampled_from([None, "train", "val"]))
def test_records_are_those_that_a_record_by_record_evaluation_chooses(events, tree, split):
    store = events if split is None else events.split(split)
    expected = [k for k, record in enumerate(records_of(store)) if holds(tree, record)]
    found = store.where(spelled(tree))
    assert found.chosen.tolist() == expected
    assert len(found) == found.num_records == len(expected)
    assert str(parse(found.condition)) == found.condition  # one spelling
    whole, view = mr.Records(store), mr.Records(found)
    for sample, record in enumerate(expected):
        one, other = view[sample], whole[record]
        assert all(np.array_equal(one[name], other[name], equal_nan=name == "weight") for name in other)
    assert found.columns["key"][:].tolist() == [store.columns["key"][k] for k in expected]
    assert list(found.columns["kind"]) == [store.columns["kind"][k] for k in expected]


def test_chosen_records_are_numbered_from_0_and_rows_are_not(events):
    found = events.where("label == 3 and n_hits > 2")
    assert found.num_rows == events.num_rows
    starts, stops = found.record_spans()
    assert starts.tolist() == events.offsets[found.chosen].tolist()
    view = mr.Records(found)
    assert view.records([0]).tolist() == [0]
    assert view.stored_records([0]).tolist() == [found.chosen[0]]
    assert view.spans([0]).starts.tolist() == [starts[0]]
    assert f"{len(found)} of 40 records where (label == 3 and n_hits > 2)" in repr(found)
    assert f"{events.num_rows - (stops - starts).sum():,} rows never delivered" in repr(view)
    row = mr.Feed(view, batch=1, device="numpy", order=mr.Sequential(len(view))).explain(0).rows[0]
    assert row["record"] == found.chosen[0]
    assert row["rows"] == (starts[0], stops[0])
    assert row["columns"]["label"] == 3


def test_conditions_add_up_and_go_with_splits(events):
    both = events.where("label == 1").where("n_hits > 1")
    assert both.condition == "(label == 1 and n_hits > 1)"
    assert both.fingerprint == events.where("label == 1 and (n_hits > 1)").fingerprint != events.fingerprint
    for part in (events.where("label == 1").split("val"), events.split("val").where("label==1")):
        assert part.chosen.tolist() == np.flatnonzero(np.asarray(events.split("val").columns["label"]) == 1).tolist()
    spec = mr.Records(part).spec()
    assert spec["where"] == "label == 1"
    again = mr.from_spec(json.loads(json.dumps(spec)), events)
    assert again.fingerprint == mr.Records(part).fingerprint
    assert again.store.chosen.tolist() == part.chosen.tolist()
    sent = pickle.loads(pickle.dumps(part))  # noqa: S301
    assert (sent.fingerprint, sent.chosen.tolist()) == (part.fingerprint, part.chosen.tolist())


def test_windows_of_chosen_entities():
    columns = {"values": np.arange(60.0), "name": list("abc"), "static": [[1.0], [2.0], [3.0]]}
    store = mr.from_arrays(columns, [0, 10, 40, 60], kind="series")
    view = mr.Windows(store.where("name != 'a' and n_values < 30"), lookback=3, horizon=1, include="static")
    whole = mr.Windows(store, lookback=3, horizon=1, include="static")
    kept = np.flatnonzero(whole.records(np.arange(len(whole))) == 2)
    assert len(view) == len(kept)
    for name, value in view[:].items():
        assert np.array_equal(value, whole[kept][name])
    assert view.records([0]).tolist() == [0]
    feed = mr.Feed(view, batch=5, epochs=1, device="numpy")
    assert sorted(s for batch in feed for s in batch.static[batch.valid, 0].tolist()) == [3.0] * len(view)


def test_blocks_and_offsets_have_no_meaning_there():
    store = mr.from_arrays({"tokens": np.arange(20), "source": [0, 1]}, [0, 9, 20]).where("source == 1")
    with pytest.raises(mr.ConfigError, match=r"where\('source == 1'\) leaves out records"):
        mr.Blocks(store, length=2)
    with pytest.raises(mr.ConfigError, match="record_spans"):
        _ = store.offsets
    assert len(mr.Records(store.where("source == 0"))) == 0


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("lable == 3", r"'lable' is unknown \(did you mean 'label'\?\); there are label, "),
        ("n_hit > 3", r"'n_hit' is unknown \(did you mean 'n_hits'\?\)"),
        ("hits > 3", "'hits' has no single value per record"),
        ("pair == 1", "'pair' has no single value per record"),
        ("label == 'a'", "label is a number, compared with a, text"),
        ("key == 3", "key is text, compared with 3, a number"),
        ("key in ('a', 3)", "key is text, compared with 3"),
        ("label + 1 == 3", r"'label \+ 1' is not understood; expected comparisons"),
        ("__import__('os').getcwd()", "is not understood"),
        ("label is 3", "'Is' is not understood"),
        ("label ==", "cannot be read"),
        ("not " * 100_000 + "label == 1", "cannot be read .it nests too deeply"),
        ("label in ()", "is not understood"),
        (" or ".join(["label == 1"] * 600), "at most 500"),
        (f"label in ({'1, ' * 400_000})", r"has 1,200,011 characters; at most 1,048,576.*mr\.Subset\("),
        (3, "expected a condition as text"),
    ],
)
def test_what_is_no_condition_is_refused(events, condition, message):
    with pytest.raises(mr.ConfigError, match=message):
        events.where(condition)


def test_a_long_condition_is_shown_by_its_beginning(events):
    chosen = events.where(f"label in ({', '.join(map(str, range(10_000)))})")
    assert chosen.num_records == events.num_records
    assert len(repr(chosen)) < 600
    assert "records where label in (0, 1, 2" in repr(chosen)


def test_conditions_that_would_mean_something_else_are_refused(events):
    for name in ("label", "not label", "n_hits and good", "weight == True"):
        with pytest.raises(mr.ConfigError, match=r"is a number; compare it: .* > 0"):
            events.where(name)
    chosen = events.where("label == 1")
    with pytest.raises(mr.ConfigError, match="cannot be read"):
        chosen.where("good) or (label == 2")  # brackets that would close those around it
    assert chosen.where("good # a remark").num_records == sum(k % 4 == 1 and k % 3 == 0 for k in range(COUNT))


def test_values_beyond_a_float_column(tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"x": mr.Column("float16", per="record")}) as writer:
        for value in (1.0, -2.0, math.nan, math.inf):
            writer.append({"x": value})
    store = mr.open_store(tmp_path / "store")
    for text, expected in (
        ("x < 70000", [0, 1]), ("x > -70000", [0, 1, 3]), ("x == 70000", []), ("x != 70000", [0, 1, 3]),
        ("x in (1, 70000)", [0]), ("x not in (1, 70000)", [1, 3]), ("x in (1e999, 70000, -2)", [1, 3]),
        (f"x > -1{'0' * 400}", [0, 1, 3]), ("x < 1e999", [0, 1]),
    ):  # fmt: skip
        assert store.where(text).chosen.tolist() == expected, text


def test_the_memory_of_many_values_grows_with_records_or_values_never_with_both():
    store = mr.from_arrays({"label": np.arange(100_000)}, per={"label": "record"})
    values = list(range(0, 100_000, 71))
    for text in (f"label in {tuple(values)}", f"label in {(2.0**60, *map(float, values))}"):
        tracemalloc.start()
        found = store.where(text)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert found.chosen.tolist() == values
        assert most < 32 << 20  # 1,400 comparisons of 100,000 records each kept 140 MB


def test_large_integers_are_compared_as_numpy_compares_them():
    numbers = np.array([2**53, 2**53 + 1, 2**63 - 1, -(2**63), 7])
    store = mr.from_arrays({"n": numbers}, per={"n": "record"})
    for value in (2**53 + 1, 2.0**53, 2.0**63, 2**63, -(2**63), 7.0, 7.5):
        assert store.where(f"n in ({value}, 1)").chosen.tolist() == np.flatnonzero(numbers == value).tolist()
        assert store.where(f"n == {value}").chosen.tolist() == np.flatnonzero(numbers == value).tolist()


def test_a_missing_value_is_chosen_neither_by_a_condition_nor_by_its_opposite(events):
    """As the guide says: ``not`` turns comparisons round."""
    missing = {k for k, record in enumerate(records_of(events)) if math.isnan(record["weight"])}
    everything = set(range(events.num_records))
    assert missing
    for text in ("weight > 3", "weight == 2", "weight in (2, 0.8)", "0 < weight <= 3", "weight == weight"):
        chosen, others = (set(events.where(spelling).chosen.tolist()) for spelling in (text, f"not ({text})"))
        assert chosen | others == everything - missing
        assert not chosen & others
    assert set(events.where("weight == weight").chosen.tolist()) == everything - missing
    for text in ("weight != 2", "weight not in (2,)", "not weight not in (2,)", "not weight != weight"):
        assert not missing & set(events.where(text).chosen.tolist())
