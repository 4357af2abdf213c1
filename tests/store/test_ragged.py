"""Ragged and Spans against lists of lists."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace import ConfigError, Ragged, Spans
from millrace.ragged import as_offsets, concatenated_ranges

items = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=8)
pieces = st.tuples(st.integers(0, 50), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def ragged_of(lists: list[list[int]]) -> Ragged:
    offsets = np.cumsum([0, *map(len, lists)])
    return Ragged(np.array([value for item in lists for value in item], np.int64), offsets)


@given(items)
def test_ragged_gives_back_its_items(lists):
    ragged = ragged_of(lists)
    assert len(ragged) == len(lists)
    assert [item.tolist() for item in ragged] == lists
    assert [ragged[k].tolist() for k in range(-len(lists), 0)] == lists
    assert ragged.lengths.tolist() == [len(item) for item in lists]


@given(items, st.none() | st.integers(0, 7), st.integers(-3, 3))
def test_pad_fills_and_cuts_like_lists(lists, length, value):
    width = max(map(len, lists), default=0) if length is None else length
    padded = ragged_of(lists).pad(value=value, length=length)
    assert padded.shape == (len(lists), width)
    assert padded.dtype == np.int64
    assert padded.tolist() == [(item + [value] * width)[:width] for item in lists]
    tensor = ragged_of(lists).to("cpu").pad(value=value, length=length)
    assert (tensor.dtype, tensor.tolist()) == (torch.int64, padded.tolist())


def test_pad_keeps_the_shape_of_rows():
    rows = np.arange(12.0, dtype=np.float32).reshape(3, 2, 2)
    padded = Ragged(rows, np.array([0, 1, 1, 3])).pad()
    assert padded.dtype == np.float32
    assert np.array_equal(padded[2], rows[1:])
    assert np.array_equal(padded[0], [rows[0], np.zeros((2, 2))])
    assert not padded[1].any()


def test_an_item_out_of_range_is_an_index_error():
    ragged = ragged_of([[1], [2]])
    with pytest.raises(IndexError):
        ragged[2]
    with pytest.raises(IndexError):
        ragged[-3]


def test_ragged_does_not_copy_its_values():
    values = np.arange(5)
    assert np.shares_memory(Ragged(values, np.array([0, 5]))[0], values)


@given(st.lists(st.lists(pieces, max_size=4), max_size=6))
def test_spans_of_several_pieces_cover_them_one_after_the_other(samples):
    flat = [piece for sample in samples for piece in sample]
    spans = Spans(
        np.array([start for start, _ in flat], np.int64),
        np.array([stop for _, stop in flat], np.int64),
        offsets=np.cumsum([0, *map(len, samples)]),
    )
    expected = [[row for start, stop in sample for row in range(start, stop)] for sample in samples]
    assert len(spans) == len(samples)
    assert [spans.rows(k).tolist() for k in range(len(samples))] == expected
    assert spans.lengths.tolist() == [len(rows) for rows in expected]


@given(st.lists(pieces, max_size=6))
def test_spans_without_offsets_have_one_piece_each(flat):
    spans = Spans(np.array([start for start, _ in flat]), np.array([stop for _, stop in flat]))
    assert len(spans) == len(flat)
    assert [spans.rows(k).tolist() for k in range(len(flat))] == [list(range(*piece)) for piece in flat]
    assert spans.lengths.tolist() == [stop - start for start, stop in flat]
    assert spans.starts.dtype == spans.stops.dtype == spans.lengths.dtype == np.int64


@pytest.mark.parametrize("offsets", [None, [0, 1, 2]])
def test_rows_of_a_sample_that_is_not_there_are_an_index_error(offsets):
    spans = Spans(np.array([0, 5]), np.array([2, 7]), offsets=None if offsets is None else np.array(offsets))
    assert spans.rows(-1).tolist() == [5, 6]
    with pytest.raises(IndexError):
        spans.rows(2)
    with pytest.raises(IndexError):
        spans.rows(-3)


@pytest.mark.parametrize(
    ("starts", "stops", "offsets", "message"),
    [
        ([0, 4], [2], None, r"shape \(2,\) and stops \(1,\)"),
        ([[0]], [[1]], None, "1-D"),
        ([0, -1], [2, 3], None, r"piece 1 is \[-1, 3\)"),
        ([0, 5], [2, 4], None, r"piece 1 is \[5, 4\)"),
        ([0, 5], [2, 6], [0, 1], "end at 1 but there are 2"),
        ([0, 5], [2, 6], [1, 2], "start at 1"),
        ([0, 5], [2, 6], [0, 2, 1, 2], "fall from 2 to 1 at record 1"),
    ],
)
def test_impossible_spans_are_refused(starts, stops, offsets, message):
    with pytest.raises(ConfigError, match=message):
        Spans(np.array(starts), np.array(stops), offsets=None if offsets is None else np.array(offsets))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([], "expected 1-D integers"),
        ([0.0, 2.0], "float64"),
        ([False, True], "bool"),
        ([[0, 2]], r"shape \(1, 2\)"),
        (7, r"shape \(\)"),
        ([1, 2], "start at 1; expected 0"),
        ([-1, 2], "start at -1"),
        ([0, 2, 1, 2], "fall from 2 to 1 at record 1"),
        ([0, 1], "end at 1 but there are 2 rows"),
        ([0, 3], "end at 3 but there are 2 rows"),
        (np.array([0, 2**63 + 2], np.uint64), "fall|end at"),
    ],
)
def test_impossible_offsets_are_refused(offsets, message):
    with pytest.raises(ConfigError, match=message):
        Ragged(np.zeros(2), offsets)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i4", ">i8", "u8"])
def test_offsets_of_any_integer_type_become_int64(dtype):
    offsets = as_offsets(np.array([0, 2, 2, 7], dtype))
    assert offsets.dtype == np.dtype(np.int64)
    assert offsets.tolist() == [0, 2, 2, 7]


def test_offsets_beyond_32_bits_are_kept():
    offsets = as_offsets([0, 2**31 + 1, 2**32 + 1, 2**62])
    assert offsets.tolist() == [0, 2**31 + 1, 2**32 + 1, 2**62]


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2**62), st.integers(0, 5)), max_size=8))
def test_concatenated_ranges_are_the_ranges_in_a_row(ranges):
    starts = np.array([start for start, _ in ranges], np.int64)
    lengths = np.array([length for _, length in ranges], np.int64)
    expected = [row for start, length in ranges for row in range(start, start + length)]
    assert concatenated_ranges(starts, lengths).tolist() == expected


def test_ragged_and_spans_survive_pickling():
    ragged, spans = ragged_of([[1], [2, 3]]), Spans(np.array([1]), np.array([4]), offsets=np.array([0, 0, 1]))
    with pytest.raises(AttributeError):
        spans.starts = np.zeros(3)  # type: ignore[misc]
    assert [item.tolist() for item in pickle.loads(pickle.dumps(ragged))] == [[1], [2, 3]]  # noqa: S301
    assert pickle.loads(pickle.dumps(spans)).rows(1).tolist() == [1, 2, 3]  # noqa: S301
