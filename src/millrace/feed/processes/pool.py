"""Pool: the worker processes of a feed, the tickets each one has, and what happens when one dies.

A ticket is a batch to make in a slot. It belongs to one worker at a time. When a worker dies, raises, or is stopped, the
pool knows which batch it was making: another worker makes it again, with the same bytes, since batches are pure.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from millrace.errors import ConfigError, FeedError, rebuild_error
from millrace.feed.line import Line
from millrace.feed.processes import worker as protocol
from millrace.feed.processes.job import Job, write_job
from millrace.feed.processes.launch import ForkServer, Spawner, describe_end, no_signals, was_killed
from millrace.feed.processes.shared_slots import SharedSlots
from millrace.feed.processes.tickets import Ends, Member, Reply, Ticket
from millrace.feed.processes.watch import Watch

MAX_STARTS = 3  # processes in a row that end before they begin to work
MAX_KILLED_STARTS = 12  # for each worker: the same where they are killed, perhaps by somebody
MAX_TICKETS = 64  # in a worker's socket. More might fill it: both ends would wait for each other.
POLL_S = 1.0
SPIN_S = 1e-4  # before the loop sleeps: to be woken takes longer than a small batch does


class Pool:
    """``count`` worker processes; ``method`` is "forkserver", "spawn" or None for the first that works.

    One thread gives tickets and receives replies. After an error, other than one in a reply, the pool must be closed.
    """

    def __init__(self, job: Job, count: int, slots: SharedSlots, method: str | None = None) -> None:
        self.count, self.slots, self._method, self._process = count, slots, method, os.getpid()
        self._lock = threading.RLock()  # held while a message is handled; ``close`` may come from another thread
        self.is_closed = self.is_taken = False  # taken: an iterator uses it
        self.ends, self._num_starts, self._next_number = Ends(), 0, 0
        self._members: dict[int, Member] = {}  # by descriptor
        self._waiting: deque[Ticket] = deque()  # for a worker
        self._line: tuple[int, Line, bytes] | None = None
        self._poll, self._job_fd = select.poll(), -1
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # workers wake us by it
        self._poll.register(self._bell, select.POLLIN)
        self._launcher: ForkServer | Spawner | None = None
        self._launcher_watch, self._looked = Watch(), time.monotonic()
        try:
            protocol.check_not_loading()
            self._job_fd = write_job(job)
            self._launch()
            for _ in range(count):
                self._start()
        except BaseException:
            self.close()
            raise

    def _launch(self) -> None:
        with _starting(self.count):
            kind = Spawner if self._method == "spawn" else ForkServer
            self._launcher, self._launcher_watch = kind(self._job_fd, self.slots.fd, self._bell), Watch()
            if self._launcher.control is not None:
                self._poll.register(self._launcher.control, select.POLLIN)

    def _start(self) -> None:
        assert self._launcher is not None
        with _starting(self.count):
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            bell = os.eventfd(0, os.EFD_CLOEXEC)
            member = Member(self._next_number, protocol.Wire(ours, self._bell, bell), bell, self._launcher)
            self._next_number += 1
            self._members[ours.fileno()] = member
            self._poll.register(ours, 0)  # only its end: the bell says when there is something to read
            if self._line is not None:
                member.send(self._line[2])
            self._launcher.start(member.number, theirs, bell)

    @property
    def is_idle(self) -> bool:
        """Whether an iterator may take it. A forked child may not: the workers are the parent's."""
        return not self.is_closed and not self.is_taken and self._process == os.getpid()

    def begin(self, line: Line) -> None:
        """Tells the workers of a new line; tickets of the one before are forgotten."""
        with self._lock:
            number = 0 if self._line is None else self._line[0] + 1
            names = ("batch", "rank", "world", "start", "stop", "epoch", "last", "first_bin")
            described = {"number": number, **{name: getattr(line, name) for name in names if hasattr(line, name)}}
            self._line = number, line, b"N" + json.dumps(described).encode()
            for ticket in self._waiting:
                ticket.slot.is_out = False
            self._waiting.clear()
            for member in self._members.values():
                member.send(self._line[2])

    def give(self, batches: range, *, together: bool = False) -> None:
        """Tickets for batches of the line, each to the worker with the fewest; or all of them, which wakes only one."""
        with self._lock:
            if not self.is_closed:
                assert self._line is not None
                self._waiting += [Ticket(self._line[0], batch, self.slots.take()) for batch in batches]
                self._hand_out(len(batches) if together else 1)

    def _hand_out(self, at_once: int = 1) -> None:
        while self._waiting:
            member = min(self._members.values(), key=lambda member: len(member.tickets))
            room = min(MAX_TICKETS - len(member.tickets), at_once, len(self._waiting))
            if room <= 0:
                return
            tickets = [self._waiting.popleft() for _ in range(room)]
            member.tickets += tickets
            member.send_tickets(*tickets)

    def receive(self, wait: bool) -> list[Reply]:
        """What workers have answered; waits a moment if nothing came and ``wait`` says so.

        While the loop waits, silent workers are looked after every second, however much comes from others.
        """
        began = time.monotonic()
        ready = self._poll.poll(0)
        while not ready and wait and time.monotonic() < began + SPIN_S:
            os.sched_yield()
            ready = self._poll.poll(0)
        if not ready and wait:
            ready = self._poll.poll(POLL_S * 1000)
        with self._lock:
            if self.is_closed:
                return []
            if not ready and wait:
                return self._look_after()
            found = {fd for fd, _ in ready}
            control = getattr(self._launcher, "control", None)
            if control is not None and control.fileno() in found:
                self._hear_launcher(control)  # before the workers: they may end because it did
            if self._bell in found:
                os.eventfd_read(self._bell)
                found.update(self._members)
            replies = [
                reply
                for member in list(self._members.values())
                if member.fileno in found
                for reply in self._hear(member)
            ]
            self._hand_out()
            return replies + self._look_after() if wait and began - self._looked >= POLL_S else replies

    def _hear_launcher(self, control: socket.socket) -> None:
        assert isinstance(self._launcher, ForkServer)
        message: bytes | None = b""
        with contextlib.suppress(OSError):
            message = protocol.receive(control, protocol.MESSAGE_BYTES)
        if message is None:
            return
        kind = message[:1]
        if kind == protocol.UNLOADABLE:
            raise _unloadable(json.loads(message[1:]))
        if kind == protocol.LOADED:
            self._launcher.is_loaded, self._num_starts = True, 0
            if int(message[1:]) == 1:
                return
            if self._method == "forkserver":
                raise ConfigError(
                    "importing the transform starts threads, and processes are not forked beside threads; use processes='spawn'"
                )
            self._method = "spawn"
        elif message:
            return  # late news of a worker that ended
        self._relaunch()

    def _relaunch(self) -> None:
        """Another fork server: the one before ended. Its workers are replaced when they are seen to have ended."""
        assert isinstance(self._launcher, ForkServer)
        self._poll.unregister(self._launcher.control)
        was_loaded, code = self._launcher.is_loaded, self._launcher.close()
        if not was_loaded:
            self._count_start(code)
        self._launch()

    def _count_start(self, code: int | None) -> None:
        self._num_starts += 1
        if self._num_starts > self._most_starts(code) and not any(member.pid for member in self._members.values()):
            raise FeedError(
                f"worker processes end before they begin to work, {describe_end(code)}; lower workers=, and see whether "
                "a new Python can import the transform"
            )

    def _most_starts(self, code: int | None) -> int:
        return MAX_KILLED_STARTS * self.count if was_killed(code) else MAX_STARTS

    def _hear(self, member: Member) -> Iterator[Reply]:
        """All messages of a worker that are there."""
        while True:
            try:
                message = member.wire.receive(protocol.MESSAGE_BYTES)
            except OSError:
                message = b""
            if message is None:
                return
            if not message:
                yield from self._bury(member)
                return
            yield from self._hear_one(member, message)

    def _hear_one(self, member: Member, message: bytes) -> list[Reply]:
        member.watch = None
        kind = message[:1]
        if kind == protocol.LOADED:
            member.pid, self._num_starts = int(message[1:]), 0
            return []
        if kind == protocol.UNLOADABLE:
            raise _unloadable(json.loads(message[1:]))
        kind, line, batch, _, num_bytes, make_s, function_s, rest_s = protocol.REPLY.unpack_from(message)
        text = message[protocol.REPLY.size :]
        ticket = member.tickets.popleft()
        if (ticket.line, ticket.batch) != (line, batch):
            raise FeedError(f"a worker answered batch {batch}, expected {ticket.batch}; this is a bug of millrace")
        if self._line is None or line != self._line[0]:
            ticket.slot.is_out = False
            return []
        if kind == protocol.TOO_SMALL:
            self.slots.grow(ticket.slot, num_bytes)
            member.tickets.appendleft(ticket)  # it keeps the batch, and packs it as soon as it has room
            member.send_tickets(ticket)
            return []
        error = rebuild_error(json.loads(text)) if kind == protocol.FAILED else None
        if error is None:
            self.slots.note(num_bytes)
        return [Reply(ticket, text, num_bytes, make_s, function_s, rest_s, error)]

    def _bury(self, member: Member, why: str | None = None, *, is_final: bool = False) -> list[Reply]:
        """Gives the tickets of a dead worker to others, and starts another in its place."""
        self._poll.unregister(member.fileno)
        del self._members[member.fileno]
        member.close()
        code = member.launcher.end(member.number)
        has_worked, is_refused = member.pid is not None, member.launcher is not self._launcher
        if not has_worked and not is_refused and member.launcher.is_loaded:
            self._count_start(code)
        if has_worked or is_refused or self._num_starts <= self._most_starts(code) or not self._members:
            self._start()  # else the others go on alone
        current = -1 if self._line is None else self._line[0]
        tickets = [ticket for ticket in member.tickets if ticket.line == current]
        for ticket in member.tickets:
            ticket.slot.is_out = ticket.line == current
        replies = []
        if has_worked and self._line is not None:
            first = tickets[0] if tickets and tickets[0] is member.tickets[0] else None
            what = f"a worker process (pid {member.pid}) {why or f'ended {describe_end(code)}'}"
            error = self.ends.add(what, code, first, self._line[1], is_final)
            if error is not None:
                replies = [Reply(tickets.pop(0), b"", 0, 0.0, 0.0, 0.0, error)]
        self._waiting.extendleft(reversed(tickets))
        self._hand_out()
        return replies

    def _look_after(self) -> list[Reply]:
        """Of those that have not answered for a second: has one ended unseen, is it stopped, or does it hang?"""
        # No more than we wait for: the loop was elsewhere, or the whole machine was suspended.
        now = time.monotonic()
        seconds, self._looked = min(now - self._looked, POLL_S), now
        if isinstance(self._launcher, ForkServer):
            finding = self._launcher_watch.look(self._launcher.pid(0), 0.0)
            if finding is not None and finding.text is not None:
                self._relaunch()
        replies = []
        for member in [member for member in self._members.values() if member.tickets]:
            if (finding := member.look(seconds)) is not None:
                replies += self._bury(member, finding.text, is_final=finding.is_final)
        return replies

    def close(self) -> None:
        """Ends all workers at once: they hold nothing that is not made again. May be called again, from any thread."""
        self.is_closed = True
        if self._process != os.getpid():
            self._forget()
            return
        for member in list(self._members.values()):
            with contextlib.suppress(OSError):
                member.wire.pipe.shutdown(socket.SHUT_RDWR)  # wakes a ``receive`` that waits
        with self._lock:
            if self._launcher is not None:
                self._launcher.close()
                self._launcher = None
            self._close_all()
            self.slots.close()

    def _close_all(self) -> None:
        while self._members:
            self._members.popitem()[1].close()
        for fd in (self._job_fd, self._bell):
            if fd >= 0:
                os.close(fd)
        self._job_fd = self._bell = -1

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _is_ending():  # at the very end the interpreter has no modules any more
            self.close()

    def _forget(self) -> None:
        """In a forked child: the workers are the parent's, and the descriptors are only copies."""
        if self._launcher is not None:
            self._launcher.forget()
            self._close_all()
            os.close(self.slots.fd)
            self._launcher = None


def close_all(pools: list[Pool]) -> None:
    while pools:
        pools[-1].close()
        pools.pop()


@contextlib.contextmanager
def _starting(count: int) -> Iterator[None]:
    try:
        with no_signals():
            yield
    except OSError as error:
        raise FeedError(
            f"{count} worker processes cannot be started ({error}); lower workers=, or raise ulimit -n and -u"
        ) from error


def _unloadable(described: dict[str, Any]) -> Exception:
    error = ConfigError(
        f"worker processes cannot load the feed: {described['message']}; give a transform that a new Python can import"
    )
    error.__cause__ = rebuild_error(described)
    return error
