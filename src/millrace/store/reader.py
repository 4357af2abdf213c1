"""Opens a store on disk: compares the manifest with the files, and maps a file when it is first touched.

A reader takes no lock, writes nothing into the store and holds one descriptor, that of the folder. Any number of
processes may read one store, also while it is appended to or replaced. Large offsets are compared once: a note in the
cache of the machine says so to the others.
"""

from __future__ import annotations

import contextlib
import os
import stat
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError, StoreCorrupt, StoreError, corrupt
from millrace.identity import digest
from millrace.lazy import cached_property
from millrace.native import cache_folder, free_memory, num_cores
from millrace.ragged import Array, Int64s
from millrace.store import manifest as manifests
from millrace.store import platform
from millrace.store.descriptors import DescriptorCache, lock_of
from millrace.store.folder import Folder
from millrace.store.layout import Layout
from millrace.store.manifest import Manifest
from millrace.store.plain_file import unreadable
from millrace.store.shard import shard_name
from millrace.store.shards import Shards
from millrace.store.snapshot import Base
from millrace.store.store import Store

MAX_CHECKED_FILES = 4096  # beyond this many, sizes are checked shard by shard when first touched
MANY_OFFSETS = 1 << 16  # of a file; those of smaller ones are checked by each process
CHUNK = 1 << 18  # of them are compared at a time
MAX_MAPS = 16_384  # of all stores: Linux allows a process 65,530; beyond this rows are read by pread


def read_store(
    path: str | os.PathLike[str],
    snapshot: str | None = None,
    *,
    check: bool = False,
    safe_read: bool = False,
    **cache: Any,
) -> Store:
    """A store in millrace's own format; ``open_store`` (open.py) also knows foreign ones.

    A compressed one is read as one elsewhere is: through the cache that ``cache`` says (cache_dir=, cache_size=).
    """
    folder = Folder(path)
    manifest, table = folder.manifest(snapshot)
    if manifest.codec is not None:
        from millrace.store.remote.open import open_compressed

        return open_compressed(folder, snapshot, check=check, safe_read=safe_read, **cache)
    if any(value is not None for value in cache.values()):
        raise ConfigError("cache_dir= and cache_size= are for stores at a URL and compressed ones; leave them out")
    counts = manifests.table_counts(table)
    shards = DiskShards(folder, manifest, table, counts, may_map=not safe_read)
    folder.check_folder("shards")
    if check or counts.shape[0] * len(shards.layout.files) <= MAX_CHECKED_FILES:
        for shard in range(len(table)):
            shards.check(shard)
    reopen = partial(read_store, safe_read=safe_read), (folder.path, manifest.fingerprint)
    return Store(
        layout=shards.layout, counts=counts, shards=shards, name_of=shards.name, kind=manifest.kind,
        meta=manifest.meta, splits=manifest.splits, split_of=table[:, 0].astype(np.int64), cuts=manifest.cuts, path=folder.path,
        fingerprint=manifest.fingerprint, reopen=reopen, manifest=manifest, folder=folder,
    )  # fmt: skip


def read_base(out: Path) -> Base:
    """What an append continues."""
    folder = Folder(out)
    manifest, table = folder.manifest(None)
    if manifest.codec is not None:
        raise ConfigError(
            f"{folder.path} is compressed ({manifest.codec}) and cannot be appended to; append to the store it was made from, "
            "or to a plain copy: millrace stage"
        )
    hashes = manifest.hashes
    return Base(manifest, table.tobytes(), folder.read(hashes.name, hashes.bytes, hashes.hash))


def _falls(offsets: Array) -> bool:
    return bool(np.any(offsets[1:] < offsets[:-1]))


class DiskShards(Shards):
    """The arrays of a store's shards, mapped when first touched and kept; past 16,384 maps of the process read by pread."""

    def __init__(
        self, folder: Folder, manifest: Manifest, table: Array, counts: Int64s, *, may_map: bool = True
    ) -> None:
        self.layout: Layout = manifest.layout
        self._folder, self._splits, self._table = folder, manifest.splits, table
        self._snapshot = manifest.fingerprint
        self._items = self.layout.file_items(counts)
        self._bytes = self.layout.file_bytes(counts)
        self._checked = bytearray(len(table))
        self._maps: dict[tuple[int, int], Array] = {}
        self._loaded: dict[tuple[int, int], Array] = {}  # copies in memory
        self._num_lent = 0  # maps that feeds and views own
        self._lent: weakref.WeakValueDictionary[tuple[int, int], Array] = weakref.WeakValueDictionary()
        self._lock = lock_of(self)
        limit = platform.descriptor_limit()
        self._max_maps = min(MAX_MAPS, limit // 2) if platform.MAPS_HOLD_DESCRIPTORS else MAX_MAPS
        self._max_maps = self._max_maps if may_map else 0
        self._descriptors = DescriptorCache(max(4, min(256, limit // 4)))

    def name(self, shard: int) -> str:
        split, number = self._table[shard, :2].tolist()
        return shard_name(self._splits[split], number)

    def path(self, shard: int, file: int) -> str:
        return self._path(shard, self.layout.files[file].name)

    def records(self, shard: int) -> int:
        return int(self._table[shard, 2])

    def check(self, shard: int) -> None:
        """Compares the sizes of a shard's files with the manifest, before any of them is mapped."""
        if self._checked[shard]:
            return
        folder = f"shards/{self.name(shard)}"
        name, wanted = "", "a folder"
        try:
            if not stat.S_ISDIR(self._folder.stat(folder).st_mode):
                raise self._corrupt(shard, name, wanted, "something else")
            for file, expected in zip(self.layout.files, self._bytes[shard].tolist(), strict=True):
                name, wanted = file.name, f"{expected} bytes"
                status = self._folder.stat(f"{folder}/{name}")
                if not stat.S_ISREG(status.st_mode):
                    raise self._corrupt(shard, name, wanted, "not a plain file")
                if status.st_size != expected:
                    raise self._corrupt(shard, name, wanted, f"{status.st_size} bytes")
        except OSError as error:
            raise self._refused(shard, name, wanted, error) from error
        self._checked[shard] = 1

    def _path(self, shard: int, name: str) -> str:
        return os.path.join(self._folder.path, "shards", self.name(shard), name)

    def _refused(self, shard: int, name: str, wanted: str, error: OSError) -> StoreError:
        if not isinstance(error, FileNotFoundError):
            return unreadable(self._path(shard, name), error)
        self._folder.check_snapshot(self._snapshot)
        return self._corrupt(shard, name, wanted, "nothing")

    def _corrupt(self, shard: int, name: str, expected: str, found: str) -> StoreCorrupt:
        column = next((file.column for file in self.layout.files if file.name == name), None)
        return corrupt(
            self._path(shard, name), f"expected {expected}, found {found}",
            "copy this shard again or prepare the store again", column=column, expected=expected, found=found,
        )  # fmt: skip

    def open(self, shard: int, file: int, *, alone: bool = False) -> int:
        """A descriptor of one file, its size checked again: mapping a shorter one could be a SIGBUS.

        ``alone`` leaves the other files of the shard unchecked.
        """
        if not alone:
            self.check(shard)
        name, expected = self.layout.files[file].name, int(self._bytes[shard, file])
        try:
            fd = self._folder.open(f"shards/{self.name(shard)}/{name}")
        except OSError as error:
            raise self._refused(shard, name, f"{expected} bytes", error) from error
        size = os.fstat(fd).st_size
        if size != expected:
            os.close(fd)
            raise self._corrupt(shard, name, f"{expected} bytes", f"{size} bytes")
        return fd

    def reader(self, fd: int, shard: int, file: int) -> Callable[[memoryview, int], int]:
        """Fills a buffer with the bytes of an open file from an offset on."""
        return partial(platform.pread_into, fd)

    def descriptor(self, shard: int, file: int) -> int | None:
        fd = self.open(shard, file)
        if platform.read_past_cache(fd):
            return fd
        os.close(fd)
        return None

    def array(self, shard: int, file: int, *, random: bool = False) -> Array | None:
        """A mapped file; None past the last map. A ``random`` map ends when all who asked for it have dropped it."""
        found = self._loaded.get((shard, file))
        if found is None:
            found = (self._lent if random else self._maps).get((shard, file))
        if found is not None:
            return found
        mapped = self._map(shard, file, random=random)  # outside the lock: nobody waits for a disk with it
        if mapped is None:
            return None
        if not random:
            self._check_offsets(shard, file, mapped)
            with self._lock:
                return self._maps.setdefault((shard, file), mapped)
        with self._lock:
            found = self._lent.get((shard, file))
            if found is None:
                found = self._lent[shard, file] = mapped
                self._num_lent += 1
                weakref.finalize(mapped, self._give_back).atexit = False
        return found

    def load(self, files: Iterable[tuple[int, int]]) -> None:
        """Copies files into memory, several at a time."""
        missing = [file for file in files if file not in self._loaded]
        needed, free = sum(int(self._bytes[file]) for file in missing), free_memory()
        if needed > free:
            raise ConfigError(
                f"tier='ram' needs {needed:,} more bytes of memory, and {free:,} are free; leave tier= out"
            )
        with ThreadPoolExecutor(num_cores()) as pool:
            self._loaded.update(zip(missing, pool.map(self._copy, missing), strict=True))

    def _copy(self, place: tuple[int, int]) -> Array:
        shard, file = place
        rows: Array = self.rows(shard, file, 0, int(self._items[place]))  # type: ignore[assignment]
        copy = self._shaped(platform.memory(int(self._bytes[place])), file)
        copy[:] = rows
        copy.flags.writeable = False
        return copy

    def will_need(self, files: Iterable[tuple[int, int]]) -> bool:
        """Whether there are maps left for all these files; the disk reads nothing before it is asked."""
        needed = sum(1 for file in files if file not in self._lent and file not in self._loaded)
        return needed <= self._max_maps - self._num_maps()

    def _num_maps(self) -> int:
        """Maps of this process; without the core only this store's are known."""
        return platform.num_maps() or len(self._maps) + self._num_lent

    def _give_back(self) -> None:
        self._num_lent -= 1

    def _map(self, shard: int, file: int, *, random: bool = False) -> Array | None:
        if self._num_maps() >= self._max_maps:
            return None
        fd = self.open(shard, file)
        try:
            return self._shaped(platform.map_file(fd, int(self._bytes[shard, file]), random=random), file)
        except OSError:  # no maps left, other stores of this process hold them: pread from here on
            self._max_maps = self._num_maps()
            return None
        finally:
            os.close(fd)

    def rows(self, shard: int, file: int, start: int, stop: int, *, wait: bool = True) -> Array | None:
        """Items [start, stop) of a file; callers stay within its count."""
        mapped = self.array(shard, file)
        if mapped is not None:
            return mapped[start:stop]
        size = self.layout.files[file].item_bytes
        read = platform.pread if wait else platform.pread_now
        with self._descriptors.use((shard, file), lambda: self._random(shard, file)) as fd:
            data = read(fd, (stop - start) * size, start * size)
        return None if data is None else self._read(shard, file, start, stop, data)

    def _random(self, shard: int, file: int) -> int:
        fd = self.open(shard, file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead
        return fd

    def _read(self, shard: int, file: int, start: int, stop: int, data: bytes) -> Array:
        spec = self.layout.files[file]
        if len(data) != (stop - start) * spec.item_bytes:
            raise self._corrupt(shard, spec.name, f"rows up to {stop}", f"an end after {len(data)} bytes")
        array = self._shaped(np.frombuffer(data, np.uint8), file)
        if stop - start == self._items[shard, file]:
            self._check_offsets(shard, file, array)
        return array

    def _shaped(self, data: Array, file: int) -> Array:
        spec = self.layout.files[file]
        return data.view(spec.dtype).reshape(-1, *spec.tail)

    def _check_offsets(self, shard: int, file: int, array: Array) -> None:
        spec = self.layout.files[file]
        if spec.axis is None:
            return
        rows = int(self._table[shard, 3 + self.layout.place_of[spec.axis]])
        is_right = array[0] == 0 and array[-1] == rows
        notes = self._notes if len(array) > MANY_OFFSETS else None
        content, status = self._content(shard, file), None if notes is None else self._status(shard, file)
        if is_right and notes is not None and status is not None and notes.is_noted(content, status):
            return  # a process of this machine saw that they rise, in the file that is there now
        if not is_right or any(_falls(array[at : at + CHUNK + 1]) for at in range(0, len(array) - 1, CHUNK)):
            found = f"{array[0]} to {array[-1]}, or a fall between"
            raise self._corrupt(shard, spec.name, f"offsets rising from 0 to {rows}", found)
        if notes is not None and status is not None:
            notes.note(content, status)

    def _content(self, shard: int, file: int) -> str:
        return digest("offsets", self._snapshot, self.name(shard), self.layout.files[file].name)

    def _status(self, shard: int, file: int) -> os.stat_result | None:
        try:
            return os.lstat(self._path(shard, self.layout.files[file].name))
        except OSError:
            return None

    @cached_property
    def _notes(self) -> Any:
        """What was checked, in the cache of this machine; None where that cannot be written."""
        from millrace.store.checked_files import NAME, CheckedFiles

        with contextlib.suppress(StoreError):
            return CheckedFiles(cache_folder() / NAME)
        return None
