"""One writer per folder: the lock that publish.py holds while a store is being written.

flock on the folder's own descriptor leaves no file behind and dies with its process, also under kill -9.
Where there is no flock (Windows, some network file systems) a lease stands in (lease.py).
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import weakref
from pathlib import Path

from millrace.errors import StoreError, StoreLocked
from millrace.store import platform
from millrace.store.lease import Lease, myself
from millrace.store.ownership import OWNER, clear
from millrace.store.plain_file import read_plain

try:
    import fcntl
except ImportError:
    HAS_FLOCK = False
else:
    HAS_FLOCK = True

_live_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


class FolderLock:
    """An exclusive lock on an existing folder, with ``owner.json`` in ``notes`` for the other's message."""

    def __init__(self, folder: Path, notes: Path, target: Path) -> None:
        self._folder, self._owner_file, self._target = folder, notes / OWNER, target
        self._fd: int | None = None
        self._lease: Lease | None = None

    def acquire(self) -> bool:
        """Raises where another holds it; False where the folder was renamed or removed meanwhile: look again."""
        held = self._flock()
        if held is None:
            held = self._take_lease()
        if held:
            _live_locks.add(self)
        return held

    def write_owner(self) -> None:
        """Says who holds the lock, for whoever finds it held, and whose the folder is."""
        with platform.writing(self._owner_file):
            data = json.dumps(myself()).encode()
            platform.write_file(self._owner_file, data, mode=0o644)
            platform.sync_dir(self._owner_file.parent)

    def _take_lease(self) -> bool:
        folder = self._owner_file.parent
        platform.make_dir(folder)
        lease = Lease(folder)
        try:
            is_mine = lease.take()
        except FileNotFoundError:
            return False
        if not is_mine:
            raise self._locked()
        self._lease = lease
        return True

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
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(self._folder)):
                self._fd = fd
                return True
        os.close(fd)
        return False

    def _locked(self) -> StoreLocked:
        try:
            owner = json.loads(read_plain(str(self._owner_file), 1 << 16))
            who = f"process {owner['pid']} on {owner['host']}, started {owner['started']}: {owner['command']}"
        except (StoreError, ValueError, KeyError, TypeError):
            owner, who = None, "another process"
        message = f"{self._target} is being written by {who}; wait for it or end it"
        return StoreLocked(message, path=str(self._target), owner=owner)

    def before_rename(self) -> None:
        """The folder is about to become a store: its lease is touched no more, and holds until ``release``."""
        if self._lease is not None:
            self._lease.stop()

    def remove_folder(self) -> None:
        """Removes all of the folder that holds ``owner.json``; a lease goes with it, an flock stays until ``release``."""
        folder = self._owner_file.parent
        clear(folder)
        had_lease = self._lease is not None
        self.drop_lease()
        try:
            platform.remove_empty(folder)
        except OSError:
            if not had_lease:  # else another writer has the folder now
                raise

    def drop_lease(self, folder: Path | None = None) -> None:
        """Gives the lock back where it is a lease; ``folder`` is where that lies now, if its own was renamed."""
        if self._lease is not None:
            self._lease.drop(folder)
            self._lease = None

    def release(self) -> None:
        self.drop_lease()
        self.forget()
        _live_locks.discard(self)

    def forget(self) -> None:
        """In a forked child: closes the copy of the descriptor, so that the lock dies with the parent alone."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._lease = None


def _forget_locks() -> None:
    for lock in list(_live_locks):
        lock.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
