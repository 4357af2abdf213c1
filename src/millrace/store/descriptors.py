"""Open descriptors of many files, and locks that a forked child does not find held. For the reader of a store's shards."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

_owners: WeakSet[Any] = WeakSet()


def lock_of(owner: Any) -> threading.Lock:
    """A lock for ``owner._lock``, which a forked child has newly: a thread that held it is not there to give it back."""
    _owners.add(owner)
    return threading.Lock()


def _renew_locks() -> None:
    for owner in list(_owners):
        owner._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)


class DescriptorCache:
    """A few open descriptors of many files; one in use by a thread is never closed under it."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = lock_of(self)
        self._open: OrderedDict[Any, list[int]] = OrderedDict()  # key -> [descriptor, users]

    @contextlib.contextmanager
    def use(self, key: Any, opener: Callable[[], int]) -> Iterator[int]:
        entry = self._taken(key)
        if entry is None:
            fd = opener()  # outside the lock: nobody waits for a disk with it
            with self._lock:
                self._evict()
                entry = self._open.setdefault(key, [fd, 0])
                entry[1] += 1
            if entry[0] != fd:  # another thread was faster
                os.close(fd)
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1

    def _taken(self, key: Any) -> list[int] | None:
        with self._lock:
            entry = self._open.get(key)
            if entry is not None:
                entry[1] += 1
                self._open.move_to_end(key)
            return entry

    def _evict(self) -> None:
        while len(self._open) >= self._limit:
            idle = next((key for key, (_, users) in self._open.items() if users == 0), None)
            if idle is None:
                return  # all are in use: one more for a moment
            os.close(self._open.pop(idle)[0])

    def close(self) -> None:
        with self._lock:
            for fd, _ in self._open.values():
                os.close(fd)
            self._open.clear()

    def __del__(self, _is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        for fd, _ in () if _is_ending() else getattr(self, "_open", {}).values():
            with contextlib.suppress(OSError):
                os.close(fd)
