"""Verdicts on counters that are given, and the counters that a feed gives; no clock decides here."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

import millrace as mr
from millrace.feed.ahead import threads
from millrace.feed.make.program import ProgramMake
from millrace.meter import usage
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


def test_the_disk_of_a_straggler_is_blamed_only_where_it_waits_for_data():
    late = judge(replace(KEEPS_UP, rank_s=(1, 1, 5, 1), rank_data_s=(0.1, 0.1, 4.0, 0.1)))
    assert "its disk" in late.remedy
    busy = judge(replace(KEEPS_UP, rank_s=(1, 1, 5, 1), rank_data_s=(0.1, 0.1, 0.01, 0.1)))
    assert busy.name == late.name == "input-bound: straggler rank"
    assert "disk" not in busy.remedy
    assert "of which it waited 0.0001 s for data" in busy.evidence


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


def test_time_without_the_gil_is_nobodys_work():
    """As counted of two threads whose plain Python transform takes 1.5 ms: before, gather had 1.21 s of 1.84."""
    counted = Interval(seconds=1, batches=300, get_s=0.9, make_s=0.63, function_s=0.61, gil_wait_s=1.21, workers=2)
    found = judge(replace(counted, gil_asked=8, gil_held=1))
    assert found.name == "input-bound: transform"
    assert "held the GIL" in found.evidence
    assert "processes=True" in found.remedy
    assert "held the GIL" not in judge(replace(counted, gil_wait_s=0.1, gil_asked=8, gil_held=1)).evidence
    assert "held the GIL" not in judge(replace(counted, is_processes=True)).evidence
    assert (counted - replace(counted, gil_wait_s=1.0)).gil_wait_s == pytest.approx(0.21)


@pytest.mark.needs_core
def test_the_counters_of_a_feed_leave_out_what_threads_wait_for_the_gil(monkeypatch):
    """A clock that is counted: each batch takes 10, of which 4 are without the lock before the transform and 1 in it."""
    clock = {"now": 0.0, "without": 0.0}

    def passes(seconds, without=0.0):
        clock["now"] += seconds
        clock["without"] += without

    def transform(batch, rng):
        passes(3, without=1)
        return batch

    real = ProgramMake.make
    monkeypatch.setattr(ProgramMake, "make", lambda self, batch: (passes(7, without=4), real(self, batch))[1])
    monkeypatch.setattr(usage.time, "perf_counter", lambda: clock["now"])
    for module in (usage, threads):
        monkeypatch.setattr(module, "lock_wait_s", lambda: clock["without"])
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(1000, dtype=np.uint16)}), length=9)
    with mr.Feed(view, batch=10, device="numpy", transform=transform, workers=1, epochs=1) as feed:
        batches = len(list(feed))
        report = feed.report()
    assert report.gil_wait_s == 5 * batches
    assert report.function_s == 2 * batches
    assert report.fill_s == 5 * batches
    assert report.interval().gil_wait_s == report.gil_wait_s
    assert "waited for Python's lock" in str(report)


@pytest.mark.needs_core
def test_the_core_counts_how_long_a_thread_waits_for_the_lock():
    view = mr.Blocks(mr.from_arrays({"tokens": np.arange(1000, dtype=np.uint16)}), length=9)
    is_over = threading.Event()

    def hold():
        while not is_over.is_set():
            ctypes.PyDLL(None).usleep(2000)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        before, deadline = usage.lock_wait_s(), time.monotonic() + 60
        with mr.Feed(view, batch=10, device="numpy", workers=1, transform=lambda batch, rng: batch) as feed:
            for _ in feed:
                if feed.report().gil_wait_s >= 0.01 or time.monotonic() > deadline:
                    break
            assert feed.report().gil_wait_s >= 0.01
        assert usage.lock_wait_s() == before  # it is a count of each thread
    finally:
        is_over.set()
        holder.join()


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
