"""Batches bounded by rows: bins against a slow twin, ranks, resume at any bin, processes, padding and balance."""

import copy
import json
import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.cli.explain import explain_run
from millrace.feed import budget, journal

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
    held = {sample: step for step, batch in reversed(list(enumerate(batches))) for sample in batch.samples.tolist()}
    assert feed_of(view).steps_of(list(held)).tolist() == list(held.values())
    feed = feed_of(view)
    iterator = iter(feed)
    next(iterator)
    state = feed.state_dict()
    assert feed.state_before(next(iterator)) == state
    assert len(list(feed_of(view).by_epoch(repeat=True))) == len(feed_of(view, epochs=1))


def source_of(count, seed):
    return view_of(np.random.default_rng(seed).integers(0, 40, count))


@pytest.mark.parametrize("seed", range(6))
def test_a_mixture_in_bins_resumes_anywhere_and_keeps_its_weights_to_the_sample(seed):
    rng = np.random.default_rng(seed)
    mixture = mr.Mixture([(source_of(70, 1), 2), (source_of(23, 2), 1)], schedule=[(100, [1, 1])])
    whole = feed_of(mixture, batch=1, epochs=None)
    bins = [own for _, batch in zip(range(120), whole, strict=False) for own in bins_of([batch])]
    feed = feed_of(mixture, batch=3, epochs=None)
    iterator, steps = iter(feed), int(rng.integers(0, 20))
    got = bins_of([next(iterator) for _ in range(steps)])
    feed.close()
    state = json.loads(json.dumps(feed.state_dict()))
    ranks = [feed_of(mixture, batch=4, epochs=None, rank=rank, world=2) for rank in range(2)]
    for again in ranks:
        again.load_state_dict(state)
    for shares in zip(*ranks, range(10), strict=False):
        got += bins_of(shares[:2])
    assert got == bins[: len(got)]
    delivered = sorted(whole.order.positions([s for own in bins for s in own][:32]).tolist())
    assert delivered == list(range(32))  # the first window
    for step in (0, 7):
        found = whole.explain(step)
        assert {row["part"] for row in found["rows"]} <= {0, 1}
        for sample, epoch in zip(found.samples.tolist(), found.epochs.tolist(), strict=True):
            assert whole.steps_of([sample], epoch=epoch) == [step]


@pytest.mark.parametrize("steps", [0, 1, 4, 9])
def test_other_weights_begin_with_the_next_window(steps):
    sources = source_of(700, 1), source_of(230, 2)
    feed = feed_of(mr.Mixture([(sources[0], 1), (sources[1], 0)]), epochs=None)
    iterator = iter(feed)
    got = [next(iterator) for _ in range(steps)]
    feed.close()
    changed = feed_of(mr.Mixture([(sources[0], 0), (sources[1], 1)]), epochs=None)
    changed.load_state_dict(feed.state_dict())
    got += [batch for _, batch in zip(range(30), changed, strict=False)]
    positions = np.concatenate([batch.positions for batch in got])
    samples = np.concatenate([batch.samples for batch in got])
    assert len(set(positions.tolist())) == len(positions)
    window = feed.position // 32 + (feed.bin > 0)
    assert ((samples >= 700) == (positions >= window * 32)).all()
    assert sorted(positions.tolist())[: window * 32 + 32] == list(range(window * 32 + 32))


@pytest.mark.parametrize("last", ["pad", "drop"])
def test_passes_end_with_their_epoch_and_resume_within_it(last):
    view = source_of(31, 5)
    options = {"epochs": None, "batch": 4, "last": last}
    feed = feed_of(view, **options)
    passes = feed.by_epoch()
    whole = [list(passes) for _ in range(3)]
    assert {len(own) for own in whole} == {len(passes)}
    if last == "pad":
        for own in whole:
            assert sorted(sample for one in bins_of(own) for sample in one) == list(range(31))
    for number, batch in enumerate([batch for own in whole for batch in own]):
        assert feed.explain(number).samples.tolist() == batch.samples.tolist()
        assert (feed.steps_of(batch.samples, epoch=number // len(passes)) == number).all()
        first = feed_of(view, **options)
        first.by_epoch()
        state = json.loads(json.dumps(first.state_at(number)))
        ranks = [feed_of(view, rank=rank, world=2, **options) for rank in range(2)]
        rest = []
        for again in ranks:
            loader = again.by_epoch()
            loader.load_state_dict(state)
            rest.append(list(loader))
        begin = len(passes) * (number // len(passes))
        expected = bins_of(whole[number // len(passes)][number - begin :])
        assert [own for step in zip(*rest, strict=True) for share in step for own in bins_of([share])] == expected


def test_a_framework_that_ends_a_pass_within_its_window_goes_on_with_the_next():
    feed = feed_of(source_of(31, 5), epochs=None, batch=4)
    passes = feed.by_epoch()
    whole = [bins_of(passes) for _ in range(2)]
    again = feed_of(source_of(31, 5), epochs=None, batch=4)
    first = feed_of(source_of(31, 5), epochs=None, batch=4)
    next(iter(first))
    first.close()
    loader = again.by_epoch()
    loader.load_state_dict(first.state_dict())
    loader.end_epoch(None)
    assert bins_of(loader) == whole[1]


def test_a_pickled_feed_and_an_empty_last_share_know_their_bin():
    view = source_of(31, 5)
    feed = feed_of(view)
    iterator = iter(feed)
    next(iterator)
    feed.close()
    assert feed.bin == 3
    assert copy.copy(feed).state_dict() == feed.state_dict()
    bins = len(bins_of(feed_of(view, batch=1)))
    batch = bins - 1  # the second batch has one bin, which rank 0 has
    ranks = [feed_of(view, batch=batch, rank=rank, world=2) for rank in range(2)]
    lasts = [list(own)[-1] for own in ranks]
    assert len(lasts[1].samples) == 0
    assert ranks[0].state_before(lasts[0]) == ranks[1].state_before(lasts[1]) == feed_of(view, batch=batch).state_at(1)


@pytest.mark.parametrize("by_epoch", [False, True])
def test_a_run_knows_what_every_step_held_also_with_another_batch(tmp_path, by_epoch):
    sources = []
    for number, lengths in enumerate(([5, 9, 30, 2] * 5, [1, 40, 7] * 3)):
        with mr.StoreWriter(tmp_path / f"store{number}", columns={"hits": mr.Column("int64")}) as writer:
            for length in lengths:
                writer.append({"hits": np.arange(length)})
        sources.append(mr.Records(mr.open_store(tmp_path / f"store{number}")))
    view = mr.Concat(sources) if by_epoch else mr.Mixture([(sources[0], 3), (sources[1], 1)])
    run, held, state = tmp_path / "run", [], None
    for batch, steps in ((3, 4), (2, 5), (5, 3), (1, 9)):
        feed = feed_of(view, batch=batch, epochs=None, run=run)
        if state is not None:
            feed.load_state_dict(state)
        for _ in range(steps if by_epoch else 1):
            for got in feed.by_epoch() if by_epoch else feed:
                held.append(got.samples.tolist())
                steps -= 1
                if steps <= 0:
                    break
            if steps <= 0:
                break
        feed.close()
        state = feed.state_dict()
    for step, samples in enumerate(held, 1):
        assert explain_run(str(run), step)["samples"].tolist() == samples


def test_a_step_after_the_end_of_a_run_is_refused(tmp_path):
    view = source_of(31, 5)
    count = len(list(feed_of(view, run=tmp_path)))
    assert len(journal.positions_of_step(tmp_path, count, view, mr.Shuffled(31, 5)))
    with pytest.raises(mr.ConfigError, match=f"which has {count} steps"):
        journal.positions_of_step(tmp_path, count + 1, view, mr.Shuffled(31, 5))


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


def test_blocks_of_several_documents_are_bounded_also_in_a_mixture():
    lengths = [5, 5, 4, 2]
    tokens = mr.from_arrays({"tokens": np.arange(16, dtype=np.uint16)}, np.concatenate(([0], np.cumsum(lengths))))
    packed = mr.Packed(tokens, length=6)  # blocks of 5, 5 and 6 tokens
    for view in (packed, mr.Mixture([(packed, 1), (packed, 2)])):
        with pytest.raises(mr.ConfigError, match="max_rows=5 is less than the 6 rows of sample 2"):
            feed_of(view, max_rows=5, epochs=None)
        with feed_of(view, max_rows=11, epochs=None, batch=4) as feed:
            batch = next(iter(feed))
        found = view[batch.samples]
        assert all(np.array_equal(batch[name], found[name]) for name in found)
        for begin, end in pairwise(batch.bins):
            assert 0 < (found["document"][begin:end] >= 0).sum() <= 11


@pytest.mark.filterwarnings("ignore:Records")
def test_rows_that_padding_cuts_off_count_for_nothing():
    store = mr.from_arrays({"hits": np.arange(160.0)}, np.array([0, 100, 102, 105, 160]))
    view = mr.Records(store, pad=8)
    with feed_of(view, max_rows=16, batch=9, epochs=1) as feed:
        batch = next(iter(feed))
    found = [batch["lengths"][begin:end].sum() for begin, end in pairwise(batch.bins)]
    assert sorted(found) == [0] * 7 + [8, 13]
    whole = mr.Records(mr.from_arrays({"hits": np.arange(16.0)}, np.array([0, 8, 16])), pad=8)
    assert mr.Mixture([(view, 21), (whole, 32)], by="token").default_order(0).segments[0].parts == (32768, 32768)


def test_what_cannot_be_bounded_is_refused():
    with pytest.raises(mr.ConfigError, match="max_rows=0; expected 1 or more"):
        feed_of(view_of([0, 0]), max_rows=0)
    with feed_of(view_of([1, 0, 1]), max_rows=1, batch=3, epochs=1) as feed:
        assert [np.diff(batch.bins).tolist() for batch in feed] == [[1, 1, 1]]
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
    for place in ({"bin": 1}, {"bin": 10**9}, {"position": 2}, {"position": 3, "bin": 1}):  # the window has one bin
        feed = feed_of(fine)
        with pytest.raises(mr.ConfigError, match="lead nowhere"):
            feed.load_state_dict({**feed.state_dict(), **place})
    queue = {"run": "x", "queue": "redis://localhost:1"}
    for options, match in (({"last": "short"}, "last='short'"), (queue, "queue= with max_rows=")):
        with pytest.raises(mr.ConfigError, match=match):
            feed_of(fine, **options)
    with pytest.raises(mr.ConfigError, match=r"by_epoch\(\) with max_rows= of 33 samples"):
        feed_of(view_of([1] * 33)).by_epoch()
    with pytest.raises(mr.ConfigError, match=r"load feed.state_at\(k\)"):
        feed_of(fine).skip(3)
    assert set(feed_of(fine, max_rows=None).state_dict()) == {"version", "position", "store", "view", "order", "seed"}
