"""Batches that workers on other machines make, taken from a queue in exact order. What does not come is made here.

Two threads take part: that of the link tells the queue what is wanted, and one of this stage fetches what is ready. The
loop never speaks to the queue, so no fault of it can hold the loop for longer than the deadline.
"""

from __future__ import annotations

import math
import queue as queues
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.errors import MillraceError, QueueError
from millrace.feed.ahead.threads import join
from millrace.feed.make.slots import Slots
from millrace.feed.processes.packing import Layout
from millrace.feed.remote.link import JOIN_S, Link, Window, log
from millrace.feed.remote.payload import PayloadRefused, Stamp, check_marks, layout_of, unpack
from millrace.feed.stages import Counters, Make
from millrace.ragged import Array

MOST_SAID = 8  # different messages
PAUSE_S = 0.2  # of the fetching thread, while the queue does not answer


class Queued:
    """Batches of a window. ``make`` makes one here, by the same code as a worker."""

    def __init__(self, link: Link, window: Window, make: Make[Any], fetch: Fetch) -> None:
        self._link, self._window, self._make, self._fetch = link, window, make, fetch
        total = window.line.num_batches
        self._count = math.inf if total is None else total
        self._by_workers = self._here = self._num_ready = 0
        self._thread = threading.Thread(target=fetch.serve, name="millrace-queue-fetch", daemon=True)
        self._finish = weakref.finalize(self, _finish, link, window, self._thread)
        self._thread.start()

    def take(self, batch: int, wait: bool = True) -> Any:
        window, link = self._window, self._link
        window.move(batch)
        link.wake()
        began = time.monotonic()
        until = began + link.patience.seconds
        while batch not in window.arrived:
            if window.is_closed or batch >= self._count:
                return None
            left = until - time.monotonic()
            if left <= 0 or not link.is_up or not link.threads:
                if wait and left <= 0:
                    link.note_late(window.ticket(batch))
                return self._made_here(batch) if wait else None
            try:
                window.news.get(wait, min(left, 1.0))  # a bounded wait, so that Ctrl-C is noticed everywhere
            except queues.Empty:
                if not wait:
                    return None
        made = window.arrived.get(batch)
        if made is None:
            return self._made_here(batch) if wait else None
        link.patience.note_waited(time.monotonic() - began)
        self._num_ready += len(window.arrived)
        window.move(batch + 1)
        self._by_workers += 1
        return made

    def _made_here(self, batch: int) -> Any:
        self._window.move(batch + 1)  # nobody else needs to make it
        self._link.wake()
        self._here += 1
        began = time.perf_counter()
        made = self._make.make(batch)
        self._link.patience.note_made(time.perf_counter() - began)
        return made

    def report(self) -> Counters:
        taken = self._by_workers + self._here
        return Counters(
            workers=self._link.threads, taken=taken, made_here=self._here, made_by_workers=self._by_workers,
            refused=self._fetch.num_refused, late=self._link.patience.num_late, slow_workers=tuple(self._link.slow_workers),
            mean_ready=self._num_ready / max(taken, 1),
        )  # fmt: skip

    def close(self) -> None:
        self._finish()


class Fetch:
    """The thread that reads payloads into slots. It holds no reference to the stage."""

    def __init__(
        self, link: Link, window: Window, stamp: Stamp, *, unpack: Callable[[Layout, Array], Any], slots: Slots
    ) -> None:
        self._link, self._window, self._stamp, self._unpack, self._slots = link, window, stamp, unpack, slots
        self._layouts: dict[bytes, Layout] = {}
        self.num_refused, self._said = 0, set[str]()

    def serve(self) -> None:
        window, link = self._window, self._link
        while not window.is_closed:
            try:
                finished = window.batches(link.queue.await_ready(link.run, window.attempt))
                # Those that lie ready without such news too: it may have been lost.
                for batch in sorted({*finished, *window.batches(window.ready)} & {*window.wanted(link.threads)}):
                    self._settle(batch, is_finished=batch in finished)
            except MillraceError:  # the link says so, once
                time.sleep(PAUSE_S)
            except Exception as error:  # noqa: BLE001 - a thread that ended here would leave every batch to the loop
                self._once(f"what the queue answered cannot be used: {type(error).__name__}: {error}")
                time.sleep(PAUSE_S)

    def _once(self, text: str) -> None:
        if text not in self._said and len(self._said) < MOST_SAID:
            self._said.add(text)
            log.warning("%s; batches that do not come are made here", text)

    def _settle(self, batch: int, *, is_finished: bool) -> None:
        try:
            made = self._read(batch)
        except PayloadRefused as error:
            if not self.num_refused:
                log.warning("refused what the queue holds for batch %d: %s", batch, error)
            self.num_refused += 1
            made, is_finished = None, True
        if made is not None or is_finished:
            self._window.settle(batch, made)
            self._link.wake()

    def _read(self, batch: int) -> Any:
        window, link = self._window, self._link
        ticket = window.ticket(batch)
        _, first, count = ticket.split(":")
        with self._slots.take() as slot:

            def memory(name: str, size: int) -> Array:
                return slot.array(name, (size,), np.dtype(np.uint8))

            found = link.queue.get(link.run, ticket, lambda size: memory("payload", size))
            if found is None:
                return None
            prefix = self._stamp.prefix(int(first), int(count))
            text, packed = unpack(found, prefix, lambda size: memory("unpacked", size))
            check_marks(packed, window.line.marked_positions(batch))
            try:
                return self._unpack(layout_of(text, self._layouts), packed)
            except (ValueError, TypeError, QueueError) as error:
                raise PayloadRefused(f"a payload cannot be unpacked: {error}") from error


def _finish(link: Link, window: Window, thread: threading.Thread) -> None:
    link.close_window(window)
    window.is_closed = True
    window.news.put(None)
    join([thread], JOIN_S)
