"""Tables that follow from the contents of a store, such as how many windows its records have: made once for a machine.

They lie in the cache as files of int64 that all processes map. Who reads one trusts it as long as it is the file that was
noted when it was made (``CheckedFiles``); any other is made again. Killed or full, they are missing, never wrong.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np

from millrace.errors import MillraceError, StoreError
from millrace.native import PRIVATE, cache_folder
from millrace.ragged import Int64s
from millrace.store import checked_files, platform
from millrace.store.checked_files import CheckedFiles

FOLDER = "index"
CHUNK = 1 << 17  # numbers that are written at a time


def kept_table(content: str, make: Callable[[], Int64s]) -> Int64s:
    """The table named ``content``, 32 hex digits; without a cache that can be written it is made here, for this process."""
    folder = cache_folder()
    try:
        with platform.writing(folder, "creating"):
            platform.make_dir(folder / FOLDER, PRIVATE)
        checked = CheckedFiles(folder / checked_files.NAME)
    except StoreError:
        return make()
    path = folder / FOLDER / content
    found = _mapped(path, content, checked)
    if found is not None:
        return found
    table = make()
    with contextlib.suppress(OSError, MillraceError):  # also a pipe in its place
        _write(path, content, table, checked)
    found = _mapped(path, content, checked)
    return table if found is None else found


def _mapped(path: Path, content: str, checked: CheckedFiles) -> Int64s | None:
    try:
        fd = os.open(path, os.O_RDONLY | platform.O_NOFOLLOW | platform.O_BINARY | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_size % 8 or not checked.is_noted(content, status):
            return None
        return platform.map_file(fd, status.st_size).view(np.int64)
    except OSError:
        return None
    finally:
        os.close(fd)


def _write(path: Path, content: str, table: Int64s, checked: CheckedFiles) -> None:
    """Two may write it at once, each aside under a name of its own. What the killed left goes; so may one on its way."""
    for left in path.parent.glob(f"{content}.*.tmp*"):
        platform.remove(left)
    aside = platform.attempt_name(path)
    blocks = (table[at : at + CHUNK].tobytes() for at in range(0, len(table), CHUNK))
    platform.write_file(aside, blocks, mode=0o600)
    platform.rename(aside, path)
    checked.note(content, os.lstat(path))
