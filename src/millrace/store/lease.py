"""The lock where there is no flock: a file in the folder that its owner touches every few seconds.

lock.py uses it on Windows and on network file systems without flock. The hosts that share a folder need not agree
about the time: how old a lease is, only the file system's own clock says.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from millrace.errors import StoreError
from millrace.store import platform
from millrace.store.ownership import is_lease
from millrace.store.plain_file import read_plain

HEARTBEAT_S = 5.0
LEASE_S = 60.0  # a lease not touched for this long is dead, whatever its host says
_ATTEMPTS = 3


class Owner(msgspec.Struct):
    """A process that writes, as ``owner.json`` and a lease describe it."""

    host: str
    pid: int
    create_time: float


def myself() -> dict[str, Any]:
    """This process, for other processes and for the people who read their messages."""
    try:
        started = psutil.Process().create_time()
    except (psutil.Error, OSError):  # no /proc
        started = time.time()
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "create_time": started,
        "started": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(started)),
        "command": " ".join(sys.argv)[:1000],
    }


class Lease:
    """A file ``lease``, or ``lease.1``, ``lease.2``, ... where dead ones were taken over.

    A dead lease is not removed to make room for another one: of two processes that do so, the slower one may remove
    the lease of the faster. Who takes over makes the file of the next number, which only one process can, and looks
    again. Only where all others are dead it holds the lock, and removes them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="millrace-lease")

    def take(self) -> bool:
        """False where a living process holds the lock; FileNotFoundError where the folder was renamed or removed."""
        for _ in range(_ATTEMPTS):
            others = self._others()
            if not all(self._is_dead(path) for path in others):
                return False
            number = max((int(other.suffix[1:] or 0) for other in others), default=-1) + 1
            path = self._folder / (f"lease.{number}" if number else "lease")
            with contextlib.suppress(FileExistsError):  # another one was faster
                self._make(path)
                others = [other for other in self._others() if other != path]
                if all(self._is_dead(other) for other in others):  # who comes later finds this one
                    self._path = path
                    self._heart.start()
                    for other in others:
                        _unlink(other)
                    return True
                _unlink(path)
        return False

    def _others(self) -> list[Path]:
        return [self._folder / name for name in os.listdir(self._folder) if is_lease(name)]

    def _make(self, path: Path) -> None:
        fd = platform.create(path)
        try:
            platform.write(fd, json.dumps(myself()).encode(), path)
        except BaseException:
            _unlink(path)
            raise
        finally:
            os.close(fd)

    def _is_dead(self, path: Path) -> bool:
        try:
            owner = msgspec.json.decode(read_plain(str(path), 1 << 16), type=Owner)
        except (StoreError, msgspec.DecodeError):
            if not os.path.lexists(path):
                return True
            owner = None  # written at this moment, or its owner was killed just then
        can_look = psutil.pid_exists(os.getpid())  # without /proc no process is seen
        if can_look and owner is not None and owner.host == socket.gethostname():
            try:
                # One with another time of birth is a later process of this number, or the clock was set since.
                if abs(psutil.Process(owner.pid).create_time() - owner.create_time) <= 1:
                    return False
            except (psutil.NoSuchProcess, ValueError):
                return True
            except (psutil.Error, OSError):
                pass
        return self._silent_s(path) > LEASE_S

    def _silent_s(self, path: Path) -> float:
        """How long ago it was touched, by the clock that also gave it its time: a new file's time is now."""
        try:
            with tempfile.TemporaryFile(dir=self._folder.parent, buffering=0) as fresh:
                fresh.write(b"now")
                os.fsync(fresh.fileno())
                now = os.fstat(fresh.fileno()).st_mtime
            return now - os.lstat(path).st_mtime
        except FileNotFoundError:
            if not self._folder.is_dir():
                raise
            return LEASE_S + 1  # its owner has just removed it
        except OSError:
            return 0.0  # nobody knows: it may be alive

    def _beat(self) -> None:
        """Touches the lease by a write: the file system gives that its own time. A time that is set may be this host's."""
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                assert self._path is not None
                fd = os.open(self._path, os.O_WRONLY | platform.O_NOFOLLOW | platform.O_BINARY)
                try:
                    os.write(fd, b"{")  # as it begins
                finally:
                    os.close(fd)

    def stop(self) -> None:
        """Ends the heartbeat, so that the folder can be renamed; the lease stays for another minute."""
        self._stop.set()
        self._heart.join()

    def drop(self, folder: Path | None = None) -> None:
        """Removes the lease; ``folder`` is where it lies now, if its own was renamed."""
        self.stop()
        assert self._path is not None
        _unlink((folder or self._folder) / self._path.name)


def _unlink(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        platform.remove(path)
