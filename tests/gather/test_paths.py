"""However rows are copied (by the core, one index into a strided view, slices, reads without maps), the batch is the same."""

import contextlib
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.gather.core_gather import Native
from millrace.gather.rows import ColumnSpans


def by_numpy():
    """Gathers without the core."""
    return mock.patch.object(Native, "find", return_value=False)


@contextlib.contextmanager
def by_slices():
    """Gathers in numpy without the fancy index."""
    with by_numpy(), mock.patch.object(ColumnSpans, "_indexed", return_value=False):
        yield


def equal_batches(one, other):
    assert list(one) == list(other)
    for name, value in one.items():
        found = other[name]
        if isinstance(value, mr.Ragged):
            assert np.array_equal(value.offsets, found.offsets)
            value, found = value.values, found.values
        assert value.dtype == found.dtype
        assert np.array_equal(value, found)


def views_of(store):
    return [
        mr.Blocks(store, length=3, stride=1, column="token"),
        *(mr.Windows(store, lookback=2, horizon=1, column=name) for name in ("plain", "single", "half")),
        *(mr.Windows(store, lookback=1, horizon=2, column="plain", target=target) for target in ([1], [1, 0], [0, 1])),
        mr.Windows(store, lookback=1, horizon=1, column="half", target=[1, 2]),
        mr.Records(store),
        mr.Records(store, pad=3),
    ]


@given(rows=st.integers(1, 6), count=st.integers(1, 9), per_shard=st.integers(1, 9), data=st.data())
def test_the_fancy_index_and_the_slices_give_the_same(kit, rows, count, per_shard, data):
    store = kit.memory(kit.records([(rows, rows % 3)] * count), per_shard)  # equal lengths: the regular case
    for view in views_of(store):
        size = data.draw(st.integers(1, 80)) if len(view) else 0
        samples = np.random.default_rng(size).integers(0, max(len(view), 1), size)
        found = view[samples]
        for way in (by_numpy, by_slices):
            with way():
                equal_batches(found, view[samples])
        for place in range(0, size, 7):
            equal_batches(view.located(samples).fill(place, place + 1), view[samples[place : place + 1]])


def test_both_paths_are_taken(kit):
    store = kit.memory(kit.records([(8, 0)] * 4), 2)
    view = mr.Windows(store, lookback=2, horizon=1, column="plain")
    taken = []
    original = ColumnSpans._indexed

    def noting(rows, first, last, out):
        taken.append(original(rows, first, last, out))
        return taken[-1]

    with by_numpy(), mock.patch.object(ColumnSpans, "_indexed", noting):
        view[np.arange(64) % len(view)]
        assert taken
        assert all(taken)
        taken.clear()
        view[[0, len(view) - 1]]
        assert not any(taken)


def test_a_batch_over_many_shards_is_the_same(kit):
    store = kit.memory(kit.records([(4, 1)] * 90), 1)
    for view in views_of(store):
        samples = np.arange(2000) * 7 % len(view)
        found = view[samples]
        for way in (by_numpy, by_slices):
            with way():
                equal_batches(found, view[samples])


def test_rows_that_are_read_rather_than_mapped_are_the_same(kit):
    records = kit.records([(k % 5, k % 3) for k in range(12)])
    mapped, read = kit.disk(records), kit.disk(records)
    read._shards._max_maps = 0
    for view, other in zip(views_of(mapped), views_of(read), strict=True):
        samples = np.arange(100) % len(view)
        equal_batches(view[samples], other[samples])
    assert read.columns["plain"].whole(0) is None


def test_arrays_are_those_the_caller_allocates(kit):
    store = kit.memory(kit.records([(4, 2), (4, 1)]), 1)
    asked = {}

    def allocate(name, shape, dtype):
        asked[name] = np.empty(shape, dtype)
        return asked[name]

    pair = mr.Records(store, columns=["plain", "label"])
    for view in (*views_of(store), mr.Concat([pair, pair]), mr.Subset(pair, [1, 0])):
        asked.clear()
        found = view.located(np.array([0, 1, 0])).fill(0, 3, allocate)
        for field in view.fields:
            array = found[field.name]
            if not field.is_text:
                assert (array.values if isinstance(array, mr.Ragged) else array) is asked[field.name]
        equal_batches(found, view[[0, 1, 0]])


def test_a_batch_is_a_copy_that_may_be_changed(kit):
    store = kit.memory(kit.records([(4, 2), (4, 1)]), 2)
    for view in views_of(store):
        before, changed = view[[0, 1]], view[[0, 1]]
        for value in changed.values():
            (value.values if isinstance(value, mr.Ragged) else value).fill(0)
        equal_batches(view[[0, 1]], before)
