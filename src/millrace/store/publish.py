"""How a store comes into being: the ``<out>.partial/`` folder, its lock and journal, and the last rename.

Nothing half-written is ever readable: the shards are whole before the tables, the tables before the
manifest, and the folder gets its name last. Killed at any point, the next run finds its journal, or starts
clean. ``StoreWriter`` and the preparations use this; readers never see it.
"""

from __future__ import annotations

import json
import os
import platform as python_platform
import sys
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import ConfigError, StoreNotFound
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.layout import Layout, check_name
from millrace.store.lock import FolderLock
from millrace.store.manifest import Manifest, TableFile, Totals, digest
from millrace.store.shard import ShardEntry, shard_name


class Partial:
    """The folder a store is written in, locked for this process until ``publish`` or ``close``.

    ``base`` is the manifest, table and hashes of the store that is appended to.
    """

    def __init__(self, out: Path, *, append: bool = False) -> None:
        self.out = out
        self.folder = out.with_name(out.name + ".partial")
        self.shards = self.folder / "shards"
        self.entries: list[ShardEntry] = []
        self._append = append
        self._lock = FolderLock(out if append else self.folder, self.folder, out)

    def acquire(self) -> None:
        """Takes the lock, or says who holds it; a finished store at ``out`` is never written over."""
        with platform.writing(self.folder, "creating"):
            if self._append and not (self.out / "store.json").exists():
                raise StoreNotFound(
                    f"{self.out} holds no store to append to; write it first without append", path=str(self.out)
                )
            if not self._append:
                self._refuse_existing()
            platform.make_dir(self.folder)
            self._lock.acquire()
            try:
                if not self._append:
                    self._refuse_existing()  # another writer may have finished between look and lock
                self._lock.write_owner()
            except BaseException:
                self._lock.release()
                raise

    def begin(self, plan: Mapping[str, Any], *, resume: bool) -> None:
        """Continues the journal of the same plan, or starts clean."""
        header = json.dumps({"plan": digest(manifests.canonical(plan))})
        with platform.writing(self.folder, "creating"):
            if not (resume and self._continue(header)):
                self._start(header)

    def _refuse_existing(self) -> None:
        if (self.out / "store.json").exists():
            raise ConfigError(
                f"{self.out} already holds a store; append to it, choose another path, or remove it yourself"
            )
        if self.out.is_dir() and any(self.out.iterdir()):
            raise ConfigError(f"{self.out} exists and is not empty; choose another path")
        if self.out.exists() and not self.out.is_dir():
            raise ConfigError(f"{self.out} is a file; a store is a folder: choose another path")

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def _start(self, header: str) -> None:
        for entry in sorted(os.listdir(self.folder)):
            if entry not in ("lease", "owner.json"):
                platform.remove(self.folder / entry)
        platform.make_dir(self.shards)
        self._note(header)

    def _continue(self, header: str) -> bool:
        """Reads the journal; a torn last line is a shard that was not finished."""
        if not self._journal.exists():
            return False
        data = self._journal.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        lines = whole.splitlines()
        if not lines or json.loads(lines[0]) != json.loads(header):
            raise ConfigError(
                f"{self.folder} was begun with other columns or options; finish it with those, or remove it to start anew"
            )
        if len(whole) != len(data):
            os.truncate(self._journal, len(whole))
        self.entries = [msgspec.json.decode(line, type=ShardEntry) for line in lines[1:]]
        platform.make_dir(self.shards)
        return True

    def _note(self, line: str) -> None:
        new = not self._journal.exists()
        fd = platform.create(self._journal) if new else os.open(self._journal, os.O_WRONLY | os.O_APPEND)
        try:
            platform.write(fd, line.encode() + b"\n", self._journal)
            platform.sync(fd, self._journal)
        finally:
            os.close(fd)
        if new:
            platform.sync_dir(self.folder)

    def add(self, entry: ShardEntry) -> None:
        """Journals a finished shard: from here on a restart keeps it."""
        with platform.writing(self._journal):
            platform.sync_dir(self.shards)
            self._note(msgspec.json.encode(entry).decode())
        self.entries.append(entry)

    def publish(self, fields: Mapping[str, Any], base: Base | None, provenance: Mapping[str, Any]) -> str:
        """Makes the store, or the next snapshot of it, visible; returns its fingerprint."""
        splits = dict.fromkeys((*fields["splits"], *sorted({entry.split for entry in self.entries}, key=_split_rank)))
        order = {split: k for k, split in enumerate(splits)}
        entries = sorted(self.entries, key=lambda entry: (order[entry.split], entry.number))
        manifest, table, hashes = build(fields, tuple(splits), entries, base)
        with platform.writing(self.out, "publishing"):
            if base is None:
                self._lay(self.folder, manifest, table, hashes, provenance)
                platform.remove(self.folder / "owner.json")
                platform.remove(self._journal)
                self._lock.before_rename()
                platform.sync_dir(self.folder)
                platform.rename(self.folder, self.out)
                platform.sync_dir(self.out.parent)
                self._lock.release()
            else:
                for entry in entries:
                    name = shard_name(entry.split, entry.number)
                    platform.rename(self.shards / name, self.out / "shards" / name)
                self._lay(self.out, manifest, table, hashes, provenance)
                self.close(remove=True)
        return manifest.fingerprint

    def _lay(self, root: Path, manifest: Manifest, table: bytes, hashes: bytes, provenance: Mapping[str, Any]) -> None:
        """The files beside the shards, the manifest last."""
        platform.make_dir(root / "snapshots")
        platform.sync_dir(root / "shards")
        platform.write_file(root / manifest.shards.name, table)
        platform.write_file(root / manifest.hashes.name, hashes)
        line = json.dumps({**describe_run(), **provenance}, allow_nan=False) + "\n"
        old = (root / "provenance.json").read_bytes() if (root / "provenance.json").exists() else b""
        platform.write_file(root / "provenance.json", old + line.encode())
        data = manifests.encode(manifest)
        platform.write_file(root / "snapshots" / f"{manifest.fingerprint}.json", data)
        platform.sync_dir(root / "snapshots")
        platform.sync_dir(root)
        platform.write_file(root / "store.json", data)
        platform.sync_dir(root)

    def close(self, *, remove: bool) -> None:
        """Gives the lock back; with ``remove`` nothing of the attempt stays."""
        if remove:
            platform.remove(self.folder)
        self._lock.release()


def _split_rank(split: str) -> tuple[int, str]:
    """Undeclared splits in an order that no timing changes: train, val, test, then by name."""
    known = ("train", "val", "test")
    return (known.index(split) if split in known else len(known), split)


class Base:
    """The store an append continues: its manifest, shard table and block hashes."""

    def __init__(self, manifest: Manifest, table: bytes, hashes: bytes) -> None:
        self.manifest, self.table, self.hashes = manifest, table, hashes

    def next_number(self, split: str) -> int:
        """The first shard number of a split that no snapshot of this line uses."""
        width = 3 + len(self.manifest.axes)
        rows = np.frombuffer(self.table, "<u8").reshape(-1, width)
        mine = (
            rows[rows[:, 0] == list(self.manifest.splits).index(split)] if split in self.manifest.splits else rows[:0]
        )
        return int(mine[:, 1].max()) + 1 if len(mine) else 0


def build(
    fields: Mapping[str, Any], splits: tuple[str, ...], entries: Iterable[ShardEntry], base: Base | None
) -> tuple[Manifest, bytes, bytes]:
    """Manifest, shard table and block hashes of a store with these shards; pure, so that reruns are identical."""
    columns = fields["columns"]
    layout = Layout(columns)
    for split in splits:
        check_name(split, "split")
    order = {split: k for k, split in enumerate(splits)}
    rows = [[order[entry.split], entry.number, entry.records, *entry.rows] for entry in entries]
    table = np.array(rows, "<u8").reshape(-1, 3 + len(layout.axes)).tobytes()
    hashes = b"".join(bytes.fromhex(block)[::-1] for entry in entries for block in entry.hashes)
    if base is not None:
        table, hashes = base.table + table, base.hashes + hashes
    whole = np.frombuffer(table, "<u8").reshape(-1, 3 + len(layout.axes))
    counts = manifests.table_counts(whole)
    sums = [sum(column) for column in counts.T.tolist()]

    def described(name: str, data: bytes) -> TableFile:
        # A snapshot's tables never replace those of another one, which a reader may be about to open.
        found = digest(data)
        return TableFile(f"{name}.bin" if base is None else f"{name}-{found[:16]}.bin", len(data), found)

    manifest = Manifest(
        version=manifests.VERSION,
        kind=fields["kind"],
        columns={name: manifests.as_entry(column) for name, column in columns.items()},
        axes=layout.axes,
        splits=splits,
        totals=Totals(
            len(whole), sums[0], dict(zip(layout.axes, sums[1:], strict=True)), int(layout.file_bytes(counts).sum())
        ),
        shards=described("shards", table),
        hashes=described("hashes", hashes),
        parent=None if base is None else base.manifest.fingerprint,
        fingerprint="",
        **{key: fields[key] for key in ("tokenizer", "scaling", "cuts", "meta") if fields.get(key) is not None},
    )
    if manifest.cuts is not None:
        manifests.check_cuts(manifest.cuts, layout)
    manifest.fingerprint = manifests.fingerprint(manifest, whole)
    return manifest, table, hashes


def describe_run() -> dict[str, Any]:
    """Who made this, for people: never part of the fingerprint."""

    def installed(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": sys.argv,
        "versions": {
            "python": python_platform.python_version(),
            **{name: installed(name) for name in ("millrace", "numpy")},
        },
    }
