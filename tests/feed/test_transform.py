"""What a transform is given, what it may return, what happens when it fails; its randomness follows the position."""

import functools
import sys
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.feed.rng import Rng

VIEW = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=1)  # 30 samples; x of sample i is [i]


def feed_of(transform, view=VIEW, **options):
    return mr.Feed(view, transform=transform, **{"batch": 8, "seed": 2, "epochs": 1, "device": "numpy", **options})


# What it is given.


def test_it_gets_host_arrays_with_padding_and_marks():
    seen = {}

    def look(batch, rng):
        seen[int(batch.positions[0])] = batch, type(batch.x), batch.x.copy(), batch.positions.copy()
        return batch

    got = list(feed_of(look))
    assert sorted(seen) == [0, 8, 16, 24]
    for batch, kind, x, positions in seen.values():
        assert kind is np.ndarray
        assert isinstance(batch, mr.Batch)
        assert x.shape == (8, 1)
        assert np.array_equal(batch.valid, positions >= 0)
        assert np.array_equal(x[batch.valid, 0], batch.samples[batch.valid])
    _, _, x, positions = seen[24]
    assert positions.tolist() == [24, 25, 26, 27, 28, 29, -1, -1]
    assert x[6:, 0].tolist() == [x[0, 0]] * 2
    assert got[-1].valid.tolist() == [True] * 6 + [False] * 2


def test_it_gets_ragged_columns_and_text():
    store = mr.from_arrays({"hits": np.arange(9.0), "key": ["a", "b", "c"]}, offsets=[0, 2, 2, 9])

    def lengths(batch, rng):
        assert isinstance(batch.hits, mr.Ragged)
        return {"length": batch.hits.lengths, "key": [key.upper() for key in batch.key], "hits": batch.hits}

    (got,) = feed_of(lengths, mr.Records(store), batch=3, order=mr.Sequential(3))
    assert got.length.tolist() == [2, 0, 7]
    assert got.key == ["A", "B", "C"]
    assert got.hits[2].tolist() == list(range(2, 9))


def test_with_device_cpu_it_still_gets_numpy_and_the_loop_tensors():
    import torch

    def twice(batch, rng):
        assert type(batch.x) is np.ndarray
        return {"x": batch.x * 2, "names": np.array(["a"] * 8), "tensor": torch.zeros(8), "list": [None] * 8}

    for got in feed_of(twice, device="cpu"):
        assert isinstance(got.x, torch.Tensor)
        assert got.x[got.valid, 0].tolist() == (2 * got.samples[got.valid]).tolist()
        assert type(got.positions) is type(got.samples) is type(got.valid) is np.ndarray
        assert type(got.names) is np.ndarray
        assert isinstance(got.tensor, torch.Tensor)


def test_flipped_and_read_only_arrays_become_tensors_too():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(31)}), length=3)

    def flip(batch, rng):
        return {"x": batch.x[:, ::-1], "same": np.broadcast_to(np.float32(1), (8, 2))}

    for got in feed_of(flip, view, device="cpu"):
        assert got.x[0].tolist() == [3 * int(got.samples[0]) + k for k in (2, 1, 0)]
        got.same += 1


# What it may return.


def test_any_mapping_with_the_same_first_axis_is_taken_and_marked_again():
    returns = [
        lambda batch, rng: dict(batch),
        lambda batch, rng: batch,
        lambda batch, rng: mr.Batch({"x": batch["x"]}),
        lambda batch, rng: {"x": batch["x"], "new": np.zeros((8, 2, 3), np.float32)},
        lambda batch, rng: {"list": [0] * 8},
        lambda batch, rng: {},
    ]
    plain = list(mr.Feed(VIEW, batch=8, seed=2, epochs=1, device="numpy"))
    for transform in returns:
        for got, expected in zip(feed_of(transform), plain, strict=True):
            assert type(got) is mr.Batch
            for mark in ("positions", "samples", "valid"):
                assert np.array_equal(getattr(got, mark), getattr(expected, mark))
            assert got.num_samples == 8


def test_marks_it_changed_are_set_right_again():
    """Even where it writes into them or takes them away."""

    def remove(batch, rng):
        batch.positions = batch.samples = batch.valid = None
        return batch

    def overwrite(batch, rng):
        batch.positions[:], batch.samples[:], batch.valid[:] = 5, 5, False
        return {**batch, "drawn": rng.uniform()}

    for spoil in (remove, overwrite):
        got = list(feed_of(spoil))
        assert np.concatenate([batch.positions for batch in got]).tolist() == [*range(30), -1, -1]
        assert all(np.array_equal(batch.x[batch.valid, 0], batch.samples[batch.valid]) for batch in got)
    assert np.array_equal(got[0].drawn, Rng(2, np.arange(8)).uniform())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "it returned NoneType; expected a mapping"),
        ([1, 2], "it returned list"),
        (np.zeros(8), "it returned ndarray"),
        ({"x": np.zeros(7)}, "it returned 7 rows in 'x'; expected 8"),
        ({"x": np.zeros((1, 8))}, "it returned 1 rows in 'x'"),
        ({"x": 3.0}, "it returned no rows in 'x'"),
        ({"x": np.float64(3)}, "'x'"),
        ({"x": np.array(3.0)}, "TypeError"),
        ({3: np.zeros(8)}, "a batch has column 3; names are strings"),
    ],
)
def test_a_wrong_result_is_a_failed_stage(result, message):
    with pytest.raises(mr.StageFailed, match=message) as caught:
        next(iter(feed_of(lambda batch, rng: result)))
    assert caught.value.stage == "transform"
    assert caught.value.position == 0
    assert isinstance(caught.value.__cause__, (mr.ConfigError, TypeError))


# What happens when it raises.


@pytest.mark.parametrize("workers", [1, 3])
def test_a_failure_comes_in_its_turn_with_its_position_and_cause(workers):
    """Batches before it are delivered, and the feed stands at the batch that failed, to be tried again."""
    broken = True

    def fail_at_16(batch, rng):
        if broken and 16 in batch.positions:
            raise KeyError("my bug")
        return batch

    feed, got = feed_of(fail_at_16, workers=workers, depth=4), []
    with pytest.raises(mr.StageFailed, match=r"position 16 .*KeyError: 'my bug'") as caught:
        got.extend(batch.positions[0] for batch in feed)
    assert (caught.value.stage, caught.value.position) == ("transform", 16)
    assert isinstance(caught.value.__cause__, KeyError)
    assert got == [0, 8]
    assert feed.state_dict()["position"] == 16
    assert feed.live is None
    broken = False
    assert [batch.positions[0] for batch in feed] == [16, 24]


class Silent(RuntimeError):
    def __str__(self):
        raise ValueError("not even a message")


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=pytest.mark.needs_core)])
@pytest.mark.parametrize("which", ["transform", "decode"])
def test_an_exception_whose_message_raises_is_a_failed_stage_too(which, processes):
    feed = feed_of(**{"transform": None, which: silent}, processes=processes, workers=1)
    with pytest.raises(
        mr.StageFailed, match=rf"{which} raised at position \d+ .*: Silent: \(its message cannot be shown\)"
    ):
        next(iter(feed))
    feed.close()


def silent(given, rng):
    raise Silent


@pytest.mark.parametrize("code", [None, 0, "enough"])
@pytest.mark.parametrize("which", ["transform", "decode"])
def test_a_function_that_exits_is_a_failed_stage_and_does_not_end_the_loop(which, code):
    def leave(given, rng):
        sys.exit(code)

    feed = feed_of(**{"transform": None, which: leave})
    with pytest.raises(mr.StageFailed, match=rf"{which} raised at position \d+ .*SystemExit") as caught:
        list(feed)
    assert caught.value.stage == which
    assert isinstance(caught.value.__cause__, SystemExit)


def test_a_transform_that_was_interrupted_is_not_a_failed_stage():
    def interrupt(batch, rng):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        next(iter(feed_of(interrupt)))


def test_a_share_of_padding_alone_fails_at_the_start_of_its_batch():
    def fail_on_padding(batch, rng):
        assert batch.valid.any()
        return batch

    feed = feed_of(fail_on_padding, rank=7, world=8)
    with pytest.raises(mr.StageFailed) as caught:
        list(feed)
    assert caught.value.position == 24


# Threads.


def test_it_runs_in_as_many_threads_as_asked_for():
    together = threading.Barrier(3, timeout=30)

    def meet(batch, rng):
        together.wait()  # passes only when three of them are here at once
        return batch

    got = [batch.positions[0] for batch in feed_of(meet, batch=5, workers=3, depth=3)]
    assert got == list(range(0, 30, 5))


def test_the_report_says_what_it_took():
    feed = feed_of(lambda batch, rng: batch, epochs=3, workers=2, depth=3)
    assert len(list(feed)) == 12
    report = feed.report()
    assert (report.way, report.workers, report.batches, report.made_in_line) == ("transform", 2, 12, 0)
    assert report.fill_s > 0
    assert report.fill_wait_s > 0
    assert 1 <= report.depth_seen <= 3
    assert "2 threads rested" in str(report)


# Randomness.


def drawn(world, batch, **options):
    """position -> everything drawn there."""

    def draw(batch, rng):
        pairs = [(rng.generator(row).normal(), rng.generator(row).integers(99)) for row in range(len(batch.x))]
        return {
            "uniform": rng.uniform(2),
            "integers": rng.integers(-3, 1 << 40),
            "normal": rng.normal(2, 2),
            "generator": np.array(pairs),
            "again": rng.uniform(2),
        }

    found = {}
    for rank in range(world):
        for got in feed_of(draw, batch=batch, rank=rank, world=world, epochs=2, **options):
            for row in np.flatnonzero(got.valid):
                found[int(got.positions[row])] = [value[row].tolist() for value in got.values()]
    assert sorted(found) == list(range(60))
    return found


def test_randomness_is_the_same_for_any_world_batch_depth_and_threads():
    expected = drawn(1, 60, workers=1, depth=1)
    for world, batch, workers, depth in ((1, 7, 2, 3), (2, 9, 3, 8), (3, 3, 1, 1), (5, 64, 4, 2), (8, 13, 2, 2)):
        assert drawn(world, batch, workers=workers, depth=depth) == expected
    assert drawn(1, 60, order=mr.Sequential(30)) == expected  # of the feed's seed, whatever the order
    assert drawn(1, 60, seed=3) != expected


def test_two_calls_and_two_epochs_differ():
    found = drawn(1, 20)
    assert all(values[0] != values[4] for values in found.values())
    assert len({str(values) for values in found.values()}) == 60


def test_padding_rows_draw_at_position_minus_one():
    *_, last = feed_of(lambda batch, rng: {"drawn": rng.uniform()})
    assert np.array_equal(last.drawn[6:], np.repeat(Rng(2, np.array([-1])).uniform(), 2))
    assert np.array_equal(last.drawn[:6], Rng(2, np.arange(24, 30)).uniform())


# What is none.


def of_one(batch):
    return batch


class Own:
    def __call__(self, batch, rng, more):
        return batch

    def two(self, batch, rng):
        return batch


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (of_one, r"transform 'of_one' takes \(batch\); a transform takes \(batch, rng\)"),
        (lambda: None, r"takes \(\); a transform takes \(batch, rng\)"),
        (Own(), r"transform 'Own' takes \(batch, rng, more\)"),
        (functools.partial(Own().two, 1), r"takes \(rng\)"),
        ("augment", "transform='augment' cannot be called"),
    ],
)
def test_what_cannot_be_called_with_a_batch_and_an_rng_is_refused_at_once(transform, message):
    with pytest.raises(mr.ConfigError, match=message):
        feed_of(transform)


@pytest.mark.parametrize(
    "transform",
    [Own().two, lambda batch, rng=None, *rest: batch, lambda *all: all[0], functools.partial(Own(), more=1), max],
)
def test_whatever_can_be_is_taken(transform):
    assert feed_of(transform).transform is transform
