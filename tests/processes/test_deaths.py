"""Workers that die, stop, exit, hang or fork: their batches are made again, or the error names the sample. No hang."""

import contextlib
import itertools
import os
import random
import re
import signal
import time
import types

import numpy as np
import psutil
import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.processes import launch, pool, tickets, watch
from millrace.feed.processes.shared_slots import SharedSlot
from millrace.testing import expect_no_leaks

from .conftest import feed_processes

METHODS = ["forkserver", "spawn"]
pytestmark = pytest.mark.usefixtures("quick_looks")
FATAL = r"a worker process \(pid \d+\) ended {end} during {stage} at position {position} \({what}.*{times} times in all"


@pytest.fixture
def quick_looks(monkeypatch):
    """Silent workers are looked at more often than once a second: tests would wait for it.

    How a worker ended is waited for as long as it takes: a slow machine must not make the reason unknown.
    """
    monkeypatch.setattr(pool, "POLL_S", 0.2)
    monkeypatch.setattr(launch, "END_S", 60.0)


def where(feed, sample=13):
    """The position of a sample, and the first of its batch."""
    position = int(np.flatnonzero(feed.order.samples(np.arange(40)) == sample)[0])
    return position, position // 8 * 8


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("what", ["kill", "stop"])
def test_a_batch_whose_worker_dies_is_made_again(what, method, feed_of, contents, tmp_path):
    feed = feed_of(functions.Once(tmp_path / "once", what), epochs=2, processes=method)
    assert contents(feed) == contents(feed_of(functions.same, epochs=2, processes=False))
    report, how = feed.report(), {"kill": "ended by signal SIGKILL", "stop": "was stopped by a signal"}[what]
    assert (report.deaths, len(report.ends)) == (1, 1)
    assert f"1 worker process ended and was replaced; its batch was made again:\n{report.ends[0]}" in str(report)
    where_it_was = f"during transform at position {where(feed)[1]} "
    assert re.fullmatch(rf"a worker process \(pid \d+\) {how}.* {where_it_was}\(samples \[.*\]\.\.\.\)", report.ends[0])


def test_workers_that_all_die_at_once_cost_a_batch_one_attempt(feed_of, contents, tmp_path):
    feed = feed_of(functions.Once(tmp_path / "once", "kill_all"), epochs=1, batch=40, workers=4)
    assert contents(feed) == contents(feed_of(functions.same, epochs=1, batch=40, processes=False))
    assert 1 <= feed.report().deaths <= 4  # the others may be missed later


@pytest.mark.parametrize("what", ["kill_server", "stop_server", "leave_a_child", "fork", "threads"])
def test_whatever_else_happens_to_a_worker_the_batches_are_the_same(what, feed_of, contents, tmp_path, monkeypatch):
    if what == "stop_server":
        monkeypatch.setattr(launch, "END_S", 0.5)  # it never answers
    feed = feed_of(functions.Once(tmp_path / "once", what), epochs=2)
    assert contents(feed) == contents(feed_of(functions.same, epochs=2, processes=False))
    assert (tmp_path / "once").exists()
    assert feed.report().deaths == {"fork": 0}.get(what, feed.report().deaths or -1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("transform", "end"), [(functions.exits, "with exit code 7"), (functions.segfaults, "by signal SIGSEGV")]
)
def test_a_batch_that_no_worker_survives_is_an_error_that_names_it(transform, end, method, feed_of):
    feed = feed_of(transform, epochs=1, processes=method)
    first = where(feed)[1]
    with pytest.raises(
        mr.StageFailed, match=FATAL.format(end=end, stage="transform", position=first, what="samples", times=3)
    ) as caught:
        list(feed)
    assert (caught.value.stage, caught.value.position) == ("transform", first)
    assert feed.position == first  # the batches before it were delivered
    assert feed.report().deaths == 3


def test_the_poison_sample_of_a_decode_is_named(feed_of):
    feed = feed_of(decode=functions.decode_dies, epochs=1)
    position = where(feed)[0]
    end = r"by signal SIGKILL \(kill -9, or out of memory\)"
    with pytest.raises(
        mr.StageFailed, match=FATAL.format(end=end, stage="decode", position=position, what="sample 13", times=5)
    ) as caught:
        list(feed)
    assert (caught.value.stage, caught.value.position, caught.value.sample) == ("decode", position, 13)


@pytest.mark.parametrize(
    ("ends", "fatal_at"),
    [
        ([("a", 7)] * 5, 2),  # it exits
        ([("a", -11), ("b", -11)] * 3, 4),
        ([("a", -9)] * 8, 4),  # killed, and no other
        ([("a", -9), ("b", -9)] + [("a", -9)] * 20, 12),  # somebody kills workers
        ([("a", None), ("b", None)] + [("a", -9)] * 20, 12),
        ([("a", -9), ("b", 7)] + [("a", -9)] * 8, 5),
        ([("a", -9), ("b", -9), ("a", -9), ("a", 7)], 3),
    ],
)
def test_how_often_the_worker_of_a_batch_may_end(ends, fatal_at, feed_of):
    line, ours = feed_of(functions.same).line(0, None), tickets.Ends()
    each = {name: tickets.Ticket(0, number, SharedSlot(number)) for number, name in enumerate("ab")}
    found = [ours.add("it ended", code, each[name], line) for name, code in ends]
    assert [error is not None for error in found[: fatal_at + 1]] == [False] * fatal_at + [True]


@pytest.mark.parametrize("method", METHODS)
def test_an_exception_comes_with_its_stage_position_and_traceback(method, feed_of):
    """However long its text is, and though it cannot be pickled."""
    feed = feed_of(functions.raises, epochs=1, processes=method, order=mr.Sequential(40))
    with pytest.raises(
        mr.StageFailed, match=r"the transform raised at position 16 .*Disagreeable: é\U0001f600"
    ) as caught:
        list(feed)
    assert (caught.value.stage, caught.value.position) == ("transform", 16)
    assert len(str(caught.value)) < 5000
    assert "in another process" in str(caught.value.__cause__)
    assert feed.report().deaths == 0


def test_memory_that_cannot_be_had_is_an_error_of_the_transform(feed_of):
    with pytest.raises(mr.StageFailed, match="MemoryError"):
        list(feed_of(functions.eats_memory, epochs=1))


def test_a_worker_that_hangs_is_an_error(feed_of, monkeypatch, tmp_path):
    """It neither answers nor computes: making the batch again would take as long again."""
    monkeypatch.setattr(watch, "HANG_S", 1.0)
    feed = feed_of(functions.Once(tmp_path / "once", "hang"), epochs=1)
    with pytest.raises(mr.StageFailed, match="neither answered nor used a core for 1 s during transform at position"):
        list(feed)


@pytest.mark.parametrize(
    ("states", "found"),
    [
        ([("R", 1), ("R", 9), ("S", 10)], None),
        ([("S", 1)] * 100, None),
        ([("R", 1)] * 1000, None),  # it would run, but others have the cores
        ([("S", 1)] * 301, "neither answered nor used a core for 300 s"),
        ([("S", k // 250) for k in range(1000)], None),  # a little now and then is enough
        ([("T", 1)], None),  # it may go on at once
        ([("T", 1), ("T", 1)], "was stopped by a signal"),
        ([("D", 1), ("Z", 1)], "gone"),
        ([("", -1)], "gone"),
    ],
)
def test_what_is_seen_of_a_silent_worker(states, found, monkeypatch):
    left = iter(states)
    monkeypatch.setattr(watch, "_state_and_ticks", lambda pid: next(left))
    silent = watch.Watch()
    findings = [silent.look(1, 1.0) for _ in states]
    assert findings[:-1] == [None] * (len(states) - 1)
    assert (findings[-1] and (findings[-1].text or "gone")) == found


def test_a_silent_worker_is_looked_after_though_others_answer(feed_of, monkeypatch):
    """Else a stopped one would be replaced only when all that others make ahead has come."""
    feed = feed_of(functions.same)
    iterator = iter(feed)
    next(iterator)
    ours = feed._pools[0]
    clock, looks = itertools.count(ours._looked, pool.POLL_S / 2), []
    monkeypatch.setattr(pool, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(
        ours, "_poll", types.SimpleNamespace(poll=lambda wait_ms: [(-1, 0)])
    )  # there is always something
    monkeypatch.setattr(ours, "_look_after", lambda: looks.append(wait) or [])
    for wait in (True, True, False, False, True, True):
        ours.receive(wait)
    monkeypatch.undo()
    assert looks == [True, True]  # not in the first second, nor while the loop does not wait


def kills(count, feed_of, whole_tree, seed):
    """Reads a feed while a process of it is killed at random moments, so many times."""
    chance = random.Random(seed)
    feed, local, done = feed_of(functions.slow, workers=3, depth=6), iter(feed_of(functions.same, processes=False)), 0
    for number, batch in enumerate(feed):  # without an end: chance decides how many batches so many kills take
        assert batch.x.tobytes() == next(local).x.tobytes(), number
        if done == count:
            break
        if chance.random() < 0.4:
            found = feed_processes()
            for process in found if whole_tree else [chance.choice(found)] if found else []:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            done += bool(found)
            time.sleep(chance.random() * 0.03)
    feed.close()
    local.close()


@pytest.fixture
def no_limit(monkeypatch):
    """Chance may kill the workers of one batch again and again."""
    for name in ("MAX_DEATHS", "MAX_KILLS", "MAX_LOSSES"):
        monkeypatch.setattr(tickets, name, 1000)
    monkeypatch.setattr(pool, "MAX_STARTS", 1000)
    monkeypatch.setattr(pool, "MAX_KILLED_STARTS", 1000)


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("whole_tree", [False, True])
def test_batches_are_the_same_whoever_is_killed_whenever(whole_tree, feed_of, seed):
    with expect_no_leaks(grace_s=10):
        kills(5, feed_of, whole_tree, seed)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("whole_tree", [False, True])
def test_a_hundred_kills(whole_tree, feed_of, seed):
    with expect_no_leaks(grace_s=10):
        kills(100, feed_of, whole_tree, seed)


def test_signals_that_end_a_worker_from_outside_are_seen_at_once(feed_of):
    feed = feed_of(functions.pids, n=400, workers=1, depth=2)
    iterator = iter(feed)
    seen = {int(next(iterator).pid[0])}
    os.kill(min(seen), signal.SIGTERM)
    seen |= {int(next(iterator).pid[0]) for _ in range(8)}
    assert len(seen) == 2
    assert feed.report().deaths == 1
