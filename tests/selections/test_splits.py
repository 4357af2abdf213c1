"""Splits and folds against what they promise: disjoint, complete, exact, whole groups, alike labels, stable folds."""

import json

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

import millrace as mr


def events(count, seed=0, groups=7):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 4, count)
    columns = {
        "hits": mr.Ragged(rng.normal(size=(lengths.sum(), 2)).astype(np.float32), np.cumsum([0, *lengths])),
        "label": rng.integers(0, 3, count).astype(np.int8),
        "run": np.array([f"run {number}" for number in rng.integers(0, groups, count)], object),
        "number": np.arange(count) * 11,
        "one": np.ones(count, np.int8),
    }
    return mr.from_arrays(columns, per=dict.fromkeys(("label", "run", "number", "one"), "record"))


def fractions_of(draw):
    parts = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4).filter(any))
    return [part / sum(parts) for part in parts]


def assert_divides(parts, view):
    """Every sample is in one part, in its order, and the spec alone makes the part again."""
    assert sorted(np.concatenate([part.ids for part in parts]).tolist()) == list(range(len(view)))
    for part in parts:
        assert np.all(np.diff(part.ids) > 0)
        again = mr.from_spec(json.loads(json.dumps(part.spec())), view.store)
        assert again.ids.tolist() == part.ids.tolist()
        assert again.fingerprint == part.fingerprint


@settings(max_examples=60)
@given(count=st.integers(0, 90), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_parts_are_disjoint_complete_and_as_large_as_asked_for(count, seed, data):
    view, fractions = mr.Records(events(count)), fractions_of(data.draw)
    parts = mr.random_split(view, fractions, seed=seed)
    assert_divides(parts, view)
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) < 1
    sizes = [len(part) for part in parts]
    by_count = mr.random_split(view, sizes, seed=seed)
    assert [part.ids.tolist() for part in by_count] == [part.ids.tolist() for part in parts]


@settings(max_examples=40)
@given(count=st.integers(1, 90), seed=st.integers(0, 99), data=st.data())
def test_every_part_has_its_share_of_every_label(count, seed, data):
    view, fractions = mr.Records(events(count, seed)), fractions_of(data.draw)
    labels = np.asarray(view.store.columns["label"])
    parts = mr.random_split(view, fractions, seed=seed, labels="label")
    assert_divides(parts, view)
    for part, fraction in zip(parts, fractions, strict=True):
        for label in np.unique(labels):
            assert abs((labels[part.ids] == label).sum() - fraction * (labels == label).sum()) < 1


def test_labels_of_one_sample_each_still_add_up_to_the_fractions():
    _, val = mr.random_split(mr.Records(events(2000)), [0.9, 0.1], labels="number")
    assert abs(len(val) - 200) < 60  # 4.5 standard deviations


@settings(max_examples=40)
@given(count=st.integers(1, 90), seed=st.integers(0, 99), groups=st.integers(1, 30), data=st.data())
def test_a_group_is_never_divided(count, seed, groups, data):
    view, fractions = mr.Records(events(count, seed, groups)), fractions_of(data.draw)
    runs = np.asarray(view.store.columns["run"])
    try:
        parts = mr.random_split(view, fractions, seed=seed, groups="run")
    except mr.ConfigError:  # a part would be empty
        reject()
    assert all(len(part) for part, fraction in zip(parts, fractions, strict=True) if fraction)
    assert_divides(parts, view)
    owners = [set(runs[part.ids]) for part in parts]
    assert sum(map(len, owners)) == len(set(runs))
    largest = max(np.unique(runs, return_counts=True)[1])
    for part, fraction in zip(parts, fractions, strict=True):
        assert abs(len(part) - fraction * count) <= largest + 1


def test_seeds_differ_and_a_split_is_not_the_order_of_training():
    view = mr.Records(events(500))
    ids = [mr.random_split(view, [0.5, 0.5], seed=seed)[0].ids for seed in (0, 1)]
    assert 80 < len(np.intersect1d(*ids)) < 170
    first_half = mr.Shuffled(500, seed=0).samples(np.arange(250))
    assert 80 < len(np.intersect1d(ids[0], first_half)) < 170


def test_golden_parts():
    """What a seed chooses never changes: checkpoints rely on it."""
    view = mr.Records(events(20))
    assert mr.random_split(view, [0.8, 0.2], seed=7)[1].ids.tolist() == [3, 9, 11, 15]
    assert mr.k_fold(view, 4, 1, seed=7)[1].ids.tolist() == [0, 5, 6, 15, 17, 18]
    assert mr.k_fold(view, 4, 1, seed=7, key="run")[1].ids.tolist() == [1, 2, 4]


@settings(max_examples=40)
@given(
    count=st.integers(0, 60), more=st.integers(0, 30), k=st.integers(2, 6), key=st.sampled_from([None, "run", "number"])
)
def test_folds_divide_a_view_and_stay_when_records_are_appended(count, more, k, key):
    long = mr.Records(events(count + more))
    store = long.store
    kept = slice(0, count)
    columns = {name: np.asarray(store.columns[name][kept]) for name in ("run", "number")}
    short = mr.Records(
        mr.from_arrays({"x": np.zeros(count), **columns}, np.arange(count + 1), per=dict.fromkeys(columns, "record"))
    )
    held = []
    for fold in range(k):
        train, inside = mr.k_fold(long, k, fold, seed=3, key=key)
        assert_divides([train, inside], long)
        held += inside.ids.tolist()
        assert inside.ids[inside.ids < count].tolist() == mr.k_fold(short, k, fold, seed=3, key=key)[1].ids.tolist()
        if key is not None:
            values = np.asarray(store.columns[key])
            assert not set(values[train.ids]) & set(values[inside.ids])
    assert sorted(held) == list(range(count + more))


def test_folds_are_about_equally_large():
    view = mr.Records(events(3000))
    for key in (None, "number"):
        sizes = [len(mr.k_fold(view, 5, fold, key=key)[1]) for fold in range(5)]
        assert max(abs(size - 600) for size in sizes) < 110  # 5 standard deviations


def test_windows_are_divided_by_their_records():
    store = mr.from_arrays({"values": np.arange(400.0), "name": [f"s{k}" for k in range(20)]}, np.arange(0, 401, 20))
    view = mr.Windows(store, lookback=5, horizon=1)
    parts = mr.random_split(view, [0.5, 0.5], groups="name")
    assert_divides(parts, view)
    assert not set(parts[0].records(np.arange(len(parts[0])))) & set(parts[1].records(np.arange(len(parts[1]))))
    assert_divides(mr.k_fold(view, 3, 0), view)


def test_a_split_of_a_split_and_of_chosen_records():
    store = events(200)
    train, _ = mr.random_split(store, [0.8, 0.2], seed=1)
    inner = mr.random_split(train, [0.5, 0.5], seed=2, labels="label")
    assert_divides(inner, train)
    chosen = store.where("label != 1")
    held = mr.k_fold(chosen, 4, 0)[1]
    whole = mr.k_fold(store, 4, 0)[1]
    assert set(held.stored_records(np.arange(len(held)))) == set(whole.ids) & set(chosen.chosen)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fractions": [0.5, 0.4]}, "sum to 0.9; expected 1, or whole numbers that sum to the 20 samples"),
        ({"fractions": []}, "expected numbers from 0 to 1"),
        ({"fractions": [1.5, -0.5]}, "expected numbers from 0 to 1"),
        ({"fractions": [10, 11]}, "sum to 21"),
        ({"groups": "run", "labels": "label"}, "give one of them"),
        (
            {"groups": "one"},
            r"part 0 .* would be empty, for the 20 samples have 1 different values of 'one'.* labels='one'",
        ),
        ({"groups": "numbr"}, r"'numbr' is unknown \(did you mean 'number'\?\)"),
        ({"labels": "hits"}, "'hits' has no single value per record"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_what_cannot_be_split_is_refused(options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.random_split(mr.Records(events(20)), **{"fractions": [0.5, 0.5], **options})


def test_folds_and_views_that_are_none_are_refused():
    view = mr.Records(events(20))
    for k, fold in ((1, 0), (3, 3), (3, -1)):
        with pytest.raises(mr.ConfigError, match=f"k={k}, fold={fold}"):
            mr.k_fold(view, k, fold)
    with pytest.raises(mr.ConfigError, match="a Concat has records of several stores"):
        mr.k_fold(mr.Concat([view, view]), 3, 0, key="run")
    spec = mr.k_fold(view, 3, 0)[0].spec()
    with pytest.raises(mr.ConfigError, match="chosen by 'oracle'"):
        mr.from_spec({**spec, "by": {"split": "oracle"}}, view.store)
