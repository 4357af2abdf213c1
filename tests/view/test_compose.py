"""Subset and Concat against lists of the items of the views they are made of."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr

RECORDS = {
    "hits": mr.Column("float16", (2,)),
    "image": mr.Column("uint8", axis="image"),
    "label": mr.Column("int64", per="record"),
    "key": mr.Column("string", per="record"),
}
RAGGED = ("hits", "image")


def events(count, seed=0):
    rng = np.random.default_rng(seed)
    return [
        {
            "hits": rng.integers(0, 50, (rng.integers(0, 4), 2)).astype(np.float16),
            "image": rng.integers(0, 255, rng.integers(0, 3)).astype(np.uint8),
            "label": int(rng.integers(100)),
            "key": f"é{seed}-{k}"[: rng.integers(5)],
        }
        for k in range(count)
    ]


def as_items(records, pad=None):
    found = []
    for record in records:
        lengths = {"lengths": record["hits"], "lengths_image": record["image"]} if pad else {}
        item = {
            "hits": record["hits"].astype(np.float32),
            "image": record["image"],
            **{name: np.int64(min(len(rows), pad)) for name, rows in lengths.items()},
            "label": np.int64(record["label"]),
            "key": record["key"],
        }
        for name in RAGGED if pad else ():
            dense = np.zeros((pad, *item[name].shape[1:]), item[name].dtype)
            dense[: len(item[name])] = item[name][:pad]
            item[name] = dense
        found.append(item)
    return found


def blocks(rows, length=3, dtype=np.uint16):
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(rows).astype(dtype)}), length=length)


def blocks_items(rows, length=3):
    starts = range(0, rows - length, length)
    return [{"x": np.arange(s, s + length), "y": np.arange(s + 1, s + 1 + length)} for s in starts]


def blocks_spans(rows, length=3):
    return [(s, s + length + 1) for s in range(0, rows - length, length)]


# Subset.


@given(rows=st.integers(0, 40), data=st.data())
def test_a_subset_is_the_samples_chosen_in_their_order_and_as_often(check_view, rows, data):
    view, items, spans = blocks(rows), blocks_items(rows), blocks_spans(rows)
    ids = data.draw(st.lists(st.integers(0, len(items) - 1)) if items else st.just([]))
    for chosen in (ids, np.array(ids, np.uint32), tuple(ids)):
        check_view(mr.Subset(view, chosen), [items[i] for i in ids], [spans[i] for i in ids])
    inner = data.draw(st.lists(st.integers(0, len(ids) - 1)) if ids else st.just([]))
    again = mr.Subset(mr.Subset(view, ids), inner)
    check_view(again, [items[ids[i]] for i in inner], [spans[ids[i]] for i in inner])


@given(mask=st.lists(st.booleans(), max_size=12))
def test_a_mask_keeps_the_samples_where_it_is_true(check_view, mask):
    rows = 3 * len(mask) + 1
    view, items, spans = blocks(rows), blocks_items(rows), blocks_spans(rows)
    kept = [i for i, keep in enumerate(mask) if keep]
    subset = mr.Subset(view, np.array(mask, bool))
    check_view(subset, [items[i] for i in kept], [spans[i] for i in kept])
    assert subset.ids.tolist() == kept


@given(count=st.integers(0, 8), pad=st.none() | st.integers(1, 3), data=st.data())
def test_a_subset_of_records_keeps_their_columns_together(stores, check_view, count, pad, data):
    records = events(count)
    store = stores.make(data.draw(st.sampled_from(stores.where)), RECORDS, records)
    ids = data.draw(st.lists(st.integers(0, count - 1)) if count else st.just([]))
    subset = mr.Subset(mr.Records(store, pad=pad), ids)
    items = as_items(records, pad)
    check_view(subset, [items[i] for i in ids], ragged=() if pad else RAGGED)
    assert subset.records(np.arange(len(ids))).tolist() == ids


def test_a_subset_stays_what_it_was_when_the_ids_are_changed():
    ids = np.array([2, 0])
    subset = mr.Subset(blocks(20), ids)
    ids[0] = 1
    assert subset.spans([0]).starts.tolist() == [6]
    with pytest.raises(ValueError, match="read-only"):
        subset.ids[0] = 1


@pytest.mark.parametrize(
    "ids", [[-1], [6], [0.5], [[0]], ["a"], np.ones(5, bool), np.ones((6, 1), bool), np.array([1 << 63], np.uint64)],
    ids=str,
)  # fmt: skip
def test_ids_that_are_no_samples_are_refused(ids):
    assert len(blocks(20)) == 6
    with pytest.raises(mr.ConfigError):
        mr.Subset(blocks(20), ids)


# Concat.


@given(sizes=st.lists(st.integers(0, 25), min_size=1, max_size=4))
def test_a_concat_is_one_view_after_the_other(check_view, sizes):
    view = mr.Concat([blocks(rows) for rows in sizes])
    items = [item for rows in sizes for item in blocks_items(rows)]
    check_view(view, items, [span for rows in sizes for span in blocks_spans(rows)])
    owners = [k for k, rows in enumerate(sizes) for _ in blocks_items(rows)]
    numbers = [i for rows in sizes for i in range(len(blocks_items(rows)))]
    views, inside = view.parts(np.arange(len(view)))
    assert (views.tolist(), inside.tolist()) == (owners, numbers)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=3), pad=st.none() | st.integers(1, 3), data=st.data())
def test_a_concat_of_ragged_records_from_several_stores(stores, check_view, counts, pad, data):
    each = [events(count, seed) for seed, count in enumerate(counts)]
    views = [
        mr.Records(stores.make(data.draw(st.sampled_from(stores.where)), RECORDS, records), pad=pad) for records in each
    ]
    view = mr.Concat(views)
    items = [item for records in each for item in as_items(records, pad)]
    check_view(view, items, ragged=() if pad else RAGGED)
    assert view.records(np.arange(len(view))).tolist() == [i for count in counts for i in range(count)]
    spans = view.spans(np.arange(len(view)), "image")
    assert spans.lengths.tolist() == [len(record["image"]) for records in each for record in records]


@given(data=st.data())
def test_any_run_of_located_samples_can_be_filled(data):
    records = [events(4, 1), events(3, 2)]
    stores = [mr.from_arrays({"x": np.concatenate([r["hits"] for r in each])}, ends(each)) for each in records]
    view = mr.Concat([mr.Records(store) for store in stores])
    samples = np.array(data.draw(st.lists(st.integers(0, 6), max_size=12)), np.int64)
    located = view.located(samples)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(samples))] * 2)))
    found, whole = located.fill(first, last)["x"], view[samples]["x"]
    assert [item.tolist() for item in found] == [whole[i].tolist() for i in range(first, last)]


def ends(records):
    return np.cumsum([0, *(len(record["hits"]) for record in records)])


def test_a_concat_of_subsets_of_concats(check_view):
    inner = mr.Concat([blocks(10), blocks(20)])  # 3 and 6 samples
    view = mr.Concat([mr.Subset(inner, [8, 0, 3]), blocks(7)])
    items = blocks_items(10) + blocks_items(20)
    check_view(view, [items[8], items[0], items[3], *blocks_items(7)])
    assert len(view.stores) == 3


def test_views_of_different_tokens_but_equal_items_may_be_joined():
    view = mr.Concat([blocks(10, dtype=np.uint16), blocks(10, dtype=np.uint32)])
    assert view[[0, 3]]["x"].tolist() == [[0, 1, 2], [0, 1, 2]]


@pytest.mark.parametrize(
    "other",
    [
        lambda: blocks(9, length=4),
        lambda: mr.Records(mr.from_arrays({"tokens": np.arange(4)})),
        lambda: mr.Windows(mr.from_arrays({"values": np.arange(9)}), lookback=3, horizon=3),
    ],
)
def test_views_of_other_shapes_cannot_be_joined(other):
    with pytest.raises(mr.ConfigError, match="view 1 delivers"):
        mr.Concat([blocks(9), other()])
    with pytest.raises(mr.ConfigError, match="no views"):
        mr.Concat([])


def of_classes(values, codes):
    column = mr.Column("dictionary", per="record", values=values)
    return {"x": mr.Column("int64"), "class": column}, [{"x": [code], "class": values[code]} for code in codes]


def test_codes_of_different_dictionaries_are_not_mixed(stores):
    def view(*values):
        return mr.Records(stores.make("memory", *of_classes(values, range(len(values)))))

    grown = mr.Concat([view("cat", "dog"), view("cat", "dog", "otter")])  # appended to: codes keep their meaning
    assert grown[:]["class"].tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(mr.ConfigError, match="'class'"):
        mr.Concat([view("cat", "dog"), view("dog", "cat")])
    with pytest.raises(mr.ConfigError, match="'class'"):
        mr.Concat([mr.Subset(grown, [0]), view("cat", "dog", "mouse")])


# What a repr may claim.


def test_repr_counts_the_rows_of_all_parts_and_claims_nothing_of_a_subset():
    view = mr.Concat([blocks(12), blocks(15)])
    assert "7 samples" in repr(view)
    assert "4 rows never delivered" in repr(view)  # rows 10, 11 and 13, 14
    assert "never delivered" not in repr(mr.Subset(view, [0]))


@given(data=st.data())
def test_a_subset_counts_the_rows_it_never_delivers(data):
    rows = data.draw(st.integers(5, 60))
    view = mr.Blocks(
        mr.from_arrays({"tokens": np.arange(rows, dtype=np.uint16)}), length=3, stride=data.draw(st.integers(1, 9))
    )
    ids = data.draw(st.lists(st.integers(0, len(view) - 1), max_size=12))
    subset = mr.Subset(view, ids)
    covered = {int(row) for k in range(len(ids)) for row in subset.spans([k]).rows(0)}
    assert subset.unused_rows() == rows - len(covered)
    assert f"{rows - len(covered)} rows never delivered" in repr(subset)


@given(data=st.data())
def test_rows_between_lookback_and_horizon_are_not_delivered(data):
    sizes = {name: data.draw(st.integers(1, 4)) for name in ("lookback", "horizon", "stride")}
    lead = data.draw(st.integers(0, 5))
    view = mr.Windows(mr.from_arrays({"values": np.arange(40.0)}), **sizes, lead=lead)
    ids = data.draw(st.lists(st.integers(0, len(view) - 1), min_size=1, max_size=6))
    subset = mr.Subset(view, ids)
    batch = subset[:]
    seen = np.unique(np.concatenate((batch["x"].ravel(), batch["y"].ravel())))  # the values are their row numbers
    assert subset.unused_rows() == 40 - len(seen)


def test_views_of_one_store_do_not_count_what_each_of_them_leaves_out():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(100, dtype=np.uint16)}), length=10)
    halves = [mr.Subset(view, np.arange(len(view)) % 2 == part) for part in (0, 1)]
    assert "never delivered" in repr(halves[0])
    assert "never delivered" not in repr(mr.Concat(halves))


def test_spans_of_a_concat_have_all_pieces_of_its_samples():
    def store(offsets):
        return mr.from_arrays({"tokens": np.arange(offsets[-1], dtype=np.uint16)}, offsets)

    packed, plain = mr.Packed(store([0, 2, 6, 9]), length=5), mr.Blocks(store([0, 30]), length=5, documents=True)
    both = mr.Concat([packed, plain])
    order = [len(packed), 1, 0, len(packed) + 2]
    found = both.spans(order)
    for at, sample in enumerate(order):
        part, inside = (packed, sample) if sample < len(packed) else (plain, sample - len(packed))
        assert found.rows(at).tolist() == part.spans([inside]).rows(0).tolist()
    assert found.lengths.tolist() == [6, 5, 4, 6]
    assert both.spans([len(packed)]).offsets is None
    assert both.records(order).tolist() == [0, 2, 1, 0]


# Tokenizers.


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """The same text in the tokens of two tokenizers, and tokens of nobody knows which."""
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "text.txt").write_text("to be or not to be " * 40)
    for name in ("bytes", "char"):
        mr.prepare_text(str(folder / "text.txt"), folder / name, tokenizer=name, val=0, workers=1)
    stores = {name: mr.open_store(folder / name) for name in ("bytes", "char")}
    return {**stores, "unknown": mr.from_arrays({"tokens": np.arange(99, dtype=np.uint16)})}


def test_tokens_of_two_tokenizers_are_not_mixed(corpora):
    spaced, char, unknown = (mr.Blocks(corpora[name], length=8) for name in ("bytes", "char", "unknown"))
    for make in (mr.Concat, lambda views, **given: mr.Mixture([(view, 1) for view in views], **given)):
        for views in ([spaced, char], [unknown, spaced, mr.Subset(char, [3, 1])], [spaced, make([char, unknown])]):
            if isinstance(views[-1], mr.Mixture):
                continue
            with pytest.raises(mr.ConfigError, match=r"'char'.*'bytes'.*allow_mixed_tokenizers=True"):
                make(views)
            both = make(views, allow_mixed_tokenizers=True)
            assert len(both) == sum(map(len, views))
        assert len(make([spaced, unknown, mr.Subset(spaced, [0])])) == len(spaced) + len(unknown) + 1
        labels = [mr.Records(corpora[name], columns=["source"]) for name in ("bytes", "char")]
        assert len(make(labels)) == 2  # no tokens, so nothing to mix


def test_a_running_mixture_of_two_tokenizers_goes_on_where_it_is_allowed(corpora):
    views = [mr.Blocks(corpora[name], length=8) for name in ("bytes", "char")]
    mixture = mr.Mixture([(view, 1) for view in views], allow_mixed_tokenizers=True)
    assert "allow_mixed_tokenizers" not in str(mixture.spec())
    assert mixture.fingerprint == mr.Concat(views, allow_mixed_tokenizers=True).fingerprint
    stores = {store.fingerprint: store for store in mixture.stores}
    with pytest.raises(mr.ConfigError, match="allow_mixed_tokenizers=True"):
        mr.from_spec(mixture.spec(), stores)
    subset = mr.Subset(mixture, [5, 2])
    for view in (mixture, subset):
        again = mr.from_spec(view.spec(), stores, {subset.ids_hash: [5, 2]}, allow_mixed_tokenizers=True)
        assert again.fingerprint == view.fingerprint
        assert again[1]["x"].tolist() == view[1]["x"].tolist()
    with mr.Feed(mixture, batch=4, device="numpy", processes=hasattr(os, "memfd_create")) as feed:
        first = next(iter(feed)).samples
        state = feed.state_dict()
    assert len(mr.balanced(mr.Records(corpora["bytes"]), "source")) == 1  # parts of one view are of one tokenizer
    with mr.Feed(mixture, batch=4, device="numpy") as feed:
        feed.load_state_dict(state)
        assert not set(first) & set(next(iter(feed)).samples)
