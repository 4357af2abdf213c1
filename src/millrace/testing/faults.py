"""Faults on demand: an error or a kill at the n-th change of the disk, and processes stopped or killed.

Every write of millrace passes ``store.platform``, which calls one hook; these functions set it. Nothing in
production reads an environment variable or a flag for this. For a script of your own there is
``python -m millrace.testing.run_with_fault``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from millrace.store import platform

Step = tuple[str, str]  # what was about to be done (mkdir, open, write, fsync, rename, unlink, rmdir), and where


@dataclass(frozen=True)
class Fault:
    """What happens at the n-th step, counted from 1: an ``OSError`` of this errno, or ``"kill"``.

    ``operation`` counts only steps of that kind; ``lasting`` fails every later one too, as a dead disk does.
    """

    at: int
    kind: int | str
    operation: str | None = None
    lasting: bool = False

    def __post_init__(self) -> None:
        if self.at < 1:
            raise ValueError(f"at={self.at}; steps are counted from 1")
        if self.kind != "kill" and not isinstance(self.kind, int):
            raise ValueError(f"kind={self.kind!r}; expected an errno or 'kill'")

    def strike(self, path: str) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        code = int(self.kind)
        raise OSError(code, os.strerror(code), path)


def count_steps(operation: str | None = None) -> AbstractContextManager[list[Step]]:
    """Yields the list of the steps taken so far, as (operation, path); its length is what ``iofault`` can hit.

    >>> import tempfile
    >>> from millrace.testing import tiny_text
    >>> with count_steps() as steps:
    ...     store = tiny_text(tempfile.mkdtemp() + "/text")
    >>> steps[0][0], steps[-1][0]
    ('mkdir', 'fsync')
    """
    return _hook(None, operation)


def iofault(
    at: int, kind: int | str, *, operation: str | None = None, lasting: bool = False
) -> AbstractContextManager[list[Step]]:
    """Within the block the ``at``-th step (from 1) raises ``OSError(kind)``, or kills the process (``"kill"``).

    Yields the list of steps, the one that failed included. See ``Fault`` for the options.
    """
    return _hook(Fault(at, kind, operation, lasting), operation)


@contextlib.contextmanager
def _hook(fault: Fault | None, operation: str | None) -> Iterator[list[Step]]:
    steps: list[Step] = []
    numbers = itertools.count(1)  # one C call, so that threads never share a number

    def step(doing: str, path: str) -> None:
        if operation not in (None, doing):
            return
        number = next(numbers)
        steps.append((doing, path))
        if fault is not None and (number == fault.at or (fault.lasting and number > fault.at)):
            fault.strike(path)

    before, platform.before_write = platform.before_write, step
    try:
        yield steps
    finally:
        platform.before_write = before


def run_forked(function: Callable[..., Any], *args: Any, fault: Fault | None = None, **kwargs: Any) -> int:
    """Calls a function in a forked child, where ``fault`` may strike, and returns how the child ended.

    0 is a return, 1 an exception (its traceback is on stderr), -9 a kill. A fork starts in milliseconds, so
    that hundreds of kill points cost seconds; the function must not need other threads of this process.
    """
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads; the child runs nothing but the function.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        with contextlib.nullcontext() if fault is None else _hook(fault, fault.operation):
            function(*args, **kwargs)
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the child must not return into the parent's code
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Within the block the process stands still (SIGSTOP); then it goes on."""
    process = psutil.Process(pid)
    process.suspend()
    try:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


class NotPossibleHere(RuntimeError):
    """The machine or the user cannot do what a fault tool needs; tests turn it into a skip with this reason."""


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A folder on a small tmpfs, for what a simulated ENOSPC cannot show; needs root, to mount it."""
    if os.name != "posix" or os.geteuid() != 0:
        raise NotPossibleHere("small_disk mounts a tmpfs, which needs root")
    with tempfile.TemporaryDirectory(prefix="small-disk-") as folder:
        options = ["-t", "tmpfs", "-o", f"size={num_bytes},mode=755", "millrace-small-disk", folder]
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if mounted.returncode:
            raise NotPossibleHere(f"mount is refused here, even to root: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            # Lazily: a map that is still alive must not keep the test from ending.
            subprocess.run(["umount", "--lazy", folder], check=True)
