"""Opens plain files and nothing else: no link, no fifo, no device, and no file beyond its limit."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from millrace.errors import StoreCorrupt, StoreError, corrupt
from millrace.store import platform

MAX_BYTES = 1 << 30  # of a file that nothing else limits, such as provenance.json
_FLAGS = os.O_RDONLY | platform.O_NOFOLLOW | platform.O_BINARY | getattr(os, "O_NONBLOCK", 0)


def open_plain(name: str, dir_fd: int | None = None, *, follow: bool = False) -> int:
    """A descriptor for reading; a fifo is not waited for. ``dir_fd`` is the folder that a relative name lies in."""
    return os.open(name, _FLAGS & ~platform.O_NOFOLLOW if follow else _FLAGS, dir_fd=dir_fd)


@contextlib.contextmanager
def open_file(
    path: str, name: str | None = None, dir_fd: int | None = None, *, follow: bool = False
) -> Iterator[tuple[int, int]]:
    """A descriptor of a plain file and its size: asked of what was opened, since an append may replace the name meanwhile.

    ``path`` is for messages; ``name`` in the folder ``dir_fd`` is opened, where they are given. ``follow`` allows a link.
    """
    name = path if name is None else name
    try:
        if not stat.S_ISREG(os.stat(name, dir_fd=dir_fd, follow_symlinks=follow).st_mode):
            raise not_plain(path)
        fd = open_plain(name, dir_fd, follow=follow)
    except OSError as error:
        raise unreadable(path, error) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise not_plain(path)
        yield fd, status.st_size
    finally:
        os.close(fd)


def read_plain(
    path: str, most: int = MAX_BYTES, name: str | None = None, dir_fd: int | None = None, *, follow: bool = False
) -> bytes:
    """A whole file of at most ``most`` bytes."""
    with open_file(path, name, dir_fd, follow=follow) as (fd, size):
        if size > most:
            raise corrupt(path, f"has {size} bytes; expected at most {most} bytes", expected=most, found=size)
        try:
            return platform.pread(fd, size, 0)
        except OSError as error:
            raise unreadable(path, error) from error


def not_plain(path: str) -> StoreCorrupt:
    return corrupt(path, "is not a plain file")


def unreadable(path: str, error: OSError) -> StoreError:
    """The error for a file the system refused to open: only some of these mean that the store is damaged."""
    remedies = {
        errno.EACCES: "fix the permission",
        errno.EPERM: "fix the permission",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "close other programs, the machine is out of open files",
    }
    problem = f"cannot be read ({error.strerror})"
    if error.errno in remedies:
        return StoreError(f"{path}: {problem}; {remedies[error.errno]}", path=path)
    return corrupt(path, problem)
