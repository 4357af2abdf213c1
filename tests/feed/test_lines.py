"""Exact ranks: every position once, on one rank, in as many batches as every other rank has."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.feed.line import Line


class Counted:
    """A view that is only counted: planning reads nothing."""

    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def located(self, samples):
        return samples


def plans(n, world, batch, start, stop, order):
    """Per rank: positions, samples, valid and what is read, each (batches, share)."""
    found = []
    for rank in range(world):
        line = Line(Counted(n), order, batch, rank, world, start, stop)
        plan = line.plan(0, line.num_batches)
        valid = np.ones(len(plan.positions), bool) if plan.valid is None else plan.valid
        shape = (line.num_batches, line.size)
        found.append([part.reshape(shape) for part in (plan.positions, plan.samples, valid, plan.located)])
    return found


def check(n, world, batch, start, stop, order):
    """Every rule of shares and last batches, for all ranks together."""
    found = plans(n, world, batch, start, stop, order)
    assert {len(positions) for positions, *_ in found} == {-(-(stop - start) // batch)}
    assert [part[0].shape[1] for part in found] == [(r + 1) * batch // world - r * batch // world for r in range(world)]
    positions, samples, valid, read = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    assert positions.shape[1] == batch
    line = start + np.arange(positions.size).reshape(positions.shape)
    assert np.array_equal(valid, line < stop)
    assert np.array_equal(positions, np.where(line < stop, line, -1))
    assert np.array_equal(samples >= 0, valid)
    assert np.array_equal(samples[valid], read[valid])
    if not valid.all():  # only the last batch has padding: the first sample of the global batch, on every rank
        assert valid[:-1].all()
        assert np.all(read[-1, ~valid[-1]] == read[-1, 0])
    return positions[valid], samples[valid]


@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_random_lines(part):
    rng = np.random.default_rng(part)
    for _ in range(2500):
        world, n = int(rng.integers(1, 9)), int(rng.integers(1, 40))
        batch, epochs = world + int(rng.integers(0, 3 * n)), int(rng.integers(1, 4))
        start = int(rng.integers(0, n * epochs)) if rng.random() < 0.5 else 0
        order = mr.Sequential(n) if rng.random() < 0.8 else mr.Shuffled(n, seed=part)
        positions, samples = check(n, world, batch, start, n * epochs, order)
        assert np.array_equal(positions, np.arange(start, n * epochs))
        assert np.array_equal(samples, order.samples(positions))


@given(st.integers(1, 300), st.integers(1, 40), st.integers(0, 200), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_every_sample_once_per_epoch(n, world, more, epochs, seed):
    _, samples = check(n, world, world + more, 0, n * epochs, mr.Shuffled(n, seed=seed))
    counts = np.stack([np.bincount(samples[e * n : (e + 1) * n], minlength=n) for e in range(epochs)])
    assert np.all(counts == 1)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (3, 4), (0, 5), (2, 7), (6, 7)])
def test_a_plan_of_some_batches_is_a_part_of_the_plan_of_all(first, last):
    line = Line(Counted(20), mr.Shuffled(20, seed=2), 6, 1, 4, 0, 40)
    whole, part = line.plan(0, 7), line.plan(first, last)
    for batch in range(first, last):
        for name, mark in part.marks(batch).items():
            assert np.array_equal(mark, whole.marks(batch)[name])
        assert np.array_equal(part.located[part.rows(batch)], whole.located[whole.rows(batch)])


def real_feeds(n, world, **options):
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(n + 1)}), length=1)
    return [mr.Feed(view, rank=rank, world=world, device="numpy", **options) for rank in range(world)]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("n", "batch"), [(1, 8), (7, 8), (8, 8), (9, 8), (61, 13), (64, 16)])
def test_padding_rows_are_real_data_and_marked(world, n, batch):
    """Also where a rank has nothing but padding, and where the view is smaller than one batch."""
    feeds = real_feeds(n, world, batch=batch, seed=4, epochs=1)
    assert {len(feed) for feed in feeds} == {-(-n // batch)}
    for batches in zip(*feeds, strict=True):
        first = batches[0].x[0, 0]
        for rank, got in enumerate(batches):
            assert got.num_samples == (rank + 1) * batch // world - rank * batch // world
            assert np.all(got.positions[~got.valid] == -1)
            assert np.all(got.samples[~got.valid] == -1)
            assert np.all(got.x[~got.valid, 0] == first)
            assert np.array_equal(got.x[got.valid, 0], got.samples[got.valid])


@pytest.mark.parametrize("seed", range(6))
def test_an_evaluation_over_ranks_is_that_of_one_process(seed):
    """Every sample counts once: a mean over valid rows, summed over ranks, to 1e-12."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 500))
    values = rng.normal(size=n) * 10.0 ** rng.integers(-8, 8, size=n)

    def metric(world, batch, transform=None):
        losses, count = [], 0
        for feed in real_feeds(n, world, batch=batch, epochs=1, order=mr.Sequential(n), transform=transform):
            for got in feed:
                losses += (values[got.x[:, 0]] ** 2)[got.valid].tolist()
                count += int(got.valid.sum())
        assert count == n
        return math.fsum(losses) / count

    alone = metric(1, n)
    assert alone == pytest.approx(math.fsum(values**2) / n, rel=1e-12)
    for world in (1, 2, 3, 4, 5, 8):
        assert metric(world, world + int(rng.integers(0, 40))) == pytest.approx(alone, rel=1e-12)
    assert metric(3, 7, lambda batch, rng: batch) == pytest.approx(alone, rel=1e-12)


def test_batches_beyond_one_plan_are_the_same_line():
    """Plans hold many batches; nothing shows where one ends and the next begins."""
    (feed,) = real_feeds(50_000, 1, batch=3, seed=1, epochs=1)
    line = feed.line(0, None)
    assert line.plan_size() * 3 < 50_000
    order, position = feed.order, 0
    for got in feed:
        if position % 8190 < 9 or position > 49_990:
            expected = order.samples(np.arange(position, min(position + 3, 50_000)))
            assert np.array_equal(got.x[got.valid, 0], expected)
        position += 3


def test_plans_shrink_for_large_batches():
    for batch, plan in ((1, 8192), (8, 1024), (1000, 64), (1 << 20, 4), (1 << 23, 1)):
        assert Line(Counted(10), mr.Sequential(10), batch, 0, 1, 0, None).plan_size() == plan
