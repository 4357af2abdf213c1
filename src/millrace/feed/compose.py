"""Chooses how the batches of an iterator are made, kept ahead and placed, from the options of its feed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millrace.feed.ahead.core_ring import CoreRing
from millrace.feed.ahead.in_line import InLine
from millrace.feed.ahead.threads import Threads
from millrace.feed.batch import Batch
from millrace.feed.line import Line
from millrace.feed.make.plan import PlanMake
from millrace.feed.make.program import Program, ProgramMake
from millrace.feed.make.transform import TransformMake
from millrace.feed.place.cuda import Gpu
from millrace.feed.place.device import DeviceSlots, group_size
from millrace.feed.place.host import Host, tensor_converter
from millrace.feed.place.parcels import ParcelMake, Parcels
from millrace.feed.stages import Ahead, Fallback, Make, Stages

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

IN_LINE_BYTES = 64 << 10  # the loop makes smaller batches itself: to wake a thread takes longer


class Composer:
    """Composes the stages of one iterator, and simpler ones if a batch cannot be made by the first."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._convert = None if feed.device == "numpy" else tensor_converter()
        self._gpu = Gpu(feed.device) if feed.device.startswith("cuda") else None
        self._left_out: set[str] = set()

    def leave_out(self, reason: Fallback) -> None:
        """Composes without this from now on."""
        self._left_out.add(reason.leave_out)

    def compose(self, line: Line) -> Stages:
        """The stages for a line; their batch 0 is the first of the line."""
        feed, gpu, depth, count = self._feed, self._gpu, self._feed.depth, line.num_batches
        in_threads = feed.transform is not None
        is_alone = gpu is None or in_threads or "groups" in self._left_out
        program = None if "core" in self._left_out else Program.of(line, 1 if is_alone else group_size(line, depth))
        make: Make[Batch] = (
            PlanMake(line, slots=depth + 2, in_threads=in_threads)
            if program is None
            else ProgramMake(program, slots=depth + 2)
        )
        if feed.transform is not None:
            make = TransformMake(make, feed.transform, line, feed.seed)
        elif program is not None:
            return self._in_core(program, make, count)
        final: Make[Any] = make
        if gpu is not None:
            assert self._convert is not None
            # Parcels that are ready or being made, on their way, and one in hand.
            final = ParcelMake(make, self._convert, gpu, slots=2 * depth + 1)
        ahead: Ahead[Any] = (
            Threads(final, workers=min(feed.workers, depth), depth=depth, count=count)
            if in_threads
            else InLine(final, count=count)
        )
        place = Host(ahead, self._convert) if gpu is None else Parcels(ahead, gpu, depth=depth)
        return Stages("transform" if in_threads else "numpy", make, ahead, place)

    def _in_core(self, program: Program, make: Make[Batch], count: int | None) -> Stages:
        """The core makes whole batches; for a GPU it also queues their copies."""
        depth, workers = self._feed.depth, min(self._feed.fillers, self._feed.depth)
        if self._gpu is not None:
            slots = DeviceSlots(program, self._gpu, count=count, depth=depth, workers=workers)
            return Stages("ring", make, slots.ring, slots)
        if program.batch_bytes < IN_LINE_BYTES:
            workers = 0
        ring = CoreRing(program, count=count, depth=depth, workers=workers)
        return Stages("ring" if workers else "in line", make, ring, Host(ring, self._convert))
