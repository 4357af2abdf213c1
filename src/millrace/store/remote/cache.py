"""Cache: shard files and tables of remote stores in a folder of this machine, shared by all its processes.

A file is named by its content and exists whole or not at all. Who uses a file holds a shared lock on its name; who
downloads it, an exclusive one. With a limit, room is made before a download begins, by removing files that nobody holds.
The tables of stores stay, and the files have the rest of the limit.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from millrace.errors import ConfigError, StoreError
from millrace.native import PRIVATE
from millrace.store import checked_files, platform
from millrace.store.checked_files import CheckedFiles
from millrace.store.descriptors import lock_of
from millrace.store.remote.contents import RemoteFile
from millrace.store.remote.download import write_checked
from millrace.store.remote.locks import HAS_LOCKS, ByteLocks
from millrace.store.remote.objects import Objects

WAIT_S = 60.0  # for room that others hold, before it is an error
LOOK_S = 0.02
ROOM = "0" * 32  # the name of the lock under which room is made
MISSING_TRIES = 50
KEY_CHARS = 32  # what follows them in a name is of one on its way
CACHED_FILE = re.compile(r"[0-9a-f]{32}")
_NAME = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+\.tmp)?")  # a file, or one on its way
Result = TypeVar("Result")
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


class NoRoom(Exception):
    """Nothing may be removed for a file that is not needed yet."""


def size_of(text: str | int, name: str = "cache_size") -> int:
    """Bytes of a size.

    >>> size_of("200GB"), size_of("1.5 MiB"), size_of(4096)
    (200000000000, 1572864, 4096)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", str(text).upper())
    if found is None or (size := int(float(found[1]) * _UNITS.get(found[2], 0))) < 1:
        raise ConfigError(f"{name}={text!r}; expected a size such as 200GB or 1.5TiB")
    return size


class Cache:
    """The files in one folder. ``limit`` bounds all their bytes, those on their way included; None is no limit."""

    def __init__(self, base: Path, limit: int | None) -> None:
        self.folder, self.tables, self.limit = base / "shards", base / "stores", limit
        with platform.writing(self.folder, "creating"):
            platform.make_dir(self.folder, PRIVATE)
        self._checked = CheckedFiles(base / checked_files.NAME)
        self.next_use: Callable[[str], float] = lambda key: float("inf")  # when this process needs a file again
        self._locks = ByteLocks(self.folder)
        self._lock = lock_of(self)
        self._turns: dict[str, threading.Lock] = {}  # one thread at a time for each file
        self._held: dict[str, int] = {}  # by how many maps of this process
        self._kept: set[str] = set()  # held for good
        self._released: deque[str] = deque()
        self._room, self._pid = threading.Lock(), os.getpid()
        self.tables_bytes = self._measure_tables()
        self._sweep()

    def _sweep(self) -> None:
        """Removes what killed downloads left: nobody has its lock."""
        parts = [name for name in os.listdir(self.folder) if _NAME.fullmatch(name) and len(name) > KEY_CHARS]
        for name in parts if HAS_LOCKS else ():
            if self._locks.own(name[:KEY_CHARS], wait=False):
                platform.remove(self.path(name))
                self._locks.release(name[:KEY_CHARS])

    def _measure_tables(self) -> int:
        found = 0
        for above, _, names in os.walk(self.tables if self.limit is not None else ""):
            for name in names:
                with contextlib.suppress(OSError):
                    found += os.lstat(os.path.join(above, name)).st_size
        return found

    @property
    def room(self) -> int | None:
        """The most that files may take together."""
        return None if self.limit is None else self.limit - self.tables_bytes

    def add_tables(self, name: str, files: Mapping[str, bytes]) -> Path:
        """Keeps the manifest and the tables of a store, in a folder of this name."""
        final, num_bytes = self.tables / name, sum(map(len, files.values()))

        def attempt() -> Path:
            with self._making_room():
                self._make_room(num_bytes, "the tables of this store have")
                self._locks.own(name)
                try:
                    for left in self.tables.glob(f"{name}.*.tmp"):  # by one who was killed
                        platform.remove(left)
                    return self._write_tables(final, files)
                finally:
                    self._locks.release(name)

        with platform.writing(final, "creating"):
            return self._until_room(attempt)

    def _write_tables(self, final: Path, files: Mapping[str, bytes]) -> Path:
        aside = platform.attempt_name(final)
        platform.make_dir(aside / "snapshots", PRIVATE)
        for file, content in files.items():
            platform.write_file(aside / file, content)
        platform.place(aside, final)
        self.tables_bytes = self._measure_tables()
        return final

    def path(self, key: str) -> str:
        return os.path.join(self.folder, key)

    def hold(self, file: RemoteFile, objects: Objects, *, is_urgent: bool = True) -> None:
        """Brings a file here if it is not, and holds it until ``release``.

        One that is not urgent raises ``NoRoom`` rather than remove what is needed before it.
        """

        def attempt() -> None:
            with self._turn(file.key):
                is_held = self._hold_again(file.key)
                if is_held and self._is_there(file):  # else it was removed or replaced under those who hold it
                    return
                self._bring(file, objects, is_urgent)
                if not is_held:
                    with self._lock:
                        self._held[file.key] = 1

        if is_urgent:
            self._until_room(attempt)
        else:
            attempt()

    def _until_room(self, attempt: Callable[[], Result]) -> Result:
        """The result of ``attempt``, again where others hold the room."""
        began = time.monotonic()
        while True:
            with contextlib.suppress(NoRoom):
                return attempt()
            if time.monotonic() - began > WAIT_S:
                raise StoreError(
                    f"the cache {self.folder} is full: its {self.limit:,} bytes are in use, by this process or others; raise "
                    "cache_size, or give this job a cache_dir of its own", path=str(self.folder),
                )  # fmt: skip
            time.sleep(LOOK_S)

    def release(self, key: str) -> None:
        """Ends a hold. Garbage collection may call this anywhere, also in a thread that has the lock: it never waits."""
        self._released.append(key)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        """Notes what was released. The caller has the lock."""
        while self._released:
            key = self._released.popleft()
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
                if key not in self._kept:
                    self._locks.release(key)

    def keep(self, key: str) -> None:
        """Holds a file that the caller holds for good. With a limit nobody keeps what is not mapped: others may need room."""
        if self.limit is None:
            with self._lock:
                self._kept.add(key)

    def _hold_again(self, key: str) -> bool:
        """Another hold of a file that this process holds."""
        with self._lock:
            self._settle()
            is_held = key in self._held or key in self._kept
            if is_held:
                self._held[key] = self._held.get(key, 0) + 1
            return is_held

    @contextlib.contextmanager
    def _turn(self, key: str) -> Iterator[None]:
        with self._lock:
            if self._pid != os.getpid():  # a forked child: the threads that had these are not here
                self._turns, self._room, self._pid = {}, threading.Lock(), os.getpid()
            turn = self._turns.setdefault(key, threading.Lock())
        with turn:
            yield

    def _bring(self, file: RemoteFile, objects: Objects, is_urgent: bool) -> None:
        """A shared lock on a file that is there."""
        key, is_alone, tries = file.key, False, 0
        while True:
            self._locks.share(key)  # waits while another process downloads it
            if self._is_there(file):
                return
            self._locks.release(key)
            is_alone = self._locks.own(key, wait=False)
            tries += 1
            if is_alone or tries > MISSING_TRIES:
                break
            time.sleep(LOOK_S)
        try:
            # If nobody downloads it and others hold it, it was deleted under them: then it comes beside their locks.
            if not self._is_there(file):
                self._download(file, objects, is_urgent)
        except BaseException:
            self._locks.release(key)
            raise
        self._locks.share(key)

    def _is_there(self, file: RemoteFile) -> bool:
        """Whether a file is there with the right bytes."""
        status = self._checked.is_right(self.path(file.key), file.key, file.num_bytes, file.hashes)
        if status is not None and self.limit is not None:
            self._checked.touch(file.key, status)  # what was used last goes last
        return status is not None

    def _download(self, file: RemoteFile, objects: Objects, is_urgent: bool) -> None:
        path, aside = self.path(file.key), str(platform.attempt_name(self.path(file.key)))
        with platform.writing(aside, "downloading"):
            fd = self._reserve(file, aside, is_urgent)
            try:
                try:
                    write_checked(objects, file, fd, aside)
                    platform.sync(fd, aside)  # else it might be there without its bytes after a power failure
                finally:
                    os.close(fd)
                with self._making_room():  # others count sizes: neither twice nor never
                    if not os.path.isfile(path):  # a folder or a pipe is nothing of ours
                        platform.remove(path)
                    platform.rename(aside, path)
                    self._checked.note(file.key, os.lstat(path))
            except BaseException:
                with contextlib.suppress(OSError):
                    platform.remove(aside)
                raise

    def _reserve(self, file: RemoteFile, aside: str, is_urgent: bool) -> int:
        """A new file of the whole size, so that others see the room as taken."""
        with self._making_room():
            latest = None if is_urgent else self.next_use(file.key)
            self._make_room(file.num_bytes, f"{file.name} has", latest)
            fd = platform.create(aside)
            if self.limit is not None:
                os.ftruncate(fd, file.num_bytes)
            return fd

    @contextlib.contextmanager
    def _making_room(self) -> Iterator[None]:
        """With a limit, one thread of one process at a time."""
        if self.limit is None:
            yield
            return
        with self._room:
            self._locks.own(ROOM)
            try:
                yield
            finally:
                self._locks.release(ROOM)

    def _make_room(self, num_bytes: int, what: str, latest: float | None = None) -> None:
        """For so many bytes. With ``latest``, only what is needed after that may go."""
        if self.limit is None:
            return
        self.tables_bytes = self._measure_tables()
        most = self.limit - self.tables_bytes
        if num_bytes > most:
            taken = f", of which tables of stores take {self.tables_bytes:,}" if self.tables_bytes else ""
            raise ConfigError(
                f"{what} {num_bytes:,} bytes and cache_size is {self.limit:,}{taken}; raise cache_size, or prepare the "
                "store with smaller shards"
            )
        found = list(self._files())
        excess = sum(status.st_size for _, status in found) + num_bytes - most
        if excess <= 0:
            return
        # Those that this process needs last go first, of equal ones the one that was used longest ago.
        found.sort(key=lambda entry: (-self.next_use(entry[0][:KEY_CHARS]), self._used_ns(*entry)))
        for name, status in found:
            if excess <= 0 or (latest is not None and self.next_use(name[:KEY_CHARS]) <= latest):
                break
            if self._remove(name, status):
                excess -= status.st_size
        if excess > 0:
            raise NoRoom

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):
                        yield entry.name, entry.stat(follow_symlinks=False)

    def _used_ns(self, name: str, status: os.stat_result) -> int:
        return self._checked.used_ns(name[:KEY_CHARS], status)

    def _remove(self, name: str, status: os.stat_result) -> bool:
        """Removes a file that nobody uses."""
        key = name[:KEY_CHARS]
        with self._lock:
            self._settle()
            turn = self._turns.setdefault(key, threading.Lock())
            if key in self._held or not turn.acquire(blocking=False):
                return False
        try:
            if not self._locks.own(key, wait=False):
                return False
            platform.remove(self.path(name))
            self._checked.forget(key, status)
            self._locks.release(key)
            return True
        finally:
            turn.release()
