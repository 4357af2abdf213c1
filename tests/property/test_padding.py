"""Padded records: the core, its numpy twin and a plain loop agree on rows, lengths and masks, however they are asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.gather.gather import new_array
from millrace.gather.reference import Reference
from millrace.native import core

COLUMNS = {
    "tokens": mr.Column("uint16"),
    "hits": mr.Column("float32", (2,)),
    "pulse": mr.Column("int64", axis="pulses"),
    "label": mr.Column("int64", per="record"),
}


def make_records(lengths):
    return [
        {
            "tokens": np.arange(rows, dtype=np.uint16) + 10 * k,
            "hits": np.full((rows, 2), k, np.float32),
            "pulse": np.arange(pulses) - k,
            "label": k,
        }
        for k, (rows, pulses) in enumerate(lengths)
    ]


def by_loop(records, samples, pad, fill=None):
    """What a batch of these samples holds."""
    names = ("tokens", "hits", "pulse", "lengths", "lengths_pulses", "row_mask", "row_mask_pulses")
    found = {name: [] for name in names}
    for sample in samples:
        record = records[sample]
        behind = {"tokens": 0, "hits": 0.0, "pulse": 0} | (fill or {})
        for name, empty in {**behind, "hits": [behind["hits"]] * 2}.items():
            rows = record[name].tolist()[:pad]
            found[name].append(rows + [empty] * (pad - len(rows)))
        for name, end in (("tokens", ""), ("pulse", "_pulses")):
            count = len(record[name].tolist()[:pad])
            found["lengths" + end].append(count)
            found["row_mask" + end].append([True] * count + [False] * (pad - count))
    return {**found, "label": [records[sample]["label"] for sample in samples]}


def by_numpy(view, samples):
    """The numpy twin alone."""
    spans = {axis: view.spans(samples, axis) for axis in ("rows", "pulses")}
    return Reference(view._sources, view.fields, spans, view.records(samples)).fill(0, len(samples), new_array)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("padding")


numbers = iter(range(10**9))


@given(
    lengths=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12),
    pad=st.integers(1, 5),
    batch=st.integers(1, 5),
    shard_bytes=st.sampled_from([1, 200, 1 << 20]),
    parts=st.booleans(),
    fill=st.none()
    | st.fixed_dictionaries(
        {"tokens": st.integers(-(2**63), 2**63 - 1)},  # stored as uint16, delivered as int64
        optional={"hits": st.floats(width=32, allow_nan=False), "pulse": st.sampled_from([-100, 0, 1])},
    ),
)
def test_the_core_its_twin_and_a_loop_agree(folder, lengths, pad, batch, shard_bytes, parts, fill):
    records, path = make_records(lengths), folder / str(next(numbers))
    with mr.StoreWriter(path, columns=COLUMNS, shard_bytes=shard_bytes) as writer:
        for record in records:
            writer.append(record)
    store = mr.open_store(path)
    view = mr.Records(store, pad=pad, mask=True, fill=fill)
    ids = list(range(len(records)))
    if parts:  # all of them, then the same from the end
        view, ids = mr.Concat([view, mr.Subset(view, ids[::-1])]), ids + ids[::-1]
    ways = [view.located(np.arange(len(ids))).fill(0, len(ids)), view[list(range(len(ids)))], view[:]]
    ways.append(by_numpy(mr.Records(store, pad=pad, mask=True, fill=fill), ids))
    expected = by_loop(records, ids, pad, fill)
    for found in ways:
        assert list(found) == list(expected)
        for name, values in expected.items():
            assert found[name].tolist() == values, name
            assert found[name].dtype == ways[0][name].dtype
            assert found[name].tobytes() == ways[0][name].tobytes()
    for k in range(len(ids)):
        assert [value.tolist() for value in view[k].values()] == [values[k] for values in expected.values()]
    for got in mr.Feed(view, batch=batch, epochs=2, seed=pad, device="numpy"):
        loop = by_loop(records, [ids[sample] for sample in got.samples[got.valid]], pad, fill)
        assert list(got) == list(loop)
        for name, values in loop.items():
            assert got[name][got.valid].tolist() == values, name


def same(batch, rng):
    return batch


@pytest.mark.needs_core  # and processes
def test_threads_and_processes_fill_alike(tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns=COLUMNS) as writer:
        for record in make_records([(k % 4, k % 3) for k in range(20)]):
            writer.append(record)
    view = mr.Records(mr.open_store(tmp_path / "store"), pad=3, fill={"tokens": -100, "pulse": 7, "hits": "nan"})

    def batches(**options):
        with mr.Feed(view, batch=6, epochs=1, workers=1, **options) as feed:
            return [[np.asarray(value).tobytes() for value in batch.values()] for batch in feed]

    expected = batches(device="numpy")
    assert batches(device="cpu") == batches(transform=same) == batches(transform=same, processes=True) == expected


@pytest.mark.needs_core
def test_the_core_makes_padded_batches():
    """Else the test above would compare the twin with itself."""
    view = mr.Records(mr.from_arrays({"hits": np.arange(8.0)}, [0, 5, 8]), pad=4, mask=True, fill={"hits": -1})
    assert core is not None
    assert view._sources.native(view.fields) is not None
    feed = mr.Feed(view, batch=1, device="numpy")
    batches = iter(feed)
    next(batches)
    assert feed.report().way != "numpy"
