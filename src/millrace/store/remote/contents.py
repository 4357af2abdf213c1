"""Contents: every file of one snapshot of a store with its size and hashes, wherever the store lies."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np

from millrace.errors import corrupt
from millrace.identity import digest
from millrace.ragged import Array
from millrace.store import manifest as manifests
from millrace.store import strict_json
from millrace.store.codec import Codec
from millrace.store.folder import Folder
from millrace.store.layout import BLOCK_BYTES, block_ends, num_blocks
from millrace.store.manifest import Manifest, TableFile
from millrace.store.remote.objects import Objects
from millrace.store.shard import shard_name
from millrace.store.verify_side_files import QUARANTINE

MANIFEST, PROVENANCE = "store.json", "provenance.json"
UNHASHED = (PROVENANCE, QUARANTINE)  # outside the fingerprint; they may be missing


class RemoteFile(NamedTuple):
    """A file of a shard: its name below the store, its size, and the hash of each 4 MiB of it, all when plain."""

    name: str
    num_bytes: int
    hashes: Array  # uint64
    codec: Codec | None = None
    block: int | None = None  # it is only this 4 MiB of a file

    def part(self, block: int) -> RemoteFile:
        """One block of a plain file, which is checked and kept like a file."""
        num_bytes = min(BLOCK_BYTES, self.num_bytes - block * BLOCK_BYTES)
        return RemoteFile(self.name, num_bytes, self.hashes[block : block + 1], block=block)

    @property
    def stored_name(self) -> str:
        """Its name where the store lies."""
        return self.name if self.codec is None else self.name + self.codec.suffix

    @property
    def key(self) -> str:
        """The name of its content: files with the same bytes have the same, in whichever store."""
        return digest(str(self.num_bytes), self.hashes.tobytes())


class Contents:
    """The manifest, the tables and the files of a snapshot. The data is checked: it may come from anywhere."""

    def __init__(self, manifest: bytes, table: bytes, hashes: bytes, where: str) -> None:
        self.data, self._where = {MANIFEST: manifest}, where
        self.manifest = manifests.decode(manifest, f"{where}/{MANIFEST}")
        named = self.manifest.shards.name, self.manifest.hashes.name
        self.table = manifests.check_table(self.manifest, table, f"{where}/{named[0]}")
        _check_hash(self.manifest.hashes.hash, f"{where}/{named[1]}", hashes)
        self.data |= {named[0]: table, named[1]: hashes, f"snapshots/{self.manifest.fingerprint}.json": manifest}
        self.layout, self.counts = self.manifest.layout, manifests.table_counts(self.table)
        self.sizes = self.layout.file_bytes(self.counts)
        self._hashes, self._ends = np.frombuffer(hashes, "<u8"), block_ends(self.sizes)

    @classmethod
    def read(cls, objects: Objects, data: bytes | None = None) -> Contents:
        """Asks a server for the manifest, if it is not given, then for the tables that it names."""
        data = read_manifest(objects) if data is None else data
        manifest = manifests.decode(data, objects.where(MANIFEST))
        return cls(data, _table(objects, manifest.shards), _table(objects, manifest.hashes), objects.url)

    @classmethod
    def of(cls, folder: Folder) -> Contents:
        """Of a store on disk."""
        manifest, table = folder.manifest(None)
        hashes = folder.read(manifest.hashes.name, manifest.hashes.bytes, manifest.hashes.hash)
        return cls(manifests.encode(manifest), table.tobytes(), hashes, folder.path)

    def coded(self, codec: Codec | None) -> Contents:
        """The same store with its files compressed in this way; None is plain."""
        manifest, names = (
            msgspec.structs.replace(self.manifest, codec=codec),
            (self.manifest.shards, self.manifest.hashes),
        )
        table, hashes = (self.data[file.name] for file in names)
        return Contents(manifests.encode(manifest), table, hashes, self._where)

    @property
    def codec(self) -> Codec | None:
        return self.manifest.codec

    @property
    def fingerprint(self) -> str:
        return self.manifest.fingerprint

    def stored_bytes(self, objects: Objects) -> int | None:
        """What the files take where they lie; None where the server lists none (https), or not all are there."""
        if self.codec is None:
            return self.manifest.totals.bytes
        if objects.url.startswith("http"):
            return None
        sizes = objects.sizes("shards")
        found = [sizes.get(file.stored_name) for file in self.files()]
        return None if None in found else sum(size or 0 for size in found)

    def file(self, shard: int, file: int) -> RemoteFile:
        split, number = self.table[shard, :2].tolist()
        name = f"shards/{shard_name(self.manifest.splits[split], number)}/{self.layout.files[file].name}"
        size, end = int(self.sizes[shard, file]), int(self._ends[shard, file])
        return RemoteFile(name, size, self._hashes[end - num_blocks(size) : end], self.codec)

    def files(self) -> Iterator[RemoteFile]:
        for shard in range(len(self.table)):
            for file in range(len(self.layout.files)):
                yield self.file(shard, file)


def tokenizer_of(manifest: Manifest, objects: Objects) -> bytes | None:
    """The tokenizer of a store, if it has one, checked by the hash in the manifest."""
    if manifest.tokenizer is None:
        return None
    hashed, where = str(manifest.tokenizer["hash"]), objects.where(manifests.TOKENIZER_FILE)
    check = partial(_check_hash, hashed, where)
    return objects.read(manifests.TOKENIZER_FILE, manifests.MAX_TOKENIZER_BYTES, check)


def read_manifest(objects: Objects, name: str = MANIFEST) -> bytes:
    """The bytes of a manifest that can be decoded."""
    check = partial(manifests.decode, path=objects.where(name))
    return objects.read(name, strict_json.MAX_BYTES, check)


def _table(objects: Objects, table: TableFile) -> bytes:
    return objects.read(table.name, table.bytes, partial(_check_hash, table.hash, objects.where(table.name)))


def _check_hash(expected: str, where: str, data: bytes) -> None:
    if (found := digest(data)) != expected:
        raise corrupt(where, f"{len(data):,} bytes have hash {found}, expected {expected}", "push the store again")
