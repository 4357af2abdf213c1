"""Shuffled looks like chance: every order equally often, both parities, no pattern within or between epochs.

Seeds are fixed, so each test gives the same number for ever. A threshold is 4 standard deviations of what chance
would do; the faults these once found stood at 30 and more.
"""

from math import factorial, sqrt

import numpy as np
import pytest

import millrace as mr
from millrace.order.hashing import round_keys
from millrace.order.permute import num_rounds, permute

LIMIT = 4.0


def chi_square_z(counts):
    """How many standard deviations the chi-square of equally likely counts lies above what is expected."""
    expected = counts.sum() / len(counts)
    freedom = len(counts) - 1
    return (((counts - expected) ** 2).sum() / expected - freedom) / sqrt(2 * freedom)


def orders_of(n, keys):
    """(trials, n): the whole order under each row of keys."""
    return np.column_stack([permute(np.full(len(keys), i, np.uint64), n, keys) for i in range(n)]).astype(np.int64)


def ranks(orders):
    """Each order as a number in [0, n!), by counting the smaller ones that are still to come."""
    n = orders.shape[1]
    rank = np.zeros(len(orders), np.int64)
    for i in range(n):
        rank = rank * (n - i) + (orders[:, i + 1 :] < orders[:, i : i + 1]).sum(axis=1)
    return rank


def is_odd(orders):
    """Whether each order takes an odd number of swaps: sort all of them at once, one place after the other."""
    orders = orders.copy()
    rows = np.arange(len(orders))
    where = np.argsort(orders, axis=1)
    odd = np.zeros(len(orders), bool)
    for i in range(orders.shape[1]):
        found, place = orders[:, i].copy(), where[:, i].copy()
        odd ^= found != i
        orders[rows, place], where[rows, found] = found, place
    return odd


def test_parity_is_counted_rightly():
    assert is_odd(np.array([[0, 1, 2], [1, 0, 2], [1, 2, 0], [2, 1, 0]])).tolist() == [False, True, False, True]


def test_ranks_number_every_order_once():
    every = np.array(np.meshgrid(*[range(4)] * 4)).reshape(4, -1).T
    every = every[[len(set(row)) == 4 for row in every.tolist()]]
    assert sorted(ranks(every).tolist()) == list(range(24))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_order_of_few_samples_comes_equally_often_over_epochs(n):
    counts = np.zeros(factorial(n), np.int64)
    for first in range(0, 1_000_000 if n > 4 else 200_000, 100_000):  # of a million, 16 rounds would show at 5 and 6
        keys = round_keys(11, 0, np.arange(first, first + 100_000), num_rounds(n))
        counts += np.bincount(ranks(orders_of(n, keys)), minlength=factorial(n))
    assert abs(chi_square_z(counts)) < LIMIT


@pytest.mark.parametrize("n", [4, 5])
def test_every_order_of_few_samples_comes_equally_often_over_seeds(n):
    keys = np.concatenate([round_keys(seed, 0, [0], num_rounds(n)) for seed in range(25_000)])
    counts = np.bincount(ranks(orders_of(n, keys)), minlength=factorial(n))
    assert abs(chi_square_z(counts)) < LIMIT


@pytest.mark.parametrize("n", [7, 8, 23, 24, 1087, 1088])
def test_half_of_the_orders_are_odd(n):
    trials = 20_000 if n < 1000 else 2000  # a bias of 0.1 would be 9 standard deviations even of 2000
    orders = mr.Shuffled(n, seed=5).samples(np.arange(trials * n)).reshape(trials, n)
    assert abs(is_odd(orders).mean() - 0.5) < LIMIT * 0.5 / sqrt(trials)


@pytest.mark.parametrize("n", [5, 23, 24, 100])
def test_every_sample_stands_equally_often_in_every_place(n):
    trials = min(400 * n, 12_000)
    orders = mr.Shuffled(n, seed=8).samples(np.arange(trials * n)).reshape(trials, n)
    for place in (0, 1, n // 2, n - 1):
        assert abs(chi_square_z(np.bincount(orders[:, place], minlength=n))) < LIMIT, place
    pairs = orders[:, 0] * n + orders[:, 1]
    counts = np.bincount(pairs, minlength=n * n).reshape(n, n)[~np.eye(n, dtype=bool)]
    assert abs(chi_square_z(counts)) < LIMIT


@pytest.mark.parametrize("n", [1024, 10**6 + 3, 10**12, (1 << 62) + 1])
@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_place_of_a_large_epoch_holds_any_sample_over_epochs(n, place):
    epochs = min(50_000, ((1 << 63) - 1) // n - 1)
    if epochs < 5000:
        found = np.array([mr.Shuffled(n, seed=seed).samples([place % n])[0] for seed in range(5000)])
    else:
        found = mr.Shuffled(n, seed=3).samples(np.arange(epochs) * n + place % n)
    bins = (found.astype(np.float64) / n * 50).astype(np.int64)
    assert abs(chi_square_z(np.bincount(bins, minlength=50))) < LIMIT


@pytest.mark.parametrize("n", [1025, 300_007, 10**12, (1 << 63) - 1])
@pytest.mark.parametrize("lag", [1, 2, 7])
def test_neighbours_of_an_epoch_have_nothing_in_common(n, lag):
    found = mr.Shuffled(n, seed=2).samples(np.arange(min(n, 300_000)))
    one, other = found[:-lag], found[lag:]
    assert abs(np.corrcoef(one.astype(float), other.astype(float))[0, 1]) < LIMIT / sqrt(len(one))
    steps = (one - other) % n  # of random neighbours any step but 0 is equally likely
    bins = (steps.astype(np.float64) / n * 40).astype(np.int64)
    assert abs(chi_square_z(np.bincount(bins, minlength=40))) < LIMIT


@pytest.mark.parametrize("n", [1025, 300_007])
def test_epochs_and_seeds_have_nothing_in_common(n):
    inside = np.arange(n)
    base = mr.Shuffled(n, seed=4).samples(inside)
    others = [mr.Shuffled(n, seed=4).samples(inside + epoch * n) for epoch in (1, 2, 64)]
    others += [mr.Shuffled(n, seed=seed).samples(inside) for seed in (0, 5, 4 ^ 1 << 63)]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < LIMIT / sqrt(n)
        assert (base == other).sum() < 12  # fixed points of a random order: Poisson with mean 1


@pytest.mark.parametrize(("block", "window"), [(1, 5), (5, 1), (3, 2)])
def test_a_block_shuffled_window_mixes_its_samples_evenly(block, window):
    n, trials = 30, 15_000
    orders = mr.BlockShuffled(n, block=block, window=window, seed=6).samples(np.arange(trials * n)).reshape(trials, n)
    for place in (0, block * window - 1, n - 1):
        assert abs(chi_square_z(np.bincount(orders[:, place], minlength=n))) < LIMIT
