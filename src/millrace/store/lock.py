"""One writer per folder: the lock that publish.py holds while a store is being written.

flock on the folder's own descriptor leaves no file behind and dies with its process, also under kill -9.
Where there is no flock (Windows, some network file systems) a lease file with a heartbeat stands in.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import psutil

from millrace.errors import StoreLocked
from millrace.store import platform

try:
    import fcntl
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

HEARTBEAT_S = 5.0
LEASE_S = 60.0  # a lease not renewed for this long is dead, whatever its host says

_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive lock on an existing folder, with ``owner.json`` in ``notes`` for the other's message."""

    def __init__(self, folder: Path, notes: Path, target: Path) -> None:
        self._folder, self._owner_file, self._target = folder, notes / "owner.json", target
        self._fd: int | None = None
        self._lease: _Lease | None = None

    def acquire(self) -> bool:
        """Raises where another holds it; False where the folder was renamed or removed meanwhile: look again."""
        held = self._flock()
        if held is None:
            platform.make_dir(self._owner_file.parent)
            self._lease = _Lease(self._owner_file.with_name("lease"))
            if not self._lease.take():
                self._lease = None
                raise self._locked()
            held = True
        if held:
            _held.add(self)
        return held

    def write_owner(self) -> None:
        """Says who holds the lock, for whoever finds it held."""
        with platform.writing(self._owner_file):
            data = json.dumps(_myself()).encode()
            platform.write_file(self._owner_file, data, mode=0o644)

    def _flock(self) -> bool | None:
        """Whether flock holds the folder that bears the name now; None where the file system has no flock."""
        if not HAS_FLOCK:
            return None
        try:
            fd = os.open(self._folder, os.O_RDONLY | platform.O_DIRECTORY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise self._locked() from None
            return None
        # Its last holder may have renamed or removed the folder, and another writer made a new one of this name.
        if not _is_still(fd, self._folder):
            os.close(fd)
            return False
        self._fd = fd
        return True

    def _locked(self) -> StoreLocked:
        try:
            owner = json.loads(self._owner_file.read_bytes())
            who = f"process {owner['pid']} on {owner['host']}, started {owner['started']}: {owner['command']}"
        except (OSError, ValueError, KeyError, TypeError):
            owner, who = None, "another process"
        return StoreLocked(
            f"{self._target} is being written by {who}; wait for it or end it", path=str(self._target), owner=owner
        )

    def before_rename(self) -> None:
        """A lease is a file in the folder that is about to become a store: it goes first."""
        if self._lease is not None:
            self._lease.drop()
            self._lease = None

    def release(self) -> None:
        self.before_rename()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        _held.discard(self)

    def forget(self) -> None:
        """In a forked child: closes the copy of the descriptor, so that the lock dies with the parent alone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        self._lease = None


def _is_still(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _forget_locks() -> None:
    for lock in list(_held):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)


def _myself() -> dict[str, Any]:
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


class _Lease:
    """A file made with O_EXCL and touched every few seconds; a dead owner's is taken over."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stop = threading.Event()
        self._heart = threading.Thread(target=self._beat, daemon=True, name="millrace-lease")

    def take(self) -> bool:
        for _ in range(2):
            try:
                fd = platform.create(self._path)
            except FileExistsError:
                if not self._dead():
                    return False
                with contextlib.suppress(FileNotFoundError):
                    platform.remove(self._path)
                continue
            try:
                platform.write(fd, json.dumps(_myself()).encode(), self._path)
            except BaseException:
                os.unlink(self._path)
                raise
            finally:
                os.close(fd)
            self._heart.start()
            return True
        return False

    def _dead(self) -> bool:
        try:
            silent_s = time.time() - self._path.stat().st_mtime
            owner = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return True
        except ValueError:
            return silent_s > LEASE_S  # being written this moment, or its owner was killed just then
        if owner["host"] != socket.gethostname() or not psutil.pid_exists(os.getpid()):  # without /proc none is seen
            return silent_s > LEASE_S
        try:
            return bool(abs(psutil.Process(owner["pid"]).create_time() - owner["create_time"]) > 1)
        except psutil.NoSuchProcess:
            return True

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_S):
            with contextlib.suppress(OSError):
                os.utime(self._path)

    def drop(self) -> None:
        self._stop.set()
        self._heart.join()
        platform.remove(self._path)
