"""Stop after any step, go on as another job: what remains is what it would have been."""

import itertools
import json
import time

import numpy as np
import pytest

import millrace as mr

pytestmark = pytest.mark.usefixtures("way")

WORLDS = (1, 2, 3, 4, 5, 8)


def noisy(batch, rng):
    return {"x": batch.x, "noise": rng.uniform(2), "die": rng.integers(0, 6)}


def slow_now_and_then(batch, rng):
    """Later batches overtake earlier ones in the threads."""
    if int(batch.positions[0]) % 3 == 0:
        time.sleep(0.0005)
    return noisy(batch, rng)


HOWS = {
    "in line": {},
    "one thread": {"transform": noisy, "workers": 1, "depth": 1},
    "three threads": {"transform": slow_now_and_then, "workers": 3, "depth": 7},
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("batch", [1, 4, 7, 23, 50])
def test_a_state_saved_after_any_step_continues_in_a_fresh_feed(numbers, job, how, batch):
    options = {"batch": batch, "seed": 5, "epochs": 2, **HOWS[how]}
    whole = job(numbers(23), **options).run()
    assert [position for position, _ in whole] == list(range(46))
    feed = mr.Feed(numbers(23), device="numpy", **options)
    states = [feed.state_dict(), *(feed.state_dict() for _ in feed)]
    assert len(states) == 1 + -(-46 // batch)
    for state in states:
        assert job(numbers(23), state=state, **options).run() == whole[state["position"] :]


@pytest.mark.parametrize("save", WORLDS)
def test_any_world_continues_in_any_other(numbers, job, save):
    options = {"batch": 9, "seed": 1, "epochs": 2}
    whole = job(numbers(31), **options).run()
    first = job(numbers(31), world=save, **options)
    for step in range(0, 7, 2):
        assert first.run(step and 2) == whole[max(0, step - 2) * 9 : step * 9]
        for restore in WORLDS:
            assert job(numbers(31), world=restore, state=first.state, **options).run() == whole[step * 9 :]


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("batch", [8, 16, 32, 48, 17, 29, 100])
def test_the_batch_may_be_another(numbers, job, world, batch):
    """Halved, doubled, tripled, not divisible by the world, larger than an epoch."""
    whole = job(numbers(61), batch=16, epochs=3).run()
    for step in range(0, 12, 3):
        first = job(numbers(61), batch=16, epochs=3, world=2)
        first.run(step)
        assert job(numbers(61), batch=batch, epochs=3, world=world, state=first.state).run() == whole[step * 16 :]


@pytest.mark.parametrize("seed", range(12))
def test_a_chain_of_restores_is_one_run(numbers, job, seed):
    """save - load - save - load, every time as another job; the second restore within an epoch is where others failed."""
    rng = np.random.default_rng(seed)
    n, epochs = int(rng.integers(1, 60)), int(rng.integers(1, 4))
    whole, got, state = job(numbers(n), batch=5, epochs=epochs).run(), [], None
    while len(got) < n * epochs:
        world = int(rng.choice(WORLDS))
        how = HOWS[rng.choice(list(HOWS))]
        link = job(numbers(n), world=world, batch=world + int(rng.integers(0, 12)), epochs=epochs, state=state, **how)
        got += link.run(int(rng.integers(0, 4)))
        state = link.state
        assert state["position"] == len(got)
    assert got == whole


def test_an_endless_feed_is_saved_over_the_ends_of_epochs(numbers, job):
    whole = job(numbers(10), batch=4, seed=3).run(40)
    epochs = [sorted(sample for _, sample in whole[e * 10 : (e + 1) * 10]) for e in range(16)]
    assert epochs == [list(range(10))] * 16
    for step in range(12):
        first = job(numbers(10), batch=4, seed=3)
        first.run(step)
        assert job(numbers(10), batch=6, seed=3, world=2, state=first.state).run(10) == whole[step * 4 : step * 4 + 60]


def test_a_state_of_the_very_end_has_nothing_left(numbers, job):
    done = job(numbers(10), batch=4, epochs=2)
    done.run()
    assert done.state["position"] == 20
    assert job(numbers(10), batch=4, epochs=2, state=done.state).run() == []
    longer = job(numbers(10), batch=4, epochs=3, state=done.state)
    assert longer.run() == job(numbers(10), batch=4, epochs=3).run()[20:]


def test_what_was_prefetched_is_not_counted(numbers):
    feed = mr.Feed(numbers(1000), batch=3, transform=noisy, workers=2, depth=9, device="numpy")
    for number, _ in enumerate(itertools.islice(feed, 20), start=1):
        assert feed.state_dict()["position"] == 3 * number


@pytest.mark.parametrize("how", HOWS)
def test_state_at_a_count_is_the_state_after_as_many_batches(numbers, how):
    """Also far ahead of the loop, after a restore, and past the end, as frameworks that read ahead ask."""
    options = {"batch": 4, "epochs": 2, "device": "numpy", **HOWS[how]}
    feed = mr.Feed(numbers(11), **options)
    ahead = [feed.state_at(k) for k in range(9)]
    for count, _ in enumerate(feed, start=1):
        assert feed.state_at(count) == feed.state_dict() == ahead[count]
    assert ahead[6] == ahead[8] == feed.state_dict()
    again = mr.Feed(numbers(11), **{**options, "batch": 3})
    again.load_state_dict(ahead[2])
    assert again.state_at(0) == ahead[2]
    for count, _ in enumerate(again, start=1):
        assert again.state_at(count) == again.state_dict()
    with pytest.raises(mr.ConfigError, match=r"state_at\(-1\)"):
        feed.state_at(-1)


@pytest.mark.parametrize("how", ["one thread", "three threads"])
def test_randomness_resumes_too(numbers, how):
    """Promise 9: what the transform drew for a position is drawn again, in any job that goes on."""

    def drawn(state, batch, world, how):
        found = {}
        for rank in range(world):
            feed = mr.Feed(numbers(13), batch=batch, epochs=2, rank=rank, world=world, device="numpy", **HOWS[how])
            feed.load_state_dict(state)
            for got in feed:
                for k in np.flatnonzero(got.valid):
                    found[int(got.positions[k])] = (*got.noise[k].tolist(), int(got.die[k]))
        return found

    start = mr.Feed(numbers(13), batch=4, epochs=2, device="numpy")
    whole = drawn(start.state_dict(), 4, 1, "one thread")
    assert len(set(whole.values())) == 26
    for step in range(7):
        state = start.state_at(step)
        expected = {position: value for position, value in whole.items() if position >= state["position"]}
        assert drawn(state, 5, 3, how) == expected


def test_a_state_is_small_and_plain(tmp_path):
    from millrace.testing import tiny_records, tiny_series, tiny_text

    text, series, records = tiny_text(tmp_path / "t"), tiny_series(tmp_path / "s"), tiny_records(tmp_path / "r")
    blocks = mr.Blocks(text.split("train"), length=8)
    views = [
        blocks,
        mr.Windows(series.split("val"), lookback=4, horizon=2),
        mr.Records(records.split("train")),
        mr.Subset(blocks, np.arange(len(blocks))[::-1]),
        mr.Concat([blocks, mr.Blocks(text.split("val"), length=8)]),
    ]
    for view in views:
        feed = mr.Feed(view, batch=2, seed=2**64 - 1, device="numpy", order=mr.BlockShuffled(len(view), seed=9))
        next(iter(feed))
        state = feed.state_dict()
        assert len(json.dumps(state)) < 1024
        assert json.loads(json.dumps(state, allow_nan=False)) == state


def test_positions_far_beyond_32_bits_resume(numbers, job):
    far = job(numbers(7), batch=4).state | {"position": 7 * 10**15 + 3}
    whole = job(numbers(7), batch=4, state=far).run(10)
    middle = job(numbers(7), batch=4, state=far)
    middle.run(3)
    assert whole[0][0] == 7 * 10**15 + 3
    assert job(numbers(7), batch=6, world=2, state=middle.state).run(4) == whole[12:36]
