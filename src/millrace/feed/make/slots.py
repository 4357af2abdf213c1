"""Slots: buffers that batches are gathered into. A buffer is used again only when nobody else holds it.

The arrays of a batch are views of its slot's buffers. So the reference counts of the buffers say whether the training
loop, a tensor from ``torch.from_numpy`` or a graph saved for backward still needs them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from millrace.ragged import Array

HUGE_PAGE = 2 << 20  # of x86 and of most others
ALIGN = 64  # JAX takes memory at such addresses as it is, and copies all other memory


def new_memory(num_bytes: int) -> Array:
    """Memory of a slot, uninitialised. Large slots begin where a large page can: then a core fills them 10 % faster."""
    align = HUGE_PAGE if num_bytes >= HUGE_PAGE else ALIGN
    raw = np.empty(num_bytes + align, np.uint8)  # numpy asks for large pages from 4 MiB on
    # Through its buffer, so that views hold the array returned here, and not the array behind it.
    return np.frombuffer(raw.data, np.uint8, num_bytes, -raw.ctypes.data % align)


class Slot:
    """One buffer per field, grown as needed. ``with slot:`` while it is filled."""

    def __init__(self, new_memory: Callable[[int], Array]) -> None:
        self._new_memory = new_memory
        self._buffers: dict[str, Array] = {}
        self.is_filling = False

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *error: object) -> None:
        self.is_filling = False

    def array(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An uninitialised array in this slot's memory."""
        size = dtype.itemsize
        for n in shape:
            size *= n
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < size:
            # A quarter more if a ragged field outgrew its buffer: the next one will be about as large.
            buffer = self._buffers[name] = self._new_memory(size if buffer is None else size + size // 4)
        return buffer[:size].view(dtype).reshape(shape)

    def holders(self) -> int:
        """The highest reference count of its buffers."""
        return max((sys.getrefcount(buffer) for buffer in self._buffers.values()), default=0)


def _idle_holders() -> int:
    """What ``holders`` returns when nobody holds a slot; it differs between Python versions."""
    slot = Slot(new_memory)
    slot.array("x", (1,), np.dtype(np.uint8))
    return slot.holders()


_IDLE = _idle_holders()


class Slots:
    """A few slots. If all are held, one is left to its holders and a new one takes its place."""

    def __init__(self, count: int, new_memory: Callable[[int], Array] = new_memory) -> None:
        self._new_memory = new_memory
        self._slots = [Slot(new_memory) for _ in range(count)]
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> Slot:
        """A slot that nobody holds, to be filled inside ``with``."""
        with self._lock:
            # From the front, not in turn: the memory used last is still in the cache.
            for slot in self._slots:
                if not slot.is_filling and slot.holders() <= _IDLE:
                    break
            else:
                slot = self._slots[self._next] = Slot(self._new_memory)
                self._next = (self._next + 1) % len(self._slots)
            slot.is_filling = True
            return slot
