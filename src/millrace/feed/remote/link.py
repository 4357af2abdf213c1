"""Link: a feed's connection to its queue. One thread says that the run is alive, and which batches are wanted.

It lives from the first iterator of a feed to the end of the feed, also between passes. What it says is whole each time:
after a flush or a restart of the server the next beat publishes everything again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue as queues
import secrets
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from millrace.errors import MillraceError, QueueUnreachable
from millrace.feed.ahead.threads import join
from millrace.feed.line import Line
from millrace.feed.remote.record import batch_of, run_name, ticket_of
from millrace.queues.open import open_queue
from millrace.queues.protocol import MOST_AHEAD, Offer, Queue
from millrace.terminal import printable
from millrace.view.spec import view_arrays

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

BEAT_S = 0.5  # between two signs of life; after a flush the run is there again after one beat
JOIN_S = 2.0
MOST_UNWANTED = 1024
ASK_S = 5.0  # between two questions to the queue who is late
MOST_SLOW = 16  # workers that are named
log = logging.getLogger(__name__)


class Window:
    """Which batches of a line are wanted from workers. The loop, the link and the fetching thread share it."""

    def __init__(self, attempt: str, line: Line, record: bytes, depth: int) -> None:
        self.attempt, self.line, self.record, self._depth = attempt, line, record, depth
        self._count = math.inf if line.num_batches is None else line.num_batches
        self.next = 0  # the first batch that the loop neither has nor makes
        self.arrived: dict[int, Any] = {}  # batches, and None for those that no worker can make
        self.news: queues.SimpleQueue[None] = queues.SimpleQueue()  # wakes a loop that waits
        self.ready: list[str] = []  # tickets whose payloads lay in the queue at the last beat
        self.unwanted: list[str] = []  # tickets, of which the queue is not told yet
        self.is_closed = False

    def ticket(self, batch: int) -> str:
        return ticket_of(self.line, self.attempt, batch)

    def batches(self, tickets: list[str]) -> set[int]:
        """The batches of this line that some tickets are for."""
        own = [batch_of(self.line, ticket) for ticket in tickets if ticket.startswith(f"{self.attempt}:")]
        return {batch for batch in own if batch is not None}

    def wanted(self, threads: int) -> list[int]:
        """The most urgent first. Every thread of a worker has a batch to make, and ``depth`` of them lie ready."""
        first = self.next
        last = min(first + max(self._depth, min(threads, MOST_AHEAD)), self._count)
        return [batch for batch in range(first, int(last)) if batch not in self.arrived]

    def settle(self, batch: int, made: Any) -> None:
        """A batch has come, or cannot: nobody needs to make it."""
        self.unwanted.append(self.ticket(batch))
        if batch >= self.next:
            self.arrived[batch] = made
        self.tell()

    def tell(self) -> None:
        """Wakes a loop that waits; one that does not wait needs no more than one such word."""
        if self.news.empty():
            self.news.put(None)

    def move(self, batch: int) -> None:
        """The loop stands at this batch now."""
        self.unwanted += [self.ticket(passed) for passed in range(self.next, batch) if passed not in self.arrived]
        del self.unwanted[:-MOST_UNWANTED]  # while the queue does not answer; what it holds expires
        self.next = max(self.next, batch)
        for passed in [known for known in list(self.arrived) if known < batch]:
            self.arrived.pop(passed, None)


class Patience:
    """How long the loop waits for a batch of workers before it makes the batch itself.

    ``deadline_s``, until a batch was late, or all that came in time took so much longer than making them here would have.
    From then on twice as long as making a batch here takes, so that a slow worker costs the loop no more than that.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s, self._make_s, self._lost_s = deadline_s, 0.0, 0.0
        self.num_late = 0

    @property
    def seconds(self) -> float:
        is_over = self.num_late or self._lost_s > self._deadline_s
        return min(self._deadline_s, 2 * self._make_s) if is_over else self._deadline_s

    def note_waited(self, seconds: float) -> None:
        """A batch of workers came in time, after the loop had waited for it."""
        self._lost_s += max(0.0, seconds - 2 * self._make_s)

    def note_made(self, seconds: float) -> None:
        """A batch was made here. The mean leans to the newest: the first also loads what it needs."""
        self._make_s = (self._make_s + seconds) / 2 if self._make_s else seconds


class Link:
    """The run of a feed in its queue. ``is_up`` and ``threads`` say what the last beat found."""

    def __init__(
        self, queue: Queue, run: str, folder: str, *, num_bytes: int = 0, arrays: dict[str, Any] | None = None
    ) -> None:
        self.queue, self.run, self.id = queue, run, secrets.token_hex(8)
        self._folder, self._num_bytes, self._arrays = folder, num_bytes, arrays or {}
        self.is_up, self.threads, self.is_closed = False, 0, False
        self._windows: list[Window] = []
        self._closed: list[Window] = []
        self._lines = 0
        self._process, self._wakes = os.getpid(), queues.SimpleQueue[None]()
        self._said = ""
        self._arrays_at = self._asked_at = -math.inf
        self.patience = Patience(queue.deadline_s)
        self.slow_workers: list[str] = []  # that held a late batch, each once
        self._late = ""  # a ticket that was late, while nobody has asked who holds it
        self._has_idle_late = False  # one was late that no worker held
        try:
            self._beat()
        except QueueUnreachable as error:
            self._down(error)
        self._thread = threading.Thread(target=self._serve, name="millrace-queue-link", daemon=True)
        self._thread.start()

    def open_window(self, line: Line, record: bytes, depth: int) -> Window:
        """Begins a line: its attempt is a new one, so it cannot meet payloads of another."""
        self._lines += 1
        window = Window(f"{self.id}-{self._lines}", line, record, depth)
        self._windows.append(window)
        self.wake()
        return window

    def close_window(self, window: Window) -> None:
        if window in self._windows and self._process == os.getpid():
            window.is_closed = True
            self._windows.remove(window)
            self._closed.append(window)
            self.wake()

    def note_late(self, ticket: str) -> None:
        """Workers did not bring this batch in time. The next beat asks who holds it, before its lease is given up."""
        self.patience.num_late += 1
        self._late = self._late or ticket

    def wake(self) -> None:
        self._wakes.put(None)

    def _serve(self) -> None:
        while True:
            is_last = self.is_closed
            try:
                self._beat()
                if is_last:
                    self.queue.end(self.run, self.id)
            except Exception as error:  # noqa: BLE001 - a link that ended here would never say so
                self._down(error)
            if is_last:
                return self.queue.close()
            with contextlib.suppress(queues.Empty):
                self._wakes.get(timeout=BEAT_S)
                while True:
                    self._wakes.get_nowait()

    def _beat(self) -> None:
        """Says all that the queue needs to know."""
        queue = self.queue
        if not self.is_up:
            queue.check(self._num_bytes)
        if self._closed:
            done = [
                (window, [window.ticket(batch) for batch in window.wanted(self.threads)]) for window in self._closed
            ]
            tickets = [ticket for window, wanted in done for ticket in (*wanted, *window.unwanted)]
            queue.close_lines(self.run, [window.attempt for window, _ in done], tickets)
            del self._closed[: len(done)]
        self._keep_arrays()  # before tickets that need them
        told = [(window, len(window.unwanted)) for window in list(self._windows)]
        if self._late and time.monotonic() - self._asked_at > ASK_S:
            self._ask_who_is_late()
        seen = queue.offer(self.run, self.id, self._folder, [self._offer(*each) for each in told])
        for window, count in told:
            window.ready = seen.ready
            del window.unwanted[:count]
        if not self.is_up and self._said:
            log.warning("the queue %s answers again", printable(queue.name))
        if self.threads and not seen.threads:
            log.warning("run %s has no worker any more; batches are made here until one comes", printable(self.run))
        self.is_up, self.threads, self._said = True, seen.threads, ""

    def _ask_who_is_late(self) -> None:
        """Names a worker that holds a late batch, once."""
        ticket, self._late, self._asked_at = self._late, "", time.monotonic()
        status = self.queue.status(self.run)
        position = ticket.split(":")[1]
        worker = next((held.worker for held in status.leases if held.ticket == ticket), "")
        shown = printable(worker)
        if shown in self.slow_workers or len(self.slow_workers) >= MOST_SLOW or (not worker and self._has_idle_late):
            return
        if worker:
            self.slow_workers.append(shown)
            info = status.workers.get(worker, {})
            made, seen_s = info.get("made", 0), info.get("seen_s", 0.0)
            why = f"worker {shown} holds it, has made {made} batches, and was seen {seen_s:.1f} s ago"
        else:
            self._has_idle_late = True
            why = f"no worker holds it, so {self.threads} threads of workers are too few"
        log.warning("the batch at position %s came too late: %s; the loop makes late batches itself", position, why)

    def _keep_arrays(self) -> None:
        if self._arrays and time.monotonic() - self._arrays_at > BEAT_S:
            if not self.queue.has_arrays(self.run, list(self._arrays)):
                for key, ids in self._arrays.items():
                    self.queue.put_array(self.run, key, ids)
            self._arrays_at = time.monotonic()

    def _offer(self, window: Window, unwanted: int) -> Offer:
        wanted = [window.ticket(batch) for batch in window.wanted(self.threads)]
        return Offer(window.attempt, window.record, wanted, window.unwanted[:unwanted])

    def _down(self, error: Exception) -> None:
        """Says once that batches are made here until the queue answers."""
        self.is_up, self.threads = False, 0
        text = str(error).rstrip(".") if isinstance(error, MillraceError) else f"{type(error).__name__}: {error}"
        if not self._said and not self.is_closed:
            log.warning("%s; batches are made here until it does", text)
        self._said = text
        for window in list(self._windows):
            window.tell()

    @property
    def is_usable(self) -> bool:
        return not self.is_closed and self._process == os.getpid()

    def close(self) -> None:
        """Ends the run in the queue, if that answers soon."""
        if self._process != os.getpid() or self.is_closed:
            return
        self.is_closed = True
        self.wake()
        join([self._thread], JOIN_S)


def link_of(feed: Feed, line: Line) -> Link:
    """The link of a feed: that of the pass before, or a new one."""
    if feed.link is not None and feed.link.is_usable:
        return feed.link
    assert feed.run is not None
    num_bytes = feed.depth * sum(
        math.prod(n or 0 for n in field.shape) * field.dtype.itemsize for field in feed.view.fields
    )
    folder = os.path.abspath(feed.run)
    arrays = {key: ids.view(np.uint8) for key, ids in view_arrays(feed.view).items()}
    link = Link(open_queue(str(feed.queue)), run_name(folder), folder, num_bytes=num_bytes * line.size, arrays=arrays)
    weakref.finalize(feed, link.close)  # also at interpreter exit
    feed.link = link
    return link
