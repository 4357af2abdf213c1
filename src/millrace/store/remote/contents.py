"""Contents: every file of one snapshot of a store with its size and hashes, wherever the store lies."""

from __future__ import annotations

import contextlib
import re
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
from millrace.store.remote.objects import ObjectMissing, Objects
from millrace.store.shard import shard_name
from millrace.store.verify_side_files import QUARANTINE

MANIFEST, PROVENANCE = "store.json", "provenance.json"
FIRST_PUSHED = manifests.MAX_SHARDS  # shard numbers from here on are those of a push; on a disk they count from 0
UNHASHED = (PROVENANCE, QUARANTINE)  # outside the fingerprint; they may be missing


_TABLE = re.compile(r"shards-([0-9a-f]{16})\.bin")


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

    def renumbered(self, numbers: Array, shards: str, hashes: str) -> Contents:
        """The same store with other shard numbers, which are names alone, and with tables of these names."""
        table = self.table.copy()
        table[:, 1] = numbers
        data = self.data[self.manifest.hashes.name]
        files = (
            TableFile(shards, table.nbytes, digest(table.tobytes())),
            TableFile(hashes, len(data), self.manifest.hashes.hash),
        )
        manifest = msgspec.structs.replace(self.manifest, shards=files[0], hashes=files[1])
        return Contents(manifests.encode(manifest), table.tobytes(), data, self._where)

    @property
    def push(self) -> str | None:
        """The push that brought it where it lies, by which its tables and its tokenizer are named. None on a disk, and
        at a URL that 0.1 pushed to: there the names are those of a disk."""
        return push_in(self.manifest)

    def as_on_disk(self) -> Contents:
        """The same store with the names that a writer on a disk gives: a push has numbers and tables of its own."""
        if self.push is None:
            return self
        numbers = np.zeros(len(self.table), "<u8")
        for split in range(len(self.manifest.splits)):
            places = np.flatnonzero(self.table[:, 0] == split)
            numbers[places] = np.arange(len(places))
        plain = self.renumbered(numbers, "shards.bin", "hashes.bin")
        if self.manifest.parent is None:
            return plain
        files = plain.manifest.shards, plain.manifest.hashes
        return plain.renumbered(numbers, *(f"{file.name[:6]}-{file.hash[:16]}.bin" for file in files))

    def shard_keys(self) -> list[tuple[str, bytes, bytes]]:
        """The content of each shard: its split, its counts and the hashes of its files."""
        ends = self._ends[:, -1].tolist() if len(self.table) else []
        starts, splits = [0, *ends[:-1]], self.manifest.splits
        return [
            (splits[int(row[0])], row[2:].tobytes(), self._hashes[start:end].tobytes())
            for row, start, end in zip(self.table, starts, ends, strict=True)
        ]

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


def push_in(manifest: Manifest) -> str | None:
    """The push that a manifest is of."""
    found = _TABLE.fullmatch(manifest.shards.name)
    return None if found is None or found[1] == manifest.shards.hash[:16] else found[1]


def tokenizer_name(push: str) -> str:
    return f"tokenizer-{push}.json"


def tokenizer_of(contents: Contents, objects: Objects) -> bytes | None:
    """The tokenizer of a store, if it has one, checked by the hash in the manifest."""
    manifest = contents.manifest
    if manifest.tokenizer is None:
        return None

    def read(name: str) -> bytes:
        check = partial(_check_hash, str(manifest.tokenizer["hash"]), objects.where(name))  # type: ignore[index]
        return objects.read(name, manifests.MAX_TOKENIZER_BYTES, check)

    if contents.push is not None:
        with contextlib.suppress(ObjectMissing):  # where a server gives a folder that somebody copied
            return read(tokenizer_name(contents.push))
    return read(manifests.TOKENIZER_FILE)


def read_manifest(objects: Objects, name: str = MANIFEST) -> bytes:
    """The bytes of a manifest that can be decoded."""
    check = partial(manifests.decode, path=objects.where(name))
    return objects.read(name, strict_json.MAX_BYTES, check)


def _table(objects: Objects, table: TableFile) -> bytes:
    return objects.read(table.name, table.bytes, partial(_check_hash, table.hash, objects.where(table.name)))


def _check_hash(expected: str, where: str, data: bytes) -> None:
    if (found := digest(data)) != expected:
        raise corrupt(where, f"{len(data):,} bytes have hash {found}, expected {expected}", "push the store again")
