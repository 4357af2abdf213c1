"""Locks of the files in a cache: one byte of one file stands for each, so a process needs a single descriptor for all.

They are locks of an open file description (Linux): they end with the process, also under kill -9, and a forked child
shares them. Where there are none, every lock is granted: files then may be downloaded twice, never wrongly.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from millrace.store import platform
from millrace.store.descriptors import lock_of

try:
    import fcntl
except ImportError:
    HAS_LOCKS = False
else:
    HAS_LOCKS = hasattr(fcntl, "F_OFD_SETLK")

NAME = "locks"


class ByteLocks:
    """Shared and exclusive locks by name, between processes. Threads of one process share what it holds."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._pid, self._fd = -1, -1
        self._lock = lock_of(self)

    def share(self, name: str) -> None:
        """Waits while another process has it exclusively; ends an exclusive lock of this process."""
        if HAS_LOCKS:
            self._set(name, fcntl.F_RDLCK, fcntl.F_OFD_SETLKW)

    def own(self, name: str, *, wait: bool = True) -> bool:
        """Exclusively. Without ``wait``: False where another process has it."""
        if HAS_LOCKS:
            try:
                self._set(name, fcntl.F_WRLCK, fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK)
            except OSError as error:
                if wait or error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                return False
        return True

    def release(self, name: str) -> None:
        if HAS_LOCKS and self._pid == os.getpid():  # a forked child would end those of its parent
            self._set(name, fcntl.F_UNLCK, fcntl.F_OFD_SETLK)

    def _set(self, name: str, kind: int, how: int) -> None:
        if self._pid != os.getpid():  # the first one, or in a forked child, which has locks of its own
            with self._lock:  # two descriptors would exclude each other
                if self._pid != os.getpid():
                    flags = os.O_RDWR | os.O_CREAT | platform.O_NOFOLLOW
                    self._fd, self._pid = os.open(self._path, flags, 0o644), os.getpid()
        # struct flock: type, whence, start, length, pid; each name stands for one of 2^60 bytes.
        fcntl.fcntl(self._fd, how, struct.pack("hhqqi4x", kind, os.SEEK_SET, int(name[:15], 16), 1, 0))

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._fd >= 0 and self._pid == os.getpid() and not _is_ending():
            with contextlib.suppress(OSError):
                os.close(self._fd)
