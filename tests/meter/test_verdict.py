"""Verdicts on counters that are given, and the counters that a feed gives; no clock decides here."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import millrace as mr
from millrace.meter.interval import Interval
from millrace.meter.verdict import judge
from millrace.testing.slow import holding_transform

KEEPS_UP = Interval(seconds=10, batches=100, get_s=0.1, make_s=5, put_wait_s=5, workers=1)
WAITS = Interval(seconds=10, batches=100, get_s=3, make_s=10, put_wait_s=0, workers=1)


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (KEEPS_UP, "compute-bound"),
        (replace(KEEPS_UP, behind_s=9.0), "compute-bound"),
        (replace(KEEPS_UP, is_cold=True), "compute-bound"),
        (replace(KEEPS_UP, get_s=0.6), "balanced"),
        (replace(KEEPS_UP, get_s=0.6, put_wait_s=50.0), "compute-bound"),
        (replace(KEEPS_UP, put_wait_s=0.1), "balanced"),
        (WAITS, "input-bound: gather"),
        (replace(WAITS, make_s=None, put_wait_s=None, workers=0), "input-bound: gather"),
        (replace(WAITS, is_cold=True), "input-bound: disk"),
        (replace(WAITS, function_s=8.0), "input-bound: transform"),
        (replace(WAITS, function_s=8.0, is_cold=True), "input-bound: transform"),
        (replace(WAITS, function_s=2.0), "input-bound: gather"),
        (replace(WAITS, function_s=2.0, is_cold=True), "input-bound: disk"),
        (replace(WAITS, is_queued=True, function_s=8.0), "input-bound: queue"),
        (replace(KEEPS_UP, transfer_s=4.0), "input-bound: transfer"),
        (replace(WAITS, transfer_s=1.0), "input-bound: gather"),
        (replace(KEEPS_UP, transfer_s=4.0, behind_s=1.0), "input-bound: transfer"),
        (replace(KEEPS_UP, transfer_s=1.0, behind_s=8.0), "compute-bound"),
        (replace(KEEPS_UP, rank_s=(1, 1, 5, 1)), "input-bound: straggler rank"),
        (replace(KEEPS_UP, rank_s=(1, 5)), "input-bound: straggler rank"),
        (replace(KEEPS_UP, rank_s=(1, 1.2, 1, 1.1)), "compute-bound"),
    ],
)
def test_what_limits_is_named(found, name):
    verdict = judge(found)
    assert verdict.name == name
    assert verdict.is_input_bound == name.startswith("input-bound")
    assert "\n" not in str(verdict)
    assert verdict.evidence in str(verdict)
    assert verdict.remedy


def test_the_straggler_is_named():
    assert "rank 2" in judge(replace(KEEPS_UP, rank_s=(1, 1, 5, 1))).evidence


def test_the_gain_is_the_time_that_was_waited():
    assert judge(WAITS).gain == pytest.approx(1 / 0.7)


def test_bursts_ask_for_depth_and_threads_for_processes():
    assert "depth=" in judge(replace(WAITS, put_wait_s=9.0)).remedy
    busy = replace(WAITS, function_s=8.0, workers=4)
    assert "processes=True" in judge(busy).remedy
    assert "processes=True" not in judge(replace(busy, is_processes=True)).remedy


def test_functions_that_hold_the_gil_ask_for_processes_and_others_for_threads():
    busy = replace(WAITS, function_s=8.0, workers=2, gil_asked=10, gil_held=6)
    held = judge(busy)
    assert "processes=True" in held.remedy
    assert "held the GIL" in held.evidence
    assert held.gain is None
    assert "raise workers=" in judge(replace(busy, gil_held=1)).remedy
    assert "processes=True" in judge(replace(busy, put_wait_s=9.0)).remedy  # no bursts: the lock is the reason


def test_a_loop_that_stands_still_without_waiting_is_seen_by_the_gil():
    busy = replace(KEEPS_UP, function_s=9.5, make_s=9.6, put_wait_s=3.0, workers=2, gil_asked=10, gil_held=9)
    assert judge(busy).name == "input-bound: transform"
    assert judge(replace(busy, gil_held=1)).name == "compute-bound"
    some = judge(replace(busy, function_s=3.0))
    assert some.name == "compute-bound"
    assert "processes=True" in some.remedy


def test_rest_is_no_burst_where_the_loop_makes_batches_itself_or_the_disk_is_slow():
    rests = replace(WAITS, put_wait_s=9.0)
    assert "depth=" in judge(rests).remedy
    assert "depth=" not in judge(replace(rests, made_here=60)).remedy
    assert "depth=" not in judge(replace(rests, is_cold=True)).remedy


def test_a_feed_notices_that_its_transform_holds_the_gil():
    with mr.Feed(view(), batch=32, device="numpy", workers=2, transform=holding_transform(0.02)) as feed:
        for _, _ in zip(range(24), feed, strict=False):
            pass
        report = feed.report()
        assert report.gil_asked >= 2
        assert report.gil_held > 0


def test_too_few_batches_have_no_verdict():
    assert judge(replace(WAITS, batches=7)) is None
    assert judge(replace(WAITS, seconds=0.0)) is None


def test_an_interval_is_the_difference_of_two_readings():
    late = Interval(
        seconds=30, batches=300, get_s=3.1, make_s=25, put_wait_s=5, workers=1, rank_s=(1.0, 2.0), is_cold=True
    )
    between = late - replace(KEEPS_UP, seconds=20)
    assert between == Interval(
        seconds=10, batches=200, get_s=3.0, make_s=20, put_wait_s=0, workers=1, rank_s=(1.0, 2.0), is_cold=True
    )


def test_the_rates_of_an_interval_are_per_second():
    found = replace(WAITS, put_wait_s=30.0, function_s=5.0, num_bytes=80, gil_asked=4, gil_held=1).rates()
    assert found == {
        "feed_make": 1.0, "feed_function": 0.5, "feed_bytes_per_s": 8.0, "feed_rest": 0.75, "feed_gil_held": 0.25,
    }  # fmt: skip
    assert Interval(seconds=0.0, batches=0, get_s=0.0).rates() == {}


def double(batch, rng):
    return {"x": batch["x"] * 2}


def keep(record, rng):
    return {"x": record["x"]}


def view():
    return mr.Blocks(mr.from_arrays({"tokens": np.arange(4000, dtype=np.uint16)}), length=4)


@pytest.mark.parametrize("options", [{"transform": double}, {"decode": keep}, {"decode": keep, "transform": double}])
@pytest.mark.parametrize("processes", [False, True])
def test_time_in_functions_is_a_part_of_making(options, processes):
    with mr.Feed(view(), batch=32, epochs=1, device="numpy", workers=1, processes=processes, **options) as feed:
        assert feed.verdict() is None
        num_batches = sum(1 for _ in feed)
        report = feed.report()
        assert num_batches > 8
        assert 0 < report.function_s <= report.fill_s
        assert report.settled.batches == 8
        assert feed.verdict() == (judge(report.interval() - report.settled) or judge(report.interval()))
        assert str(feed.verdict()) in str(report)


def test_a_feed_without_functions_counts_none():
    feed = mr.Feed(view(), batch=32, epochs=1, device="numpy")
    list(feed)
    assert feed.report().function_s is None
    assert feed.report().interval().function_s is None


def test_rows_on_the_gpu_have_advice_of_their_own():
    all_there = judge(replace(WAITS, missed=0.0))
    assert all_there is not None
    assert all_there.name == "input-bound: gather"
    assert "batch=" in str(all_there.remedy)
    assert "workers=" not in str(all_there.remedy)
    some = judge(replace(WAITS, missed=0.25))
    assert some is not None
    assert "25%" in some.evidence
    assert "device_bytes=" in str(some.remedy)
