"""The folder of a store on disk, held by a descriptor; its manifest and tables are read and checked here."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

from millrace.errors import ConfigError, MillraceError, StoreCorrupt, StoreError, StoreNotFound, corrupt
from millrace.identity import digest
from millrace.ragged import Array
from millrace.store import manifest as manifests
from millrace.store import platform, strict_json
from millrace.store.advice import not_a_store
from millrace.store.manifest import FINGERPRINT, Manifest
from millrace.store.ownership import is_ours
from millrace.store.plain_file import MAX_BYTES, open_file, open_plain, read_plain, unreadable


class Folder:
    """The folder of a store, held by a descriptor: a store moved or replaced under a reader stays itself."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._fd: int | None = None
        if not os.path.isfile(os.path.join(self.path, "store.json")):
            raise no_store(self.path)
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
        return open_plain(name if self._fd is not None else os.path.join(self.path, name), self._fd)

    def stat(self, name: str) -> os.stat_result:
        if self._fd is not None:
            return os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        return os.stat(os.path.join(self.path, name), follow_symlinks=False)

    def read(self, name: str, num_bytes: int, expected_hash: str | None = None) -> bytes:
        """A whole small file, its size checked before a byte is read."""
        where = os.path.join(self.path, name)
        with self.open_file(name) as (fd, size):
            if size != num_bytes:
                raise corrupt(where, f"has {size} bytes, expected {num_bytes}", expected=num_bytes, found=size)
            data = platform.pread(fd, num_bytes, 0)
        if expected_hash is not None and (found := digest(data)) != expected_hash:
            problem = f"has hash {found}, expected {expected_hash}"
            raise corrupt(where, problem, expected=expected_hash, found=found)
        return data

    def open_file(self, name: str) -> contextlib.AbstractContextManager[tuple[int, int]]:
        """A descriptor and its size of a plain file; one that is a link, or lies behind one, is refused."""
        return open_file(os.path.join(self.path, name), *self._place(name))

    def side_file(self, name: str, most: int = MAX_BYTES) -> bytes:
        """A whole file of at most ``most`` bytes, opened as the shards are: from this folder, no link, no fifo."""
        return read_plain(os.path.join(self.path, name), most, *self._place(name))

    def _place(self, name: str) -> tuple[str | None, int | None]:
        if above := os.path.dirname(name):
            self.check_folder(above)
        return name if self._fd is not None else None, self._fd

    def check_folder(self, name: str) -> None:
        """A folder of the store is no link: what a store names lies inside it."""
        where = os.path.join(self.path, name)
        try:
            if not stat.S_ISDIR(self.stat(name).st_mode):
                raise corrupt(where, "is not a plain folder")
        except OSError as error:
            raise unreadable(where, error) from error

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
                f"{where} is not there; the snapshot was removed or belongs to another store: open the store without it, "
                "and keep snapshots that are in use with millrace gc --keep",
                path=where,
            ) from error
        manifest = self.decode(name)
        if snapshot is not None and manifest.fingerprint != snapshot:
            raise corrupt(where, f"holds snapshot {manifest.fingerprint}, expected {snapshot}")
        try:
            data = self.read(manifest.shards.name, manifest.shards.bytes)
        except StoreCorrupt:
            if snapshot is None and self.decode("store.json").fingerprint != manifest.fingerprint:
                return self.manifest(None)  # a newer snapshot was committed and this one collected meanwhile
            raise
        return manifest, manifests.check_table(manifest, data, os.path.join(self.path, manifest.shards.name))

    def check_snapshot(self, fingerprint: str) -> None:
        """Raises where gc removed the snapshot of a reader: then its missing files are no damage."""
        try:
            if self.has(f"snapshots/{fingerprint}.json"):
                return
            now = self.decode("store.json").fingerprint
        except (OSError, StoreError):
            return  # the store itself is damaged, or gone
        if now != fingerprint:
            raise StoreNotFound(
                f"{self.path}: millrace gc removed the snapshot {fingerprint} that this store was opened at; open the store "
                "again, or run gc with a larger --keep while old snapshots are read",
                path=self.path,
            )

    def has(self, name: str) -> bool:
        """Whether there is such a file, readable or not."""
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def decode(self, name: str) -> Manifest:
        """The manifest in a file, checked by itself; not yet its shard table."""
        data = self.side_file(name, strict_json.MAX_BYTES)
        return manifests.decode(data, os.path.join(self.path, name))


def no_store(path: str) -> StoreNotFound:
    """The error where a store of millrace is needed and the path holds none, perhaps one of another tool."""
    from millrace.store.foreign import open_foreign  # which asks here too

    try:
        layout = open_foreign(path, None).meta["layout"]
    except (MillraceError, OSError):
        return missing(path)
    problem = f"{path} is in the layout of another tool ({layout}), and this needs a store of millrace"
    return StoreNotFound(f"{problem}; copy its files as they are, or prepare a store from its sources", path=path)


def missing(path: str) -> StoreNotFound:
    if os.path.isdir(f"{path}.partial") and is_ours(Path(f"{path}.partial")):
        problem = f"{path} is not finished ({path}.partial is there)"
        return StoreNotFound(f"{problem}; run the command or program that writes it again to continue", path=path)
    return StoreNotFound(not_a_store(path), path=path)
