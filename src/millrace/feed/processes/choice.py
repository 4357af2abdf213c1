"""What ``processes="auto"`` chooses: threads if the transform leaves the GIL to the loop, else processes."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from millrace.errors import ConfigError
from millrace.feed.line import Line
from millrace.feed.make.compose import compose_make
from millrace.feed.make.program import Program
from millrace.feed.processes.job import check_job
from millrace.feed.processes.worker import check_not_loading
from millrace.native import num_cores

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

ENOUGH = 0.85  # of its speed alone: then the loop does not feel a thread that makes batches
SPEED_S = 0.06  # to measure a speed


def choose_way(feed: Feed, line: Line) -> None:
    """Measures the first batches of a line, once for each feed."""
    check_not_loading()
    if feed.choice is not None:
        return
    feed.uses_processes, feed.choice = _choose(feed, line)


def _choose(feed: Feed, line: Line) -> tuple[bool, str]:
    if num_cores() == 1:
        return False, "threads, because there is one core"
    try:
        check_job(feed)
    except ConfigError as error:
        return False, f"threads, because {error}"
    make = compose_make(line, feed, Program.of(line), slots=3)
    numbers = itertools.cycle(range(min(line.num_batches or 8, 8)))
    share = speed_beside(lambda: make.make(next(numbers)))
    if share is None:
        return False, "threads, because the first batches could not be made"
    is_free = share >= ENOUGH
    return (
        not is_free,
        f"{'threads' if is_free else 'processes'}, because a loop beside the transform ran at {share:.0%}",
    )


def speed_beside(work: Callable[[], object]) -> float | None:
    """How fast Python runs in this thread while another repeats ``work``, as a share of its speed alone.

    Time in which other programs had the cores does not count. None if ``work`` fails.
    """
    alone = _speed()
    repeat = _Repeat(work)
    repeat.start()
    try:
        repeat.has_begun.wait()
        beside = _speed()
    finally:
        repeat.is_over = True  # it is not waited for if this is interrupted: the work may never end
    repeat.join()
    return None if repeat.has_failed else min(1.0, beside / alone)


class _Repeat(threading.Thread):
    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(name="millrace-choice", daemon=True)
        self._work, self.has_begun = work, threading.Event()
        self.is_over = self.has_failed = False

    def run(self) -> None:
        try:
            self._work()  # the first call also loads what it needs
            self.has_begun.set()
            while not self.is_over:
                self._work()
        except BaseException:  # noqa: BLE001 - the feed meets it again, in its turn
            self.has_failed = True
        finally:
            self.has_begun.set()


def _speed() -> float:
    """Steps of a training loop, for each second in which it ran or waited for the GIL."""
    count, took_s, began, waited_s = 0, 0.0, time.perf_counter(), _wait_for_core_s()
    while took_s < SPEED_S:
        until = time.perf_counter() + SPEED_S / 5
        while time.perf_counter() < until:
            time.sleep(0)  # lets go of the GIL, as a training loop does in each call of its framework
            count += 1
        took_s = time.perf_counter() - began - (_wait_for_core_s() - waited_s)
    return count / took_s


def _wait_for_core_s() -> float:
    """How long this thread has wanted to run while others had the cores; to wait for the GIL is none of it."""
    with contextlib.suppress(OSError, IndexError), open("/proc/thread-self/schedstat", "rb") as file:
        return int(file.read().split()[1]) * 1e-9
    return 0.0
