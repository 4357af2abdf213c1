"""What a loop can rely on: lengths, passes by epoch, one iterator at a time, and refusals at construction."""

import functools
import gc
import itertools
import os

import numpy as np
import pytest

import millrace as mr


@functools.cache
def numbers(n):
    """n samples; x of sample i is [i]."""
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)


def feed_of(n=10, **options):
    return mr.Feed(numbers(n), device="numpy", **{"batch": 4, "seed": 3, **options})


def positions(batches):
    return [got.positions[got.valid].tolist() for got in batches]


def joined(batches):
    return [position for batch in positions(batches) for position in batch]


def same(batch, rng):
    return batch


# Lengths.


@pytest.mark.parametrize(("n", "batch", "epochs"), [(10, 4, 1), (10, 5, 3), (1, 7, 2), (10, 4, 2), (3, 1, 1)])
def test_a_finite_feed_has_as_many_batches_as_it_says(n, batch, epochs):
    feed = feed_of(n, batch=batch, epochs=epochs)
    assert len(feed) == len(list(feed)) == -(-n * epochs // batch)


def test_the_length_counts_from_where_the_feed_was_made_or_restored():
    """As in ``loss / len(feed)`` after the loop: it does not shrink while the loop runs; what is left the iterator says."""
    feed = feed_of(epochs=2)
    iterator = iter(feed)
    for left in (4, 3, 2, 1, 0):
        next(iterator)
        assert (len(feed), len(iterator)) == (5, left)
    feed.close()
    assert len(feed) == 5
    state = feed.state_at(2)
    feed.load_state_dict(state)
    assert len(feed) == 3
    assert len(list(feed)) == 3


def test_an_endless_feed_has_no_length():
    feed = feed_of()
    with pytest.raises(TypeError, match="endless"):
        len(feed)
    with pytest.raises(TypeError, match="endless"):
        len(iter(feed))
    assert len(list(itertools.islice(feed, 100))) == 100


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next():
    got = list(itertools.islice(feed_of(), 5))
    assert positions(got) == [list(range(k, k + 4)) for k in range(0, 20, 4)]
    samples = np.concatenate([batch.samples for batch in got])
    assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
    assert samples[:10].tolist() != samples[10:].tolist()


# Passes by epoch.


def test_by_epoch_is_one_pass_per_epoch_again_and_again():
    feed = feed_of()
    loader = feed.by_epoch()
    for epoch in range(5):
        assert len(loader) == 3
        got = list(loader)
        assert joined(got) == list(range(epoch * 10, epoch * 10 + 10))
        assert [batch.num_samples for batch in got] == [4, 4, 4]
        assert got[-1].valid.tolist() == [True, True, False, False]
        assert feed.state_dict()["position"] == (epoch + 1) * 10


def test_the_length_of_a_pass_stands_while_it_runs():
    loader = feed_of().by_epoch()
    assert [len(loader) for _ in loader] == [3, 3, 3]
    iterator = iter(loader)
    next(iterator)
    assert len(loader) == 3
    del iterator
    assert len(loader) == 2  # the rest of this epoch is the next pass


@pytest.mark.parametrize("threads", [{}, {"transform": same, "workers": 2}])
def test_a_pass_that_was_left_is_finished_by_the_next(threads):
    feed = feed_of(**threads)
    loader = feed.by_epoch()
    for _ in loader:
        break
    assert positions(loader) == [[4, 5, 6, 7], [8, 9]]
    assert positions(loader) == [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]


@pytest.mark.parametrize("position", [0, 3, 9, 10, 11, 25])
def test_by_epoch_resumes_in_the_middle_of_an_epoch(position):
    feed = feed_of(batch=3)
    feed.load_state_dict(feed.state_dict() | {"position": position})
    loader, end = feed.by_epoch(), (position // 10 + 1) * 10
    assert len(loader) == -(-(end - position) // 3)
    assert joined(loader) == list(range(position, end))
    assert joined(loader) == list(range(end, end + 10))


def test_by_epoch_on_every_rank_has_as_many_batches():
    for n, world in itertools.product((1, 5, 16, 17), (1, 2, 3, 8)):
        passes = [list(feed_of(n, batch=8, rank=r, world=world).by_epoch()) for r in range(world)]
        assert {len(one) for one in passes} == {-(-n // 8)}
        every = np.concatenate([got.samples[got.valid] for one in passes for got in one])
        assert sorted(every) == list(range(n))


def test_passes_end_where_the_epochs_do():
    loader = feed_of(epochs=2).by_epoch()
    assert [len(list(loader)) for _ in range(4)] == [3, 3, 0, 0]
    assert len(loader) == 0


# Iterators.


def test_iterating_continues_and_never_rewinds():
    feed = feed_of(epochs=2)
    seen = [next(iter(feed)) for _ in range(3)]
    assert positions(seen) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert positions(feed) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert list(feed) == []
    assert feed.state_dict()["position"] == 20


@pytest.mark.parametrize("threads", [{}, {"transform": same}])
def test_two_live_iterators_are_refused(threads):
    feed = feed_of(**threads)
    first = iter(feed)
    for attempt in (lambda: iter(feed), lambda: iter(feed.by_epoch()), lambda: feed.load_state_dict(feed.state_dict())):
        with pytest.raises(mr.ConfigError, match="while an iterator of this feed is live"):
            attempt()
    assert positions([next(first)]) == [[0, 1, 2, 3]]
    feed.close()
    assert list(first) == []  # ended, not revived
    assert positions([next(iter(feed))]) == [[4, 5, 6, 7]]


def end_by_break(feed):
    for _ in feed:
        break


def end_by_error(feed):
    try:
        for batch in feed:
            raise KeyError(batch.num_samples)
    except KeyError as error:
        feed.kept = error  # with its traceback, as a notebook keeps the last one


def end_by_del(feed):
    iterator = iter(feed)
    next(iterator)
    del iterator


def end_by_collection(feed):
    iterator = iter(feed)
    next(iterator)
    cycle = [iterator]
    cycle.append(cycle)
    del iterator, cycle
    gc.collect()


def end_by_close(feed):
    feed.kept = iter(feed)
    next(feed.kept)
    feed.close()


def end_by_with(feed):
    with feed:
        feed.kept = iter(feed)
        next(feed.kept)


@pytest.mark.parametrize("end", [end_by_break, end_by_error, end_by_del, end_by_collection, end_by_close, end_by_with])
@pytest.mark.parametrize("threads", [{}, {"transform": same, "workers": 3, "depth": 5}])
def test_an_ended_iterator_frees_the_feed(end, threads):
    feed = feed_of(**threads)
    end(feed)
    assert feed.live is None
    assert positions([next(iter(feed))]) == [[4, 5, 6, 7]]


def test_closing_twice_or_before_the_start_is_nothing():
    feed = feed_of()
    feed.close()
    feed.close()
    with feed as same_feed:
        assert same_feed is feed
        next(iter(feed))
    feed.close()


# Refusals.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch=0"),
        ({"batch": -3}, "batch=-3"),
        ({"batch": 3, "rank": 0, "world": 4}, "batch=3 is smaller than world=4"),
        ({"rank": 0}, "give both or neither"),
        ({"world": 2}, "give both or neither"),
        ({"rank": 2, "world": 2}, "rank=2 of world=2"),
        ({"rank": -1, "world": 2}, "rank=-1"),
        ({"epochs": 0}, "epochs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1 << 64}, "seed="),
        ({"order": mr.Sequential(10), "seed": -1}, "seed=-1"),
        ({"order": mr.Sequential(9)}, "the order is over 9 samples, the view has 10"),
        ({"depth": 0}, "depth=0"),
        ({"workers": 0}, "workers=0"),
        ({"depth": 1 << 40}, "depth=1099511627776; expected 1 to 4096"),
        ({"workers": 1 << 40}, "workers=1099511627776; expected 1 to 4096"),
        ({"batch": 1 << 50}, "more than any memory"),
        ({"device": "tpu"}, "device='tpu'"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.Feed(numbers(10), **{"batch": 4, "device": "numpy", **options})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say which cores may be used")
def test_threads_are_as_many_as_the_cores_this_process_may_use(monkeypatch):
    for allowed, workers, fillers in ((1, 1, 1), (2, 2, 1), (3, 3, 2), (64, 4, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, count=allowed: set(range(count)))
        feed = mr.Feed(numbers(10), batch=4, device="numpy")
        assert (feed.workers, feed.fillers) == (workers, fillers)


@pytest.mark.parametrize("order", [None, mr.Sequential(1)])
def test_an_empty_view_is_refused(order):
    empty = mr.Blocks(mr.from_arrays({"tokens": np.arange(3)}), length=8)
    with pytest.raises(mr.ConfigError, match="no samples"):
        mr.Feed(empty, batch=1, order=order)


@pytest.mark.parametrize(
    "name", ["positions", "samples", "valid", "num_samples", "micro", "items", "copy", "keys", "get"]
)
def test_a_column_named_like_an_attribute_of_a_batch_is_refused(name):
    store = mr.from_arrays({name: np.arange(6.0), "label": [1, 2]}, offsets=[0, 2, 6])
    with pytest.raises(mr.ConfigError, match=f"column named '{name}'"):
        mr.Feed(mr.Records(store), batch=1)
    assert len(mr.Feed(mr.Records(store, columns=["label"]), batch=1, epochs=1)) == 2


def test_the_repr_says_where_it_stands():
    feed = feed_of(rank=1, world=2)
    next(iter(feed))
    assert "position 4, batch 4 as rank 1 of 2" in repr(feed)
