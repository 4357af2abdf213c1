"""PacedGpu: a simulated GPU whose copies and kernels take real time, for feeds with a transform.

Two threads are its streams. Each runs its queue in order, and an event is a place in a queue. So a loop on it waits where
it would wait on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

LOOP, COPIES = 0, 1


class _Event:
    stream = place = 0


class PacedGpu:
    """``copy_s`` is what each copy takes; ``run_kernel(seconds)`` is a step of the loop."""

    home = LOOP

    def __init__(self, copy_s: float) -> None:
        import torch

        self.device, self._copy_s = torch.device("cpu"), copy_s
        self._queues: list[deque[Callable[[], Any]]] = [deque(), deque()]
        self._queued, self._done = [0, 0], [0, 0]
        self._changed, self._is_closed = threading.Condition(), False
        self._threads = [threading.Thread(target=self._run, args=(stream,), daemon=True) for stream in (LOOP, COPIES)]
        for thread in self._threads:
            thread.start()

    def _run(self, stream: int) -> None:
        queue = self._queues[stream]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: queue or self._is_closed)
                if self._is_closed:
                    return
                work = queue.popleft()
            work()
            with self._changed:
                self._done[stream] += 1
                self._changed.notify_all()

    def _queue(self, stream: int, work: Callable[[], Any]) -> None:
        with self._changed:
            self._queues[stream].append(work)
            self._queued[stream] += 1
            self._changed.notify_all()

    def _record(self, event: _Event, stream: int) -> None:
        event.stream, event.place = stream, self._queued[stream]

    def _wait(self, stream: int, event: _Event) -> None:
        other, place = event.stream, event.place
        self._queue(stream, lambda: self._until(other, place))

    def _until(self, stream: int, place: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done[stream] >= place or self._is_closed)

    def run_kernel(self, seconds: float) -> None:
        self._queue(LOOP, lambda: time.sleep(seconds))

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    # What the feed asks of a GPU.

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...

    def current(self) -> int:
        return LOOP

    def host_memory(self, num_bytes: int) -> Any:
        return np.empty(num_bytes, np.uint8)

    def new_memory(self, num_bytes: int) -> Any:
        import torch

        return torch.empty(num_bytes, dtype=torch.uint8)

    def record_use(self, memory: Any, stream: int) -> None: ...

    def event(self) -> _Event:
        return _Event()

    def mark(self, event: _Event) -> None:
        self._record(event, LOOP)

    mark_new = mark

    def copy(self, source: int, target: int, num_bytes: int, after: _Event, done: _Event, begun: _Event) -> None:
        def move() -> None:
            time.sleep(self._copy_s)
            ctypes.memmove(target, source, num_bytes)

        self._wait(COPIES, after)
        self._record(begun, COPIES)
        self._queue(COPIES, move)
        self._record(done, COPIES)

    def use(self, done: _Event) -> None:
        self._wait(LOOP, done)

    def follow(self, stream: int, other: int, event: _Event) -> None:
        self._record(event, other)
        self._wait(stream, event)

    def is_done(self, event: _Event) -> bool:
        return self._done[event.stream] >= event.place

    def finish(self, event: _Event) -> None:
        self._until(event.stream, event.place)

    def finish_all(self) -> None:
        self._until(COPIES, self._queued[COPIES])


@contextlib.contextmanager
def paced_gpu(copy_s: float) -> Iterator[PacedGpu]:
    """Feeds with ``device="cuda"`` that begin within the block run on a simulated GPU."""
    from millrace.feed import compose

    module: Any = compose
    gpu, real = PacedGpu(copy_s), module.Gpu
    module.Gpu = lambda device: gpu
    try:
        yield gpu
    finally:
        module.Gpu = real
        gpu.close()
