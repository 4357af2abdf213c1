"""What a loop can rely on: lengths, one iterator at a time, last batches, names, and refusals at construction."""

import functools
import gc
import itertools
import os
import warnings

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


def test_the_length_is_that_of_the_whole_feed_wherever_it_stands():
    """Frameworks count up to it, also after a restore; what is left the feed and its iterator say."""
    feed = feed_of(epochs=2)
    iterator = iter(feed)
    for left in (4, 3, 2, 1, 0):
        next(iterator)
        assert (len(feed), feed.remaining, len(iterator)) == (5, left, left)
    feed.load_state_dict(feed.state_at(2))
    assert (len(feed), feed.remaining) == (5, 3)
    assert len(list(feed)) == 3
    assert (len(feed), feed.remaining) == (5, 0)


def test_an_endless_feed_has_no_length():
    feed = feed_of()
    with pytest.raises(TypeError, match="endless"):
        len(feed)
    with pytest.raises(TypeError, match="endless"):
        len(iter(feed))
    with pytest.raises(TypeError, match="endless"):
        feed.remaining  # noqa: B018
    assert len(list(itertools.islice(feed, 100))) == 100


def test_a_batch_may_hold_the_end_of_one_epoch_and_the_start_of_the_next():
    got = list(itertools.islice(feed_of(), 5))
    assert positions(got) == [list(range(k, k + 4)) for k in range(0, 20, 4)]
    samples = np.concatenate([batch.samples for batch in got])
    assert sorted(samples[:10]) == sorted(samples[10:]) == list(range(10))
    assert samples[:10].tolist() != samples[10:].tolist()


# Iterators.


def test_iterating_continues_and_never_rewinds():
    feed = feed_of(epochs=2)
    seen = [next(iter(feed)) for _ in range(3)]
    assert positions(seen) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert positions(feed) == [[12, 13, 14, 15], [16, 17, 18, 19]]
    assert feed.state_dict()["position"] == 20


@pytest.mark.parametrize("threads", [{}, {"transform": same}])
@pytest.mark.parametrize("last", ["pad", "drop", "short"])
def test_a_feed_that_came_to_its_end_refuses_another_pass(threads, last):
    """Which would be silently empty, as an evaluation over nothing is."""
    feed = feed_of(epochs=1, last=last, **threads)
    assert len(list(feed)) == len(feed)
    for again in (lambda: iter(feed), lambda: iter(feed.by_epoch())):
        with pytest.raises(mr.ConfigError, match=r"delivered all of its epochs=1 .*by_epoch\(repeat=True\)"):
            again()
    other = feed_of(epochs=1, last=last)
    other.load_state_dict(feed.state_dict())
    assert list(other) == list(other) == []  # restored at its end there is nothing left


def test_an_iterator_ends_with_its_last_batch():
    """Loops that count batches never read to the end."""
    feed = feed_of(epochs=1)
    iterator = iter(feed)
    for _ in range(len(feed)):
        assert feed.live is iterator
        next(iterator)
    assert feed.live is None
    assert feed.report().batches == 3
    feed.load_state_dict(feed.state_at(1))
    assert positions(feed) == [[4, 5, 6, 7], [8, 9]]


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


# Last batches and names.


@pytest.mark.parametrize("threads", [{}, {"transform": same, "workers": 2}])
@pytest.mark.parametrize(
    ("n", "batch", "epochs"), [(10, 4, 1), (10, 5, 3), (7, 7, 1), (10, 4, 3), (3, 1, 1), (9, 2, 1)]
)
def test_last_batches_are_padded_dropped_or_short(n, batch, epochs, threads):
    padded, dropped, short = (
        list(feed_of(n, batch=batch, epochs=epochs, last=last, **threads)) for last in ("pad", "drop", "short")
    )
    total = n * epochs
    assert [got.num_samples for got in padded] == [batch] * -(-total // batch)
    assert [got.num_samples for got in dropped] == [batch] * (total // batch)
    assert [got.num_samples for got in short] == [
        *[batch] * (total // batch),
        *([total % batch] if total % batch else []),
    ]
    assert joined(padded) == joined(short) == list(range(total))
    assert joined(dropped) == list(range(total // batch * batch))
    for got in short + dropped:
        assert got.valid.all()
        assert len(got.x) == got.num_samples
        assert np.array_equal(got.x[:, 0], got.samples)


def test_the_tail_that_is_dropped_is_behind_the_feed_once_the_loop_asks_for_more():
    """Until then it was not delivered: a smaller batch may still deliver it."""
    feed = feed_of(epochs=1, last="drop")
    states = [feed.state_dict() for _ in feed]
    assert [state["position"] for state in states] == [4, 8]
    assert feed.position == 10
    assert feed.remaining == 0
    assert [feed.state_at(k)["position"] for k in range(4)] == [0, 4, 8, 10]
    smaller = feed_of(batch=2, epochs=1, last="drop")
    smaller.load_state_dict(states[1])
    assert [got.positions.tolist() for got in smaller] == [[8, 9]]
    again = feed_of(epochs=1, last="drop")
    again.load_state_dict(states[1])
    assert (again.remaining, list(again), again.position) == (0, [], 10)
    counted = feed_of(epochs=1, last="drop")
    for _ in itertools.islice(counted, 2):  # counts its batches, and does not ask for more
        pass
    assert counted.position == 8
    with pytest.raises(mr.ConfigError, match="delivered all of its epochs=1"):
        iter(counted)
    assert feed.explain(1).positions.tolist() == [4, 5, 6, 7]
    samples = feed.order.samples(np.arange(10))
    assert feed.steps_of(samples[:8], 0).tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    with pytest.raises(mr.ConfigError, match="in no batch of this epoch"):
        feed.steps_of(samples[8:9], 0)


def test_short_last_batches_have_no_place_in_a_world_of_several():
    with pytest.raises(mr.ConfigError, match="last='short' with 2 ranks"):
        iter(feed_of(epochs=1, last="short", rank=0, world=2))


def test_ragged_columns_of_a_short_last_batch():
    hits = mr.Records(mr.from_arrays({"hits": np.arange(9.0), "label": [7, 8, 9]}, offsets=[0, 4, 4, 9]))
    *_, last = mr.Feed(hits, batch=2, order=mr.Sequential(3), epochs=1, last="short", device="numpy")
    assert [item.tolist() for item in last.hits] == [[4, 5, 6, 7, 8]]
    assert last.label.tolist() == [9]


@pytest.mark.parametrize("threads", [{}, {"transform": same}])
def test_columns_have_the_names_a_model_wants(threads):
    feed = feed_of(rename={"x": "input_ids", "y": "labels"}, **threads)
    plain = next(iter(feed_of()))
    batch = next(iter(feed))
    assert list(batch) == ["input_ids", "labels"]
    assert np.array_equal(batch.input_ids, plain.x)
    assert batch.samples.tolist() == plain.samples.tolist()
    assert feed.explain(0).rename == {"x": "input_ids", "y": "labels"}
    assert "rename" not in feed_of().explain(0)


def test_rename_comes_after_the_transform():
    feed = feed_of(transform=lambda batch, rng: {"z": batch.x + 1}, rename={"z": "inputs"})
    assert list(next(iter(feed))) == ["inputs"]
    feed = feed_of(transform=lambda batch, rng: {"z": batch.x + 1}, rename={"x": "inputs"})
    with pytest.raises(mr.ConfigError, match="names 'x'; the batch has z"):
        next(iter(feed))
    assert feed.position == 0  # it was not delivered


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
        ({"last": "cut"}, "last='cut'; expected one of pad, drop, short"),
        ({"last": "drop", "batch": 16, "epochs": 1}, "last='drop' leaves no batch of 16 in 10 samples"),
        ({"rename": {"z": "a"}}, "names 'z'; the batch has x, y"),
        ({"rename": {"x": "y"}}, "two columns the name 'y'"),
        ({"rename": {"x": 3}}, "a batch has column 3; names are strings"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.Feed(numbers(10), **{"batch": 4, "device": "numpy", **options})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not say which cores may be used")
def test_threads_are_as_many_as_the_cores_this_process_may_use(monkeypatch):
    for allowed, workers in ((1, 1), (2, 2), (3, 3), (64, 4)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, count=allowed: set(range(count)))
        feed = mr.Feed(numbers(10), batch=4, device="numpy")
        assert feed.workers == workers


@pytest.mark.parametrize("order", [None, mr.Sequential(1)])
def test_an_empty_view_is_refused(order):
    empty = mr.Blocks(mr.from_arrays({"tokens": np.arange(3)}), length=8)
    with pytest.raises(mr.ConfigError, match="no samples"):
        mr.Feed(empty, batch=1, order=order)


def test_the_repr_says_where_it_stands():
    feed = feed_of(rank=1, world=2)
    next(iter(feed))
    assert "position 4, batch 4 as rank 1 of 2" in repr(feed)


def test_a_batch_larger_than_the_view_is_warned_of():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)  # 10 samples
    with pytest.warns(UserWarning, match="batch=11 is larger than the view, which has 10 samples") as caught:
        mr.Feed(view, batch=11)
    assert [warning.filename for warning in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mr.Feed(view, batch=10)
        mr.Feed(view, batch=11, epochs=1, order=mr.Sequential(10))  # an evaluation: every sample once
