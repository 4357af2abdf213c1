"""What ``processes="auto"`` chooses, and that the report says why."""

import threading
import time

import pytest
import worker_functions as functions

import millrace as mr
from millrace.feed.processes import choice


@pytest.mark.parametrize(
    ("share", "way", "because"),
    [
        (0.99, "transform", "threads, because a loop beside the transform ran at 99%"),
        (0.5, "processes", "processes, because a loop beside the transform ran at 50%"),
        (None, "transform", "threads, because the first batches could not be made"),
    ],
)
def test_the_measured_share_decides(share, way, because, feed_of, monkeypatch):
    monkeypatch.setattr(choice, "num_cores", lambda: 2)
    monkeypatch.setattr(choice, "speed_beside", lambda work: work() and share)
    feed = feed_of(functions.same, processes="auto", epochs=1)
    assert len(list(feed)) == 5
    assert (feed.report().way, feed.report().choice) == (way, because)
    assert f"processes='auto': {because}" in str(feed.report())


def test_one_core_or_what_cannot_be_sent_means_threads(feed_of, monkeypatch):
    monkeypatch.setattr(choice, "num_cores", lambda: 1)
    feed = feed_of(functions.same, processes="auto", epochs=1)
    assert len(list(feed)) == 5
    assert feed.report().choice == "threads, because there is one core"
    monkeypatch.setattr(choice, "num_cores", lambda: 2)
    feed = feed_of(lambda batch, rng: batch, processes="auto", epochs=1)
    assert len(list(feed)) == 5
    assert "cannot be sent to another process" in feed.report().choice


def test_without_functions_nothing_is_measured(feed_of, monkeypatch):
    monkeypatch.setattr(choice, "speed_beside", lambda work: 1 / 0)
    feed = feed_of(processes="auto", epochs=1)
    assert len(list(feed)) == 5
    assert feed.report().choice is None


def test_it_is_measured_once_and_for_real(feed_of, contents, monkeypatch):
    """Whatever it chooses on this machine, the batches are the same."""
    monkeypatch.setattr(choice, "num_cores", lambda: 2)
    feed = feed_of(functions.takes_long, processes="auto", epochs=1)
    assert contents(feed) == contents(feed_of(functions.same, processes=False, epochs=1))
    assert "a loop beside the transform ran at" in feed.report().choice


def test_a_loop_feels_python_but_not_what_frees_the_gil():
    """A share of 0.5 is usual beside Python; nothing else is said here, since this machine may be busy."""
    assert choice.speed_beside(lambda: time.sleep(0.01)) > 0
    assert choice.speed_beside(lambda: 1 / 0) is None
    assert choice.speed_beside(lambda: (_ for _ in ()).throw(SystemExit)) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "millrace-choice"]


class Clock:
    """Each look at it takes a millisecond; others have the core for a share of that."""

    def __init__(self, lost):
        self.now, self._lost, self.num_released = 0.0, lost, 0

    def perf_counter(self):
        self.now += 1e-3
        return self.now

    def sleep(self, seconds):
        self.num_released += 1

    def wait_for_core_s(self):
        return self.now * self._lost


def test_the_speed_is_that_of_a_loop_that_lets_go_of_the_gil_and_has_a_core(monkeypatch):
    speeds = []
    for lost in (0.0, 0.5):
        clock = Clock(lost)
        monkeypatch.setattr(choice, "time", clock)
        monkeypatch.setattr(choice, "_wait_for_core_s", clock.wait_for_core_s)
        speeds.append(choice._speed())
        assert clock.num_released > 10
    assert speeds[1] == pytest.approx(2 * speeds[0], rel=0.1)


def test_an_error_of_the_transform_comes_in_its_turn(feed_of, monkeypatch):
    monkeypatch.setattr(choice, "num_cores", lambda: 2)
    feed = feed_of(functions.raises, processes="auto", epochs=1, order=mr.Sequential(40))
    with pytest.raises(mr.StageFailed, match="position 16"):
        list(feed)
    assert feed.position == 16
