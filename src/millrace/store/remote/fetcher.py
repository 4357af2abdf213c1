"""Fetcher: threads that bring files into the cache before they are needed, in the order they were asked for."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable

from millrace.errors import MillraceError
from millrace.store.descriptors import lock_of
from millrace.store.remote.cache import Cache, NoRoom
from millrace.store.remote.contents import RemoteFile
from millrace.store.remote.objects import Objects

THREADS = 8


class Fetcher:
    """Downloads ahead. Its threads end when nothing is asked for, and when the program does."""

    def __init__(self, cache: Cache, objects: Objects) -> None:
        self._cache, self._objects = cache, objects
        self._asked: deque[RemoteFile] = deque()
        self._lock = lock_of(self)
        self._running, self._pid = 0, os.getpid()

    def ask(self, files: Iterable[RemoteFile]) -> None:
        """Asks for more files, and tries those again for which there was no room."""
        with self._lock:
            if self._pid != os.getpid():  # a forked child has no threads
                self._running, self._pid = 0, os.getpid()
            self._asked.extend(files)
            missing = min(THREADS, len(self._asked)) - self._running
            self._running += max(0, missing)
        for _ in range(missing):
            threading.Thread(target=self._work, name="millrace-fetch").start()

    def close(self) -> None:
        with self._lock:
            self._asked.clear()

    def _next(self) -> RemoteFile | None:
        with self._lock:
            if self._asked and threading.main_thread().is_alive():
                return self._asked.popleft()
            self._running -= 1
            return None

    def _work(self) -> None:
        while (file := self._next()) is not None:
            try:
                self._cache.hold(file, self._objects, is_urgent=False)
            except NoRoom:
                with self._lock:  # until the feed has gone on
                    self._asked.appendleft(file)
                    self._running -= 1
                return
            except (MillraceError, OSError):
                continue  # who needs the file tries again, and gets the error
            self._cache.keep(file.key)
            self._cache.release(file.key)
