"""A worker process: takes tickets from its socket, makes their batches, and packs them into shared slots.

``serve_forks`` is the fork server's life, ``serve_alone`` that of a worker in an interpreter of its own. A worker owns
nothing that others need: it may be killed at any moment, and another one makes its batch again.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from millrace.errors import ConfigError, describe_error
from millrace.feed.batch import Batch
from millrace.feed.make.compose import compose_make
from millrace.feed.make.program import Program
from millrace.feed.processes.job import Job, read_job
from millrace.feed.processes.launch import ENDED, REQUEST
from millrace.feed.processes.packing import HEAD, STAGES, Packed, Places
from millrace.feed.processes.shared_slots import map_shared
from millrace.feed.stages import Fallback, Make
from millrace.ragged import Array

MESSAGE_BYTES = 1 << 17
TICKET = struct.Struct("<cqqqqq")  # b"T", line, batch, slot, offset and size of the slot
REPLY = struct.Struct("<cqqqqddd")  # kind, line, batch, slot, bytes; seconds to make it, in functions, of rest
READY, TOO_SMALL, FAILED, LOADED, UNLOADABLE = b"R", b"S", b"F", b"L", b"U"
PARENT_MS = 1000  # how often it is asked whether the trainer is still there
is_worker = False  # set in a process that loads a job or works on it


def serve_alone(socket_fd: int, bell: int, job_fd: int, slots_fd: int, pool_bell: int, trainer: int) -> NoReturn:
    """The life of a worker that was started by itself."""
    pipe = _begin(socket_fd)
    threading.Thread(target=_end_with, args=(pipe, trainer), daemon=True, name="millrace-parent").start()
    job = _load(pipe, job_fd)
    if job is None:
        _leave(1)
    _work(job, Wire(pipe, bell, pool_bell), slots_fd)


def _end_with(pipe: socket.socket, trainer: int) -> None:
    """Ends this process with the trainer, also in the middle of a batch."""
    watch = select.poll()
    watch.register(pipe, 0)  # only that the other end is closed
    while not watch.poll(PARENT_MS) and os.getppid() == trainer:
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def serve_forks(socket_fd: int, job_fd: int, slots_fd: int, pool_bell: int, trainer: int) -> NoReturn:
    """The life of the fork server: forks a worker for each socket it is sent, and says how workers ended."""
    control, pids = _begin(socket_fd), dict[int, int]()
    job = _load(control, job_fd)
    if job is not None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer has gone
            control.sendall(LOADED + str(_num_threads()).encode())
            if _num_threads() == 1:  # a fork beside threads may never end: each worker gets an interpreter of its own
                gc.freeze()  # the objects so far stay in pages that all workers share
                _serve_requests(control, job, (slots_fd, pool_bell), trainer, pids)
    for pid in pids.values():
        _reap(pid)
    _leave(0)


def _serve_requests(
    control: socket.socket, job: Job, shared: tuple[int, int], trainer: int, pids: dict[int, int]
) -> None:
    watch = select.poll()
    watch.register(control, select.POLLIN)
    while os.getppid() == trainer:  # a child that the trainer forked may keep the socket open after its end
        if not watch.poll(PARENT_MS):
            continue
        message, fds, _, _ = socket.recv_fds(control, REQUEST.size, 2)
        if not message:
            return
        number, is_end = REQUEST.unpack(message)
        if is_end:
            control.sendall(ENDED.pack(b"E", number, _reap(pids.pop(number, None))))
        elif len(fds) == 2:  # fewer if no descriptor was left: the other end of the socket closes, which says so
            _fork(pids, number, control, job, (*fds, *shared))
        for fd in fds:
            os.close(fd)


def _fork(pids: dict[int, int], number: int, control: socket.socket, job: Job, fds: tuple[int, ...]) -> None:
    _flush()  # or each worker would print again what lies in the buffers
    server = os.getpid()
    with contextlib.suppress(OSError):  # no more processes: the other end of the socket closes, which says so
        pids[number] = os.fork()
        if pids[number] == 0:
            control.close()
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: we end with the server, whoever has the GIL
            if os.getppid() != server:
                _leave(1)
            pipe, bell, slots_fd, pool_bell = fds
            _work(job, Wire(socket.socket(fileno=pipe), bell, pool_bell), slots_fd)


def _work(job: Job, wire: Wire, slots_fd: int) -> NoReturn:
    code: Any = 1
    try:
        Worker(job, wire, slots_fd).serve()
        code = 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code
    except BaseException:  # noqa: BLE001 - shown as Python would, then the process ends
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code if isinstance(code, int) else 1)


def _leave(code: int) -> NoReturn:
    """Ends this process without its threads, exit functions and objects: some of them might hang."""
    _flush()
    os._exit(code & 0xFF)


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()


def _reap(pid: int | None) -> int:
    if pid is None:
        return 1
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # nothing if it has ended
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _begin(socket_fd: int) -> socket.socket:
    global is_worker
    is_worker = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(AttributeError, OSError, ValueError):  # what a worker prints is seen, though it is killed
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return socket.socket(fileno=socket_fd)


def _load(pipe: socket.socket, job_fd: int) -> Job | None:
    """Reads the job, or says why that cannot be."""
    try:
        return read_job(job_fd)
    except BaseException as error:  # noqa: BLE001 - the trainer raises it
        with contextlib.suppress(OSError):
            pipe.sendall(UNLOADABLE + json.dumps(describe_error(error)).encode())
        return None


def _num_threads() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def receive(pipe: socket.socket, num_bytes: int) -> bytes | None:
    """The next message, b"" if the other end is closed, None if there is none now."""
    try:
        return pipe.recv(num_bytes, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # said once, if it ended with messages unread. Its own last ones are still here.
        return pipe.recv(num_bytes, socket.MSG_DONTWAIT)


class Wire:
    """One end of the socket between pool and worker, and the eventfds that wake the two.

    A socket wakes its reader on the core of the writer, in the belief that this will sleep. Both would share a core.
    """

    def __init__(self, pipe: socket.socket, own_bell: int, other_bell: int) -> None:
        self.pipe, self._own_bell, self._other_bell = pipe, own_bell, other_bell

    def send(self, *messages: bytes) -> None:
        for message in messages:
            self.pipe.sendall(message)
        os.eventfd_write(self._other_bell, 1)

    def receive(self, num_bytes: int) -> bytes | None:
        return receive(self.pipe, num_bytes)

    def wait(self) -> bytes:
        """The next message."""
        while (message := self.receive(1 << 12)) is None:
            os.eventfd_read(self._own_bell)
        return message


class Area(NamedTuple):
    """A slot as this worker sees it."""

    offset: int
    memory: Array
    targets: dict[bytes, list[Array]]  # where the columns of the last batch went


class Worker:
    """Makes the batches of its tickets, one after the other."""

    def __init__(self, job: Job, wire: Wire, slots_fd: int) -> None:
        self._job, self._wire, self._slots_fd, self._pid = job, wire, slots_fd, os.getpid()
        self._areas: dict[int, Area] = {}  # of each slot
        self._places: Places | None = None  # of the last batch
        self._line = (-1, job.line)
        self._make: Make[Batch] | None = None
        self._has_core = True
        self._unpacked: tuple[int, Packed] | None = None  # a batch that did not fit into its slot
        self._backlog: deque[bytes] = deque()  # messages that came while it waited for a larger one
        self._head: Any = bytearray(HEAD.size)

    def serve(self) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the trainer has gone
            self._wire.send(LOADED + str(self._pid).encode())
            since = time.perf_counter()
            while message := self._next_message():
                if message[:1] == b"N":
                    self._begin_line(json.loads(message[1:]))
                else:
                    self._answer(TICKET.unpack(message)[1:], since)
                since = time.perf_counter()

    def _next_message(self) -> bytes:
        """The next one; while a batch waits for a larger slot, that slot or a new line comes before all others."""
        if self._unpacked is None and self._backlog:
            return self._backlog.popleft()
        while message := self._wire.wait():
            if self._unpacked is None or message[:1] == b"N" or TICKET.unpack(message)[2] == self._unpacked[0]:
                break
            self._backlog.append(message)
        return message

    def _begin_line(self, described: dict[str, Any]) -> None:
        number = described.pop("number")
        self._line, self._make, self._unpacked = (number, replace(self._line[1], **described)), None, None

    def _answer(self, ticket: tuple[int, ...], since: float) -> None:
        line, batch, slot, offset, size = ticket
        began = time.perf_counter()
        rest_s = began - since
        kind, text, num_bytes = READY, b"", 0
        before_s = self._function_s()
        if line == self._line[0]:  # else nobody waits for it any more
            try:
                num_bytes, text = self._fill(batch, self._area(slot, offset, size))
                kind = TOO_SMALL if num_bytes > size else READY
            except Exception as error:  # noqa: BLE001 - the loop raises it when it comes to this batch
                self._unpacked = None
                self._check_process(1)
                kind, text = FAILED, json.dumps(describe_error(error)).encode()
        took_s, function_s = time.perf_counter() - began, max(0.0, self._function_s() - before_s)
        self._wire.send(REPLY.pack(kind, line, batch, slot, num_bytes, took_s, function_s, rest_s) + text)

    def _fill(self, batch: int, area: Area) -> tuple[int, bytes]:
        """Makes a batch and packs it, if it fits: how many bytes it has, and where its columns lie."""
        if self._unpacked is None or self._unpacked[0] != batch:
            self._head = area.memory.data
            self._note("gather")
            self._unpacked = batch, Packed(self._made(batch), self._places)
        packed = self._unpacked[1]
        if packed.num_bytes <= len(area.memory):
            packed.write(area.memory, area.targets)
            self._unpacked = None
            self._places = packed.places
        return packed.num_bytes, packed.text

    def _made(self, batch: int) -> Batch:
        try:
            if self._make is None:
                program = Program.of(self._line[1]) if self._has_core else None
                self._make = compose_make(self._line[1], self._job, program, slots=2, note=self._note)
            made = self._make.make(batch)
        except Fallback:
            self._make, self._has_core = None, False
            return self._made(batch)
        self._check_process(0)
        self._note("packing")
        return made

    def _function_s(self) -> float:
        """Seconds in decode and transform so far."""
        return getattr(self._make, "function_s", 0.0)

    def _check_process(self, code: int) -> None:
        """Ends a child that the transform forked: it must not touch the slot, and has nobody to answer."""
        if os.getpid() != self._pid:
            _leave(code)

    def _note(self, stage: str, row: int = -1) -> None:
        """Says what is being done, for the case that this process dies of it."""
        HEAD.pack_into(self._head, 0, STAGES.index(stage), row)

    def _area(self, slot: int, offset: int, size: int) -> Area:
        known = self._areas.get(slot)
        if known is None or known.offset != offset:
            known = self._areas[slot] = Area(offset, map_shared(self._slots_fd, offset, size), {})
        return known


def check_not_loading() -> None:
    """Refuses a feed with processes in a process that is itself loading the script of one."""
    if is_worker:
        raise ConfigError(
            "a worker process imported this script, and the script begins to train; "
            "put the lines that start it under: if __name__ == '__main__':"
        )
