"""CheckedFiles: which files were compared with their hashes, so that no other process of this machine reads them for it.

A note says: the file with this identity has this content. The identity is device, inode, size and times, so a file that
was written to, replaced or touched since counts as unchecked. A note is an empty file whose name holds both: asking for
one is a single call, and a killed process leaves no half of one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from millrace.errors import StoreError
from millrace.identity import digest
from millrace.native import PRIVATE
from millrace.ragged import Array
from millrace.store import platform
from millrace.store.plain_file import open_file
from millrace.store.shard import check_blocks

NAME = "checked"  # of the folder of notes, below that of the cache


class CheckedFiles:
    """The notes in one folder. ``content`` names what a file must hold, as ``RemoteFile.key`` does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._wrong: dict[str, str] = {}  # notes that cannot be: these files were read and are damaged
        with platform.writing(folder, "creating"):
            platform.make_dir(folder, PRIVATE)

    def is_right(self, path: str, content: str, num_bytes: int, hashes: Array) -> os.stat_result | None:
        """The status of a plain file with these bytes; it is read only where nobody noted that. None for any other."""
        try:
            status = os.lstat(path)
        except OSError:
            return None
        if not stat.S_ISREG(status.st_mode) or status.st_size != num_bytes:
            return None
        if self.is_noted(content, status) or self._read(path, content, status, hashes):
            return status
        return None

    def _read(self, path: str, content: str, status: os.stat_result, hashes: Array) -> bool:
        """Reads a file and compares it with its hashes; a damaged one only once."""
        note = self._note_path(content, status)
        if self._wrong.get(path) == note:
            return False
        try:
            with open_file(path) as (fd, _):
                is_right = not any(problem for *_, problem in check_blocks(fd, status.st_size, hashes.tolist()))
        except StoreError:  # gone or replaced meanwhile
            return False
        if is_right:
            self.note(content, status)  # as it was before it was read: who changed it meanwhile changed its times
        else:
            self._wrong[path] = note
        return is_right

    def _note_path(self, content: str, status: os.stat_result) -> str:
        parts = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
        return os.path.join(self._folder, f"{content}-{digest(*map(str, parts))[:16]}")

    def is_noted(self, content: str, status: os.stat_result) -> bool:
        return os.path.lexists(self._note_path(content, status))

    def note(self, content: str, status: os.stat_result) -> None:
        """Notes that a file is right. Where that cannot be written, the next process reads the file again."""
        with contextlib.suppress(OSError):
            os.close(os.open(self._note_path(content, status), os.O_WRONLY | os.O_CREAT | platform.O_NOFOLLOW, 0o600))

    def forget(self, content: str, status: os.stat_result) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._note_path(content, status))

    def touch(self, content: str, status: os.stat_result) -> None:
        """Says that a file is used now: its own times are its identity and stay."""
        with contextlib.suppress(OSError):
            os.utime(self._note_path(content, status))

    def used_ns(self, content: str, status: os.stat_result) -> int:
        """When a file was used last."""
        try:
            return os.lstat(self._note_path(content, status)).st_mtime_ns
        except OSError:
            return status.st_mtime_ns
