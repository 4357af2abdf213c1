"""Nothing left behind: what a block of code must give back when it ends.

Child processes, descriptors, threads, names in /dev/shm and temporary files are listed before and after; what
is new after a short grace is a leak.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import psutil

PREFIXES = ("millrace", "mr-")
SHARED_MEMORY = "/dev/shm"
# Opened once per process by Python or numpy and kept on purpose.
_LASTING = ("/dev/urandom", "/dev/random", "/dev/null")


@contextlib.contextmanager
def expect_no_leaks(*, grace_s: float = 2.0, prefixes: tuple[str, ...] = PREFIXES) -> Iterator[None]:
    """Raises ``AssertionError`` listing what the block left: processes, descriptors, threads, shared memory, files.

    Ending takes a moment, so that leaks are looked for until none is found or ``grace_s`` has passed. Temporary files and
    shared memory count where their names start with one of ``prefixes``, shared memory also where this program has it
    in use. A block that raises is not examined.
    """
    before = _everything(prefixes)
    yield
    deadline = time.monotonic() + grace_s
    while True:
        gc.collect()
        left = [text for key, text in _everything(prefixes).items() if key not in before]
        if not left:
            return
        if time.monotonic() > deadline:
            raise AssertionError("left behind:\n  " + "\n  ".join(sorted(left)))
        time.sleep(0.02)


def _everything(prefixes: tuple[str, ...]) -> dict[object, str]:
    """What identifies each thing -> how to show it."""
    found: dict[object, str] = dict(_processes())
    found |= {text: text for text in _descriptors()}
    found |= {thread: f"thread {thread.name}" for thread in threading.enumerate()}
    found |= {text: text for text in (*_shared_memory(prefixes), *_names(tempfile.gettempdir(), prefixes))}
    return found


def _processes() -> Iterator[tuple[object, str]]:
    helpers = _helpers()
    for child in psutil.Process().children(recursive=True):
        if child.pid in helpers:
            continue
        try:
            yield child, f"process {child.pid}: {' '.join(child.cmdline())[:200]}"
        except psutil.ZombieProcess:
            yield child, f"process {child.pid}: ended, but nobody waited for it"
        except psutil.NoSuchProcess:
            pass


def _helpers() -> set[int]:
    """Processes that multiprocessing keeps for the whole life of a program."""
    pids: set[int] = set()
    for module, name in (("resource_tracker", "_resource_tracker"), ("forkserver", "_forkserver")):
        helper = getattr(sys.modules.get(f"multiprocessing.{module}"), name, None)
        for attribute in ("_pid", "_forkserver_pid"):
            pids.add(getattr(helper, attribute, None) or -1)
    return pids


def _descriptors() -> Iterator[str]:
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    helper = getattr(sys.modules.get("multiprocessing.resource_tracker"), "_resource_tracker", None)
    tracker = getattr(helper, "_fd", None)
    for number in os.listdir(folder) if os.path.isdir(folder) else ():
        with contextlib.suppress(OSError):  # the one that listed the folder is gone by now
            target = os.readlink(f"{folder}/{number}")
            if target not in _LASTING and int(number) != tracker:
                yield f"descriptor {number} of {target}"


def _names(folder: str, prefixes: tuple[str, ...]) -> Iterator[str]:
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        if name.startswith(prefixes):
            yield f"file {os.path.join(folder, name)}"


def _shared_memory(prefixes: tuple[str, ...]) -> Iterator[str]:
    """Shared memory is a plain file there; folders are somebody's temporary ones, and other programs come and go."""
    in_use = set(_maps_there())
    for name in _names(SHARED_MEMORY, ("",)):
        path = name.removeprefix("file ")
        if path in in_use or (os.path.basename(path).startswith(prefixes) and not os.path.isdir(path)):
            yield name


def _maps_there() -> Iterator[str]:
    """Shared memory that this program has in use, its children included."""
    program = psutil.Process()
    for process in (program, *program.children(recursive=True)):
        with contextlib.suppress(OSError), open(f"/proc/{process.pid}/maps", errors="replace") as maps:
            yield from (line.split(maxsplit=5)[-1].rstrip() for line in maps if f" {SHARED_MEMORY}/" in line)
