"""Stages that are slow on purpose: what does a run look like that waits for its disk, its transform, its bus?

Each takes ``seconds`` for each batch. They change feeds that begin within the block and have a transform in threads, as
``same`` is one; ``slow_transform`` also runs in worker processes. A slow bus is ``millrace.testing.device.paced_gpu``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


def same(batch: Any, rng: Any) -> Any:
    """A transform that changes nothing."""
    return batch


def slow_transform(seconds: float) -> Callable[[Any, Any], Any]:
    """A transform that takes so long for each batch."""
    return functools.partial(_after, seconds=seconds)


def _after(batch: Any, rng: Any, seconds: float) -> Any:
    time.sleep(seconds)
    return batch


def holding_transform(seconds: float) -> Callable[[Any, Any], Any]:
    """A transform that takes so long for each batch and keeps Python's lock (the GIL) meanwhile, as long computations do."""
    return functools.partial(_holding, seconds=seconds)


def _holding(batch: Any, rng: Any, seconds: float) -> Any:
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # PyDLL, unlike CDLL, does not let go of the lock
    return batch


def python_transform(seconds: float) -> Callable[[Any, Any], Any]:
    """A transform that is a plain Python loop of so much CPU time for each batch: it gives the lock away only when asked."""
    return functools.partial(_looping, seconds=seconds)


def _looping(batch: Any, rng: Any, seconds: float) -> Any:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return batch


@contextlib.contextmanager
def slow_gather(seconds: float) -> Iterator[None]:
    """Copying the rows of each batch takes so long."""
    from millrace.feed.make.plan import PlanMake
    from millrace.feed.make.program import ProgramMake

    kinds: tuple[Any, ...] = (PlanMake, ProgramMake)
    real = [kind.make for kind in kinds]

    def slowed(make: Any) -> Any:
        def after(self: Any, batch: int) -> Any:
            time.sleep(seconds)
            return make(self, batch)

        return after

    for kind, make in zip(kinds, real, strict=True):
        kind.make = slowed(make)
    try:
        yield
    finally:
        for kind, make in zip(kinds, real, strict=True):
            kind.make = make


@contextlib.contextmanager
def slow_disk(store: str | os.PathLike[str], seconds: float) -> Iterator[None]:
    """The store is dropped from memory, so its rows come from the disk, and each batch of it takes so long.

    Needs a store with a disk behind it that no map of this process holds.
    """
    for path in Path(store).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
    with slow_gather(seconds):
        yield


@contextlib.contextmanager
def queue_worker(url: str, run: str, functions: Mapping[str, Any]) -> Iterator[None]:
    """A worker of a queue in a thread of this process, as slow as its ``decode`` or ``transform``."""
    from millrace.feed.remote.worker import Functions, Lines, Worker
    from millrace.queues.open import open_queue

    queue = open_queue(url)
    worker = Worker(
        queue, run, Lines(queue, run, Functions(**functions), [], threads=1).maker, threads=1, say=lambda text: None
    )
    thread = threading.Thread(target=worker.serve)
    thread.start()
    try:
        yield
    finally:
        worker.is_over = True
        thread.join()
        queue.close()


class Ranks:
    """Loops of several ranks in threads, which meet after each step as training ranks do.

    ``step(rank)`` is what a rank does before it meets the others; ``own_s`` counts the time of each until then.
    """

    def __init__(self, count: int, step: Callable[[int], Any]) -> None:
        self._step, self._barrier = step, threading.Barrier(count)
        self.own_s = [0.0] * count

    def run(self, steps: int) -> None:
        threads = [threading.Thread(target=self._loop, args=(rank, steps)) for rank in range(len(self.own_s))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _loop(self, rank: int, steps: int) -> None:
        try:
            for _ in range(steps):
                began = time.perf_counter()
                self._step(rank)
                self.own_s[rank] += time.perf_counter() - began
                self._barrier.wait()
        except BaseException:
            self._barrier.abort()
            raise
