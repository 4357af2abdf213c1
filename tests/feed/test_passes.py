"""One loader for frameworks: sized, iterated again and again, with a state, and a pass that repeats for evaluation."""

import gc
import itertools
import json
import pickle

import numpy as np
import pytest

import millrace as mr

VIEW = mr.Blocks(mr.from_arrays({"tokens": np.arange(11)}), length=1)  # 10 samples


def feed_of(view=VIEW, **options):
    return mr.Feed(view, device="numpy", **{"batch": 4, "seed": 3, **options})


def positions(batches):
    return [got.positions[got.valid].tolist() for got in batches]


def same(batch, rng):
    return batch


FIRST, SECOND = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], [[10, 11, 12, 13], [14, 15, 16, 17], [18, 19]]


def test_a_pass_per_epoch_again_and_again():
    feed = feed_of()
    loader = feed.by_epoch()
    for epoch in range(5):
        assert len(loader) == 3
        got = list(loader)
        assert np.concatenate(positions(got)).tolist() == list(range(epoch * 10, epoch * 10 + 10))
        assert [batch.num_samples for batch in got] == [4, 4, 4]
        assert got[-1].valid.tolist() == [True, True, False, False]
        assert feed.state_dict()["position"] == (epoch + 1) * 10


@pytest.mark.parametrize("threads", [{}, {"transform": same, "workers": 2}])
def test_a_pass_that_was_left_is_over_when_the_next_begins(threads):
    feed = feed_of(**threads)
    loader = feed.by_epoch()
    left = iter(loader)
    assert positions([next(left)]) == FIRST[:1]
    assert positions(loader) == SECOND
    assert list(left) == []  # ended, not revived
    assert len(loader) == 3


def test_an_iterator_that_delivered_nothing_has_begun_no_pass():
    """Lightning asks for one only to see that it can, StatefulDataLoader to have a state."""
    feed = feed_of()
    loader = feed.by_epoch()
    unused = [iter(loader) for _ in range(3)]
    assert positions(loader) == FIRST
    assert [list(one) for one in unused] == [[], [], []]
    iter(loader)
    assert positions(loader) == SECOND


def test_a_pass_ends_with_its_last_batch():
    feed = feed_of()
    loader = feed.by_epoch()
    begun = iter(loader)
    assert feed.live is begun
    for _ in range(len(loader)):
        next(begun)
    assert feed.live is None
    assert feed.report().batches == 3
    assert positions(loader) == SECOND


def test_a_pass_that_is_dropped_frees_the_feed():
    feed = feed_of(transform=same)
    for _ in feed.by_epoch():
        break
    gc.collect()
    assert feed.live is None
    assert positions([next(iter(feed))]) == [[4, 5, 6, 7]]  # the feed itself goes on where the loop stood


@pytest.mark.parametrize("position", [0, 3, 9, 10, 11, 25])
def test_after_a_restore_it_is_the_rest_of_that_pass(position):
    feed = feed_of(batch=3)
    loader, end = feed.by_epoch(), (position // 10 + 1) * 10
    loader.load_state_dict(feed.state_dict() | {"position": position})
    assert len(loader) == 4
    assert np.concatenate(positions(loader)).tolist() == list(range(position, end))
    assert np.concatenate(positions(loader)).tolist() == list(range(end, end + 10))


@pytest.mark.parametrize("stop", range(7))
def test_its_state_is_that_of_the_feed_and_counts_what_the_loop_got(stop):
    feed = feed_of()
    loader = feed.by_epoch()
    line = itertools.chain.from_iterable(itertools.repeat(loader))
    for _ in range(stop):
        next(line)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state == {**feed.state_dict(), "batch": 4}
    rest = positions(itertools.islice(line, 8))
    for load in (lambda feed, loader: loader.load_state_dict(state), lambda feed, loader: feed.load_state_dict(state)):
        other = feed_of()
        again = other.by_epoch()
        load(other, again)
        assert positions(itertools.islice(itertools.chain.from_iterable(itertools.repeat(again)), 8)) == rest


def test_a_state_can_be_loaded_while_a_pass_is_live():
    feed = feed_of()
    loader = feed.by_epoch()
    begun = iter(loader)
    states = [loader.state_dict() for _ in begun]
    begun = iter(loader)
    next(begun)
    loader.load_state_dict(states[0])
    assert list(begun) == []
    assert positions(loader) == FIRST[1:]


def test_every_rank_has_as_many_batches():
    for n, world in itertools.product((1, 5, 16, 17), (1, 2, 3, 8)):
        view = mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)
        for repeat in (False, True):
            loaders = [feed_of(view, batch=8, rank=r, world=world).by_epoch(repeat=repeat) for r in range(world)]
            passes = [list(loader) for loader in loaders]
            assert {len(one) for one in passes} == {len(loader) for loader in loaders} == {-(-n // 8)}
            every = np.concatenate([got.samples[got.valid] for one in passes for got in one])
            assert sorted(every) == list(range(n))


def test_passes_end_where_the_epochs_do():
    feed = feed_of(epochs=2)
    loader = feed.by_epoch()
    assert [len(list(loader)) for _ in range(2)] == [3, 3]
    with pytest.raises(mr.ConfigError, match="delivered all of its epochs=2"):
        iter(loader)
    other = feed_of(epochs=2)
    other.by_epoch().load_state_dict(loader.state_dict())
    assert [list(other.by_epoch()) for _ in range(2)] == [[], []]
    left = feed_of(epochs=1).by_epoch()
    next(iter(left))
    with pytest.raises(mr.ConfigError, match="delivered all of its epochs=1"):
        iter(left)  # a sanity check took some of it: nothing is left for the validation itself


def test_a_live_iterator_of_the_feed_itself_is_not_ended():
    feed = feed_of()
    live = iter(feed)
    for attempt in (lambda: iter(feed.by_epoch()), lambda: feed.by_epoch().load_state_dict(feed.state_dict())):
        with pytest.raises(mr.ConfigError, match="while an iterator of this feed is live"):
            attempt()
    assert positions([next(live)]) == FIRST[:1]
    feed.close()
    begun = iter(feed.by_epoch())
    with pytest.raises(mr.ConfigError, match="while an iterator of this feed is live"):
        iter(feed)
    feed.close()
    assert list(begun) == []


# Evaluation.


@pytest.mark.parametrize("threads", [{}, {"transform": same, "workers": 2}])
def test_a_repeated_pass_is_the_whole_first_epoch_every_time(threads):
    feed = feed_of(epochs=1, **threads)
    loader = feed.by_epoch(repeat=True)
    for stop in (2, 0, 3, 1, 3):  # a sanity check, an iterator never used, a whole one, ...
        got = list(itertools.islice(loader, stop))
        assert positions(got) == FIRST[:stop]
    assert len(loader) == 3
    assert sorted(np.concatenate([got.samples[got.valid] for got in loader])) == list(range(10))
    assert feed.position == 0


def test_a_repeated_pass_neither_moves_the_feed_nor_follows_it():
    feed = feed_of()
    loader = feed.by_epoch(repeat=True)
    training = iter(feed)
    for step in range(5):
        assert positions([next(training)]) == [list(range(4 * step, 4 * step + 4))]
        assert positions(loader) == FIRST
    assert feed.position == 20
    loader.load_state_dict(feed.state_dict())
    loader.load_state_dict({"anything": 1})
    loader.set_epoch(7)
    assert positions(loader) == FIRST
    assert json.dumps(loader.state_dict())


# What frameworks say of epochs.


def test_set_epoch_goes_forward_and_never_back():
    loader = feed_of().by_epoch()
    begun = iter(loader)
    loader.sampler.set_epoch(1)  # as Lightning does, which restores no loader where an epoch has ended
    assert positions(begun) == SECOND
    loader.set_epoch(0)
    assert np.concatenate(positions(loader)).tolist() == list(range(20, 30))
    loader.batch_sampler.sampler.set_epoch(5)
    assert np.concatenate(positions(loader)).tolist() == list(range(50, 60))


@pytest.mark.parametrize(("position", "begins"), [(0, 0), (4, 10), (10, 10), (14, 20)])
def test_a_restored_pass_that_a_framework_ends_is_followed_by_the_next(position, begins):
    feed = feed_of()
    loader = feed.by_epoch()
    loader.load_state_dict(feed.state_dict() | {"position": position})
    loader.end_epoch(None)
    assert positions(loader)[0][0] == begins


def test_in_an_epoch_that_a_framework_ends_nothing_more_is_delivered():
    feed = feed_of()
    loader = feed.by_epoch()
    loader.load_state_dict(feed.state_dict() | {"position": 4})
    begun = iter(loader)
    loader.end_epoch(0)
    loader.set_epoch(0)
    assert positions(begun) == []
    assert positions(loader) == SECOND  # of a loop of one's own, which is in no epoch of a framework
    begun = iter(loader)
    loader.end_epoch(2)
    loader.set_epoch(3)
    assert positions(begun)[0][0] == 30


# Last batches.


def test_passes_drop_and_cut_their_last_batch_and_the_next_starts_where_its_epoch_does():
    feed = feed_of(last="drop")
    loader = feed.by_epoch()
    assert len(loader) == 2
    assert [positions(loader) for _ in range(3)] == [
        [[e, e + 1, e + 2, e + 3], [e + 4, e + 5, e + 6, e + 7]] for e in (0, 10, 20)
    ]
    assert feed.position == 30
    assert [feed.state_at(k)["position"] for k in range(5)] == [0, 4, 8, 14, 18]
    assert feed.explain(3).positions.tolist() == [14, 15, 16, 17]
    samples = feed.order.samples(np.arange(10, 20))
    assert feed.steps_of(samples[:8], 1).tolist() == [2, 2, 2, 2, 3, 3, 3, 3]
    with pytest.raises(mr.ConfigError, match="in no batch of this epoch"):
        feed.steps_of(samples[8:], 1)
    short = feed_of(last="short").by_epoch()
    assert [[got.num_samples for got in short] for _ in range(2)] == [[4, 4, 2], [4, 4, 2]]


@pytest.mark.parametrize("position", [8, 10])  # where a state of today stands after the last full batch, and one of 0.1
def test_a_rest_that_would_be_dropped_alone_is_no_pass(position):
    feed = feed_of(last="drop")
    loader = feed.by_epoch()
    loader.load_state_dict(feed.state_dict() | {"position": position})
    assert positions(loader) == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert positions(loader) == [[20, 21, 22, 23], [24, 25, 26, 27]]


def test_a_pass_that_was_counted_to_its_end_is_left_by_the_next_one():
    """Frameworks know the length, and never ask for one batch more. Batches are counted on over the passes."""
    feed = feed_of(last="drop")
    loader = feed.by_epoch()
    for number in range(3):
        for _ in itertools.islice(loader, 2):
            pass
        assert feed.position == number * 10 + 8
    assert feed.explain(4).positions.tolist() == [20, 21, 22, 23]
    assert feed.state_dict() == feed.state_at(6)
    rest = feed_of(batch=2, last="drop").by_epoch()
    rest.load_state_dict(feed.state_dict())
    assert positions(rest) == [[28, 29]]


def test_a_feed_that_is_read_by_epoch_again_counts_its_batches_in_passes_again():
    feed = feed_of()
    passes = feed.by_epoch()
    assert feed.explain(3).positions.tolist() == [10, 11, 12, 13]  # before any pass has begun
    list(passes)
    next(iter(feed))
    assert feed.explain(2).positions.tolist() == [18, 19, 20, 21]
    feed.close()
    assert positions(passes) == [[14, 15, 16, 17], [18, 19]]
    assert [feed.explain(k).positions.tolist() for k in range(3)] == [[14, 15, 16, 17], [18, 19], [20, 21, 22, 23]]
    assert feed.state_dict() == feed.state_at(2)


def test_passes_of_which_nothing_is_left_are_refused():
    for repeat in (False, True):
        with pytest.raises(mr.ConfigError, match="10 samples are fewer than batch=16"):
            feed_of(batch=16, last="drop").by_epoch(repeat=repeat)


# Loops that read ahead.


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("options", [{}, {"epochs": 2}, {"epochs": 2, "last": "drop"}])
@pytest.mark.parametrize("kind", ["feed", "passes"])
@pytest.mark.parametrize("transform", [None, same])
def test_the_state_before_a_batch_is_that_of_a_loop_which_has_not_used_it(world, options, kind, transform):
    for rank in range(world):
        feed = feed_of(rank=rank, world=world, transform=transform, **options)
        batches = feed if kind == "feed" else itertools.chain.from_iterable(itertools.repeat(feed.by_epoch()))
        states, read = [feed.state_dict()], []
        for batch in itertools.islice(batches, 4):
            read.append(batch)
            states.append(feed.state_dict())
        for batch, state in zip(read, states, strict=False):
            if kind == "passes" and state["position"] == 8 and options.get("last") == "drop":
                state["position"] = 10  # who has the next batch has left the pass behind
            assert feed.state_before(batch) == state
            assert feed.state_before(type(batch)(dict(batch.items()))) == state  # rebuilt by a framework


def test_a_share_that_is_padding_alone_knows_where_its_batch_begins():
    feed = feed_of(batch=9, rank=2, world=3, epochs=1)
    *_, last = feed
    assert not last.valid.any()
    assert feed.state_before(last)["position"] == 9
    assert feed.state_before(last.to("cpu"))["position"] == 9


def test_the_state_before_a_part_of_a_batch_is_refused():
    feed = feed_of()
    batch = next(iter(feed))
    for part in (batch.micro(2)[1], mr.Batch(dict(batch))):
        with pytest.raises(mr.ConfigError, match="needs a whole batch"):
            feed.state_before(part)


def test_its_samples_have_no_numbers():
    for loader in (feed_of(), feed_of().by_epoch()):
        with pytest.raises(mr.ConfigError, match=r"millrace\.torch\.Dataset\(view\)"):
            loader[0]
    assert "one epoch after the other, 3 batches each" in repr(feed_of().by_epoch())


def test_a_feed_that_is_sent_on_begins_the_next_pass_as_it_would_here():
    feed = feed_of()
    loader = feed.by_epoch()
    next(iter(loader))
    sent = pickle.loads(pickle.dumps(loader))  # noqa: S301 - our own
    assert sent.feed.position == 4
    assert positions(sent) == SECOND == positions(loader)


def test_epochs_of_a_framework_do_not_move_what_is_repeated():
    feed = feed_of()
    feed.by_epoch(repeat=True).set_epoch(7)
    assert positions(feed.by_epoch()) == FIRST
