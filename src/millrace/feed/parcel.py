"""Parcels: batches that lie in one run of host memory, so that one copy brings them to a device.

The core's ring makes them as they are. What a transform or numpy made is packed: in the transform's threads, or in line.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.feed.batch import Batch
from millrace.feed.native import NativeRing
from millrace.feed.program import ALIGN, Layout
from millrace.feed.ring import Slots
from millrace.ragged import Array, Ragged


@dataclass
class Parcel(ABC):
    """A batch on its way to a device."""

    memory: Array | None  # of the host, until its copy is queued
    address: int
    num_bytes: int
    marks: Batch  # positions, samples, valid

    def views(self, memory: Any) -> Any:
        """What can be made of a slot of the device once and for all."""
        return None

    @abstractmethod
    def unpack(self, memory: Any, views: Any) -> dict[str, Any]:
        """The columns, in the memory of the device that the parcel was copied to."""


@dataclass
class NativeParcel(Parcel):
    layout: Layout
    rows: dict[str, int]  # of ragged columns

    def views(self, memory: Any) -> Any:
        return self.layout.views(memory, torch_dtype)[1]

    def unpack(self, memory: Any, views: Any) -> dict[str, Any]:
        values: dict[str, Any] = {}
        end = self.layout.fixed_bytes
        for name, ragged, view in views:
            values[name] = view.detach()  # a tensor of its own: its storage counts who holds it
            if ragged is not None:
                rows = self.rows[name]
                there = self.layout.ragged_values(memory, ragged, end, rows, torch_dtype)
                values[name] = Ragged.trusted(there, values[name])
                end = self.layout.ragged_end(ragged, end, rows)
        return values


class NativeParcels:
    """The batches of the core's ring."""

    def __init__(self, ring: NativeRing) -> None:
        self._ring, self._layout = ring, ring.memory.layout
        self.num_workers = ring.num_workers
        self._addresses: dict[int, tuple[Any, int]] = {}  # of host memory, which is not held: who holds it is counted

    def poll(self, batch: int, wait: bool) -> Parcel | None:
        """The next batch, which is number ``batch``; None where it is not ready and ``wait`` is false, or there is none."""
        got = self._ring.poll(wait)
        if got is None:
            return None
        number, used = got
        memory, found = self._ring.memory.arrays[number], self._ring.memory.batch(number)
        assert memory is not None
        rows = {name: len(value.values) for name, value in found.items() if isinstance(value, Ragged)}
        return NativeParcel(memory, self._address(number, memory), used, _marks(found), self._layout, rows)

    def _address(self, number: int, memory: Array) -> int:
        """Where a slot of the host lies; asked for once, since numpy takes its time to tell."""
        known = self._addresses.get(number)
        if known is None or known[0]() is not memory:
            known = self._addresses[number] = (weakref.ref(memory), memory.ctypes.data)
        return known[1]

    def report(self) -> dict[str, Any]:
        return self._ring.report()

    def close(self) -> None:
        self._ring.close()


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a parcel."""

    begin: int
    num_bytes: int
    dtype: Any
    shape: tuple[int, ...]

    def view(self, memory: Any) -> Any:
        return memory[self.begin : self.begin + self.num_bytes].view(self.dtype).reshape(self.shape)


@dataclass
class PackedParcel(Parcel):
    placed: dict[str, Any]  # what is not in a place stays as it is, or moves by itself
    device: Any

    def unpack(self, memory: Any, views: Any) -> dict[str, Any]:
        def there(value: Any) -> Any:
            if isinstance(value, Place):
                return value.view(memory)
            return value.to(self.device, non_blocking=True) if hasattr(value, "to") else value

        return {name: v.map(there) if isinstance(v, Ragged) else there(v) for name, v in self.placed.items()}


class Packer:
    """Puts the tensors of a batch side by side into pinned memory that is used again."""

    def __init__(self, lanes: Any, num_slots: int) -> None:
        self._slots, self._device = Slots(num_slots, lanes.host_memory), lanes.device

    def pack(self, batch: Batch) -> PackedParcel:
        import torch

        tensors: list[tuple[Place, Any]] = []
        end = 0

        def place(value: Any) -> Any:
            nonlocal end
            if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.device.type != "cpu":
                return value
            num_bytes = value.numel() * value.element_size()
            tensors.append((Place(end, num_bytes, value.dtype, tuple(value.shape)), value))
            end += -(-num_bytes // ALIGN) * ALIGN
            return tensors[-1][0]

        placed = {name: v.map(place) if isinstance(v, Ragged) else place(v) for name, v in batch.items()}
        slot = self._slots.take()
        try:
            memory = slot.array("batch", (max(end, 1),), np.dtype(np.uint8))
        finally:
            slot.is_filling = False
        there = torch.from_numpy(memory)
        for at, tensor in tensors:
            at.view(there).copy_(tensor.detach())
        return PackedParcel(memory, memory.ctypes.data, end, _marks(batch), placed, self._device)


class InLineParcels:
    """Batches that the loop makes itself, when it asks for them."""

    num_workers = 0

    def __init__(self, make: Callable[[int], Parcel]) -> None:
        self._make = make

    def poll(self, batch: int, wait: bool) -> Parcel | None:
        return self._make(batch) if wait else None

    def report(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        pass


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def _marks(batch: Batch) -> Batch:
    return Batch(positions=batch.positions, samples=batch.samples, valid=batch.valid)
