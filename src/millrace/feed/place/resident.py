"""Batches gathered on a GPU that holds their rows. The core's ring brings only where the rows are, for many batches.

The loop's own stream runs the gather of a group, a few kernels: at 3 TB/s they take a thousandth of the steps. So torch's
allocator knows the columns as it knows any tensor, and their memory is used again when nobody holds a batch of the group.
"""

from __future__ import annotations

from typing import Any

from millrace.feed.batch import Batch, Marks
from millrace.feed.make.program import Program
from millrace.feed.make.slot_layout import torch_dtype
from millrace.feed.place.device import DeviceMemory, DeviceSlots
from millrace.feed.resident.residency import Residency
from millrace.feed.stages import Counters
from millrace.ragged import Ragged


class Resident(DeviceSlots):
    """Batches from rows on a device; a slot has the places of a group of batches, and rows that are not there."""

    splits = False

    def __init__(
        self, program: Program, gpu: Any, residency: Residency, *, count: int | None, depth: int, workers: int | None
    ) -> None:
        super().__init__(program, gpu, count=count, depth=depth, workers=workers)
        self._residency, self._gather = residency, residency.gatherer(self._size)
        self._num_samples = self._num_missed = 0
        with gpu:
            self._turn = gpu.event()  # between two streams of the loop

    def _unpack(self, slot: int, memory: DeviceMemory, count: int) -> None:
        views = self._memory.views[slot]
        assert views is not None
        places = {name: view.data for name, view in memory.columns[0]}
        if self._layout.has_ragged:
            self._layout.add_ragged(places, views, memory.memory, torch_dtype)
        for held in self._residency.held:
            if self.stream not in held.streams:
                held.streams.add(self.stream)
                self._gpu.record_use(held.rows, self.stream)
        found, missed = self._gather.batches(places, {name: array for name, _, array in views[1]}, count)
        self._num_samples += count * self._size
        self._num_missed += missed
        marks, size, total = views[0].tobytes(), self._size, self._layout.size
        for k in reversed(range(count)):
            self.ready.append(Batch(found[k], marks=Marks(marks, total, size, k * size)))

    def _follow(self, stream: int) -> None:
        """The loop has gone to another stream between two batches of a group, which were gathered on the one before."""
        with self._gpu:
            self._gpu.follow(stream, self.stream, self._turn)
        self._slots[-1][1].use_on(self._gpu, stream)
        for batch in self.ready:
            for value in dict.values(batch):
                for tensor in (value.values, value.offsets) if isinstance(value, Ragged) else (value,):
                    self._gpu.record_use(tensor, stream)
        self.stream = stream

    def report(self) -> Counters:
        hits = 1.0 - self._num_missed / self._num_samples if self._num_samples else None
        return (
            super()
            .report()
            ._replace(hit_rate=hits, held_bytes=self._residency.held_bytes, row_bytes=self._residency.num_bytes)
        )
