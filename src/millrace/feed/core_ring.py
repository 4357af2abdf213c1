"""The ring of the C core: batches made ahead by threads without the GIL, or in line where that is cheaper."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from millrace.errors import FeedError
from millrace.feed import slots as ring
from millrace.feed.batch import Batch
from millrace.feed.program import Layout, Program, Views
from millrace.native import core
from millrace.ragged import Array

COLD_WORKERS = 4  # at least, while the data is cold: they wait for the disk, where cores are not what limits
IN_LINE_BYTES = 64 << 10  # smaller batches are made by the loop itself: a wake-up takes longer
HELD = 2  # by the loop: the batch of its step, and the one before until the next is there
JOIN_S = 10.0  # a thread ends after the batch it is on


class Memory:
    """The memory of the slots, and the views of it that batches are made of."""

    def __init__(self, layout: Layout, count: int, new_memory: Callable[[int], Array]) -> None:
        self.layout, self._new_memory = layout, new_memory
        self.arrays: list[Array | None] = [None] * count
        self.views: list[Views | None] = [None] * count

    def allocate(self, slot: int, num_bytes: int) -> Any:
        self.arrays[slot] = self.views[slot] = None
        array = self._new_memory(num_bytes)
        self.arrays[slot], self.views[slot] = array, self.layout.views(array)
        return array

    def batch(self, slot: int) -> Batch:
        views = self.views[slot]
        assert views is not None
        return self.layout.batch(views, self.arrays[slot])


class NativeRing:
    """Batches 0, 1, 2, ... of a program, at most ``depth`` ahead. Threads hold the core's ring, never this object."""

    def __init__(
        self, program: Program, *, count: int | None, depth: int, workers: int, memory: Memory | None = None,
        lanes: Any = None,
    ) -> None:  # fmt: skip
        """Where ``memory`` has more slots than batches may be ready, those are the loop's; if it holds more, they are new."""
        in_line = workers == 0
        depth = 1 if in_line else depth
        if not in_line:
            program.open_files()
        self.memory = memory or Memory(program.layout, depth + (1 if in_line else HELD), ring.new_memory)
        self._program, self._num_more = program.core, 0 if in_line else max(0, min(depth, COLD_WORKERS) - workers)
        self._ring = core.Ring(
            program.core, self.memory.allocate, -1 if count is None else count, depth, len(self.memory.arrays), workers,
            self._num_more, None if lanes is None else lanes.table,
        )  # fmt: skip
        self.num_workers, self._is_on_device = workers, lanes is not None
        self._threads: list[threading.Thread] = []
        # Runs at garbage collection and at interpreter exit, whichever comes first.
        self._finish = weakref.finalize(self, _finish, self._ring, self._threads, lanes, os.getpid())
        try:
            self._start(workers)
        except BaseException:  # Ctrl-C, or no more threads to be had
            self._finish()
            raise

    def _start(self, count: int) -> None:
        for number in range(len(self._threads), len(self._threads) + count):
            name = f"millrace-fill-{number}"
            thread = threading.Thread(target=self._ring.work, args=(number,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _start_more(self) -> None:
        """The threads that only cold data needs, when it is found to be."""
        count, self._num_more = self._num_more, 0
        with contextlib.suppress(RuntimeError):  # no more threads to be had: it works without
            self._start(count)

    def take(self, batch: int) -> Batch:
        """The next batch, which is number ``batch``."""
        found = self.poll()
        if found is None:
            raise FeedError("the feed was closed while a batch was awaited")
        return self.memory.batch(found[0])

    def poll(self, wait: bool = True, *on_device: Any) -> tuple[int, int] | None:
        """Slot and bytes of the next batch; None where it is not ready and ``wait`` is false, or there is none.

        A ring of a device is also given the loop's stream, and the slots that were let go.
        """
        if self._num_more and self._program.is_cold():
            self._start_more()
        return self._ring.get(wait, *on_device)  # type: ignore[no-any-return]

    @property
    def behind_s(self) -> float:
        return self._ring.behind_ns() * 1e-9  # type: ignore[no-any-return]

    def report(self) -> dict[str, Any]:
        """What was counted, in the terms of ``Report``."""
        found = self._ring.counters()
        return {
            "fill_s": found["fill_ns"] * 1e-9,
            "fill_wait_s": found["fill_wait_ns"] * 1e-9,
            "depth_seen": found["depth_seen"] / max(found["batches"], 1),
            "made_in_line": found["in_line"],
            "num_bytes": found["bytes"],
            "is_cold": bool(found["is_cold"]),
            "behind_s": self.behind_s if self._is_on_device else None,
            "past_cache": found["fetched"],
        }

    def close(self) -> None:
        self._finish()


def _finish(ring: Any, threads: list[threading.Thread], lanes: Any, process: int) -> None:
    if process != os.getpid():
        return  # a forked child has none of the threads, and one of them may have held the lock
    ring.close()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
    if lanes is not None:  # memory goes when no copy needs it any more
        with contextlib.suppress(FeedError), lanes:  # a GPU that failed copies no more
            lanes.finish_all()
