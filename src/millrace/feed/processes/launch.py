"""Starts worker processes: forked from one clean process that has loaded the job, or each one by itself.

The trainer is never forked: it has threads, and perhaps a GPU. ``ForkServer`` is one new interpreter. It loads the
modules of the job once and forks a worker whenever it is asked to. ``Spawner`` starts an interpreter for each worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator

START = (
    "import sys; sys.path[:] = {path!r}; from millrace.feed.processes.worker import {function} as run; run({numbers})"
)
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # workers share the cores
REQUEST = struct.Struct("<q?")  # to the fork server: the number of a worker; whether to end it, or to start it
ENDED = struct.Struct("<cqq")  # from it: b"E", the number of a worker, its exit code as subprocess gives it
END_S = 5.0  # for a killed worker to end
CLOSE_S = 0.5


class ForkServer:
    """Workers forked from one process that has loaded the job. ``control`` says whether it could.

    ``fds`` are those of the job, of the slots, and of the eventfd by which workers wake the pool.
    """

    def __init__(self, *fds: int) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.is_loaded = False  # whoever hears it on ``control`` says so here
        with theirs:
            self._process = _interpreter("serve_forks", theirs.fileno(), *fds)

    def start(self, number: int, theirs: socket.socket, bell: int) -> None:
        """Starts worker ``number``, which talks through this end of a pair, and is woken by this eventfd."""
        with theirs, contextlib.suppress(OSError):  # it has ended: the worker's end closes, which says so
            socket.send_fds(self.control, [REQUEST.pack(number, False)], [theirs.fileno(), bell])

    def pid(self, number: int) -> int:
        """The process to look at while a worker has not yet said its own."""
        return self._process.pid

    def end(self, number: int) -> int | None:
        """Kills a worker if it still runs; how it ended: an exit code, or minus a signal. None if nobody knows."""
        with contextlib.suppress(OSError):
            self.control.sendall(REQUEST.pack(number, True))
            self.control.settimeout(END_S)
            while reply := self.control.recv(1 << 16):
                if reply[:1] == b"E" and ENDED.unpack(reply)[1] == number:
                    return int(ENDED.unpack(reply)[2])
        return None

    def close(self) -> int:
        """Ends all workers."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)  # a forked child of the trainer may hold it too
        self.control.close()
        if self.is_loaded:  # then it ends its workers and itself at once
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=CLOSE_S)
        self._process.kill()  # the system ends its workers with it
        return self._process.wait()

    def forget(self) -> None:
        """In a forked child of the trainer."""
        self.control.close()
        self._process.poll()  # it is not our child: Python notes that there is nobody to wait for


class Spawner:
    """Each worker is an interpreter of its own. The methods are those of ``ForkServer``."""

    control, is_loaded = None, True

    def __init__(self, *fds: int) -> None:
        self._fds = fds
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, number: int, theirs: socket.socket, bell: int) -> None:
        with theirs:
            self._processes[number] = _interpreter("serve_alone", theirs.fileno(), bell, *self._fds)

    def pid(self, number: int) -> int:
        return self._processes[number].pid

    def end(self, number: int) -> int | None:
        process = self._processes.get(number)
        if process is None:
            return None
        process.kill()  # nothing if it has ended
        code = process.wait()
        self._processes.pop(number, None)
        return code

    def close(self) -> int:
        for process in self._processes.values():
            process.kill()
        for number in list(self._processes):
            self.end(number)
        return 0

    def forget(self) -> None:
        for process in self._processes.values():
            process.poll()


def _interpreter(function: str, *fds: int) -> subprocess.Popen[bytes]:
    """A new Python that runs a function of ``worker.py``."""
    path = [entry or os.getcwd() for entry in sys.path]
    code = START.format(path=path, function=function, numbers=", ".join(map(str, (*fds, os.getpid()))))
    return subprocess.Popen(
        [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
        pass_fds=fds, stdin=subprocess.DEVNULL, env={**os.environ, **dict.fromkeys(ONE_THREAD, "1")},
    )  # fmt: skip


@contextlib.contextmanager
def no_signals() -> Iterator[None]:
    """Half a process or socket is not left by a signal, which comes after it. A child inherits this until it works:
    Ctrl-C while it starts is for the trainer alone.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def was_killed(code: int | None) -> bool:
    """Rather than that it crashed or ended by itself; also if nobody knows."""
    return code in (None, -signal.SIGKILL, -signal.SIGTERM)


def describe_end(code: int | None) -> str:
    if code is None:
        return "for an unknown reason"
    if code >= 0:
        return f"with exit code {code}"
    hint = " (kill -9, or out of memory)" if code == -signal.SIGKILL else ""
    with contextlib.suppress(ValueError):
        return f"by signal {signal.Signals(-code).name}{hint}"
    return f"by signal {-code}"
