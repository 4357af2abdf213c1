"""The folder of a store on disk: opened by descriptor, its manifest and tables read and checked.

``reader.py`` and ``verify.py`` read stores through this; what is wrong with a path is said here.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator

from millrace.errors import ConfigError, StoreCorrupt, StoreError, StoreNotFound
from millrace.ragged import Array
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.advice import not_a_store
from millrace.store.manifest import FINGERPRINT, Manifest


class Folder:
    """The folder of a store, held by a descriptor: a store moved or replaced under a reader stays itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._fd: int | None = None
        if not os.path.isfile(os.path.join(self.path, "store.json")):
            raise missing(self.path)
        if platform.HAS_DIR_FD:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | platform.O_DIRECTORY)
            except OSError as error:
                raise unreadable(self.path, error) from error

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if getattr(self, "_fd", None) is not None and not _is_ending():
            with contextlib.suppress(OSError):
                os.close(self._fd)  # type: ignore[arg-type]

    def open(self, name: str) -> int:
        flags = os.O_RDONLY | platform.O_NOFOLLOW | platform.O_BINARY
        if self._fd is not None:
            return os.open(name, flags, dir_fd=self._fd)
        return os.open(os.path.join(self.path, name), flags)

    def stat(self, name: str) -> os.stat_result:
        if self._fd is not None:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        return os.stat(os.path.join(self.path, name), follow_symlinks=False)

    def read(self, name: str, num_bytes: int, expected_hash: str | None = None) -> bytes:
        """A whole small file, its size checked before a byte is read."""
        where = os.path.join(self.path, name)
        with self.opened(name, where) as (fd, size):
            if size != num_bytes:
                raise StoreCorrupt(
                    f"{where} has {size} bytes, expected {num_bytes}; copy or prepare the store again",
                    path=where, expected=num_bytes, found=size,
                )  # fmt: skip
            data = platform.pread(fd, num_bytes, 0)
        if expected_hash is not None and (found := manifests.digest(data)) != expected_hash:
            raise StoreCorrupt(
                f"{where} has hash {found}, expected {expected_hash}; copy or prepare the store again",
                path=where, expected=expected_hash, found=found,
            )  # fmt: skip
        return data

    @contextlib.contextmanager
    def opened(self, name: str, where: str) -> Iterator[tuple[int, int]]:
        """A descriptor and its size: asked of what was opened, since an append may replace the name meanwhile."""
        try:
            if not stat.S_ISREG(self.stat(name).st_mode):
                raise StoreCorrupt(f"{where} is not a plain file; copy or prepare the store again", path=where)
            fd = self.open(name)
        except OSError as error:
            raise unreadable(where, error) from error
        try:
            yield fd, os.fstat(fd).st_size
        finally:
            os.close(fd)

    def manifest(self, snapshot: str | None) -> tuple[Manifest, Array]:
        """The manifest (of a pinned snapshot, if named) and its shard table, both checked."""
        if snapshot is not None and not FINGERPRINT.fullmatch(snapshot):
            raise ConfigError(f"snapshot={snapshot!r}; expected a fingerprint of 32 hex digits, as millrace info shows")
        name = "store.json" if snapshot is None else f"snapshots/{snapshot}.json"
        where = os.path.join(self.path, name)
        try:
            self.stat(name)
        except OSError as error:
            raise StoreNotFound(
                f"{where} is not there; the snapshot was removed or belongs to another store", path=where
            ) from error
        with self.opened(name, where) as (fd, size):
            if size > manifests.MAX_MANIFEST_BYTES:
                raise StoreCorrupt(
                    f"{where} has {size} bytes; expected at most {manifests.MAX_MANIFEST_BYTES} bytes", path=where
                )
            manifest = manifests.decode(platform.pread(fd, size, 0), where)
        if snapshot is not None and manifest.fingerprint != snapshot:
            raise StoreCorrupt(f"{where} holds snapshot {manifest.fingerprint}; expected {snapshot}", path=where)
        try:
            data = self.read(manifest.shards.name, manifest.shards.bytes)
        except StoreCorrupt:
            if snapshot is None and self._fingerprint_now() != manifest.fingerprint:
                return self.manifest(None)  # a newer snapshot was committed and this one collected meanwhile
            raise
        return manifest, manifests.check_table(manifest, data, os.path.join(self.path, manifest.shards.name))

    def _fingerprint_now(self) -> str:
        where = os.path.join(self.path, "store.json")
        with self.opened("store.json", where) as (fd, size):
            return manifests.decode(platform.pread(fd, size, 0), where).fingerprint


def unreadable(path: str, error: OSError) -> StoreError:
    """The error for a file the system refused to open: only some of these mean that the store is damaged."""
    remedies = {
        errno.EACCES: "fix the permission",
        errno.EPERM: "fix the permission",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
        errno.ENFILE: "close other programs, the machine is out of open files",
    }
    what = f"{path} cannot be read ({error.strerror})"
    if error.errno in remedies:
        return StoreError(f"{what}; {remedies[error.errno]}", path=path)
    return StoreCorrupt(f"{what}; copy or prepare the store again", path=path)


def missing(path: str) -> StoreNotFound:
    if os.path.isdir(f"{path}.partial"):
        return StoreNotFound(
            f"{path} is not finished ({path}.partial is there); run the same command again to continue", path=path
        )
    return StoreNotFound(not_a_store(path), path=path)
