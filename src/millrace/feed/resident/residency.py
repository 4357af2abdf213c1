"""Residency: the rows of a view that lie on a device, for a feed and the iterators it makes."""

from __future__ import annotations

import math
import threading
import weakref
from dataclasses import replace
from typing import Any

from millrace.errors import ConfigError
from millrace.feed.line import Line
from millrace.feed.make.slot_layout import is_ragged
from millrace.feed.resident.columns import ADVICE, Table, choose_rows, tables_of
from millrace.feed.resident.gather import Gatherer
from millrace.feed.resident.twin import twin_of
from millrace.order.orders import Order
from millrace.view.view import View

CHUNK_BYTES = 32 << 20  # of pinned memory, through which columns are copied
SPARE_BYTES = 256 << 20  # of the device, for the groups of batches
GROUP_BYTES = 64 << 20  # of the batches that are gathered together
STREAMED_BYTES = 16 << 20  # where rows come along with them: they lie in slots
MAX_GROUP = 32  # whoever keeps a column keeps those of its group

_lock = threading.Lock()
_known: weakref.WeakValueDictionary[Any, Held] = weakref.WeakValueDictionary()


class Held:
    """The rows of one table on a device, as integers of the same size. Feeds of the same rows share it."""

    def __init__(self, gpu: Any, table: Table) -> None:
        self.columns = table.columns  # their tiers stay, and so does the key
        self.rows = _load(gpu, table)
        self.streams = {gpu.current()}  # that torch's allocator knows to use them


def _hold(gpu: Any, tables: list[Table], limit: int | None) -> list[Held]:
    """The rows of each table, loaded where they are not on the device yet."""
    keys = [(str(gpu.device), tuple((own.key, own.num_held) for own in table.columns)) for table in tables]
    with _lock:
        found = [_known.get(key) for key in keys]
        _check_room(gpu, sum(t.held_bytes for t, known in zip(tables, found, strict=True) if known is None), limit)
        for k, table in enumerate(tables):
            if found[k] is None:
                found[k] = _known[keys[k]] = Held(gpu, table)
        return [held for held in found if held is not None]


def _load(gpu: Any, table: Table) -> Any:
    """Copies the first rows of each column to the device, chunk by chunk through pinned memory."""
    import torch

    column = table.columns[0]
    bits = getattr(torch, f"int{8 * column.stored.dtype.itemsize}")
    try:
        rows = torch.empty((table.num_held, column.row_items), dtype=bits, device=gpu.device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"tier='device': no {table.held_bytes:,} bytes in one piece on the GPU; {ADVICE}") from error
    if not table.num_held:
        return rows
    step = max(1, CHUNK_BYTES // max(column.row_bytes, 1))
    memory = gpu.host_memory(min(step, table.num_held) * column.row_bytes)
    base = 0
    for column in table.columns:
        for first in range(0, column.num_held, step):
            last = min(first + step, column.num_held)
            chunk = memory[: (last - first) * column.row_bytes].view(column.stored.dtype)
            chunk.reshape(last - first, *column.stored.shape[1:])[...] = column.stored[first:last]
            rows[base + first : base + last].copy_(
                torch.from_numpy(chunk.view(f"i{column.stored.dtype.itemsize}")).reshape(last - first, -1)
            )
        base += column.num_held
    return rows


class Residency:
    """Which rows of a view lie on a device, those rows, and what is gathered from them."""

    def __init__(self, view: View, order: Order, gpu: Any, limit: int | None, position: int) -> None:
        self._view = view
        self.tables = tables_of(view)
        choose_rows(self.tables, limit, view, order, position)
        self.num_bytes = sum(table.num_bytes for table in self.tables)
        self.held_bytes = sum(table.held_bytes for table in self.tables)
        self.held = _hold(gpu, self.tables, limit)
        self.twin = twin_of(view, self.tables)

    def line(self, line: Line) -> Line:
        """The line whose batches say where the rows are."""
        return replace(line, view=self.twin)

    def group_size(self, line: Line) -> int:
        """How many batches are gathered together, so that they share the launches of kernels."""
        is_whole = all(table.is_whole for table in self.tables)
        most = (GROUP_BYTES if is_whole else STREAMED_BYTES) // max(_batch_bytes(self._view, line.size), 1)
        most = max(1, min(most, MAX_GROUP))
        return most if line.num_batches is None else max(1, min(most, line.num_batches))

    def gatherer(self, size: int) -> Gatherer:
        return Gatherer(self._view.fields, self.tables, [held.rows for held in self.held], size)


def _check_room(gpu: Any, needed: int, limit: int | None) -> None:
    free = gpu.free_memory() - SPARE_BYTES
    if needed > free:
        asked = "" if limit is None else f"device_bytes={limit:,}: "
        raise ConfigError(
            f"{asked}tier='device' needs {needed:,} bytes on the GPU for the rows of this view, and {max(free, 0):,} are free "
            f"beside {SPARE_BYTES:,} for batches; {ADVICE}"
        )


def _batch_bytes(view: View, size: int) -> int:
    """Of a batch as it is delivered; of ragged columns about."""
    total = 0
    for field in view.fields:
        rows = 1
        if is_ragged(field):
            rows = -(-len(view.store.columns[field.column]) // max(view.store.num_records, 1))
        total += math.prod(n or rows for n in field.shape) * field.dtype.itemsize
    return total * size
