"""Worker processes that make batches ahead of the loop, in exact order. No thread of this process takes part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from millrace.feed.line import Line
from millrace.feed.place.device import MAX_GROUP
from millrace.feed.processes.packing import Layout
from millrace.feed.processes.pool import Pool
from millrace.feed.processes.tickets import Reply
from millrace.feed.stages import Counters
from millrace.ragged import Array

MAX_AHEAD = 2 * MAX_GROUP  # one group is on its way to the device, and one is made
MAX_LAYOUTS = 64  # kept: those of ragged batches differ each time


class Processes:
    """Batches of a line from a pool of processes, at most ``depth`` ahead of the loop.

    ``unpack(layout, memory)`` gives the batch in a slot as the place wants it. With ``keeps_pool`` the processes stay
    after this line, for the next pass. A place that takes several small batches at once says how many ``bytes_ahead``
    it wants: so many more batches are made ahead once the size of one is known, up to ``MAX_AHEAD``.
    """

    def __init__(
        self, pool: Pool, line: Line, *, depth: int, unpack: Callable[[Layout, Array], Any], keeps_pool: bool = False,
        bytes_ahead: int = 0,
    ) -> None:  # fmt: skip
        self._pool, self._depth, self._unpack, self._keeps_pool = pool, depth, unpack, keeps_pool
        self._bytes_ahead, self._in_lots = bytes_ahead, bytes_ahead > 0
        self._count = math.inf if line.num_batches is None else line.num_batches
        self._layouts: dict[bytes, Layout] = {}
        self._arrivals: dict[int, Reply] = {}
        self._given = self._taken = self._num_ready = self._num_bytes = 0
        self._make_s = self._function_s = self._rest_s = 0.0
        self._before = pool.ends.count, pool.slots.num_grown  # in earlier passes
        self._is_closed = self._is_broken = False
        pool.is_taken = True
        try:
            pool.begin(line)
            self._give(0)
        except BaseException:
            pool.close()
            raise

    def _give(self, batch: int) -> None:
        """A ticket for every batch up to ``depth`` from this one."""
        until = int(min(batch + self._depth, self._count))
        if until > self._given:
            self._pool.give(range(self._given, until))
            self._given = until

    def _give_lots(self, batch: int) -> None:
        """The same; but beside a GPU, as long as half of the batches lie ready, one worker gets the tickets for the others.

        To wake a worker takes longer than to take a batch, and each one that works takes something from the loop.
        """
        half, until = self._depth // 2, batch + self._depth
        if self._in_lots and until < self._count and half > 1:
            if until - self._given < half and self._arrivals:
                return
            if len(self._arrivals) < half:
                self._receive(wait=False)
            if len(self._arrivals) >= half:
                self._pool.give(range(self._given, until), together=True)
                self._given = until
        self._give(batch)

    def take(self, batch: int, wait: bool = True) -> Any:
        try:
            reply = self._reply(batch, wait)
            if reply is None:
                return None
            self._give_lots(batch + 1)  # before the batch is looked at: a worker is woken while we go on
            made = None if reply.error is not None else self._unpacked(reply)
            reply.ticket.slot.is_out = False
        except BaseException:
            # Also from a signal's handler, at any step: what the pool knows may be half of it. It is closed with us: until
            # then copies to a device may read its slots.
            self._is_broken, self._keeps_pool = True, False
            raise
        if reply.error is not None:
            raise reply.error
        return made

    def _reply(self, batch: int, wait: bool) -> Reply | None:
        """What became of a batch, when its turn has come."""
        while (reply := self._arrivals.pop(batch, None)) is None:
            if self._is_closed or self._is_broken or self._pool.is_closed or batch >= self._count:
                return None
            self._give(batch)
            if not self._receive(wait) and not wait:
                return None
        if self._bytes_ahead and reply.num_bytes:
            self._deepen(min(MAX_AHEAD, self._bytes_ahead // reply.num_bytes))
        self._taken, self._num_bytes = self._taken + 1, self._num_bytes + reply.num_bytes
        self._make_s, self._rest_s = self._make_s + reply.make_s, self._rest_s + reply.rest_s
        self._function_s += reply.function_s
        self._num_ready += 1 + len(self._arrivals)
        return reply

    def _receive(self, wait: bool) -> int:
        replies = self._pool.receive(wait)
        for reply in replies:
            self._arrivals[reply.ticket.batch] = reply
        return len(replies)

    def _deepen(self, depth: int) -> None:
        """Batches turned out to be small: more of them are made ahead from now on."""
        self._bytes_ahead = 0
        if depth > self._depth:
            slots = self._pool.slots
            slots.keep = max(slots.keep, 2 * depth + 2)  # an earlier pass may have asked for them
            self._depth = depth

    def _unpacked(self, reply: Reply) -> Any:
        layout = self._layouts.get(reply.text)
        if layout is None:
            if len(self._layouts) >= MAX_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[reply.text] = Layout(reply.text)
        assert reply.ticket.slot.array is not None
        return self._unpack(layout, reply.ticket.slot.array)

    def report(self) -> Counters:
        """Counts what the loop has taken: batches that lie ready are not in it yet."""
        ends, (deaths, grown) = self._pool.ends, self._before
        return Counters(
            workers=self._pool.count, taken=self._taken, made_here=0, make_s=self._make_s, put_wait_s=self._rest_s,
            function_s=self._function_s,
            mean_ready=self._num_ready / max(self._taken, 1), num_bytes=self._num_bytes, deaths=ends.count - deaths,
            ends=tuple(ends.last)[max(0, len(ends.last) - (ends.count - deaths)) :],
            outgrown=self._pool.slots.num_grown - grown,
        )  # fmt: skip

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for reply in self._arrivals.values():
            reply.ticket.slot.is_out = False
        self._arrivals.clear()
        self._pool.is_taken = False
        if not self._keeps_pool:
            self._pool.close()
