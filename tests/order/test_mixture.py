"""MixtureOrder: exact shares at every prefix, both directions, weights that change, and the core's twin."""

import json

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.order.mixture import PERIOD, as_parts, reference_turns, turns_of
from millrace.order.orders import order_from_spec

weights = st.lists(st.integers(0, 1000) | st.floats(0, 1), min_size=1, max_size=12).filter(lambda own: sum(own) > 1e-3)


@st.composite
def mixtures(draw):
    count = draw(st.integers(1, 5))
    sizes = draw(st.lists(st.integers(1, 50) | st.integers(1, 10**12), min_size=count, max_size=count))
    shares = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    ends = sorted(draw(st.sets(st.integers(1, 3 * PERIOD), max_size=3)))
    return mr.MixtureOrder(sizes, [(at, draw(shares)) for at in (0, *ends)], seed=draw(st.integers(0, 1 << 64 - 1)))


def sources_at(order, positions):
    return np.searchsorted(np.cumsum(order.sizes), order.samples(positions), side="right")


@settings(max_examples=25)
@given(weights=weights)
def test_at_every_prefix_a_source_is_less_than_one_off_its_weight(weights):
    parts, steps = as_parts(weights), np.arange(1, PERIOD + 1)
    assert sum(parts) == PERIOD
    assert [part > 0 for part in parts] == [weight > 0 for weight in weights]
    turns = turns_of(parts)
    for source, part in enumerate(parts):
        off = np.abs(np.cumsum(turns == source) - part * steps / PERIOD)
        assert off.max() <= max(0, 1 - 1 / max(1, 2 * np.count_nonzero(parts) - 2)) + 1e-9


@pytest.mark.needs_core
@example(weights=[1.0])
@example(weights=[1] * 1000)
@example(weights=[1e-9] * 40 + [1, 0, 3])
@settings(max_examples=15)
@given(weights=weights)
def test_the_core_takes_turns_as_its_twin(weights):
    parts = as_parts(weights)
    assert np.array_equal(turns_of(parts), reference_turns(parts))


def test_a_thousand_sources_stay_within_one_sample():
    parts = as_parts(np.random.default_rng(7).random(1000))
    turns, steps = turns_of(parts), np.arange(1, PERIOD + 1)
    assert max(np.abs(np.cumsum(turns == k) - parts[k] * steps / PERIOD).max() for k in range(0, 1000, 7)) < 1


@example(
    order=mr.MixtureOrder([(1 << 62) + 9, 3, 700, 5000], [1, 1, 1, 2], seed=2), start=65_400
)  # halves beyond 31 bits
@settings(max_examples=30)
@given(order=mixtures(), start=st.integers(0, 5 * PERIOD))
def test_core_and_twin_agree_and_positions_come_back(order, start):
    line = start + np.arange(300)
    found = order.samples(line)
    assert np.array_equal(order._at(line), found)
    assert np.array_equal(order.positions(found, order.epochs(line)), line)
    assert order_from_spec(json.loads(json.dumps(order.spec()))).samples(line).tolist() == found.tolist()


def test_each_source_delivers_every_sample_once_per_pass_also_across_a_change_of_weights():
    order = mr.MixtureOrder([40, 7, 300], [(0, [5, 1, 4]), (90, [1, 1, 8]), (500, [1, 0, 0])], seed=3)
    found = order.samples(np.arange(2000))
    for source, (first, size) in enumerate(zip((0, 40, 47), order.sizes, strict=True)):
        own = found[(found >= first) & (found < first + size)]
        passes = [own[k : k + size] for k in range(0, len(own) - size + 1, size)]
        assert passes or source == 2
        assert all(sorted(part.tolist()) == list(range(first, first + size)) for part in passes)
        assert len({tuple(part.tolist()) for part in passes}) == len(passes)  # each pass is shuffled anew


def test_other_weights_at_resume_go_on_where_each_source_stands():
    before = mr.MixtureOrder([50, 50], [1, 1], seed=1)
    after = mr.MixtureOrder([50, 50], [9, 1], seed=1).resumed(before.state(), 30)
    assert np.array_equal(after.samples(np.arange(30)), before.samples(np.arange(30)))
    line = after.samples(np.arange(65))
    assert len(set(line.tolist())) == 65
    assert np.bincount(sources_at(after, np.arange(30, 130))).tolist() == [90, 10]
    same = mr.MixtureOrder([50, 50], [1, 1], seed=1).resumed(before.state(), 30)
    assert same.segments == before.segments  # the period goes on
    assert after.identity() == before.identity()


@pytest.mark.parametrize(
    ("sizes", "schedule", "match"),
    [
        ([5, 0], [1, 1], "at least one"),
        ([5, 5], [1], "1 weights for 2"),
        ([5, 5], [1, -1], "from 0 on"),
        ([5, 5], [0, 0], "from 0 on"),
        ([5, 5], [1, float("nan")], "from 0 on"),
        ([5, 5], [(3, [1, 1])], "expected 0 first"),
        ([5, 5], [(0, [1, 1]), (9, [1, 1]), (9, [2, 1])], "then larger"),
    ],
)
def test_what_cannot_be_mixed_is_refused(sizes, schedule, match):
    with pytest.raises(mr.ConfigError, match=match):
        mr.MixtureOrder(sizes, schedule)


@pytest.mark.parametrize("segments", [None, [], [[0, [1, 2]]], [[5, [65536, 0]]], [[0, [65536]]], "x"])
def test_damaged_segments_of_a_state_are_refused(segments):
    with pytest.raises(mr.ConfigError, match=r"segments|schedule|expected"):
        mr.MixtureOrder([5, 5], [1, 1]).resumed({"segments": segments}, 3)


def test_epochs_beyond_the_end_of_the_line_are_refused():
    order = mr.MixtureOrder([10**12, 5], [1, 65535])
    for epoch in (-1, 1 << 62, (1 << 63) // 10**12 - 1):
        with pytest.raises(mr.ConfigError, match=r"2\^63 - 1"):
            order.positions([3], epoch)
