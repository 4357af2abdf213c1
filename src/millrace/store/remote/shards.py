"""RemoteShards: the shards of a store elsewhere, as maps of files in the cache."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence

from millrace.errors import ConfigError, StoreCorrupt, StoreError
from millrace.ragged import Array
from millrace.store import platform
from millrace.store.folder import Folder
from millrace.store.layout import BLOCK_BYTES
from millrace.store.manifest import decode
from millrace.store.plain_file import open_plain, unreadable
from millrace.store.reader import DiskShards
from millrace.store.remote.cache import Cache
from millrace.store.remote.contents import Contents, RemoteFile, read_manifest
from millrace.store.remote.fetcher import Fetcher
from millrace.store.remote.objects import NoRanges, ObjectMissing, Objects

LOOKAHEAD = 256  # batches: a file takes tenths of a second to come, in which a fast loop takes hundreds


class RemoteShards(DiskShards):
    """Files come into the cache before their batch, as ``expect`` names them, else when they are touched.

    A few rows of a large file come as blocks of 4 MiB, where ``Pace`` finds that cheaper.

    With a limit on the cache that the store does not fit in, maps end when nobody uses them, so that their files can go.
    """

    def __init__(self, folder: Folder, contents: Contents, objects: Objects, cache: Cache) -> None:
        super().__init__(folder, contents.manifest, contents.table, contents.counts)
        self._contents, self._objects, self._cache = contents, objects, cache
        self._fingerprint = contents.fingerprint
        self._fetcher = Fetcher(cache, objects)
        self._window = Window(LOOKAHEAD)
        cache.next_use = self._window.next_use
        self._asked: set[tuple[int, int]] = set()
        self._is_whole = False  # files come whole, all of them
        self._whole: set[tuple[int, int]] = set()  # these do
        self._parts: dict[tuple[int, int], set[int]] = {}  # blocks of the others that were read
        self._unasked: dict[tuple[int, int], set[int]] = {}  # (split, file) -> shards
        weakref.finalize(self, self._fetcher.close).atexit = False

    @property
    def lookahead(self) -> int:  # type: ignore[override]
        """None any more when every file of the columns that are read was asked for, and none will go."""
        is_done = bool(self._unasked) and not any(self._unasked.values())
        return 0 if is_done and self._cache.limit is None else LOOKAHEAD

    def path(self, shard: int, file: int) -> str:
        return self._objects.where(self._contents.file(shard, file).stored_name)

    def check(self, shard: int) -> None:
        """Files are checked when they come."""

    def _status(self, shard: int, file: int) -> os.stat_result | None:
        try:
            return os.lstat(self._cache.path(self._contents.file(shard, file).key))
        except OSError:
            return None

    def choose(self, samples: int | None, files: Iterable[tuple[int, int]] = ()) -> None:
        if samples is None:
            self._is_whole = True
            return
        files = set(files)
        blocks = samples * len({file for _, file in files})  # a sample lies in one, or two
        if not self._objects.pace.prefers_blocks(blocks, self._sum(files), len(files)):
            self._whole |= files

    def describe(self) -> str | None:
        with self._lock:
            parts = sum(map(len, self._parts.values()))
        ways = f"{parts:,} blocks of 4 MiB read by ranges" if parts else "files come whole"
        return f"{self._objects.url}: {self._objects.pace}; {ways}"

    def _by_blocks(self, shard: int, file: int, first: int = 0, last: int = 1) -> bool:
        """Whether blocks [first, last) of a file come by themselves: not where all of it is wanted or here."""
        place, num_bytes = (shard, file), int(self._bytes[shard, file])
        if self._is_whole or place in self._whole or num_bytes <= BLOCK_BYTES:
            return False
        if self._contents.codec is not None or self.layout.files[file].axis is not None or self._objects.is_local:
            return False  # views read all offsets
        if place in self._loaded or place in self._maps or place in self._lent or self.is_at_hand(shard, file):
            return False
        with self._lock:
            known = self._parts.get(place, set())
            blocks = len(known) + sum(block not in known for block in range(first, last))
        if self._objects.pace.prefers_blocks(blocks, num_bytes):
            return True
        self._whole.add(place)
        return False

    def rows(self, shard: int, file: int, start: int, stop: int, *, wait: bool = True) -> Array | None:
        size = self.layout.files[file].item_bytes
        first, last = start * size // BLOCK_BYTES, -(-stop * size // BLOCK_BYTES)
        if start >= stop or not self._by_blocks(shard, file, first, last):
            return super().rows(shard, file, start, stop, wait=wait)
        whole = self._contents.file(shard, file)
        parts = [whole.part(block) for block in range(first, last)]
        if not wait:
            self._fetcher.ask(parts)
            return None
        try:
            data = b"".join(self._read_part(part, start * size, stop * size) for part in parts)
        except NoRanges:
            self._is_whole = True
            return super().rows(shard, file, start, stop, wait=wait)
        with self._lock:
            self._parts.setdefault((shard, file), set()).update(range(first, last))
        return self._read(shard, file, start, stop, data)

    def _read_part(self, part: RemoteFile, start: int, stop: int) -> bytes:
        """Those bytes [start, stop) of a file that lie in one block."""
        base = (part.block or 0) * BLOCK_BYTES
        first, last = max(start - base, 0), min(stop - base, part.num_bytes)
        fd = self._open(part)
        try:
            return platform.pread(fd, last - first, first)
        finally:
            os.close(fd)
            self._cache.release(part.key)

    def expect(self, files: Sequence[tuple[int, int]]) -> None:
        files = [file for file in files if file not in self._loaded and not self._by_blocks(*file)]
        if self._cache.limit is not None:
            self._check_window(files)
            self._window.add([self._contents.file(*file).key for file in files])
        self._ask(files)

    def _ask(self, files: Iterable[tuple[int, int]]) -> None:
        with self._lock:
            new = [file for file in files if self._cache.limit is not None or file not in self._asked]
            self._asked.update(new)
            for shard, file in new:
                self._of_column(shard, file).discard(shard)
        self._fetcher.ask([self._contents.file(*file) for file in new])

    def _of_column(self, shard: int, file: int) -> set[int]:
        """The shards of a split whose file was not asked for yet."""
        split = int(self._table[shard, 0])
        found = self._unasked.get((split, file))
        if found is None:
            found = self._unasked[split, file] = set((self._table[:, 0] == split).nonzero()[0].tolist())
        return found

    def _check_window(self, files: Sequence[tuple[int, int]]) -> None:
        limit, room, needed = self._cache.limit, self._cache.room, self._sum(set(files))
        if room is not None and needed > room:
            tables = self._cache.tables_bytes
            raise ConfigError(
                f"one batch reads {len(set(files)):,} files with {needed:,} bytes, and cache_size is {limit:,} ({tables:,} of "
                f"it for tables of stores); raise cache_size, or read fewer shards at a time: "
                f"order=mr.BlockShuffled.for_cache(view, {limit})"
            )

    @property
    def is_limited(self) -> bool:  # type: ignore[override]
        return self._cache.limit is not None

    def will_need(self, files: Iterable[tuple[int, int]]) -> bool:
        """Whether these files fit in the cache together, and there are maps left for them."""
        files = set(files)
        if any(self._by_blocks(*file) for file in files):
            return False
        room = self._cache.room
        return (room is None or self._sum(files) <= room) and super().will_need(files)

    def num_bytes(self, shard: int, file: int) -> int:
        return int(self._bytes[shard, file])

    def is_at_hand(self, shard: int, file: int) -> bool:
        """Whether the cache has a file."""
        return os.path.exists(self._cache.path(self._contents.file(shard, file).key))

    def _sum(self, files: set[tuple[int, int]]) -> int:
        return sum(int(self._bytes[file]) for file in files)

    def array(self, shard: int, file: int, *, random: bool = False) -> Array | None:
        if self.layout.files[file].axis is not None and (shard, file) not in self._asked:
            # Views read the offsets of all shards, one after the other: they come side by side.
            self._ask([(other, file) for other in range(len(self._table))])
        if self._by_blocks(shard, file):
            return None
        # With a limit, maps end with their users.
        return super().array(shard, file, random=random or self._cache.limit is not None)

    def descriptor(self, shard: int, file: int) -> int | None:
        return None if self._cache.limit is not None else super().descriptor(shard, file)

    def open(self, shard: int, file: int, *, alone: bool = False) -> int:
        wanted = self._contents.file(shard, file)
        fd = self._open(wanted)
        self._cache.keep(wanted.key)
        self._cache.release(wanted.key)
        return fd

    def _open(self, file: RemoteFile) -> int:
        """A descriptor of a file that is held from here on."""
        try:
            self._cache.hold(file, self._objects)
        except (StoreCorrupt, ObjectMissing) as error:
            self._check_replaced(error)
            raise
        path = self._cache.path(file.key)
        try:
            return open_plain(path)
        except OSError as error:  # removed or replaced just now
            self._cache.release(file.key)
            raise unreadable(path, error) from error

    def _check_replaced(self, error: StoreError) -> None:
        """Says so where the files at the URL are those of another store now."""
        try:
            now = decode(read_manifest(self._objects), self._objects.url).fingerprint
        except StoreError:
            return
        if now != self._fingerprint:
            raise StoreCorrupt(
                f"{error.path}: {self._objects.url} was replaced by another store since it was opened (fingerprint {now}; "
                f"this one has {self._fingerprint}); open it again, or bring the old one back", path=error.path,
            ) from error  # fmt: skip

    def _map(self, shard: int, file: int, *, random: bool = False) -> Array | None:
        if self._num_maps() >= self._max_maps:
            return None
        wanted = self._contents.file(shard, file)
        fd = self._open(wanted)
        try:
            mapped = platform.map_file(fd, wanted.num_bytes, random=random)
        except OSError:
            self._cache.release(wanted.key)
            self._max_maps = self._num_maps()
            return None
        finally:
            os.close(fd)
        # Every array over these bytes ends at this one: the file is held as long as any of them lives.
        weakref.finalize(mapped, self._cache.release, wanted.key).atexit = False
        return self._shaped(mapped, file)


class Window:
    """The batches to come, by the files they need: when each is needed next."""

    def __init__(self, length: int) -> None:
        self._length, self._batches = length, deque[list[str]]()
        self._uses: dict[str, deque[int]] = {}
        self._number = 0  # of the next batch that is named

    def add(self, keys: list[str]) -> None:
        """Appends a batch; the oldest one has passed."""
        for key in keys:
            self._uses.setdefault(key, deque()).append(self._number)
        self._batches.append(keys)
        self._number += 1
        for key in self._batches.popleft() if len(self._batches) > self._length + 1 else ():
            self._uses[key].popleft()
            if not self._uses[key]:
                del self._uses[key]

    def next_use(self, key: str) -> float:
        """The number of the batch; infinity where none of those that are known needs it. Any thread may ask."""
        uses = self._uses.get(key)
        with contextlib.suppress(IndexError):  # it passed just now
            return uses[0] if uses is not None else float("inf")
        return float("inf")
