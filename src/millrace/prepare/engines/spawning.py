"""Starts worker processes from any kind of program: a script, a notebook, standard input."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_starting, _starts = threading.Lock(), list[int]()
_before: list[Any] = []  # the main module, and the number of threads, outside of all starts


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """A process that is started inside does not run the user's script again, nor print a traceback at Ctrl-C.

    Spawn imports the main module again. That fails in a script without a guard, in a notebook and from standard
    input; our tasks never live there. numpy starts no threads in it: they would spin, and it is one of many.
    """
    with _starting:  # several may start at once
        if not _starts:
            _before[:] = sys.modules.get("__main__"), os.environ.get(BLAS_THREADS)
            sys.modules["__main__"] = types.ModuleType("__main__")
            os.environ.setdefault(BLAS_THREADS, "1")
        _starts.append(1)
    try:
        with _without_interrupt():
            yield
    finally:
        with _starting:
            _starts.pop()
            if not _starts:
                main, threads = _before
                if main is not None:
                    sys.modules["__main__"] = main
                if threads is None:
                    del os.environ[BLAS_THREADS]


@contextlib.contextmanager
def _without_interrupt() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait for the end of the block. A process started inside never sees Ctrl-C."""
    resource_tracker.ensure_running()  # started inside, it would unblock the signal
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if threading.current_thread() is not threading.main_thread() or None in before.values():
        yield
        return
    arrived: list[int] = []
    # The worker inherits the block. We hold signals back too, since any thread may get them.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    for number in before:
        signal.signal(number, lambda number, frame: arrived.append(number))
    try:
        yield
    finally:
        if blocked is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, handler in before.items():
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
