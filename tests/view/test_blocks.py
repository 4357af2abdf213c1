"""Blocks against a loop over the stream of tokens; what it refuses; sizes no memory could hold."""

import os
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr

DTYPES = ["uint8", "uint16", "uint32", "int32", "int64"]
lengths_of_documents = st.lists(st.integers(0, 9) | st.integers(0, 40), max_size=8)


def documents(lengths, dtype="uint16"):
    ends = np.cumsum([0, *lengths])
    tokens = np.random.default_rng(3).integers(0, np.iinfo(dtype).max, ends[-1], endpoint=True, dtype=dtype)
    return [{"tokens": tokens[a:b]} for a, b in pairwise(ends)]


def expected(records, length, stride):
    """Items and spans, by hand: slide along the joined documents while a whole block fits."""
    stream = [int(token) for record in records for token in record["tokens"]]
    items, spans = [], []
    start = 0
    while start + length + 1 <= len(stream):
        piece = stream[start : start + length + 1]
        items.append({"x": np.array(piece[:-1], np.int64), "y": np.array(piece[1:], np.int64)})
        spans.append((start, start + length + 1))
        start += stride
    return items, spans, len(stream)


@given(
    lengths=lengths_of_documents,
    length=st.integers(1, 12),
    stride=st.none() | st.integers(1, 30),
    dtype=st.sampled_from(DTYPES),
    data=st.data(),
)
def test_blocks_are_the_runs_of_the_stream(stores, check_view, lengths, length, stride, dtype, data):
    records = documents(lengths, dtype)
    where = data.draw(st.sampled_from(stores.where))
    store = stores.make(where, {"tokens": mr.Column(dtype)}, records)
    view = mr.Blocks(store, length=length, stride=stride)
    items, spans, rows = expected(records, length, stride or length)
    check_view(view, items, spans)
    delivered = {row for start, stop in spans for row in range(start, stop)}
    assert f"{rows - len(delivered):,} rows never delivered" in repr(view)


@given(lengths=lengths_of_documents, data=st.data())
def test_blocks_of_a_split_are_those_of_its_documents(stores, check_view, lengths, data):
    records = documents(lengths)
    splits = data.draw(st.lists(st.sampled_from(["train", "val"]), min_size=len(records), max_size=len(records)))
    where = data.draw(st.sampled_from(stores.where))
    store = stores.make(where, {"tokens": mr.Column("uint16")}, records, splits=splits)
    for name in store.splits:
        mine = [record for record, split in zip(records, splits, strict=True) if split == name]
        items, spans, _ = expected(mine, 4, 3)
        check_view(mr.Blocks(store.split(name), length=4, stride=3), items, spans)


def test_x_and_y_are_contiguous_int64_that_share_nothing():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(100, dtype=np.uint16)}), length=8)
    batch = view[np.arange(10)]
    for array in (batch["x"], batch["y"], view[3]["x"], view[3]["y"]):
        assert array.dtype == np.int64
        assert array.flags.c_contiguous
    assert not np.shares_memory(batch["x"], batch["y"])
    assert np.array_equal(batch["x"][:, 1:], batch["y"][:, :-1])


def test_tokens_of_any_size_are_read_to_the_last_bit():
    top = np.array([0, 1, (1 << 32) - 1, 1 << 31, 7], np.uint32)
    assert mr.Blocks(mr.from_arrays({"tokens": top}), length=4)[0]["y"].tolist() == top[1:].tolist()


def test_stride_is_length_unless_given_and_1_gives_every_position():
    store = mr.from_arrays({"tokens": np.arange(21, dtype=np.uint16)})
    assert mr.Blocks(store, length=5).stride == 5
    assert len(mr.Blocks(store, length=5)) == 4
    every = mr.Blocks(store, length=5, stride=1)
    assert every.spans(np.arange(len(every))).starts.tolist() == list(range(16))


def test_the_column_is_tokens_or_the_only_one_of_rows_or_the_one_named():
    columns = {"ids": np.arange(9), "tokens": np.arange(9) + 100, "more": np.arange(9) + 200}
    assert mr.Blocks(mr.from_arrays(columns), length=2)[0]["x"].tolist() == [100, 101]
    assert mr.Blocks(mr.from_arrays(columns), length=2, column="more")[0]["x"].tolist() == [200, 201]
    assert mr.Blocks(mr.from_arrays({"ids": np.arange(9)}), length=2)[0]["x"].tolist() == [0, 1]


def test_a_block_knows_the_document_it_starts_in():
    store = mr.from_arrays({"tokens": np.arange(10, dtype=np.uint16)}, [0, 3, 3, 7, 7, 10])
    view = mr.Blocks(store, length=1, stride=1)
    assert view.records(np.arange(9)).tolist() == [0, 0, 0, 2, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("options", [{"length": 0}, {"length": -1}, {"length": 4, "stride": 0}])
def test_lengths_below_1_are_refused(options):
    with pytest.raises(mr.ConfigError, match="length="):
        mr.Blocks(mr.from_arrays({"tokens": np.arange(9)}), **options)


@pytest.mark.parametrize(
    "column", [np.zeros(4), np.zeros((4, 2), np.int64), np.array(["a"] * 4, object), np.zeros(4, bool)], ids=str
)
def test_columns_that_hold_no_tokens_are_refused(column):
    store = mr.from_arrays({"tokens": column}, per={"tokens": "row"})
    with pytest.raises(mr.ConfigError, match="'tokens'"):
        mr.Blocks(store, length=2)


@pytest.mark.parametrize("name", ["label", "gone", "image"])
def test_record_columns_unknown_ones_and_those_of_another_axis_are_refused(name):
    image = mr.Ragged(np.zeros(3, np.uint8), np.array([0, 1, 3]))
    store = mr.from_arrays({"tokens": np.arange(9), "label": [1, 2], "image": image}, [0, 4, 9])
    with pytest.raises(mr.ConfigError, match=repr(name)):
        mr.Blocks(store, length=2, column=name)


def test_a_split_by_time_has_no_stream():
    store = mr.from_arrays({"x": np.arange(6), "cuts": [[2], [1]]}, [0, 4, 6], cuts=mr.Cuts(("train", "val")))
    assert len(mr.Blocks(store, length=2, column="x")) == 2
    with pytest.raises(mr.ConfigError, match="split 'val' is a split by time"):
        mr.Blocks(store.split("val"), length=2, column="x")


def test_ten_thousand_million_samples_over_a_sparse_file_need_no_memory(tmp_path):
    rows = 10**10 + 1024
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, 2 * rows)
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.array([7, 8], "<u2").tobytes())
    mr.Blocks(mr.open_store(path), length=2)[0]  # what is imported lazily is imported now
    tracemalloc.start()
    try:
        view = mr.Blocks(mr.open_store(path), length=1023, stride=1)
        assert len(view) == 10**10 + 1
        assert view.spans([-1, 3]).starts.tolist() == [10**10, 3]
        assert view[-1]["y"][-2:].tolist() == [7, 8]
        assert view[[10**10, 5]]["x"].sum() == 7
        assert "10,000,000,001 samples" in repr(view)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes"
