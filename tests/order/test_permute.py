"""The permutation itself: a bijection for every n, equal to a twin in plain integers, small in memory."""

import json
import tracemalloc
from functools import cache
from math import isqrt
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.order.hashing import mix32s, mix64, mix64s, round_keys
from millrace.order.permute import CHUNK, num_rounds, numpy_permute, permute, sides

MAX_N = (1 << 63) - 1
GOLDEN = Path(__file__).parents[1] / "golden" / "orders.json"
POWERS = [1 << k for k in range(1, 63)]
EDGES = sorted({n for power in POWERS for n in (power - 1, power, power + 1)} | {MAX_N - 1, MAX_N})


# The twin: design section 8 in Python's integers, with no array and no import from the package.


def twin_mix64(value):
    value %= 1 << 64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % (1 << 64)
    value = (value ^ value >> 27) * 0x94D049BB133111EB % (1 << 64)
    return value ^ value >> 31


def twin_mix32(value):
    value = (value ^ value >> 16) * 0x7FEB352D % (1 << 32)
    value = (value ^ value >> 15) * 0x846CA68B % (1 << 32)
    return value ^ value >> 16


@cache
def twin_keys(seed, lane, stream, rounds):
    golden = 0x9E3779B97F4A7C15
    base = twin_mix64(seed ^ int.from_bytes(b"millrace", "big") ^ twin_mix64(lane))
    state = twin_mix64(twin_mix64(stream + golden) ^ base)
    return [twin_mix64(state + (r + 1) * golden) >> 32 for r in range(rounds)]


def twin_sides(n):
    a = next(root for root in (isqrt(n), isqrt(n) + 1) if root * root >= n)
    b = (n + a - 1) // a
    if a % 2 == 1 and b % 2 == 1:
        b += 1
    return a, b


def twin_permute(value, n, keys):
    a, b = twin_sides(n)
    while True:
        left, right = divmod(value, b)
        for r, key in enumerate(keys):
            if r % 2 == 0:
                left = (left + (twin_mix32(right ^ key) * a >> 32)) % a
            else:
                right = (right + (twin_mix32(left ^ key) * b >> 32)) % b
        value = left * b + right
        if value < n:
            return value


def twin_sample(position, n, seed):
    epoch, inside = divmod(position, n)
    return twin_permute(inside, n, twin_keys(seed, 0, epoch, 24 if n < 1024 else 8))


def twin_block_sample(position, n, block, window, seed):
    """Samples move within their window of blocks, then full blocks within the epoch."""

    def moved(value, size, lane, stream):
        return twin_permute(value, size, twin_keys(seed, lane, stream, 24 if size < 1024 else 8))

    epoch, inside = divmod(position, n)
    number, place = divmod(inside, block * window)
    windows = -(-n // (block * window))
    size = min(block * window, n - number * block * window)
    slot, offset = divmod(moved(place, size, 2, epoch * windows + number), block)
    slot += number * window
    if slot < n // block:
        slot = moved(slot, n // block, 1, epoch)
    return slot * block + offset


sizes = st.one_of(st.integers(1, 3000), st.sampled_from(EDGES), st.integers(1, MAX_N))
seeds = st.one_of(st.integers(0, 5), st.integers(0, (1 << 64) - 1))


@given(n=sizes, seed=seeds, data=st.data())
def test_samples_are_those_of_the_twin_in_plain_integers(n, seed, data):
    positions = data.draw(st.lists(st.integers(0, MAX_N) | st.integers(0, 3 * n).map(lambda p: min(p, MAX_N))))
    found = mr.Shuffled(n, seed=seed).samples(np.array(positions, np.int64))
    assert found.tolist() == [twin_sample(position, n, seed) for position in positions]


@given(n=sizes, block=st.integers(1, 2000), window=st.integers(1, 100), seed=seeds, data=st.data())
def test_block_shuffled_samples_are_those_of_the_twin(n, block, window, seed, data):
    positions = data.draw(st.lists(st.integers(0, MAX_N) | st.integers(0, 3 * n).map(lambda p: min(p, MAX_N))))
    found = mr.BlockShuffled(n, block=block, window=window, seed=seed).samples(np.array(positions, np.int64))
    assert found.tolist() == [twin_block_sample(position, n, block, window, seed) for position in positions]


def test_golden_vectors_are_those_of_the_twin():
    golden = json.loads(GOLDEN.read_text())
    for case in golden["shuffled"]:
        n, first = case["n"], case["n"] * case["epoch"]
        assert case["samples"] == [twin_sample(first + k, n, case["seed"]) for k in range(min(n, 16))], case
    for case in golden["block_shuffled"]:
        n, first = case["n"], case["n"] * case["epoch"]
        options = [case[name] for name in ("n", "block", "window", "seed")]
        assert case["first"] == [twin_block_sample(first + k, *options) for k in range(min(n, 16))], case
        assert case["last"] == [twin_block_sample(first + n - 1 - k, *options) for k in range(min(n, 16))], case


@given(seed=seeds, lane=st.integers(0, 3), streams=st.lists(st.integers(0, MAX_N), min_size=1, max_size=5))
def test_round_keys_are_those_of_the_twin(seed, lane, streams):
    found = round_keys(seed, lane, np.array(streams), 24)
    assert found.dtype == np.uint32
    assert found.tolist() == [twin_keys(seed, lane, stream, 24) for stream in streams]


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20))
def test_hashes_of_arrays_are_the_hashes_of_their_numbers(values):
    expected = [twin_mix64(value) for value in values]
    assert mix64s(np.array(values, np.uint64)).tolist() == [mix64(value) for value in values] == expected
    halves = [value >> 32 for value in values]
    assert mix32s(np.array(halves, np.uint32)).tolist() == [twin_mix32(half) for half in halves]


def test_the_rectangle_holds_n_and_little_more_and_is_never_odd():
    for n in (*range(1, 3000), *EDGES):
        a, b = sides(n)
        assert (a, b) == twin_sides(n), n
        assert 0 <= a * b - n < a + b, n  # so that walking ends soon
        assert a * b % 2 == 0, n
        assert max(a, b) < 1 << 32, n  # halves are hashed as 32 bits


def test_small_n_has_24_rounds_and_large_n_8():
    assert [num_rounds(n) for n in (1, 5, 1023, 1024, 1 << 40)] == [24, 24, 24, 8, 8]


# Bijective, forwards and backwards.


def test_every_n_up_to_5000_is_a_permutation():
    for n in range(1, 5001):
        epoch = n % 11
        found = mr.Shuffled(n, seed=n // 100).samples(np.arange(epoch * n, (epoch + 1) * n))
        assert np.all(np.bincount(found, minlength=n) == 1), f"n={n}"
        assert len(found) == n


@pytest.mark.parametrize("n", [1, 2, 3, 999, 1023, 1024, 5000, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 1_000_003])
def test_positions_undo_samples_over_a_whole_epoch(n):
    order = mr.Shuffled(n, seed=9)
    positions = np.arange(2 * n, 3 * n)
    found = order.samples(positions)
    assert np.all(np.bincount(found, minlength=n) == 1)
    assert np.array_equal(order.positions(found, epoch=2), positions)


def test_random_positions_come_back_at_and_around_every_power_of_two():
    rng = np.random.default_rng(5)
    for n in EDGES:
        positions = np.unique(np.concatenate(([0, n - 1], rng.integers(0, n, 200))))
        order = mr.Shuffled(n, seed=int(rng.integers(1 << 60)))
        found = order.samples(positions)
        assert found.min() >= 0, f"n={n}"
        assert found.max() < n, f"n={n}"
        assert len(np.unique(found)) == len(positions), f"n={n}"
        assert np.array_equal(order.positions(found), positions), f"n={n}"


def test_the_largest_n_reaches_its_last_position():
    order = mr.Shuffled(MAX_N, seed=1)
    found = order.samples([0, MAX_N - 1])
    assert order.positions(found).tolist() == [0, MAX_N - 1]
    assert mr.Shuffled(3).samples(MAX_N).tolist() == [twin_sample(MAX_N, 3, 0)]


@given(n=sizes, data=st.data())
def test_unpermute_undoes_permute_with_a_key_for_each_value(n, data):
    values = np.array(data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30)), np.uint64)
    keys = round_keys(3, 0, np.arange(len(values)), num_rounds(n))
    moved = permute(values, n, keys)
    assert np.array_equal(permute(moved, n, keys, backward=True), values)
    one_by_one = [int(permute(values[k : k + 1], n, keys[k])[0]) for k in range(len(values))]
    assert moved.tolist() == one_by_one


@pytest.mark.parametrize("each", [False, True], ids=["one key", "a key for each"])
@pytest.mark.parametrize("n", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 7, 10**12 + 39])
def test_the_numpy_twin_alone_goes_on_over_its_chunks(n, each):
    """By itself, since elsewhere the core stands before it."""
    count = min(n, 2 * CHUNK + 7)
    values = np.arange(count, dtype=np.uint64) + np.uint64(n - count)
    keys = round_keys(3, 0, np.arange(count) if each else [0], num_rounds(n))
    moved = numpy_permute(values, n, keys if each else keys[0])
    own = keys if each else np.broadcast_to(keys, (count, keys.shape[1]))
    for place in {*range(0, count, 997), CHUNK - 1, CHUNK, count - 1} & set(range(count)):
        assert moved[place] == twin_permute(int(values[place]), n, own[place].tolist()), place
    assert each or len(np.unique(moved)) == count
    assert np.array_equal(moved, permute(values, n, keys if each else keys[0]))
    assert np.array_equal(numpy_permute(moved, n, keys if each else keys[0], backward=True), values)


@given(n=st.integers(1, 2000), seed=seeds, block=st.integers(1, 50), window=st.integers(1, 9), epoch=st.integers(0, 3))
def test_the_numpy_twin_of_an_order_alone_gives_its_samples(n, seed, block, window, epoch):
    for order in (mr.Sequential(n), mr.Shuffled(n, seed), mr.BlockShuffled(n, block=block, window=window, seed=seed)):
        inside, epochs = np.arange(n), np.full(n, epoch) + np.arange(n) % 2
        assert np.array_equal(order._forward(inside, epochs), order.samples(epochs * n + inside))


def test_asking_leaves_the_question_as_it_was():
    values = np.arange(100, dtype=np.uint64)
    keys = round_keys(0, 0, [0], 24)[0]
    before = keys.copy()
    permute(values, 100, keys)
    permute(values, 100, keys, backward=True)
    assert np.array_equal(values, np.arange(100))
    assert np.array_equal(keys, before)


@pytest.mark.parametrize("n", [10**12, MAX_N])
def test_an_order_of_any_size_needs_no_memory(n):
    mr.Shuffled(10).samples([0])  # what is imported lazily is imported now
    tracemalloc.start()
    try:
        order = mr.Shuffled(n, seed=7)
        block = mr.BlockShuffled(n, block=4096, window=512, seed=7)
        for each in (order, block):
            each.positions(each.samples(np.arange(n - 1000, n)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20, f"{peak} bytes for {n} samples"
