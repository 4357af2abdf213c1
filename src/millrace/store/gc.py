"""Deletes what no kept snapshot names: old snapshots on request, and what an interrupted append left."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError, StoreError
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.folder import Folder, missing
from millrace.store.lock import FolderLock
from millrace.store.manifest import Manifest
from millrace.store.ownership import check_ours, partial_of
from millrace.store.shard import shard_name

# What millrace itself writes; anything else in the folder is not ours to delete.
_SNAPSHOT = re.compile(r"[0-9a-f]{32}\.json(\.tmp)?")
_SHARD = re.compile(r".+-[0-9]{5,}(\.tmp)?")
_TABLE = re.compile(r"(shards|hashes)(-[0-9a-f]{16})?\.bin|.*\.tmp|lease(\.[0-9]+)?")


def collect(path: str | os.PathLike[str], *, keep: int | None = None, dry_run: bool = False) -> dict[str, Any]:
    """What ``millrace gc`` does: locks the store, keeps the newest ``keep`` snapshots (None: all), removes the rest."""
    out = Path(os.path.realpath(path))
    if keep is not None and keep < 1:
        raise ConfigError(f"keep={keep}; at least the current snapshot stays: expected 1 or more")
    if not os.path.exists(out / "store.json"):
        raise missing(str(out))
    partial = partial_of(out)
    check_ours(partial, out)
    lock = FolderLock(out, partial, out)
    interrupted = partial.is_dir()  # before the lock, which may keep a lease there
    if not lock.acquire():
        raise missing(str(out))
    try:
        check_ours(partial, out)
        done = sweep(out, keep, dry_run=dry_run)
        if interrupted:
            done["removed"].append(partial.name)
            done["freed_bytes"] += _size(partial)
        if not dry_run and partial.is_dir():
            with platform.writing(partial, "removing"):
                lock.remove_folder()
        return done
    finally:
        if not interrupted:
            with contextlib.suppress(OSError):
                lock.drop_lease()
                os.rmdir(partial)
        lock.release()


def sweep(out: Path, keep: int | None = None, *, dry_run: bool = False, spare: Collection[str] = ()) -> dict[str, Any]:
    """Deletes what no kept snapshot names; ``keep`` newest snapshots stay, None keeps all.

    The caller holds the lock on ``out``; ``spare`` are shards that it is about to commit. Returns what went and
    what stayed.
    """
    folder = Folder(out)
    for name in ("shards", "snapshots"):
        folder.check_folder(name)  # behind a link lies nothing of this store
    chain = _chain(folder)
    remaining = chain if keep is None else chain[:keep]
    names = {f"{manifest.fingerprint}.json" for manifest in remaining}
    tables = {table.name for manifest in remaining for table in (manifest.shards, manifest.hashes)}
    folders = [name for name in sorted(os.listdir(out / "shards")) if _SHARD.fullmatch(name)]
    unnamed = set(folders).difference(spare)
    for manifest in remaining:  # the newest first: it names nearly all, and then no other table is read
        if unnamed:
            data = folder.read(manifest.shards.name, manifest.shards.bytes)
            table = manifests.check_table(manifest, data, str(out / manifest.shards.name))
            unnamed -= {shard_name(manifest.splits[row[0]], row[1]) for row in table[:, :2].tolist()}
    snapshots = [name for name in sorted(os.listdir(out / "snapshots")) if _SNAPSHOT.fullmatch(name)]
    doomed = [out / "snapshots" / name for name in snapshots if name not in names]
    doomed += [out / name for name in sorted(os.listdir(out)) if _TABLE.fullmatch(name) and name not in tables]
    doomed += [out / "shards" / name for name in folders if name in unnamed]
    freed = sum(_size(path) for path in doomed)
    if not dry_run:
        with platform.writing(out, "removing from"):
            for path in doomed:
                platform.remove(path)
    return {
        "removed": [str(path.relative_to(out)) for path in doomed],
        "freed_bytes": freed,
        "kept": [manifest.fingerprint for manifest in remaining],
    }


def _chain(folder: Folder) -> list[Manifest]:
    """The current manifest and its ancestors that are still there, newest first, then any others."""
    found: dict[str, Manifest] = {}
    for name in sorted(os.listdir(os.path.join(folder.path, "snapshots"))):
        if _SNAPSHOT.fullmatch(name) and name.endswith(".json"):
            manifest = folder.decode(f"snapshots/{name}")
            found[manifest.fingerprint] = manifest
    current = folder.decode("store.json")
    chain = []
    step: str | None = current.fingerprint
    while step is not None and step in found:
        chain.append(found.pop(step))
        step = chain[-1].parent
    if not chain:
        problem = f"{folder.path}/snapshots lacks the current snapshot {current.fingerprint}; run millrace verify"
        raise StoreError(problem, path=folder.path)
    return chain


def _size(path: Path) -> int:
    if path.is_dir():
        return sum(_size(child) for child in path.iterdir())
    return path.lstat().st_size
