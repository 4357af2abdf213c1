"""How a store comes into being: the folder ``<out>.partial/``, its lock and journal, and the last rename.

Nothing half-written is ever readable. Shards are whole before the tables, tables before the manifest, and the folder
gets its name last. After a kill the next run continues from the journal, or starts clean.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform as python_platform
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from millrace.distribution import __version__
from millrace.errors import ConfigError, StoreError, StoreNotFound
from millrace.native import num_cores
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.journal import Header, Journal
from millrace.store.layout import Layout
from millrace.store.lock import FolderLock
from millrace.store.manifest import Manifest, digest
from millrace.store.ownership import OWNER, check_ours, is_lease, mark_named, mark_unnamed, partial_of
from millrace.store.plain_file import read_plain
from millrace.store.shard import ShardEntry, is_whole, shard_name
from millrace.store.snapshot import Base, build, split_rank


class Partial:
    """The folder a store is written in, locked for this process until ``publish`` or ``close``.

    ``base`` is the manifest, table and hashes of the store that is appended to.
    """

    def __init__(self, out: Path, *, append: bool = False, scratch: tuple[str, ...] = ()) -> None:
        self.out = out
        self._scratch = scratch  # names in the folder that outlive a change of plan, and go before the store is there
        self.folder = partial_of(out)
        self.shards = self.folder / "shards"
        self.entries: dict[str, ShardEntry] = {}  # by shard name
        self.committed: list[ShardEntry] = []  # what a killed append had brought into the store
        self._append, self._pid = append, os.getpid()
        self._journal = Journal(self.folder)
        self._lock = FolderLock(out if append else self.folder, self.folder, out)

    @property
    def mine(self) -> bool:
        """False in a forked child: the folder and its lock stay with the parent."""
        return os.getpid() == self._pid

    def acquire(self) -> None:
        """Takes the lock, or says who holds it; a finished store at ``out`` is never written over."""
        with platform.writing(self.folder, "creating"):
            while True:  # again where another writer finished or gave up between look and lock
                self._check_target()
                check_ours(self.folder, self.out)
                if not self._append:
                    platform.make_dir(self.folder)
                if self._lock.acquire():
                    break
            is_ours = False
            try:
                self._check_target()
                check_ours(self.folder, self.out)
                is_ours = True
                platform.make_dir(self.folder)
                self._lock.write_owner()
            except BaseException:
                with contextlib.suppress(OSError):
                    self._lock.drop_lease()
                    if is_ours and os.listdir(self.folder) == [OWNER]:
                        os.unlink(self.folder / OWNER)
                    os.rmdir(self.folder)  # only if there is nothing in it
                self._lock.release()
                raise

    def begin(self, plan: Mapping[str, Any], layout: Layout, base: Base | None, *, resume: bool) -> None:
        """Continues the journal of the same plan, or starts clean."""
        options = digest(manifests.canonical(plan))
        header = Header(options, None if base is None else base.manifest.fingerprint)
        with platform.writing(self.folder, "creating"):
            found, entries, complete = self._journal.read() if resume else (None, [], False)
            if found is None:
                self._start(header)
            elif found == header:
                whole = self._whole(entries, layout)
                if not complete or whole != entries:
                    self._journal.write(header, whole)
                platform.make_dir(self.shards)
                self.entries = {_name(entry): entry for entry in whole}
                self._remove_attempts()
            elif base is not None and found == Header(options, base.manifest.parent):
                self.committed = entries  # killed between its commitment and its end
            else:
                raise ConfigError(
                    f"{self.folder} was begun with other columns or options, or by another version of millrace; "
                    "finish it with those, or begin afresh: remove it, or prepare with --restart"
                )

    def _check_target(self) -> None:
        if not self._append:
            self._refuse_existing()
        elif not (self.out / "store.json").exists():
            raise StoreNotFound(f"{self.out} holds no store to append to; first write one", path=str(self.out))

    def _refuse_existing(self) -> None:
        # Looked for first: another writer's store may appear here at any moment, and then it is whole.
        is_filled = self.out.is_dir() and any(self.out.iterdir())
        if (self.out / "store.json").exists():
            raise ConfigError(f"{self.out} already holds a store; append to it, remove it, or choose another path")
        if is_filled:
            raise ConfigError(f"{self.out} exists and is not empty; choose another path")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file; a store is a folder: choose another path")

    def _start(self, header: Header) -> None:
        for entry in sorted(os.listdir(self.folder)):
            if entry not in (OWNER, *self._scratch) and not is_lease(entry):
                platform.remove(self.folder / entry)
        platform.make_dir(self.shards)
        self._journal.write(header)

    def _whole(self, entries: list[ShardEntry], layout: Layout) -> list[ShardEntry]:
        """The shards that still hold the bytes they were written with, read once more.

        None of a split after a damaged one: the next records follow the last.
        """
        # A killed append may have moved a shard already.
        places = (self.shards, self.out / "shards")
        with ThreadPoolExecutor(num_cores()) as threads:
            checks = threads.map(lambda entry: any(is_whole(place, entry, layout) for place in places), entries)
            whole: list[ShardEntry] = []
            damaged: set[str] = set()
            for entry, is_good in zip(entries, checks, strict=True):
                if not is_good:
                    damaged.add(entry.split)
                if entry.split not in damaged:
                    whole.append(entry)
        return whole

    def _remove_attempts(self) -> None:
        """Removes shards that are not in the journal: unfinished ones, and those of writers that died."""
        for name in sorted(os.listdir(self.shards)) if self.shards.is_dir() else ():
            if name not in self.entries:
                platform.remove(self.shards / name)

    def add(self, entry: ShardEntry) -> None:
        """Journals a finished shard: from here on a restart keeps it."""
        if self.committed:
            raise ConfigError(f"{self.out} holds this append, which was killed at its end; append more in another run")
        known = self.entries.get(_name(entry))
        if known is not None and known != entry:
            raise ConfigError(f"shard {_name(entry)} was added twice, with different contents; use each number once")
        if known is None:
            with platform.writing(self._journal.path):
                platform.sync_dir(self.shards)
                self._journal.note(entry)
            self.entries[_name(entry)] = entry

    def publish(
        self,
        fields: Mapping[str, Any],
        base: Base | None,
        provenance: Mapping[str, Any],
        files: Mapping[str, bytes | Iterable[bytes]] | None = None,
    ) -> str:
        """Makes the store, or the next snapshot of it, visible; returns its fingerprint.

        ``files`` lie beside the manifest, whole before it is there.
        """
        written = self.entries.values()
        splits = dict.fromkeys((*fields["splits"], *sorted({entry.split for entry in written}, key=split_rank)))
        order = {split: k for k, split in enumerate(splits)}
        entries = sorted(written, key=lambda entry: (order[entry.split], entry.number))
        built = build(fields, tuple(splits), entries, base)
        fingerprint = built[0].fingerprint
        with platform.writing(self.out, "publishing"):
            self._remove_attempts()
            if base is None:
                self._lay(self.folder, built, provenance, files or {})
                self._appear()
                return fingerprint
            for entry in entries:
                if (self.shards / _name(entry)).exists():  # else a killed run has moved it
                    platform.rename(self.shards / _name(entry), self.out / "shards" / _name(entry))
            try:
                self._lay(self.out, built, provenance, files or {})
            except OSError:
                self._restore(base)
                raise
        with contextlib.suppress(OSError):  # it is in the store: what stays here, the next append or gc removes
            self.close(remove=True)
        return fingerprint

    def complete(self) -> bool:
        """Ends a publication that was killed when all was written but the name; False where there is none."""
        if self._append or not (self.folder / "store.json").exists():
            return False
        with platform.writing(self.out, "publishing"):
            self._appear()
        return True

    def _appear(self) -> None:
        """Removes what a finished store does not hold, then gives it its name."""
        for name in (*self._scratch, self._journal.path.name):
            platform.empty(self.folder / name)
            platform.remove(self.folder / name)
        mark_unnamed(self.folder)
        platform.remove(self.folder / OWNER)
        platform.sync_dir(self.folder)
        self._lock.before_rename()
        self._rename()
        mark_named(self.out)
        with contextlib.suppress(OSError):  # the store is there: what stays of a lease, the next append or gc removes
            self._lock.drop_lease(self.out)
        self._lock.release()

    def _rename(self) -> None:
        """The moment a store comes into being; an error must mean that it has not."""
        platform.rename(self.folder, self.out)
        try:
            platform.sync_dir(self.out.parent)
        except OSError:
            platform.rename(self.out, self.folder)
            raise

    def _restore(self, base: Base) -> None:
        """After a failure behind the commitment of an append: an error must mean that nothing was appended."""
        with contextlib.suppress(OSError, StoreError):
            old = read_plain(str(self.out / "snapshots" / f"{base.manifest.fingerprint}.json"))
            if read_plain(str(self.out / "store.json")) != old:
                platform.write_file(self.out / "store.json", old)
                platform.sync_dir(self.out)

    def _lay(
        self,
        root: Path,
        built: tuple[Manifest, bytes, bytes],
        provenance: Mapping[str, Any],
        files: Mapping[str, bytes | Iterable[bytes]],
    ) -> None:
        """The files beside the shards, the manifest last."""
        manifest, table, hashes = built
        for name, data in files.items():
            platform.write_file(root / name, data)
        platform.make_dir(root / "snapshots")
        platform.sync_dir(root / "shards")
        platform.write_file(root / manifest.shards.name, table)
        platform.write_file(root / manifest.hashes.name, hashes)
        line = json.dumps({**describe_run(), "fingerprint": manifest.fingerprint, **provenance}, allow_nan=False) + "\n"
        path = root / "provenance.json"
        platform.write_file(path, (read_plain(str(path)) if os.path.lexists(path) else b"") + line.encode())
        data = manifests.encode(manifest)
        platform.write_file(root / "snapshots" / f"{manifest.fingerprint}.json", data)
        platform.sync_dir(root / "snapshots")
        platform.sync_dir(root)
        platform.write_file(root / "store.json", data)
        platform.sync_dir(root)

    def close(self, *, remove: bool) -> None:
        """Gives the lock back; with ``remove`` nothing of the attempt stays."""
        try:
            if remove and self.folder.is_dir():
                with platform.writing(self.folder, "removing"):
                    self._lock.remove_folder()
        finally:
            self._lock.release()


def _name(entry: ShardEntry) -> str:
    return shard_name(entry.split, entry.number)


def installed(package: str) -> str | None:
    """The version of a package that is installed."""
    with contextlib.suppress(PackageNotFoundError):
        return version(package)
    return None


def describe_run() -> dict[str, Any]:
    """Who made this, for people: never part of the fingerprint."""
    versions = {"python": python_platform.python_version(), "millrace": __version__, "numpy": installed("numpy")}
    return {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": sys.argv, "versions": versions}
