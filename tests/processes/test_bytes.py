"""Batches from processes are those from threads, byte for byte, however many workers and wherever the run stands."""

import json

import numpy as np
import pytest
import worker_functions as functions
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import millrace as mr

OPTIONS = {"plain": {}, "transform": {"transform": functions.noisy}, "decode": {"decode": functions.decode},
           "both": {"transform": functions.shifted, "decode": functions.decode},
           "columns": {"transform": functions.columns}}  # fmt: skip


@pytest.mark.parametrize("kind", OPTIONS)
def test_batches_are_those_of_threads_with_any_number_of_workers(kind, feed_of, contents):
    options = {**OPTIONS[kind], "epochs": 3}
    expected = contents(feed_of(processes=False, workers=3, **options))
    assert len(expected) == 15
    for workers, depth in [(1, 1), (3, 5)]:
        assert contents(feed_of(workers=workers, depth=depth, **options)) == expected


def test_spawned_workers_make_the_same(feed_of, contents):
    options = {"transform": functions.noisy, "epochs": 2}
    assert contents(feed_of(processes="spawn", **options)) == contents(feed_of(processes=False, **options))


def test_tensors_come_as_tensors(feed_of, contents):
    import tensor_functions

    options = {"transform": tensor_functions.tensors, "epochs": 1, "device": "cpu"}
    assert contents(feed_of(**options)) == contents(feed_of(processes=False, **options))


@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_what_the_loop_keeps_stays_as_it_was(start, feed_of, contents):
    """More batches than slots and than descriptors: each has its own memory."""
    feed = feed_of(functions.noisy, epochs=20, processes=start)
    kept = list(feed)
    feed.close()
    assert len(kept) == 100
    expected = contents(feed_of(functions.noisy, epochs=20, processes=False))
    for batch, (marks, columns) in zip(kept, expected, strict=True):
        assert batch.positions.tolist() == marks[0]
        assert batch.x.tobytes() == columns["x"][2]


def test_a_batch_larger_than_its_slot_is_counted_and_served(feed_of, contents):
    feed = feed_of(functions.growing, n=160, epochs=1, workers=1)
    assert contents(feed) == contents(feed_of(functions.growing, n=160, epochs=1, processes=False))
    assert feed.report().outgrown >= 1
    assert "larger than their slot" in str(feed.report())


def rows_of(feeds, steps):
    """(position, every value of the row) of the next steps, all ranks together."""
    rows = []
    for feed in feeds:
        for _, batch in zip(range(steps), feed, strict=False):
            for k in np.flatnonzero(batch.valid):
                ragged = batch["rows"][k].tolist()
                rows.append(
                    (int(batch.positions[k]), ragged, batch.u[k], batch.v[k], batch.g[k].tolist(), batch.name[k])
                )
        feed.close()
    return sorted(rows)


@given(
    parts=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(2, 9), st.sampled_from([0, 1, 3])), min_size=2, max_size=3
    )
)  # fmt: skip
@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_a_run_goes_on_the_same_with_another_world_batch_and_number_of_workers(parts, feed_of):
    """Each part: steps, world, batch, workers (0: threads), from the state of the part before, as JSON."""
    found, state = [], None
    for steps, world, batch, workers in parts:
        options = {"decode": functions.decode, "processes": workers > 0, "workers": workers or 2, "batch": batch}
        feeds = [feed_of(functions.shifted, rank=rank, world=world, **options) for rank in range(world)]
        if state is not None:
            for feed in feeds:
                feed.load_state_dict(json.loads(state))
        found += rows_of(feeds, steps)
        assert len({json.dumps(feed.state_dict()) for feed in feeds}) == 1
        state = json.dumps(feeds[0].state_dict())
    whole = feed_of(functions.shifted, decode=functions.decode, processes=False, batch=1)
    assert found == rows_of([whole], len(found))


def test_the_state_at_every_step_continues_the_same(feed_of, contents):
    """Saved while batches are made ahead: what the loop has not got does not count."""
    expected = contents(feed_of(functions.noisy, epochs=2, processes=False))
    feed = feed_of(functions.noisy, epochs=2, depth=6)
    states = [feed.state_dict(), *(feed.state_dict() for _ in feed)]
    assert feed.state_at(len(states) - 1) == states[-1]
    for step in (0, 3, 5, 9, 10):
        other = feed_of(functions.noisy, epochs=2, workers=1)
        other.load_state_dict(json.loads(json.dumps(states[step])))
        assert other.state_dict() == states[step]
        assert contents(other) == expected[step:]
        other.close()


@pytest.mark.parametrize("device", ["numpy", "cpu"])
def test_columns_of_one_axis_share_their_offsets(tmp_path, device):
    axes = {"x": "hits", "y": "hits", "p": "tracks"}
    with mr.StoreWriter(tmp_path / "store", columns={n: mr.Column("int64", axis=a) for n, a in axes.items()}) as writer:
        for k in range(12):
            writer.append({"x": range(k), "y": range(k), "p": range(2)})
    view = mr.Records(mr.open_store(tmp_path / "store"))
    with mr.Feed(view, batch=4, epochs=1, workers=1, processes=True, device=device) as feed:
        for batch in feed:
            assert batch.x.offsets is batch.y.offsets
            assert batch.p.offsets.tolist() == [0, 2, 4, 6, 8]
            assert all(batch.y[row].tolist() == list(range(k)) for row, k in enumerate(batch.samples))
