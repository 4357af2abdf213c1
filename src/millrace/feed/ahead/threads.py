"""Python threads that make batches ahead of the training loop, in exact order: for transforms.

Threads hold no reference to the iterator that started them, so they end when it is dropped. Numbers and batches go
through queues: a signal at any moment leaves a queue whole, but not a condition and its lock.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from millrace.errors import StageFailed
from millrace.feed.line import Line
from millrace.feed.processes import watch
from millrace.feed.stages import Counters, Make
from millrace.meter.usage import lock_wait_s, without_core_s

# Batch, error, seconds to make it, rest before it, and seconds without Python's lock.
Outcome: TypeAlias = tuple[Any, BaseException | None, float, float, float]
POLL_S = 1.0  # a bounded wait, so that Ctrl-C is noticed everywhere
# Whether functions hold the GIL is asked 8 times soon, then rarely; it is let go for 0.3 ms: at 0.05 a thread was often not awake.
SOON, SOON_S, ASK_S, LET_GO_S = 8, 0.1, 2.0, 3e-4
JOIN_S = 0.8  # for all threads together: a transform that never returns must not delay Ctrl-C by a second


class Threads:
    """Batches of a line made in ``workers`` threads, at most ``depth`` ahead of the consumer."""

    def __init__(self, make: Make[Any], line: Line, *, workers: int, depth: int) -> None:
        self._workers, self._depth, self._line = workers, depth, line
        self._count = math.inf if line.num_batches is None else line.num_batches
        self._taken = self._num_ready = 0
        self._make_s = self._rest_s = self._lock_wait_s = 0.0
        self._watches: list[watch.Watch] = []  # of the threads, while nothing comes
        self._gil_asked = self._gil_held = 0
        self._ask_at = 0.0
        shared = self._shared = _Shared()
        for batch in range(depth):
            self._request(batch)
        self._threads = [
            threading.Thread(target=_work, args=(shared, make.make), name=f"millrace-transform-{k}", daemon=True)
            for k in range(workers)
        ]
        # Runs at garbage collection and at interpreter exit, whichever comes first.
        self._finish = weakref.finalize(self, _finish, shared, self._threads)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C, or no thread can be started
            self.close()
            raise

    def _request(self, batch: int) -> None:
        if batch < self._count:
            self._shared.requests.put(batch)

    def take(self, batch: int, wait: bool = True) -> Any:
        shared = self._shared
        while (outcome := shared.arrivals.pop(batch, None)) is None:
            if shared.is_closed or batch >= self._count:
                return None
            try:
                arrival = shared.results.get(wait, POLL_S)
            except queue.Empty:
                if not wait:
                    return None
                self._look_after(batch)
            else:
                shared.arrivals |= arrival
                self._watches.clear()
        self._request(batch + self._depth)
        result, error, make_s, rest_s, lock_wait = outcome
        self._lock_wait_s += lock_wait
        self._taken, self._make_s, self._rest_s = self._taken + 1, self._make_s + make_s, self._rest_s + rest_s
        self._num_ready += 1 + len(shared.arrivals) + shared.results.qsize()
        if error is not None:
            raise error
        if (now := time.perf_counter()) >= self._ask_at and result is not None:
            self._ask_for_gil(now)
        return result

    def _look_after(self, batch: int) -> None:
        """Nothing came for a while. If no thread does anything, this batch never comes."""
        self._watches = self._watches or [watch.Watch() for _ in self._threads]
        looks = [
            own.look(f"self/task/{thread.native_id}", POLL_S)
            for own, thread in zip(self._watches, self._threads, strict=True)
        ]
        if all(look is not None and look.is_final for look in looks):
            position = self._line.first_position(batch)
            raise StageFailed(
                f"decode or transform neither returned nor used a core for {watch.HANG_S:.0f} s, in the batch at position "
                f"{position}; look at what it waits for", position=position,
            )  # fmt: skip

    def _ask_for_gil(self, now: float) -> None:
        """Lets go of Python's lock for a moment, as a training step often does. Does a function keep it as long as it may?"""
        no_core_s = without_core_s()
        time.sleep(LET_GO_S)
        no_core_s = without_core_s() - no_core_s  # on a busy machine it takes as long without any function
        took_s = time.perf_counter() - now
        self._gil_asked += 1
        self._gil_held += took_s - no_core_s >= 0.8 * sys.getswitchinterval()
        self._ask_at = now + took_s + (SOON_S if self._gil_asked < SOON else ASK_S)

    def report(self) -> Counters:
        """Counts what the loop has taken: batches that lie ready are not in it yet."""
        return Counters(
            workers=self._workers, taken=self._taken, made_here=0, make_s=self._make_s, put_wait_s=self._rest_s,
            mean_ready=self._num_ready / max(self._taken, 1), gil_asked=self._gil_asked, gil_held=self._gil_held,
            gil_wait_s=self._lock_wait_s,
        )  # fmt: skip

    def close(self) -> None:
        """May be called again, also after a signal has interrupted it."""
        _finish(self._shared, self._threads)
        self._finish.detach()


class _Shared:
    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # numbers of batches; None ends a thread
        self.results: queue.SimpleQueue[dict[int, Outcome]] = queue.SimpleQueue()
        self.arrivals: dict[int, Outcome] = {}  # results whose turn has not come
        self.is_closed = False
        self.process = os.getpid()

    def clear(self) -> None:
        """Lets go of all batches, and wakes a consumer that waits."""
        _empty(self.results)
        self.arrivals.clear()
        self.results.put({})


def _empty(some: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            some.get_nowait()


def _work(shared: _Shared, make: Callable[[int], Any]) -> None:
    since = time.perf_counter()
    while (batch := shared.requests.get()) is not None:
        # No name here holds the batch: its slot is free as soon as the loop lets go of it.
        shared.results.put({batch: _outcome(shared, make, batch, since)})
        if shared.is_closed:
            shared.clear()
        since = time.perf_counter()


def _outcome(shared: _Shared, make: Callable[[int], Any], batch: int, since: float) -> Outcome:
    result, failure, began, without_lock_s = None, None, time.perf_counter(), lock_wait_s()
    try:
        result = make(batch)
    except BaseException as error:  # noqa: BLE001 - it is raised again in the consumer
        failure = error
    if shared.process != os.getpid():
        _end_child(failure)
    without_lock_s = lock_wait_s() - without_lock_s
    return result, failure, time.perf_counter() - began - without_lock_s, began - since, without_lock_s


def _end_child(failure: BaseException | None) -> None:
    """Ends a process that the transform forked: it has no other threads, and nobody takes its batches."""
    code, says = 0 if failure is None else 1, ""
    if failure is not None and isinstance(failure.__cause__, SystemExit):  # in the child it means what it says
        failure = failure.__cause__
    if isinstance(failure, SystemExit) and (failure.code is None or isinstance(failure.code, int)):
        code = failure.code or 0
    elif isinstance(failure, SystemExit):
        says = f"{failure.code}\n"
    elif failure is not None:
        says = "".join(traceback.format_exception(failure))
    with contextlib.suppress(AttributeError, OSError, ValueError):  # no streams, or closed ones
        sys.stderr.write(says)
        sys.stderr.flush()
        sys.stdout.flush()
    os._exit(code & 0xFF)


def _finish(shared: _Shared, threads: list[threading.Thread]) -> None:
    if shared.process != os.getpid():
        return  # a forked child has none of the threads
    shared.is_closed = True
    _empty(shared.requests)
    for _ in threads:
        shared.requests.put(None)
    shared.clear()
    join(threads, JOIN_S)


def join(threads: list[threading.Thread], timeout_s: float) -> None:
    """Waits for the end of all threads but the caller's, at most so long for all together."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
