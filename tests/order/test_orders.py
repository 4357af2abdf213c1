"""Orders as users meet them: both directions, what is refused, specs, shares, and where BlockShuffled reads."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.order.orders import Order, order_from_spec, share

MAX_POSITION = (1 << 63) - 1


@st.composite
def orders(draw, max_n=400):
    n = draw(st.integers(1, max_n))
    seed = draw(st.integers(0, 3) | st.integers(0, (1 << 64) - 1))
    block, window = draw(st.integers(1, 40)), draw(st.integers(1, 12))
    kinds = [mr.Sequential(n), mr.Shuffled(n, seed=seed), mr.BlockShuffled(n, block=block, window=window, seed=seed)]
    return draw(st.sampled_from(kinds))


def epoch_of(order, epoch):
    return order.samples(np.arange(epoch * order.n, (epoch + 1) * order.n))


# Two directions of one thing.


@given(order=orders(), epoch=st.integers(0, 5))
def test_an_epoch_holds_every_sample_once_and_positions_finds_them(order, epoch):
    found = epoch_of(order, epoch)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(order.n))
    assert order.positions(found, epoch).tolist() == list(range(epoch * order.n, (epoch + 1) * order.n))


@given(order=orders(max_n=60), data=st.data())
def test_any_positions_in_any_order_get_the_sample_they_get_alone(order, data):
    positions = data.draw(st.lists(st.integers(0, 6 * order.n)))
    alone = [int(order.samples(position)[0]) for position in positions]
    assert order.samples(positions).tolist() == alone
    assert order.samples(np.array(positions, np.uint64)).tolist() == alone


@given(order=orders())
def test_the_last_epoch_of_the_line_has_an_inverse_and_the_next_is_refused(order):
    epoch = (MAX_POSITION + 1) // order.n - 1
    positions = np.arange(order.n) + epoch * order.n
    assert np.array_equal(order.positions(order.samples(positions), epoch), positions)
    with pytest.raises(mr.ConfigError, match=f"epoch={epoch + 1}"):
        order.positions([0], epoch + 1)


@given(n=st.integers(10**9, MAX_POSITION), data=st.data())
def test_block_shuffled_comes_back_at_any_size(n, data):
    block = data.draw(st.sampled_from([1, 3, 256, 4096, 1 << 31]))
    order = mr.BlockShuffled(n, block=block, window=data.draw(st.sampled_from([1, 64, 1 << 20])), seed=1)
    inside = data.draw(st.lists(st.integers(0, n - 1), max_size=20))
    found = order.samples(inside)
    assert np.array_equal(order.positions(found), np.array(inside, np.int64))
    assert len(set(found.tolist())) == len(set(inside))


def test_sequential_is_the_samples_as_they_lie():
    assert mr.Sequential(4).samples(np.arange(10)).tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    assert mr.Sequential(4).positions([3, 0], epoch=2).tolist() == [11, 8]


@pytest.mark.parametrize("make", [mr.Shuffled, mr.BlockShuffled])
def test_seed_and_epoch_are_hashed_together_never_added(make):
    n = 1000
    of = {(seed, epoch): tuple(epoch_of(make(n, seed=seed), epoch).tolist()) for seed in range(8) for epoch in range(8)}
    assert len(set(of.values())) == 64


def test_a_seed_means_the_same_in_every_object():
    assert np.array_equal(epoch_of(mr.Shuffled(500, seed=3), 2), epoch_of(mr.Shuffled(500, seed=3), 2))
    assert np.array_equal(epoch_of(mr.Shuffled(500), 0), epoch_of(mr.Shuffled(500, seed=0), 0))


# BlockShuffled reads block by block.


@given(n=st.integers(1, 500), block=st.integers(1, 40), window=st.integers(1, 9), epoch=st.integers(0, 3))
def test_the_samples_of_a_window_are_those_of_its_blocks(n, block, window, epoch):
    order = mr.BlockShuffled(n, block=block, window=window, seed=2)
    found = epoch_of(order, epoch)
    is_short = np.arange(n) // block == n // block  # of the last block, where it is not full
    seen = []
    for first in range(0, n, block * window):
        part = found[first : first + block * window]
        blocks = np.unique(part // block)
        assert len(blocks) <= window
        for number in blocks:  # every block a window touches, it delivers whole
            whole = np.arange(number * block, min((number + 1) * block, n))
            assert set(whole.tolist()) <= set(part.tolist())
        seen += blocks.tolist()
    assert sorted(seen) == list(range(-(-n // block)))
    if is_short.any():
        last_window = (n - 1) // (block * window)
        assert set(np.flatnonzero(is_short[found]) // (block * window)) == {last_window}


def test_full_blocks_go_anywhere_and_differently_every_epoch():
    order = mr.BlockShuffled(1003, block=10, window=5, seed=1)
    first_windows = [frozenset((epoch_of(order, epoch)[:50] // 10).tolist()) for epoch in range(20)]
    assert len(set(first_windows)) == 20
    assert set.union(*map(set, first_windows)) <= set(range(100))
    assert len(set.union(*map(set, first_windows))) > 50


def test_windows_of_an_epoch_are_mixed_differently():
    order = mr.BlockShuffled(10_000, block=100, window=1, seed=1)
    inside = epoch_of(order, 0).reshape(100, 100) % 100
    assert len({tuple(row) for row in inside.tolist()}) == 100


def test_a_block_larger_than_the_data_is_one_shuffled_window():
    order = mr.BlockShuffled(50, block=256, window=64, seed=1)
    assert sorted(epoch_of(order, 0).tolist()) == list(range(50))
    assert epoch_of(order, 0).tolist() != list(range(50))


# What is refused.


@pytest.mark.parametrize("make", [mr.Sequential, mr.Shuffled, mr.BlockShuffled])
@pytest.mark.parametrize(
    "positions",
    [[-1], [3, -7], np.array([1 << 63], np.uint64), [0.0], [True], ["1"], [[1, 2]], np.array([None])],
    ids=str,
)
def test_positions_that_are_none_are_refused(make, positions):
    with pytest.raises(mr.ConfigError, match="position"):
        make(10).samples(positions)


@pytest.mark.parametrize("make", [mr.Sequential, mr.Shuffled, mr.BlockShuffled])
@pytest.mark.parametrize("samples", [[-1], [10], [0, 11], [0.5], np.array([1 << 63], np.uint64)], ids=str)
def test_samples_outside_the_order_are_refused(make, samples):
    with pytest.raises(mr.ConfigError, match="sample"):
        make(10).positions(samples)
    with pytest.raises(mr.ConfigError, match="epoch=-1"):
        make(10).positions([0], epoch=-1)


@pytest.mark.parametrize("empty", [[], np.zeros(0, np.int64), np.zeros(0, np.uint32)], ids=repr)
@given(order=orders(max_n=50))
def test_no_positions_give_no_samples(order, empty):
    assert order.samples(empty).dtype == order.positions(empty, 3).dtype == np.int64
    assert len(order.samples(empty)) == len(order.positions(empty, 3)) == 0


@pytest.mark.parametrize("n", [0, -1, 1 << 63, 2.5, 3.0, "3", None])
@pytest.mark.parametrize("make", [mr.Sequential, mr.Shuffled, mr.BlockShuffled])
def test_a_number_of_samples_that_is_none_is_refused(make, n):
    with pytest.raises(mr.ConfigError, match="n="):
        make(n)


@pytest.mark.parametrize("seed", [-1, 1 << 64, 0.5, "7"])
@pytest.mark.parametrize("make", [mr.Shuffled, mr.BlockShuffled])
def test_a_seed_outside_64_bits_is_refused(make, seed):
    with pytest.raises(mr.ConfigError, match="seed="):
        make(10, seed=seed)


@pytest.mark.parametrize("options", [{"block": 0}, {"window": 0}, {"block": -3}, {"block": 1 << 40, "window": 1 << 40}])
def test_blocks_and_windows_are_1_or_more(options):
    with pytest.raises(mr.ConfigError, match="block="):
        mr.BlockShuffled(10, **options)


# Specs.


@given(order=orders(), epoch=st.integers(0, 3))
def test_the_spec_through_json_rebuilds_the_order(order, epoch):
    spec = json.loads(json.dumps(order.spec()))
    again = order_from_spec(spec)
    assert type(again) is type(order)
    assert again.spec() == order.spec() == spec
    assert np.array_equal(epoch_of(again, epoch), epoch_of(order, epoch))


@pytest.mark.parametrize("number", [np.int64, np.uint64, np.int32])
def test_numbers_of_numpy_are_as_good_as_integers(number):
    plain = mr.BlockShuffled(1000, block=10, window=4, seed=9)
    order = mr.BlockShuffled(number(1000), block=number(10), window=number(4), seed=number(9))
    assert json.dumps(order.spec()) == json.dumps(plain.spec())
    assert np.array_equal(epoch_of(order, 1), epoch_of(plain, 1))
    shuffled = mr.Shuffled(number(1000), seed=number(9))
    assert json.dumps(shuffled.spec()) == json.dumps(mr.Shuffled(1000, seed=9).spec())
    assert np.array_equal(epoch_of(shuffled, 1), epoch_of(mr.Shuffled(1000, seed=9), 1))


@pytest.mark.parametrize(
    "spec",
    [{}, {"order": "sorted", "n": 3}, {"order": "shuffled"}, {"order": "sequential", "n": 3, "seed": 1},
     {"order": "shuffled", "n": 3, "sede": 1}, {"order": "shuffled", "n": "3", "seed": 1}],
    ids=str,
)  # fmt: skip
def test_a_spec_of_no_order_is_refused(spec):
    with pytest.raises(mr.ConfigError):
        order_from_spec(spec)


def test_repr_says_what_it_is():
    assert repr(mr.Shuffled(1_000_000, seed=7)) == "Shuffled(1,000,000, seed=7)"
    assert repr(mr.Sequential(5)) == "Sequential(5)"
    assert repr(mr.BlockShuffled(5, block=2, window=3)) == "BlockShuffled(5, block=2, window=3, seed=0)"
    assert len(mr.Sequential(5)) == 5


def test_an_order_of_ones_own_needs_two_functions_and_a_spec():
    class Backwards(Order):
        def _forward(self, inside, epochs):
            return self.n - 1 - inside

        def _backward(self, samples, epoch):
            return self.n - 1 - samples

        def spec(self):
            return {"order": "backwards", "n": self.n}

    order = Backwards(4)
    assert order.samples([0, 1, 4]).tolist() == [3, 2, 3]
    assert order.positions([3], epoch=1).tolist() == [4]


# Shares.


@given(world=st.integers(1, 300), extra=st.integers(0, 5000))
def test_shares_are_the_law_of_the_design_and_cover_the_batch(world, extra):
    batch = world + extra
    shares = [share(batch, rank, world) for rank in range(world)]
    assert shares == [(rank * batch // world, (rank + 1) * batch // world) for rank in range(world)]
    assert [row for first, last in shares for row in range(first, last)] == list(range(batch))
    sizes = {last - first for first, last in shares}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1


@pytest.mark.parametrize(("batch", "rank", "world"), [(3, 0, 4), (0, 0, 1), (8, 4, 4), (8, -1, 4), (8, 0, 0)])
def test_a_share_that_cannot_be_is_refused(batch, rank, world):
    with pytest.raises(mr.ConfigError):
        share(batch, rank, world)
