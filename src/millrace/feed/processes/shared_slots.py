"""SharedSlots: slots for batches in one anonymous memory file, which workers write and the loop reads in place.

The file has no name, so nothing is left behind. Its pages are allocated before anybody writes: too little memory is an
error here, and never a bus error in a worker. A slot is used again when nobody but the feed holds its array.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from typing import Any

import numpy as np

from millrace.errors import FeedError
from millrace.ragged import Array

PAGE = mmap.PAGESIZE
MADV_REMOVE = 9  # frees the pages of the file, not only of this map
MAX_STEP = 4  # times the usual size, by which one larger batch changes that: it may be the only one
MAX_SPARE = 8  # times the usual size: what a slot may have and keep


class SharedSlot:
    """``number`` names it to the workers; ``array`` is its memory, None before the first batch is known."""

    def __init__(self, number: int) -> None:
        self.number, self.offset, self.size = number, 0, 0
        self.array: Array | None = None
        self.is_out = False  # a worker has it, or the loop has not looked at its batch yet

    @property
    def is_idle(self) -> bool:
        return not self.is_out and (self.array is None or sys.getrefcount(self.array) <= _IDLE)


def _idle_count() -> int:
    slot = SharedSlot(0)
    slot.array = np.empty(1)
    return sys.getrefcount(slot.array)


_IDLE = _idle_count()


def no_memory(what: str, error: OSError) -> FeedError:
    """The error for shared memory that the system does not give."""
    limits = {
        errno.EFBIG: "raise the file size limit (ulimit -f)",
        errno.EMFILE: "raise the limit of open files (ulimit -n)",
    }
    remedy = limits.get(error.errno or 0, "lower batch, depth or workers")
    return FeedError(f"{what} cannot be had ({error.strerror}); {remedy}")


class SharedSlots:
    """Slots that grow and shrink with the batches. Of those that nobody holds, at most ``keep`` stay allocated.

    ``gpu`` registers their memory, so that a batch is copied to the device as it lies there.
    """

    def __init__(self, keep: int, gpu: Any = None) -> None:
        self.fd = os.memfd_create("millrace-slots", os.MFD_CLOEXEC)
        self.keep, self._gpu, self._end = keep, gpu, 0
        self._usual, self._is_known = PAGE, False  # the size that slots get; a page until a batch is known
        self._slots: dict[int, SharedSlot] = {}
        self.num_grown = 0  # batches that did not fit in their slot

    def take(self) -> SharedSlot:
        """A slot that nobody holds; a new one where all are held."""
        if len(self._slots) > self.keep:
            for slot in [slot for slot in self._slots.values() if slot.is_idle][self.keep :]:
                self._free(slot)
                del self._slots[slot.number]
        slot = next((slot for slot in self._slots.values() if slot.is_idle), None) or self._new()
        if not self._usual <= slot.size <= MAX_SPARE * self._usual:
            self._allocate(slot, self._usual)
        slot.is_out = True
        return slot

    def _new(self) -> SharedSlot:
        number = max(self._slots, default=-1) + 1
        slot = self._slots[number] = SharedSlot(number)
        return slot

    def grow(self, slot: SharedSlot, num_bytes: int) -> None:
        """Makes room for a batch that did not fit; later slots are larger too."""
        if slot.size > PAGE:
            self.num_grown += 1
            num_bytes += num_bytes // 4  # ragged batches grow: the next one will be about as large
        self._usual = max(self._usual, min(num_bytes, MAX_STEP * self._usual) if self._is_known else num_bytes)
        self._allocate(slot, max(self._usual, num_bytes))

    def note(self, num_bytes: int) -> None:
        """A batch of this size came: the usual size falls slowly, so that a large one does not take memory for ever."""
        self._usual -= max(0, self._usual - max(num_bytes, PAGE)) // 64
        self._is_known = True

    def _allocate(self, slot: SharedSlot, num_bytes: int) -> None:
        self._free(slot)
        size = -(-num_bytes // PAGE) * PAGE
        try:
            os.posix_fallocate(self.fd, self._end, size)
            array = map_shared(self.fd, self._end, size)
        except OSError as error:
            raise no_memory(f"{size:,} bytes of shared memory for a batch", error) from error
        if self._gpu is not None:
            self._gpu.register(array)
        slot.array, slot.offset, slot.size = array, self._end, size
        self._end += size

    def _free(self, slot: SharedSlot) -> None:
        """Gives the pages of a slot back to the system."""
        if slot.array is None:
            return
        if self._gpu is not None:
            self._gpu.unregister(slot.array)
        _libc.madvise(slot.array.ctypes.data, slot.size, MADV_REMOVE)
        slot.array, slot.size = None, 0

    def close(self) -> None:
        """Batches that the loop holds stay as they are: their maps keep the memory."""
        if self.fd >= 0:
            if self._gpu is not None:
                for slot in self._slots.values():
                    if slot.array is not None:
                        self._gpu.unregister(slot.array)
            os.close(self.fd)
            self.fd = -1
        self._slots.clear()


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
_libc.munmap.argtypes = ctypes.c_void_p, ctypes.c_size_t
_libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


def map_shared(fd: int, offset: int, size: int) -> Array:
    """A part of a memory file as an array. Unlike Python's own maps it keeps no descriptor: a loop may hold thousands."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address is None or address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return np.frombuffer(memory, np.uint8)  # type: ignore[call-overload, no-any-return]
