"""What ``store.columns[name]`` does, against numpy over the same values, for any cut into shards."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.store.layout import Column, Layout, bfloat16_bits, bfloat16_values
from millrace.store.memory import array_store

SIZES = st.lists(st.integers(0, 6), min_size=1, max_size=8)
TAILS = st.sampled_from([(), (2,), (2, 3)])
quick = settings(max_examples=200)


def column_over(sizes, tail=(), dtype="int32"):
    """A column cut into shards of these sizes, and the same values as one array."""
    count = sum(sizes) * int(np.prod(tail, dtype=int))
    values = (np.arange(count) + 1).astype(dtype).reshape(-1, *tail)
    layout = Layout({"x": Column(dtype, tail)})
    ends = np.cumsum([0, *sizes])
    shards = [(f"s{k}", [np.array([0, n]), values[ends[k] : ends[k] + n]]) for k, n in enumerate(sizes)]
    return array_store(layout, shards, kind="records").columns["x"], values


def same(found, expected):
    """Equal values, shape and dtype, or the same refusal."""
    assert type(found) is type(expected)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected)


def indexing(length):
    """Keys that numpy understands for the first axis, most of them within range."""
    edge = st.integers(-length - 2, length + 1)
    slices = st.slices(length) | st.builds(
        slice, st.none() | edge, st.none() | edge, st.sampled_from([None, -3, -1, 1, 2, 5])
    )
    integers = st.lists(edge, max_size=6)
    arrays = integers.filter(bool).flatmap(
        lambda rows: st.sampled_from([np.int64, np.int16, np.int32]).map(lambda kind: np.array(rows, kind))
    )
    masks = st.lists(st.booleans(), min_size=length, max_size=length).map(lambda mask: np.array(mask, bool))
    return st.one_of(edge, edge.map(np.int64), slices, integers, arrays, masks)


@quick
@given(st.data(), SIZES, TAILS, st.sampled_from(["int32", "float64", "bool"]))
def test_indexing_is_numpys(data, sizes, tail, dtype):
    column, values = column_over(sizes, tail, dtype)
    key = data.draw(indexing(len(values)))
    try:
        expected = values[key]
    except IndexError:
        with pytest.raises(IndexError):
            column[key]
    else:
        same(column[key], expected)


@quick
@given(st.data(), SIZES)
def test_tuples_index_rows_and_then_inside_them(data, sizes):
    column, values = column_over(sizes, (2, 3))
    inner = st.one_of(st.integers(-2, 1), st.slices(2), st.lists(st.integers(0, 1), min_size=1, max_size=3))
    last = st.one_of(st.integers(-3, 2), st.slices(3))
    first = data.draw(indexing(len(values)))
    key = (first, *data.draw(st.one_of(st.tuples(), st.tuples(inner), st.tuples(inner, last))))
    try:
        expected = values[key]
    except IndexError:
        with pytest.raises(IndexError):
            column[key]
    else:
        assert np.array_equal(column[key], expected)
        assert np.shape(column[key]) == expected.shape


@quick
@given(SIZES, TAILS, st.data())
def test_spans_and_takes_agree_with_slices_and_fancy_indexing(sizes, tail, data):
    column, values = column_over(sizes, tail)
    start = data.draw(st.integers(0, len(values)))
    stop = data.draw(st.integers(start, len(values)))
    same(column.span(start, stop), values[start:stop])
    rows = np.array(data.draw(st.lists(st.integers(0, max(0, len(values) - 1)), max_size=20)), np.int64)
    rows = rows[rows < len(values)]
    same(column.take(rows), values[rows])


@quick
@given(SIZES, TAILS)
def test_shape_iteration_pieces_and_asarray_show_all_rows(sizes, tail):
    column, values = column_over(sizes, tail)
    assert (len(column), column.shape, column.ndim, column.dtype) == (
        len(values),
        values.shape,
        values.ndim,
        values.dtype,
    )
    same(np.asarray(column), values)
    same(np.asarray(column, dtype=np.float64), values.astype(np.float64))
    assert [np.asarray(row).tolist() for row in column] == values.tolist()
    pieces = list(column.pieces())
    assert [len(piece) for _, piece in pieces] == sizes
    assert [start for start, _ in pieces] == np.cumsum([0, *sizes])[:-1].tolist()
    assert repr(column) == f"<column int32 {values.shape}>"


def test_an_empty_tuple_is_the_whole_column():
    column, values = column_over([2, 3])
    same(column[()], values)


@pytest.mark.parametrize("key", [[], np.zeros(5, bool), slice(3, 3), slice(4, 1), slice(1, 4, -1)])
def test_nothing_selected_is_an_empty_array_of_the_right_shape(key):
    column, _ = column_over([2, 3], (4,))
    assert column[key].shape == (0, 4)
    assert column[key].dtype == np.int32


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, "row 5 is out of range; the column has 5"),
        (-6, "row -6 is out of range"),
        ([0, 5], "row 5 is out of range"),
        ([-6, 0], "row -6 is out of range"),
        (np.array([2**63], np.uint64), "row 9223372036854775808 is out of range"),
        (np.ones(4, bool), r"a mask of shape \(4,\) for 5 rows"),
        (np.ones((5, 1), bool), r"a mask of shape \(5, 1\) for 5 rows"),
        (True, "a mask of shape"),
        (np.array([0.0]), "float64"),
        (1.0, "float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ("x", "expected integers"),
        (None, "expected integers"),
        (..., "expected integers"),
    ],
)
def test_an_unusable_index_is_an_index_error_that_says_why(key, message):
    column, _ = column_over([2, 3])
    with pytest.raises(IndexError, match=message):
        column[key]


def test_an_empty_column_can_be_sliced_and_not_indexed():
    column, _ = column_over([0, 0], (2,))
    for key in (slice(None), slice(None, None, -1), slice(None, None, 2), [], np.zeros(0, bool)):
        assert column[key].shape == (0, 2)
    with pytest.raises(IndexError):
        column[0]
    assert list(column) == []


def test_a_slice_within_a_shard_is_a_view_and_across_shards_a_copy():
    column, values = column_over([4, 4])
    assert np.shares_memory(column[1:4], values)
    assert np.shares_memory(column[1:4:2], values)
    assert not np.shares_memory(column[3:5], values)
    assert not np.shares_memory(np.array(column_over([4])[0]), values)


class Watched:
    """Shards that note how many rows were asked of them; ``mapped=False`` as past the last map."""

    def __init__(self, shards, *, mapped):
        self._shards, self._mapped, self.rows_read, self.calls = shards, mapped, [], []

    def array(self, shard, file):
        return self._shards.array(shard, file) if self._mapped else None

    def rows(self, shard, file, start, stop, *, wait=True):
        """Rows of every third shard lie in memory."""
        self.calls.append(("rows" if wait else "ask", shard, start, stop))
        self.rows_read += [stop - start] if wait else []
        return self._shards.rows(shard, file, start, stop) if wait or shard % 3 == 2 else None


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize(
    "key", [slice(None, None, 2500), slice(None, None, -2500), slice(0, 900, 450), [7, 9999, 5, 7]]
)
def test_rows_far_apart_are_had_without_those_between(key, mapped):
    column, values = column_over([1000] * 10, (40,), "float64")
    watched = column._shards = Watched(column._shards, mapped=mapped)
    same(column[key], values[key])
    assert sum(watched.rows_read) <= 10


def test_rows_less_than_a_page_apart_are_read_together():
    column, values = column_over([1000] * 10)
    watched = column._shards = Watched(column._shards, mapped=False)
    rows = np.array([1999, 100, 90, 1500, 1000, 1999])
    same(column[rows], values[rows])
    assert watched.rows_read == [11, 1000]


@pytest.mark.parametrize("way", ["take", "spans"])
def test_rows_that_are_not_mapped_are_all_asked_for_before_the_first_is_waited_for(way):
    column, values = column_over([1000] * 10)
    watched = column._shards = Watched(column._shards, mapped=False)
    starts = np.array([9000, 2500, 2990, 100, 4999, 50, 50])
    if way == "take":
        same(column.take(starts), values[starts])
    else:
        for found, start in zip(column.spans(starts, starts + 20), starts, strict=True):
            same(found, values[start : start + 20])
        same(column.spans(starts, starts)[0], values[:0])
    asked = [call[1:] for call in watched.calls if call[0] == "ask"]
    waited = [call[1:] for call in watched.calls if call[0] == "rows"]
    assert [call[0] for call in watched.calls] == ["ask"] * len(asked) + ["rows"] * len(waited)
    assert set(waited) <= set(asked)
    # What lay in memory was not read again, unless its span goes on in another shard.
    assert {shard for shard, start, stop in waited if shard % 3 == 2 and start > 0 and stop < 1000} == set()


@quick
@given(st.data(), SIZES, TAILS)
def test_indexing_is_numpys_where_nothing_is_mapped(data, sizes, tail):
    column, values = column_over(sizes, tail)
    column._shards = Watched(column._shards, mapped=False)
    key = data.draw(indexing(len(values)))
    try:
        expected = values[key]
    except IndexError:
        with pytest.raises(IndexError):
            column[key]
    else:
        same(column[key], expected)


@pytest.mark.parametrize("sizes", [[5], [2, 3]])
def test_columns_are_read_only(sizes):
    column, _ = column_over(sizes)
    with pytest.raises(TypeError):
        column[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        column[0:1][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        column.span(0, 1).fill(1)
    for _, piece in column.pieces():
        with pytest.raises(ValueError, match="read-only"):
            piece[0] = 1


def test_stores_on_disk_are_read_only(rich):
    store = mr.open_store(rich.path)
    for name, column in store.columns.items():
        raw = {"key": "raw", "text": "raw", "word": "codes", "city": "codes"}.get(name)
        array = getattr(column, raw) if raw else column.raw
        with pytest.raises(ValueError, match="read-only"):
            array[0:1].fill(0)
    with pytest.raises(ValueError, match="read-only"):
        store.offsets[0] = 1
    with pytest.raises(TypeError):
        store.columns["new"] = 1
    with pytest.raises(TypeError):
        store.meta["new"] = 1


@pytest.mark.parametrize("split", [None, "train", "val"])
@pytest.mark.parametrize("name", ["bool", "uint64", "float16", "wide", "image", "depth", "label"])
def test_what_was_written_is_read(rich, name, split):
    store = mr.open_store(rich.path)
    records = rich.of_split("train") + rich.of_split("val") if split is None else rich.of_split(split)
    column = (store if split is None else store.split(split)).columns[name]
    parts = [np.asarray(one[name]) for one in records]
    expected = np.array(parts) if rich.columns[name].per == "record" else np.concatenate(parts)
    same(np.asarray(column), expected)


def test_a_split_renumbers_rows_records_and_offsets_from_zero(rich):
    store = mr.open_store(rich.path)
    for split in ("train", "val"):
        part, records = store.split(split), rich.of_split(split)
        assert part.num_records == len(part) == len(records)
        assert part.num_shards > 1
        assert part.offsets.tolist() == np.cumsum([0, *(len(one["bool"]) for one in records)]).tolist()
        assert part.axis_offsets("pixels").tolist() == np.cumsum([0, *(len(one["image"]) for one in records)]).tolist()
        assert part.num_rows == part.offsets[-1]
        shards, inside = part.locate(np.arange(part.num_rows))
        starts = np.searchsorted(shards, np.arange(part.num_shards))
        assert np.array_equal(np.arange(part.num_rows) - starts[shards], inside)
        assert all(part.shard_name(k).startswith(split) for k in range(part.num_shards))


# Strings and dictionaries.


def texts_of(rich):
    return [one["key"] for one in rich.of_split("train") + rich.of_split("val")]


@quick
@given(data=st.data())
def test_strings_are_indexed_like_an_object_array(rich, data):
    expected = np.array(texts_of(rich), object)
    column = mr.open_store(rich.path).columns["key"]
    key = data.draw(indexing(len(expected)))
    try:
        wanted = expected[key]
    except IndexError:
        with pytest.raises(IndexError):
            column[key]
    else:
        found = column[key]
        assert type(found) is type(wanted)
        assert np.array_equal(found, wanted)


def test_strings_show_length_bytes_and_all_texts(rich):
    column = mr.open_store(rich.path).columns["text"]
    texts = [one["text"] for one in rich.of_split("train") + rich.of_split("val")]
    assert (len(column), column.shape, column.dtype) == (len(texts), (len(texts),), np.dtype(object))
    assert list(column) == texts
    assert np.asarray(column).tolist() == texts
    assert bytes(column.raw[:]) == "".join(texts).encode()
    assert [bytes(item).decode() for item in column.ragged(3, 9)] == texts[3:9]
    assert len(column.ragged(5, 5)) == 0
    assert repr(column) == f"<column of {len(texts)} strings>"


def test_text_that_is_no_utf8_is_refused_by_record():
    layout = Layout({"x": Column("int8"), "key": Column("string", per="record")})
    raw = np.frombuffer(b"ok\xff\xfe", np.uint8)
    store = array_store(
        layout, [("s", [np.array([0, 0, 0]), np.array([0, 2, 4]), np.zeros(0, np.int8), raw])], kind="records"
    )
    assert store.columns["key"][0] == "ok"
    with pytest.raises(mr.StoreCorrupt, match="column 'key' of record 1 is not utf-8") as caught:
        store.columns["key"][:]
    assert caught.value.column == "key"


@quick
@given(data=st.data())
def test_dictionaries_are_indexed_like_the_texts_they_stand_for(rich, data):
    records = rich.of_split("train") + rich.of_split("val")
    expected = np.array([word for one in records for word in one["word"]], object)
    column = mr.open_store(rich.path).columns["word"]
    key = data.draw(indexing(len(expected)))
    try:
        wanted = expected[key]
    except IndexError:
        with pytest.raises(IndexError):
            column[key]
    else:
        found = column[key]
        assert type(found) is type(wanted)
        assert np.array_equal(found, wanted)


def test_a_dictionary_shows_codes_and_values(rich):
    column = mr.open_store(rich.path).columns["city"]
    cities = [one["city"] for one in rich.of_split("train") + rich.of_split("val")]
    assert column.values == ("Ulm", "Zürich", "")  # in the order in which the writer met them
    assert (len(column), column.shape) == (len(cities), (len(cities),))
    assert column.codes.dtype == np.int32
    assert [column.values[code] for code in column.codes] == cities
    assert list(column) == np.asarray(column).tolist() == cities
    assert [column.code(city) for city in cities] == column.codes[:].tolist()
    with pytest.raises(mr.ConfigError, match="'Paris' is not among the 3 values of column 'city'"):
        column.code("Paris")
    assert repr(column) == f"<column ({len(cities)},) of 3 dictionary values>"


@pytest.mark.parametrize("code", [-1, 2, 2**31 - 1])
def test_a_code_without_a_value_is_refused(code):
    layout = Layout({"x": Column("dictionary", values=("a", "b"))})
    codes = np.array([0, 1, code], np.int32)
    column = array_store(layout, [("s", [np.array([0, 3]), codes])], kind="records").columns["x"]
    assert column[:2].tolist() == ["a", "b"]
    with pytest.raises(mr.StoreCorrupt, match=f"column 'x' holds code {code} of 2 values"):
        column[2]


# bfloat16, which numpy does not have: torch is the reference.


def torch_bits(array):
    return torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_every_bfloat16_is_shown_as_the_float32_it_stands_for():
    bits = np.arange(1 << 16, dtype=np.uint16)
    reference = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(torch.float32).numpy()
    # NaNs are compared by their bits: a payload is kept.
    assert np.array_equal(bfloat16_values(bits).view(np.uint32), reference.view(np.uint32))


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_floats_are_rounded_to_bfloat16_as_torch_does(bits):
    array = np.array(bits, np.uint32).view(np.float32)
    found, reference = bfloat16_bits(array), torch_bits(array)
    nan = np.isnan(array)
    assert np.array_equal(found[~nan], reference[~nan])
    assert np.isnan(bfloat16_values(found[nan])).all()


def test_bfloat16_rounds_to_even_and_keeps_signs_infinities_and_subnormals():
    # Around every bfloat16: itself, just below, half-way, just above the middle, the last before the next.
    high = np.arange(1 << 16, dtype=np.uint32) << 16
    array = (high[:, None] | np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)).reshape(-1).view(np.float32)
    nan = np.isnan(array)
    assert np.array_equal(bfloat16_bits(array)[~nan], torch_bits(array)[~nan])
    assert np.isnan(bfloat16_values(bfloat16_bits(array[nan]))).all()
    assert np.signbit(bfloat16_values(bfloat16_bits(np.float32([-0.0])))).all()


def test_a_bfloat16_column_shows_floats_and_raw_bits(rich):
    column = mr.open_store(rich.path).split("train").columns["bfloat16"]
    written = np.concatenate([one["bfloat16"] for one in rich.of_split("train")])
    assert column.dtype == np.float32
    assert column.raw.dtype == np.uint16
    assert np.array_equal(column.raw[:], torch_bits(written))
    assert np.array_equal(np.asarray(column), torch.from_numpy(written).to(torch.bfloat16).to(torch.float32).numpy())
    assert column[3] == column[:][3] == column[[3]][0]
    assert column[5:2:-1].dtype == np.float32


def test_a_column_of_a_store_on_disk_is_indexed_the_same(rich):
    column = mr.open_store(rich.path).columns["wide"]
    values = np.asarray(column)
    for key in (
        7,
        -1,
        slice(3, 50, 4),
        slice(None, None, -1),
        [5, 0, -2],
        values[:, 0, 0] > 0,
        (slice(2, 9), 1),
        (4, 1, 2),
    ):
        same(column[key], values[key])


def test_texts_are_read_by_their_spans(tmp_path, monkeypatch):
    """Not by a number for each of their bytes."""
    texts = [f"{k} " * (k % 50) for k in range(500)]
    with mr.StoreWriter(
        tmp_path / "store", columns={"name": mr.Column("string", per="record"), "v": mr.Column("int8")}
    ) as writer:
        for text in texts:
            writer.append({"name": text, "v": np.zeros(1, np.int8)})
    column = mr.open_store(tmp_path / "store").columns["name"]
    monkeypatch.setattr(type(column.raw), "take", None)
    assert column[:].tolist() == texts
    assert column[::-1].tolist() == texts[::-1]
    assert column[[3, 400, 3]].tolist() == [texts[3], texts[400], texts[3]]
    assert column[[]].tolist() == []
