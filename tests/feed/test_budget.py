"""Batches bounded by rows: bins against a slow twin, ranks, resume at any bin, processes, padding and balance."""

import json
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.feed import budget

WORKERS = {"processes": hasattr(os, "memfd_create"), "workers": 2}  # threads on other platforms


def view_of(lengths):
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    columns = {"hits": np.arange(offsets[-1], dtype=np.float32), "label": np.arange(len(lengths))}
    return mr.Records(mr.from_arrays(columns, offsets, per={"hits": "row", "label": "record"}))


def feed_of(view, batch=3, max_rows=40, **options):
    return mr.Feed(view, **{"batch": batch, "max_rows": max_rows, "seed": 5, "device": "numpy", "epochs": 2, **options})


def bins_of(batches):
    """Every bin as its samples, in order; empty ones left out."""
    found = []
    for batch in batches:
        assert len(batch["hits"]) == len(batch.samples) == batch.bins[-1]
        found += [tuple(batch.samples[begin:end].tolist()) for begin, end in pairwise(batch.bins) if end > begin]
    return found


@pytest.fixture(autouse=True)
def small_windows(monkeypatch):
    monkeypatch.setattr(budget, "WINDOW", 32)


def transform(batch, rng):
    return {"hits": batch["hits"], "drawn": rng.integers(0, 1 << 40)}


lengths = st.lists(st.integers(0, 40), min_size=1, max_size=90)


@settings(max_examples=30)
@given(lengths=lengths, batch=st.integers(1, 5), max_rows=st.integers(40, 100))
def test_every_sample_comes_once_per_epoch_in_bins_within_the_budget(lengths, batch, max_rows):
    view = view_of(lengths)
    feed = feed_of(view, batch=batch, max_rows=max_rows)
    batches = list(feed)
    assert len(batches) == len(feed_of(view, batch=batch, max_rows=max_rows))
    found = bins_of(batches)
    samples = [sample for own in found for sample in own]
    for epoch in range(2):
        assert sorted(samples[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))
    for own in found:
        assert sum(max(1, lengths[sample]) for sample in own) <= max_rows
    for one in batches:
        assert np.array_equal(one["hits"].values, view[one.samples]["hits"].values)
        assert one.valid.all()
        assert len(one.bins) == batch + 1


@settings(max_examples=25)
@given(lengths=lengths, data=st.data())
def test_resume_at_any_step_with_other_ranks_and_batch_has_the_same_bins(lengths, data):
    view = view_of(lengths)
    whole = bins_of(feed_of(view, batch=1))
    feed = feed_of(view, batch=data.draw(st.integers(1, 4)))
    iterator = iter(feed)
    steps = data.draw(st.integers(0, len(feed)))
    got = bins_of([next(iterator) for _ in range(steps)])
    feed.close()
    state = json.loads(json.dumps(feed.state_dict()))
    assert state == json.loads(json.dumps(feed_of(view, batch=feed.batch).state_at(steps)))
    world = data.draw(st.integers(1, 3))
    batch = data.draw(st.integers(world, 6))
    parts = []
    for rank in range(world):
        again = feed_of(view, batch=batch, rank=rank, world=world)
        again.load_state_dict(state)
        remaining = again.remaining
        parts.append(list(again))
        assert len(parts[-1]) == remaining
    assert len({len(part) for part in parts}) == 1
    got += [own for step in zip(*parts, strict=True) for batch in step for own in bins_of([batch])]
    assert got == whole


def test_threads_and_processes_make_the_same_batches():
    view = view_of(np.random.default_rng(3).integers(1, 40, 90))
    expected = list(feed_of(view, transform=transform))
    for options in ({"workers": 2}, WORKERS):
        with feed_of(view, transform=transform, **options) as feed:
            for one, other in zip(feed, expected, strict=True):
                assert np.array_equal(one.samples, other.samples)
                assert np.array_equal(one.bins, other.bins)
                assert np.array_equal(one["drawn"], other["drawn"])
                assert np.array_equal(one["hits"].values, other["hits"].values)
            assert feed.report().samples == 180


def test_explain_steps_of_and_state_before_answer():
    view = view_of(np.random.default_rng(4).integers(1, 40, 90))
    batches = list(feed_of(view))
    for step in (0, 5, len(batches) - 1):
        assert feed_of(view).explain(step).samples.tolist() == batches[step].samples.tolist()
        assert (feed_of(view).steps_of(batches[step].samples, epoch=int(step > len(batches) // 2)) == step).all()
    feed = feed_of(view)
    iterator = iter(feed)
    next(iterator)
    state = feed.state_dict()
    assert feed.state_before(next(iterator)) == state
    assert len(list(feed_of(view).by_epoch(repeat=True))) == len(feed_of(view, epochs=1))


def test_log_normal_records_fill_bins_and_balance_ranks(monkeypatch):
    monkeypatch.setattr(budget, "WINDOW", 1 << 16)
    view = view_of(np.exp(np.random.default_rng(7).normal(np.log(60), 0.7, 70_000)).astype(int) + 1)
    ranks = [[] for _ in range(4)]
    padded = real = 0
    for rank, rows in enumerate(ranks):
        for batch in feed_of(view, batch=8, max_rows=4096, rank=rank, world=4, epochs=1):
            rows.append(len(batch["hits"].values))
            for begin, end in pairwise(batch.bins):
                lengths = batch["hits"].lengths[begin:end]
                padded, real = padded + len(lengths) * int(lengths.max(initial=0)), real + int(lengths.sum())
    totals = [sum(rows) for rows in ranks]
    assert max(totals) / min(totals) < 1.05
    assert real / padded > 0.95


def test_what_cannot_be_bounded_is_refused():
    view = view_of([3, 50, 7])
    with pytest.raises(mr.ConfigError, match="the 50 rows of sample 1"):
        feed_of(view)
    fine = view_of([3, 9, 7])
    with pytest.raises(mr.ResumeMismatch, match="max_rows=40, this feed has max_rows=41"):
        feed_of(fine, max_rows=41).load_state_dict(feed_of(fine).state_dict())
    with pytest.raises(mr.ResumeMismatch, match="max_rows=None"):
        feed_of(fine).load_state_dict(feed_of(fine, max_rows=None).state_dict())
    with pytest.raises(mr.ConfigError, match="bin is -1"):
        feed_of(fine).load_state_dict({**feed_of(fine).state_dict(), "bin": -1})
    for options, match in (({"last": "short"}, "last='short'"), ({"run": "x"}, "run= notes steps")):
        with pytest.raises(mr.ConfigError, match=match):
            feed_of(fine, **options)
    with pytest.raises(mr.ConfigError, match="by_epoch"):
        feed_of(fine).by_epoch()
    with pytest.raises(mr.ConfigError, match="max_rows= of a mixture"):
        feed_of(mr.Mixture([(fine, 1)]), epochs=None)
    assert set(feed_of(fine, max_rows=None).state_dict()) == {"version", "position", "store", "view", "order", "seed"}
