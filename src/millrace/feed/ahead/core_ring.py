"""The ring of the C core: its threads make batches ahead without the GIL. With no thread, the loop makes them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from millrace.errors import FeedError
from millrace.feed.ahead.threads import join
from millrace.feed.batch import Batch
from millrace.feed.make import slots
from millrace.feed.make.program import Program
from millrace.feed.make.slot_layout import SlotLayout, Views
from millrace.feed.stages import Counters
from millrace.native import core, num_cores
from millrace.ragged import Array

COLD_WORKERS = 4  # at least, while the data is cold: they wait for the disk, and cores are not the limit
HELD = 2  # slots of the loop: the batch of its step, and the one before until the next is there
SPARE = 1  # a slot for the batch of a thread that gets no core; it has memory once it is needed
THREAD_BYTES = 512 << 10  # made ahead that are worth a thread
MAX_THREADS = 8  # unless you ask for more: the other cores are the loop's
JOIN_S = 10.0  # a thread ends after the batch it works on


def num_threads(cores: int, bytes_ahead: int) -> int:
    """How many threads make batches of hot data, by cores and by the bytes to be made ahead.

    A core is left to the loop. On a single core there are none: the loop makes each batch when it needs it.
    """
    return min(cores - 1, MAX_THREADS, max(1, bytes_ahead // THREAD_BYTES))


class SlotMemory:
    """The memory of the slots, and the views of it that batches consist of."""

    def __init__(self, layout: SlotLayout, count: int, new_memory: Callable[[int], Array]) -> None:
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


class CoreRing:
    """Batches of a program, at most ``depth`` ahead. Threads hold the core's ring, never this object."""

    def __init__(
        self, program: Program, *, count: int | None, depth: int, workers: int | None, memory: SlotMemory | None = None,
        gpu: Any = None,
    ) -> None:  # fmt: skip
        """``memory`` needs more than ``depth`` slots: the loop holds the others. If it holds more, those are new.

        ``workers`` is None for as many as fit, or 0 for none, also if the data is cold.
        """
        in_line = workers == 0
        depth = 1 if in_line else depth
        if not in_line:
            program.open_files()
        self.memory = memory or SlotMemory(program.layout, depth + (1 if in_line else HELD + SPARE), slots.new_memory)
        self._program, self._group, self._size = program.core, program.group, program.layout.size
        self._cores = num_cores()
        if workers is None:
            hot = num_threads(self._cores, depth * program.batch_bytes)
            self._workers = hot if gpu is None else max(1, hot)  # copies to a GPU are queued beside the loop
        else:
            self._workers = min(workers, self._cores)  # with hot data none of them ever waits
        self._num_more = 0 if in_line else max(workers or 0, COLD_WORKERS, self._workers) - self._workers
        self._ring = core.Ring(
            program.core, self.memory.allocate, -1 if count is None else count, depth, len(self.memory.arrays),
            self._workers, self._num_more, None if gpu is None else gpu.table,
        )  # fmt: skip
        self._threads: list[threading.Thread] = []
        # Runs at garbage collection and at interpreter exit, whichever comes first.
        self._finish = weakref.finalize(self, _finish, self._ring, self._threads, gpu, os.getpid())
        try:
            self._start(self._workers)
        except BaseException:  # Ctrl-C, or no thread can be started
            self._finish()
            raise

    def _start(self, count: int) -> None:
        for number in range(len(self._threads), len(self._threads) + count):
            name = f"millrace-fill-{number}"
            thread = threading.Thread(target=self._ring.work, args=(number,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def take(self, batch: int, wait: bool = True) -> Batch | None:
        slot = self.take_slot(wait)
        return None if slot is None else self.memory.batch(slot)

    def take_slot(self, wait: bool = True, *on_device: Any) -> int | None:
        """The slot of the next batch; None as for ``take``.

        The ring of a device also needs the loop's stream, and the slots that the loop has let go.
        """
        if self._num_more and self._program.is_cold():  # only cold data needs more threads
            count, self._num_more = self._num_more, 0
            with contextlib.suppress(RuntimeError):  # no thread can be started: it works without
                self._start(count)
        found = self._ring.get(wait, *on_device)
        return None if found is None else found[0]

    @property
    def behind_s(self) -> float:
        """How long the loop has waited for a GPU that was behind."""
        return self._ring.behind_ns() * 1e-9  # type: ignore[no-any-return]

    def report(self) -> Counters:
        """Batches that share a slot are counted as a full slot."""
        found, group = self._ring.counters(), self._group
        return Counters(
            workers=self._workers, taken=found["batches"] * group, made_here=found["samples_here"] * group // self._size,
            made_again=found["made_again"] * group, pieces=found["pieces"], cores=self._cores,
            make_s=found["fill_ns"] * 1e-9, put_wait_s=found["fill_wait_ns"] * 1e-9,
            mean_ready=found["depth_seen"] / max(found["batches"], 1) * group, num_bytes=found["bytes"],
            past_cache=found["fetched"],
        )  # fmt: skip

    def close(self) -> None:
        self._finish()


def _finish(ring: Any, threads: list[threading.Thread], gpu: Any, process: int) -> None:
    if process != os.getpid():
        return  # a forked child has none of the threads, and one of them may have held the lock
    ring.close()
    join(threads, JOIN_S)
    if gpu is not None:  # memory goes when no copy needs it any more
        with contextlib.suppress(FeedError), gpu:  # a GPU that failed copies no more
            gpu.finish_all()
