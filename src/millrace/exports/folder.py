"""OutFolder: the folder of an export. It appears whole, by one rename; what a killed export left is written again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.store import platform
from millrace.store.lock import FolderLock
from millrace.store.ownership import check_ours, clear, partial_of


class OutFolder:
    """``with OutFolder(out) as folder:`` gives an empty folder, and names it ``out`` where no error comes."""

    def __init__(self, out: Path) -> None:
        self._out, self._partial = out, partial_of(out)

    def __enter__(self) -> Path:
        self._check_new()
        check_ours(self._partial, self._out)
        with platform.writing(self._partial):
            while True:
                platform.make_dir(self._partial)
                self._lock = FolderLock(self._partial, self._partial, self._out)
                if self._lock.acquire():
                    break
            try:
                self._check_new()
                clear(self._partial)
                self._lock.write_owner()
                platform.make_dir(self._partial / "data")
            except BaseException:
                self._lock.release()
                raise
        return self._partial / "data"

    def _check_new(self) -> None:
        if os.path.lexists(self._out):
            raise ConfigError(
                f"{self._out} exists; export writes a new folder: choose another name, or remove it first"
            )

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            with platform.writing(self._out):
                if error is None:
                    self._check_new()
                    platform.rename(self._partial / "data", self._out)
                    platform.sync_dir(self._out.parent)
                self._lock.remove_folder()
        finally:
            self._lock.release()


def sync_file(path: Path) -> None:
    """Makes a file durable that another library wrote."""
    fd = os.open(path, os.O_RDWR)
    try:
        platform.sync(fd, path)
    finally:
        os.close(fd)
