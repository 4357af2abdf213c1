"""sorted_by: the same order as numpy's stable sort, through subsets, several stores, specs and feeds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr


def records(lengths, scores):
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return mr.from_arrays({"x": np.arange(offsets[-1]), "score": np.array(scores)}, offsets, per={"score": "record"})


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-3, 3)), min_size=3, max_size=30))
def test_samples_come_by_value_and_equal_ones_keep_their_order(pairs):
    lengths, scores = (np.array(each) for each in zip(*pairs, strict=True))
    scores = scores.astype(np.float32) / 3
    store = records([*lengths, 6], [*scores, 9.0])
    view, n = mr.Records(store), len(pairs) + 1
    assert mr.sorted_by(store, "score").ids.tolist() == np.argsort([*scores, 9], kind="stable").tolist()
    assert mr.sorted_by(view).ids.tolist() == sorted(range(n), key=lambda k: [*lengths, 6][k])
    assert mr.sorted_by(view, "score", descending=True).ids.tolist() == sorted(range(n), key=lambda k: -[*scores, 9][k])
    both = mr.Concat([mr.Subset(view, [2, 0]), view])
    values = [[*scores, 9][k] for k in (2, 0, *range(n))]
    assert mr.sorted_by(both, "score").ids.tolist() == np.argsort(values, kind="stable").tolist()


def test_a_feed_of_it_goes_from_low_to_high_and_its_spec_needs_no_array():
    view = mr.sorted_by(records([1] * 9, [5, 3, 8, 1, 9, 2, 7, 0, 4]), "score")
    order = mr.Sequential(len(view))
    with mr.Feed(view, order=order, batch=3, epochs=1, device="numpy") as feed:
        assert [batch["score"].tolist() for batch in feed] == [[0, 1, 2], [3, 4, 5], [7, 8, 9]]
    assert view.ids_hash == mr.Subset(view.view, [7, 3, 5, 1, 8, 0, 6, 2, 4]).ids_hash
    for made in (view, mr.sorted_by(view, descending=True), mr.Subset(view, [3, 1])):
        again = mr.from_spec(made.spec(), view.store, {made.ids_hash: made.ids} if made.by is None else None)
        assert again.ids.tolist() == made.ids.tolist()
        assert again.fingerprint == made.fingerprint


def test_what_has_no_order_is_refused():
    with pytest.raises(mr.ConfigError, match="'score' holds NaN"):
        mr.sorted_by(records([1, 1], [np.nan, 1.0]), "score")
    with pytest.raises(mr.ConfigError, match="'x' has no single value per record"):
        mr.sorted_by(records([1, 1], [0, 1]), "x")
