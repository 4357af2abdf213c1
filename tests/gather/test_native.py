"""The core's gather: every cast to the last bit, wrong spans and wrong calls as errors, several threads."""

import os
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.gather import core_gather as native
from millrace.gather.gather import Field, Located, new_array
from millrace.gather.reference import Reference
from millrace.native import core

HIDDEN = os.environ.get("MILLRACE_TEST_HIDE") == "1" or os.environ.get("MILLRACE_NATIVE") == "0"
needs_core = pytest.mark.needs_core


def test_the_core_is_there_unless_it_is_hidden():
    assert (core is None) == HIDDEN


def by_numpy(view, samples):
    """The numpy twin alone."""
    spans = {axis: view.spans(samples, axis) for axis in {field.axis for field in view.fields} - {None}}
    return Reference(view._sources, view.fields, spans, view.records(samples)).fill(0, len(samples), new_array)


def both_ways(view, samples):
    yield view[samples]
    yield by_numpy(view, samples)


STORED = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.mark.parametrize("dtype", STORED)
def test_tokens_are_widened_to_the_last_bit(dtype):
    tokens = np.frombuffer(np.random.default_rng(0).bytes(8 * 3000), dtype)[:3000]
    for found in both_ways(mr.Blocks(mr.from_arrays({"tokens": tokens}), length=7, stride=3), np.arange(500)):
        rows = np.arange(500)[:, None] * 3 + np.arange(7)
        assert np.array_equal(found["x"], tokens.astype(np.int64)[rows])
        assert np.array_equal(found["y"], tokens.astype(np.int64)[rows + 1])
        assert found["x"].dtype == np.int64


def test_every_half_is_widened_to_the_last_bit():
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    one, other = both_ways(mr.Windows(mr.from_arrays({"values": halves}), lookback=1, horizon=1), np.arange(65535))
    assert one["x"].tobytes() == other["x"].tobytes()


def test_every_bfloat16_is_widened_to_the_last_bit(tmp_path):
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    with mr.StoreWriter(tmp_path / "store", kind="series", columns={"values": mr.Column("bfloat16")}) as writer:
        finite = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
        writer.extend({"values": finite}, [0, len(finite)])
    view = mr.Windows(mr.open_store(tmp_path / "store"), lookback=1, horizon=1)
    for found in both_ways(view, np.arange(len(view))):
        assert found["x"].tobytes() == finite[:-1].tobytes()


class Wrong(mr.View):
    """A view whose spans are what a test says."""

    def __init__(self, spans, records=None):
        self.store = mr.from_arrays({"hits": np.arange(10.0), "label": [1, 2]}, [0, 4, 10])
        self._spans, self._records = spans, records
        self.fields = (
            Field("x", "hits", "rows", np.dtype(float), length=3),
            *([] if records is None else [Field("label", "label", None, np.dtype(np.int64))]),
        )

    def __len__(self):
        return 2

    def spans(self, samples, axis=None):
        return mr.Spans(*(np.array(part) for part in self._spans))

    def records(self, samples):
        return np.array(self._records)

    def spec(self):
        return {}


@pytest.mark.parametrize(
    "spans",
    [
        ([0, 8], [3, 11]),
        ([0, 10], [3, 13]),
        ([0, (1 << 63) - 4], [3, (1 << 63) - 1]),
        ([0, 4], [3, 6]),
        ([0, 4], [3, 4]),
        ([0, 4, 9], [3, 6, 12], [0, 1, 3]),
        ([0, 4], [3, 6], [0, 1, 2]),
        ([0], [3], [0, 1, 1]),
    ],
)
def test_a_wrong_span_is_an_error(spans):
    with pytest.raises(mr.ConfigError, match="its view is wrong"):
        list(both_ways(Wrong(spans), np.array([0, 1])))
    if not HIDDEN:
        with pytest.raises((mr.ConfigError, ValueError)):
            by_numpy(Wrong(spans), np.array([0, 1]))


@needs_core
@pytest.mark.parametrize("record", [-1, 2, 1 << 40])
def test_a_wrong_record_is_an_error(record):
    with pytest.raises(mr.ConfigError, match="its view is wrong"):
        Wrong(([0, 4], [3, 7]), [0, record])[np.array([0, 1])]


@needs_core
@given(rows=st.integers(1, 300), threads=st.integers(1, 8), count=st.integers(0, 700), seed=st.integers(0, 99))
def test_any_number_of_threads_gives_the_same(rows, threads, count, seed):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate(([0], np.sort(rng.integers(0, rows + 1, 20)), [rows]))
    columns = {"hits": np.arange(rows * 2).reshape(rows, 2), "label": np.arange(21)}
    store = mr.from_arrays(columns, offsets, per={"label": "record"})
    samples = rng.integers(0, 21, count)
    several = {"THREAD_BYTES": 1, "MAX_THREADS": threads}
    with mock.patch.multiple(native, **several, num_cores=lambda: threads):
        found = mr.Records(store)[samples]
    expected = by_numpy(mr.Records(store), samples)
    assert np.array_equal(found["hits"].values, expected["hits"].values)
    assert np.array_equal(found["label"], expected["label"])


# Calls that are wrong: an exception each, whatever is wrong with them.


def small():
    column = core.Column(np.array([0, 2, 5]), 8)
    column.give(0, np.arange(2.0))
    column.give(1, np.arange(3.0))
    return column


def fill(gather, *, starts=(0, 1), stops=(2, 3), offsets=None, records=None, first=0, last=2, out=4, places=None):
    axes = ((np.array(starts), np.array(stops), None if offsets is None else np.array(offsets)),)
    outs = (np.zeros(out),)
    gather.fill(axes, records, first, last, outs, (None if places is None else np.array(places),), 1)
    return outs[0]


@needs_core
def test_calls_that_are_wrong_are_errors():
    dense = core.Gather((small(),), (("x", 0, 0, 0, 0, 0, 2, 1, 1, 8, None),))
    ragged = core.Gather((small(),), (("x", 0, 1, 0, 0, 0, 0, 1, 1, 8, None),))
    record = core.Gather((small(),), (("x", 0, 3, 0, 0, 0, 1, 1, 1, 8, None),))
    assert fill(dense).tolist() == [0, 1, 1, 0]
    assert fill(ragged, places=[0, 2, 4]).tolist() == [0, 1, 1, 0]
    wrong = [
        (dense, {"out": 3}),
        (dense, {"out": 5}),
        (dense, {"last": 3}),
        (dense, {"first": -1}),
        (dense, {"first": 2, "last": 1}),
        (dense, {"stops": [2]}),
        (dense, {"offsets": [0, 2, 3]}),
        (dense, {"offsets": [0, -1, 2]}),
        (dense, {"starts": [0, -5]}),
        (dense, {"starts": [0.0, 1.0]}),
        (ragged, {"places": [0, 2]}),
        (ragged, {"places": [0, 3, 4]}),
        (ragged, {"places": [0, 5, 4]}),
        (ragged, {"places": [1, 2, 4]}),
        (ragged, {}),
        (record, {"out": 2}),
        (record, {"out": 2, "records": np.array([0])}),
    ]
    for gather, options in wrong:
        with pytest.raises((ValueError, TypeError)):
            fill(gather, **options)


@needs_core
@pytest.mark.parametrize(
    "field",
    [
        ("x", 1, 0, 0, 0, 0, 2, 1, 1, 8, None),
        ("x", 0, 9, 0, 0, 0, 2, 1, 1, 8, None),
        ("x", 0, 0, 99, 0, 0, 2, 1, 1, 8, None),
        ("x", 0, 0, 0, 99, 0, 2, 1, 1, 8, None),
        ("x", 0, 0, 0, 0, -1, 2, 1, 1, 8, None),
        ("x", 0, 0, 0, 0, 1 << 62, 1 << 62, 1, 1, 8, None),
        ("x", 0, 0, 0, 0, 0, 2, 2, 1, 8, None),
        ("x", 0, 0, 0, 0, 0, 2, 1, 1, 4, None),
        ("x", 0, 0, 0, 0, 0, 2, 1, 1, 8, (1,)),
        ("x", 0, 0, 0, 0, 0, 2, 1, 1, 8, (-1,)),
        ("x", 0, 0, 0, 0, 0, 2, 1, 1, 8, ()),
        ("x", 0, 0, 0, 4, 0, 2, 1, 1, 8, None),
    ],
)
def test_fields_that_are_wrong_are_errors(field):
    with pytest.raises((ValueError, TypeError, IndexError)):
        core.Gather((small(),), (field,))


@needs_core
def test_columns_that_are_wrong_are_errors():
    for starts, row_bytes in [([0, 3, 2], 8), ([1, 2], 8), ([], 8), ([0, 1 << 62], 8), ([0, 2], -1)]:
        with pytest.raises((ValueError, TypeError)):
            core.Column(np.array(starts, np.int64), row_bytes)
    column = core.Column(np.array([0, 2]), 8)
    for shard, array in [(1, np.zeros(2)), (-1, np.zeros(2)), (0, np.zeros(1)), (0, np.zeros(4)[::2]), (0, "text")]:
        with pytest.raises((ValueError, TypeError, IndexError)):
            column.give(shard, array)
    gather = core.Gather((column,), (("x", 0, 0, 0, 0, 0, 2, 1, 1, 8, None),))
    with pytest.raises(mr.FeedError, match="was not given"):
        fill(gather)


def test_memory_that_is_not_one_run_is_gathered_by_numpy():
    wide = np.arange(40.0).reshape(20, 2)
    view = mr.Windows(mr.from_arrays({"values": wide[::2]}), lookback=2, horizon=1)
    assert view[[3, 0]]["x"].tolist() == [wide[6:10:2].tolist(), wide[0:4:2].tolist()]
    assert (
        Located({"values": view.store.columns["values"]}, view.fields, {"rows": view.spans([0])}, None)._native is None
    )
