"""``decode``: one record at a time, joined to columns; its randomness follows the position."""

import functools

import numpy as np
import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.rng import RecordRng, Rng


def decoded(feed_of, decode, **options):
    return list(feed_of(decode=decode, processes=False, epochs=1, **options))


def test_results_of_one_shape_are_stacked(feed_of):
    batch = decoded(feed_of, lambda record, rng: {"square": record["x"] ** 2, "one": 1.5})[0]
    assert batch.square.tolist() == (batch.samples[:, None] ** 2).tolist()
    assert batch.one.tolist() == [1.5] * 8


def test_results_that_differ_in_their_first_axis_are_ragged(feed_of):
    batch = decoded(feed_of, lambda record, rng: {"rows": np.full((record["x"][0] % 3, 2), record["y"][0])})[0]
    assert np.diff(batch.rows.offsets).tolist() == (batch.samples % 3).tolist()
    for k, sample in enumerate(batch.samples):
        assert batch.rows[k].tolist() == [[sample + 1] * 2] * (sample % 3)


def test_a_column_said_to_be_ragged_is_so_whatever_its_lengths(feed_of):
    batch = decoded(feed_of, lambda record, rng: {"rows": mr.Ragged.one(record["x"])})[0]
    assert isinstance(batch.rows, mr.Ragged)
    assert batch.rows.offsets.tolist() == list(range(9))


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (lambda record, rng: 3, "returned int; expected a mapping"),
        (lambda record, rng: {"x": np.zeros((1, record["x"][0] % 3))}, "only the first axis may differ"),
        (lambda record, rng: {"x": np.zeros(2, np.float32 if record["x"][0] == 13 else np.float64)}, r"float32\[2\]"),
        (
            lambda record, rng: {"a": 1} if record["x"][0] == 4 else {"b": 1},
            "ConfigError: it returned a; the samples before it b",
        ),
        (lambda record, rng: {3: 1}, "a batch has column 3; names are strings"),
    ],
)
def test_results_that_cannot_be_joined_are_refused(decode, message, feed_of):
    with pytest.raises(mr.MillraceError, match=message):
        decoded(feed_of, decode)


@pytest.mark.parametrize("processes", [False, True])
def test_an_error_names_the_sample(processes, feed_of):
    feed = feed_of(decode=functions.decode_raises, processes=processes, epochs=1)
    with pytest.raises(
        mr.StageFailed, match=r"decode raised at position \d+ \(sample 13\): KeyError: 'no such key'"
    ) as caught:
        list(feed)
    position = int(np.flatnonzero(feed.order.samples(np.arange(40)) == 13)[0])
    assert (caught.value.stage, caught.value.sample, caught.value.position) == ("decode", 13, position)
    assert feed.position == position // 8 * 8  # the batches before it were delivered


def test_the_numbers_of_a_record_are_those_of_its_position():
    """As ``Rng`` of the seed and "decode", without the first axis; other numbers than a transform draws."""
    alone, batch = RecordRng(7, 21), Rng(7 ^ int.from_bytes(b"decode", "big"), np.array([20, 21]))
    assert alone.uniform() == batch.uniform()[1]
    assert alone.integers(0, 9, 4).tolist() == batch.integers(0, 9, 4)[1].tolist()
    assert alone.normal(2, 3).tolist() == batch.normal(2, 3)[1].tolist()
    assert alone.generator().integers(0, 1 << 60) == batch.generator(1).integers(0, 1 << 60)
    assert alone.uniform(50).tolist() != Rng(7, np.array([21])).uniform(50)[0].tolist()


def draw(record, rng):
    return {"u": rng.uniform(2), "n": rng.normal()}


@pytest.mark.parametrize(("batch", "world", "workers"), [(40, 1, 1), (9, 2, 3), (4, 4, 2)])
def test_the_numbers_do_not_depend_on_batch_world_or_workers(batch, world, workers, feed_of):
    found = {}
    for rank in range(world):
        for part in decoded(feed_of, draw, batch=batch, rank=rank, world=world, workers=workers):
            found |= {int(p): (u.tolist(), n) for p, u, n in zip(part.positions, part.u, part.n, strict=True) if p >= 0}
    expected = {p: (RecordRng(3, p).uniform(2).tolist(),) for p in range(40)}
    assert {p: values[:1] for p, values in found.items()} == expected
    second = RecordRng(3, 5)
    second.uniform(2)
    assert found[5][1] == second.normal()


def test_the_records_of_a_store_are_decoded(tmp_path, feed_of, contents):
    """Compressed hits of events, say: each record has its own rows."""
    store = mr.from_arrays({"hits": np.arange(20.0)}, offsets=[0, 3, 3, 10, 20])
    options = {"batch": 2, "epochs": 1, "device": "numpy", "decode": functools.partial(functions.total, times=2)}
    expected = [2 * sum(range(*span)) for span in [(0, 3), (3, 3), (3, 10), (10, 20)]]
    for processes in (False, True):
        feed = mr.Feed(mr.Records(store), processes=processes, **options)
        found = {int(s): float(t) for batch in feed for s, t in zip(batch.samples, batch.total, strict=True)}
        assert [found[sample] for sample in range(4)] == expected


def test_a_decode_that_takes_other_arguments_is_refused_at_once(feed_of):
    with pytest.raises(mr.ConfigError, match=r"decode '<lambda>' takes \(record\); a decode takes \(record, rng\)"):
        feed_of(decode=lambda record: record)


@pytest.mark.parametrize("processes", [False, True])
def test_a_rank_whose_bins_are_empty_gets_the_columns_without_rows(processes):
    """The last batch of a feed with a budget may have rows for other ranks alone; a stand-in says what the columns are."""
    view = mr.Records(mr.from_arrays({"x": np.arange(10)}, offsets=[0, 3, 5, 10]))
    options = {
        "batch": 2,
        "max_rows": 20,
        "epochs": 1,
        "rank": 1,
        "world": 2,
        "device": "numpy",
        "processes": processes,
    }
    (batch,) = mr.Feed(view, decode=functions.decode, **options)
    assert (batch.rows.values.dtype, len(batch.rows), batch.u.shape, batch.g.shape) == (np.int64, 0, (0,), (0, 3))
    assert (batch.name, batch.bins.tolist()) == ([], [0, 0])
    for name, error in {"decode": "decode raised", "transform": "the transform raised"}.items():
        with pytest.raises(mr.StageFailed, match=f"{error} at position 0 .*ZeroDivisionError") as caught:
            list(mr.Feed(view, **{name: functions.divides}, **options))
        assert (caught.value.stage, caught.value.position) == (name, 0)
