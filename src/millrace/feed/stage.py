"""The threads that run a user's transform ahead of the training loop, in exact order.

Every batch is a pure function of its number, so any thread may make any batch. Threads hold no reference to
the iterator that started them: dropping it ends them.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from millrace.errors import FeedError

Make: TypeAlias = Callable[[int], Any]
JOIN_S = 2.0  # for all threads together: a transform that never returns must not keep the program alive


class Stage:
    """Makes batches 0, 1, 2, ... by ``make`` in ``workers`` threads, at most ``depth`` ahead of the consumer."""

    def __init__(self, make: Make, *, workers: int, depth: int, count: int | None) -> None:
        shared = self._shared = _Shared(make, depth, count)
        self.num_workers = workers
        self._threads = [
            threading.Thread(target=_work, args=(shared,), name=f"millrace-transform-{k}", daemon=True)
            for k in range(workers)
        ]
        # Runs at garbage collection and at interpreter exit, whichever comes first.
        self._finish = weakref.finalize(self, _finish, shared, self._threads)
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:  # Ctrl-C, or no more threads to be had
            self._finish()
            raise

    def take(self, batch: int) -> Any:
        """The next batch, which is number ``batch``; raises what its transform raised."""
        found = self.poll(batch, True)
        if found is None:
            raise FeedError("the feed was closed while a batch was awaited")
        return found

    def poll(self, batch: int, wait: bool) -> Any:
        """The same; None where it is not ready and ``wait`` is false, or there is none."""
        shared = self._shared
        with shared.changed:
            while batch not in shared.done:
                if shared.is_closed or not wait or (shared.count is not None and batch >= shared.count):
                    return None
                shared.changed.wait(timeout=1.0)  # a bounded wait, so that Ctrl-C is seen on every platform
            result, error = shared.done.pop(batch)
            shared.taken = batch + 1
            shared.changed.notify_all()
        if error is not None:
            raise error
        return result

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._finish()


class _Shared:
    def __init__(self, make: Make, depth: int, count: int | None) -> None:
        self.make, self.depth, self.count = make, depth, count
        self.changed = threading.Condition()
        self.done: dict[int, tuple[Any, BaseException | None]] = {}
        self.next = self.taken = 0
        self.is_closed = False
        self.process = os.getpid()

    def ticket(self) -> int | None:
        """The number of the next batch to make, or None when there is no more work."""
        with self.changed:
            while True:
                if self.is_closed or (self.count is not None and self.next >= self.count):
                    return None
                if self.next < self.taken + self.depth:
                    self.next += 1
                    return self.next - 1
                self.changed.wait()


def _work(shared: _Shared) -> None:
    while (batch := shared.ticket()) is not None:
        try:
            outcome: tuple[Any, BaseException | None] = (shared.make(batch), None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the consumer
            outcome = (None, error)
        with shared.changed:
            shared.done[batch] = outcome
            del outcome  # else this thread would hold the batch's slot until it makes another
            shared.changed.notify_all()


def _finish(shared: _Shared, threads: list[threading.Thread]) -> None:
    if shared.process != os.getpid():
        return  # a forked child has none of the threads, and one of them may have held the lock
    with shared.changed:
        shared.is_closed = True
        shared.done.clear()
        shared.changed.notify_all()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
