"""The threads that run a user's transform ahead of the training loop, in exact order.

Every batch is a pure function of its number, so any thread may make any batch. Threads hold no reference to
the iterator that started them: dropping it ends them. Numbers and batches go through queues that a signal at any
moment leaves whole, which is not true of a condition and its lock.
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

from millrace.errors import FeedError

Make: TypeAlias = Callable[[int], Any]
Outcome: TypeAlias = tuple[Any, BaseException | None]
JOIN_S = 2.0  # for all threads together: a transform that never returns must not keep the program alive


class Stage:
    """Makes batches 0, 1, 2, ... by ``make`` in ``workers`` threads, at most ``depth`` ahead of the consumer."""

    def __init__(self, make: Make, *, workers: int, depth: int, count: int | None) -> None:
        self.num_workers, self._depth = workers, depth
        self._count = math.inf if count is None else count
        shared = self._shared = _Shared()
        for batch in range(depth):
            self._ask_for(batch)
        self._threads = [
            threading.Thread(target=_work, args=(shared, make), name=f"millrace-transform-{k}", daemon=True)
            for k in range(workers)
        ]
        # Runs at garbage collection and at interpreter exit, whichever comes first.
        self._finish = weakref.finalize(self, _finish, shared, self._threads)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C, or no more threads to be had
            self.close()
            raise

    def _ask_for(self, batch: int) -> None:
        if batch < self._count:
            self._shared.asked.put(batch)
        elif batch == self._count:
            self._shared.end(self.num_workers)

    def take(self, batch: int) -> Any:
        """The next batch, which is number ``batch``; raises what its transform raised."""
        found = self.poll(batch, True)
        if found is None:
            raise FeedError("the feed was closed while a batch was awaited")
        return found

    def poll(self, batch: int, wait: bool) -> Any:
        """The same; None where it is not ready and ``wait`` is false, or there is none."""
        shared = self._shared
        while (outcome := shared.done.pop(batch, None)) is None:
            if shared.is_closed or batch >= self._count:
                return None
            try:
                made = shared.made.get(wait, 1.0)  # a bounded wait, so that Ctrl-C is seen on every platform
            except queue.Empty:
                if not wait:
                    return None
            else:
                shared.done |= made
        self._ask_for(batch + self._depth)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """May be called again, also where a signal has interrupted it."""
        _finish(self._shared, self._threads)
        self._finish.detach()


class _Shared:
    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # numbers of batches; None ends a thread
        self.made: queue.SimpleQueue[dict[int, Outcome]] = queue.SimpleQueue()
        self.done: dict[int, Outcome] = {}  # that the consumer has, and not yet asked for
        self.is_closed = False
        self.process = os.getpid()

    def end(self, workers: int) -> None:
        for _ in range(workers):
            self.asked.put(None)

    def clear(self) -> None:
        """Nothing keeps the memory of a batch, and who waits for one is told."""
        _empty(self.made)
        self.done.clear()
        self.made.put({})


def _empty(some: queue.SimpleQueue[Any]) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            some.get_nowait()


def _work(shared: _Shared, make: Make) -> None:
    while (batch := shared.asked.get()) is not None:
        # No name here holds the batch: its slot is free as soon as the loop lets go of it.
        shared.made.put({batch: _outcome(shared, make, batch)})
        if shared.is_closed:
            shared.clear()


def _outcome(shared: _Shared, make: Make, batch: int) -> Outcome:
    result, failure = None, None
    try:
        result = make(batch)
    except BaseException as error:  # noqa: BLE001 - it is raised again in the consumer
        failure = error
    if shared.process != os.getpid():
        _end_child(failure)
    return result, failure


def _end_child(failure: BaseException | None) -> None:
    """Ends a process that the transform forked: it has none of the other threads, and nobody takes its batches."""
    code, says = 0 if failure is None else 1, ""
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
    _empty(shared.asked)
    shared.end(len(threads))
    shared.clear()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
