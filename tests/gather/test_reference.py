"""The gather in numpy against slicing sample by sample: pieces, shards, axes, casts, padding, ragged offsets."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.gather.gather import Field, Located

DELIVERED = {"uint16": "int64", "float16": "float32", "bfloat16": "float32", "dictionary": "int32", "string": "object"}


class Pieces(mr.View):
    """A view of one's own: each sample is any pieces of rows, given per axis."""

    def __init__(self, store, pieces, fields, records):
        self.store, self._pieces, self.fields, self._records = store, pieces, tuple(fields), records

    def __len__(self):
        return len(self._records)

    def spans(self, samples, axis=None):
        chosen = [self._pieces[axis or "rows"][sample] for sample in self._checked(samples)]
        flat = np.array([piece for pieces in chosen for piece in pieces], np.int64).reshape(-1, 2)
        return mr.Spans(flat[:, 0], flat[:, 1], np.cumsum([0, *map(len, chosen)], dtype=np.int64))

    def records(self, samples):
        return np.array(self._records, np.int64)[self._checked(samples)]

    def spec(self):
        return {"view": "pieces"}


def draw_pieces(rng, rows, at_least):
    """Pieces in any order, overlapping or empty, with at least so many rows together."""
    pieces = []
    for _ in range(rng.integers(0, 4)):
        start, stop = sorted(rng.integers(0, rows + 1, 2).tolist())
        pieces.append((start, stop))
    while sum(stop - start for start, stop in pieces) < at_least:
        start = int(rng.integers(0, rows))
        pieces.insert(int(rng.integers(0, len(pieces) + 1)), (start, int(rng.integers(start + 1, rows + 1))))
    return pieces


def dtype_of(column):
    return np.dtype(DELIVERED.get(column.dtype, column.dtype))


def expected(field, columns, pieces, records, record):
    """One sample of one field, by slicing."""
    if field.is_text:
        return records[record][field.column]
    if field.axis is None:
        return np.asarray(records[record][field.column]).astype(field.dtype)
    none = np.zeros((0, *columns[field.column].shape))
    rows = np.concatenate([none, *(one[field.column] for one in records)]).astype(field.dtype)
    found = np.concatenate([rows[:0], *(rows[start:stop] for start, stop in pieces[field.axis])])
    if field.length is not None:
        found = found[field.first : field.first + field.length]
        found = found[:, None] if field.is_single else found
        return found if field.items is None else found[..., list(field.items)]
    if field.pad is not None:
        dense = np.zeros((field.pad, *found.shape[1:]), found.dtype)
        dense[: len(found[: field.pad])] = found[: field.pad]
        return dense
    return found


def compare(found, want, field):
    if field.is_text:
        assert found.tolist() == want
        return
    if field.axis is not None and field.length is None and field.pad is None:
        assert isinstance(found, mr.Ragged)
        assert found.offsets.tolist() == np.cumsum([0, *map(len, want)]).tolist()
        assert found.offsets.dtype == np.int64
        want = np.concatenate([np.zeros((0, *field.tail), field.dtype), *want])
        found = found.values
    else:
        want = np.stack(want) if want else np.zeros((0, *field.shape), field.dtype)
    assert (found.dtype, found.shape) == (field.dtype, want.shape)
    assert np.array_equal(found, want)
    assert found.flags.c_contiguous


@st.composite
def fields_of(draw, columns, rows_on_axes):
    """Some fields of every kind; dense ones only on axes that have rows."""
    made = []
    for name, column in columns.items():
        what = {"dtype": dtype_of(column), "tail": column.shape, "is_bits": column.dtype == "bfloat16"}
        if column.axis is None:
            made.append(Field(name, name, None, **what, is_text=column.dtype == "string"))
            continue
        made.append(Field(name, name, column.axis, **what, pad=draw(st.none() | st.integers(1, 5))))
        for suffix in ("x", "y") if rows_on_axes[column.axis] else ():
            first, length = draw(st.integers(0, 4)), draw(st.integers(1, 5))
            more = dict(what)
            if column.shape and draw(st.booleans()):
                items = tuple(draw(st.lists(st.integers(0, column.shape[-1] - 1), min_size=1, max_size=3)))
                more |= {"items": items, "tail": (*column.shape[:-1], len(items))}
            elif not column.shape and draw(st.booleans()):
                more |= {"tail": (1,), "is_single": True}
            made.append(Field(name + suffix, name, column.axis, first=first, length=length, **more))
    return draw(st.lists(st.sampled_from(made), min_size=1, unique_by=lambda field: field.name))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=7),
    per_shard=st.integers(1, 4),
    count=st.integers(0, 40),
    seed=st.integers(0, 1 << 20),
    on_disk=st.sampled_from([False, False, True]),
    data=st.data(),
)
def test_samples_of_any_pieces_are_their_slices(kit, lengths, per_shard, count, seed, on_disk, data):
    rng = np.random.default_rng(seed)
    records = kit.records(lengths, seed)
    store = kit.disk(records) if on_disk else kit.memory(records, per_shard)
    rows = {"rows": sum(one for one, _ in lengths), "image": sum(two for _, two in lengths)}
    fields = data.draw(fields_of(kit.columns, rows))
    axes = {}
    for axis, limit in rows.items():
        needed = max((f.first + f.length for f in fields if f.axis == axis and f.length is not None), default=0)
        axes[axis] = [draw_pieces(rng, limit, needed) for _ in range(count)]
    owners = rng.integers(0, len(records), count).tolist()
    view = Pieces(store, axes, fields, owners)
    samples = rng.integers(0, count, 30) if count else np.zeros(0, np.int64)
    batch = view[samples]
    assert list(batch) == [field.name for field in fields]
    first, last = sorted(rng.integers(0, len(samples) + 1, 2).tolist())
    part = view.located(samples).fill(first, last)
    for field in fields:
        want = [
            expected(field, kit.columns, {axis: own[k] for axis, own in axes.items()}, records, owners[k])
            for k in samples
        ]
        compare(batch[field.name], want, field)
        compare(part[field.name], want[first:last], field)


def test_one_piece_each_is_the_same_with_and_without_offsets(kit):
    records = kit.records([(5, 1), (0, 2), (7, 0), (4, 3)])
    store = kit.memory(records, 1)
    starts = np.array([0, 3, 9, 12, 4, 4])
    fields = [
        Field("x", "half", "rows", np.dtype(np.float32), (3,), length=3),
        Field("y", "half", "rows", np.dtype(np.float32), (3,), first=2, length=2),
        Field("all", "plain", "rows", np.dtype(np.float32), (2,)),
    ]
    columns = {name: store.columns[name] for name in ("half", "plain")}
    one, other = (
        Located(columns, fields, {"rows": mr.Spans(starts, starts + 4, offsets)}, None).fill(0, len(starts))
        for offsets in (None, np.arange(len(starts) + 1))
    )
    for field in fields:
        compare(other[field.name], list(one[field.name]), field)


# Edges.


@pytest.mark.parametrize("per_shard", [1, 3])
def test_empty_spans_stand_anywhere_also_at_the_very_end(kit, per_shard):
    store = kit.memory(kit.records([(3, 0), (0, 0), (2, 0), (0, 0)]), per_shard)
    field = Field("plain", "plain", "rows", np.dtype(np.float32), (2,))
    places = np.repeat(np.arange(6), 20)
    found = Located({"plain": store.columns["plain"]}, [field], {"rows": mr.Spans(places, places)}, None).fill(0, 120)
    assert found["plain"].offsets.tolist() == [0] * 121
    assert found["plain"].values.shape == (0, 2)


@pytest.mark.parametrize("count", [3, 64])
def test_a_store_without_shards_has_samples_without_rows(kit, count):
    store = kit.disk([])
    assert store.num_shards == 0
    assert len(mr.Records(store)) == 0
    assert mr.Records(store)[[]]["plain"].values.shape == (0, 2)
    fields = [
        Field("half", "half", "rows", np.dtype(np.float32), (3,)),
        Field("pixel", "pixel", "image", np.dtype("u1")),
    ]
    found = Pieces(store, {"rows": [[], [(0, 0)]], "image": [[(0, 0)], []]}, fields, [0, 0])[np.arange(count) % 2]
    assert found["half"].offsets.tolist() == found["pixel"].offsets.tolist() == [0] * (count + 1)
    spans = mr.Spans(np.zeros(count, np.int64), np.zeros(count, np.int64))
    columns = {"half": store.columns["half"]}
    assert Located(columns, fields[:1], {"rows": spans}, None).fill(0, count)["half"].values.shape == (0, 3)


def test_a_view_of_pieces_knows_the_record_each_sample_starts_in(kit):
    store = kit.memory(kit.records([(3, 0), (0, 0), (2, 0)]), 2)

    class Started(Pieces):
        records = mr.View.records

    view = Started(store, {"rows": [[(4, 5), (0, 1)], [(0, 3), (3, 5), (1, 1)], [(3, 4)]]}, [], [0, 0, 0])
    assert view.records([0, 1, 2, 1]).tolist() == [2, 0, 2, 0]


def test_a_field_knows_the_shape_of_one_sample():
    number = np.dtype(np.float32)
    assert Field("x", "x", "rows", number, (3,), length=4).shape == (4, 3)
    assert Field("x", "x", "rows", number, (3,), pad=5).shape == (5, 3)
    assert Field("x", "x", "rows", number, (3,)).shape == (None, 3)
    assert Field("x", "x", None, number, (3,)).shape == (3,)
