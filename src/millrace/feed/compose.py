"""Chooses how the batches of an iterator are made, kept ahead and placed, from the options of its feed."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from millrace.errors import ConfigError
from millrace.feed.ahead.core_ring import CoreRing
from millrace.feed.ahead.in_line import InLine
from millrace.feed.ahead.processes import Processes
from millrace.feed.ahead.queue import Fetch, Queued
from millrace.feed.ahead.threads import Threads
from millrace.feed.batch import Batch
from millrace.feed.line import Line
from millrace.feed.make.compose import compose_make
from millrace.feed.make.program import Program, ProgramMake
from millrace.feed.make.slots import Slots, new_memory
from millrace.feed.place.cuda import Gpu
from millrace.feed.place.device import GROUP_BYTES, MAX_GROUP, DeviceSlots, group_size
from millrace.feed.place.host import Host, tensor_converter
from millrace.feed.place.parcels import ParcelMake, Parcels, parcel_of
from millrace.feed.place.resident import Resident
from millrace.feed.processes.choice import choose_way
from millrace.feed.processes.packing import Layout
from millrace.feed.remote.link import link_of
from millrace.feed.remote.record import Record
from millrace.feed.resident.residency import Residency
from millrace.feed.stages import Ahead, Fallback, Make, Stages
from millrace.feed.tier import load_columns

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

IN_LINE_BYTES = 64 << 10  # the loop makes smaller batches itself: to wake a thread takes longer


class Composer:
    """Composes the stages of one iterator, and simpler ones if a batch cannot be made by the first."""

    def __init__(self, feed: Feed, *, keeps_workers: bool = False) -> None:
        self._feed, self._keeps_workers = feed, keeps_workers
        self._convert = None if feed.device == "numpy" else tensor_converter()
        self._gpu = Gpu(feed.device) if feed.device.startswith("cuda") else None
        self._left_out: set[str] = set()

    def leave_out(self, reason: Fallback) -> None:
        """Composes without this from now on."""
        self._left_out.add(reason.leave_out)

    def compose(self, line: Line) -> Stages:
        """The stages for a line; their batch 0 is the first of the line."""
        feed, gpu, depth, count = self._feed, self._gpu, self._feed.depth, line.num_batches
        has_functions = feed.transform is not None or feed.decode is not None
        if feed.tier == "device":
            return self._on_device(line)
        if feed.tier == "ram":
            load_columns(line.view)
        if feed.processes == "auto" and has_functions:
            choose_way(feed, line)
        if feed.uses_processes:
            return self._in_processes(line)
        if feed.queue is not None:
            return self._in_queue(line)
        is_alone = gpu is None or has_functions or "groups" in self._left_out
        program = None if "core" in self._left_out else Program.of(line, 1 if is_alone else group_size(line, depth))
        workers = feed.workers if has_functions else 0
        ahead_by = max(depth, workers)  # every thread has a batch to make
        make = compose_make(line, feed, program, slots=ahead_by + 2, in_threads=has_functions)
        if program is not None and not has_functions:
            return self._in_core(program, make, count)
        final: Make[Any] = make
        if gpu is not None:
            assert self._convert is not None
            # Parcels that are ready or being made, on their way, and one in hand.
            final = ParcelMake(make, self._convert, gpu, slots=2 * ahead_by + 1)
        ahead: Ahead[Any] = (
            Threads(final, line, workers=workers, depth=ahead_by) if has_functions else InLine(final, count=count)
        )
        place = Host(ahead, self._convert) if gpu is None else Parcels(ahead, gpu, depth=depth)
        return Stages("transform" if has_functions else "numpy", make, ahead, place)

    def reads(self, line: Line) -> Line:
        """The line that says which rows are read from the store."""
        return line if self._feed.tier != "device" else self._residency(line).line(line)

    def _residency(self, line: Line) -> Residency:
        """The rows on the device: loaded once for all iterators of the feed."""
        feed = self._feed
        found: Residency = feed.residency or Residency(line.view, line.order, self._gpu, feed.device_bytes, line.start)
        feed.residency = found
        return found

    def _on_device(self, line: Line) -> Stages:
        """The GPU has the rows, and gathers batches itself."""
        feed, residency = self._feed, self._residency(line)
        group = 1 if "groups" in self._left_out else residency.group_size(line)
        program = None if "core" in self._left_out else Program.of(residency.line(line), group)
        if program is None:
            raise ConfigError(
                f"tier='device' cannot make batches of {line.view!r}: it needs the C core, a view that the core knows, no text "
                "columns, and few enough shards for their maps; take tier='ram'"
            )
        place = Resident(program, self._gpu, residency, count=line.num_batches, depth=feed.depth, workers=feed.fillers)
        return Stages("resident", ProgramMake(program, slots=1), place.ring, place)

    def _in_processes(self, line: Line) -> Stages:
        """Worker processes make the batches; the loop reads them where the workers wrote them."""
        feed, gpu = self._feed, self._gpu
        depth = max(feed.depth, feed.workers)  # every worker has a batch to make
        unpack = Layout.batch if gpu is None else partial(parcel_of, device=gpu.device)
        pool = feed.pool_of_workers(depth, gpu)
        ahead = Processes(
            pool, line, depth=depth, unpack=unpack, keeps_pool=self._keeps_workers,
            bytes_ahead=0 if gpu is None else 2 * GROUP_BYTES,
        )  # fmt: skip
        make = compose_make(line, feed, None, slots=1)  # it is asked only what it reports
        place = Host(ahead, self._convert) if gpu is None else Parcels(ahead, gpu, depth=max(depth, MAX_GROUP))
        return Stages("processes", make, ahead, place)

    def _in_queue(self, line: Line) -> Stages:
        """Workers on other machines make the batches; those that do not come in time are made here."""
        feed, gpu = self._feed, self._gpu
        program = None if "core" in self._left_out else Program.of(line)
        make = compose_make(line, feed, program, slots=3)
        final: Make[Any] = make
        if gpu is not None:
            assert self._convert is not None
            final = ParcelMake(make, self._convert, gpu, slots=2 * feed.depth + 1)
        record, link = Record.of(feed, line), link_of(feed, line)
        window = link.open_window(line, record.write(), feed.depth)
        unpack = Layout.batch if gpu is None else partial(parcel_of, device=gpu.device)
        slots = Slots(2 * feed.depth + 2, new_memory if gpu is None else gpu.host_memory)
        fetch = Fetch(link, window, record.stamp(link.run, window.attempt, line), unpack=unpack, slots=slots)
        ahead = Queued(link, window, final, fetch)
        place = Host(ahead, self._convert) if gpu is None else Parcels(ahead, gpu, depth=feed.depth)
        return Stages("queue", make, ahead, place)

    def _in_core(self, program: Program, make: Make[Batch], count: int | None) -> Stages:
        """The core makes whole batches; for a GPU it also queues their copies."""
        depth, workers = self._feed.depth, self._feed.fillers
        if self._gpu is not None:
            slots = DeviceSlots(program, self._gpu, count=count, depth=depth, workers=workers)
            return Stages("ring", make, slots.ring, slots)
        is_tiny = program.batch_bytes < IN_LINE_BYTES
        ring = CoreRing(program, count=count, depth=depth, workers=0 if is_tiny else workers)
        return Stages("in line" if is_tiny else "ring", make, ring, Host(ring, self._convert))
