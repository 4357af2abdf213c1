"""Gathers batches on a device: places of rows -> columns, for a group of batches by a few kernels.

Numbers lie on the device as they are stored, under integer types of their size: torch gathers those, and widens them by
integer arithmetic, so that every bit is that of the gather in numpy. The twin to compare with is the feed on the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.batch import ALIGN
from millrace.feed.make.slot_layout import is_ragged, torch_dtype
from millrace.feed.resident.columns import Table
from millrace.feed.resident.twin import length_name, rest_name, start_name
from millrace.gather.gather import Field
from millrace.gather.rows import neighbours
from millrace.ragged import Array, Ragged

MASKS = {"u1": 0xFF, "u2": 0xFFFF, "u4": 0xFFFFFFFF}


class Gatherer:
    """The columns of a view from the rows that ``held`` has of each table, and those that came with a group."""

    def __init__(self, fields: Sequence[Field], tables: Sequence[Table], held: Sequence[Any], size: int) -> None:
        self._fields, self._tables, self._held, self._size = fields, tables, held, size

    def batches(
        self, places: Mapping[str, Any], host: Mapping[str, Array], count: int
    ) -> tuple[list[dict[str, Any]], int]:
        """``count`` batches of a slot whose columns are ``places``, and how many of their samples had rows that were not held.

        ``host`` has the lengths and the offsets of the slot on the host, so that nothing waits for the device.
        """
        import torch

        total, missed = count * self._size, np.zeros(0, bool)
        groups: dict[str, list[Any]] = {}
        with torch.inference_mode(False), torch.no_grad():
            for k, table in enumerate(self._tables):
                rows = _Rows(k, table, self._held[k], places, host, total)
                missed = rows.missed if not len(missed) else missed | rows.missed
                for field in table.fields:
                    groups[field.name] = self._column(rows, field, count)
            for field in self._fields:
                if field.name not in groups:
                    groups[field.name] = _split(places[field.name][:total], count)
        names = [field.name for field in self._fields]
        return [{name: groups[name][k] for name in names} for k in range(count)], int(missed.sum())

    def _column(self, rows: _Rows, field: Field, count: int) -> list[Any]:
        if is_ragged(field):
            return rows.ragged(field, count)
        stored = rows.dense(field) if field.length is not None else rows.padded(field)
        values = rows.delivered(stored, field)
        if field.fill is not None:
            values = rows.filled(values, field)
        return _split(values.reshape(-1, *(n or 0 for n in field.shape)), count)


class _Rows:
    """The rows of one table for the samples of a group."""

    def __init__(
        self, number: int, table: Table, held: Any, places: Mapping[str, Any], host: Mapping[str, Array], total: int
    ) -> None:
        self._held, self._dtype, self._total = held, table.columns[0].stored.dtype, total
        self._tail = tuple(table.columns[0].stored.shape[1:])
        self._starts = places[start_name(number)][:total]
        self._lengths = places[length_name(number)][:total] if length_name(number) in places else None
        self._host_lengths = host.get(length_name(number))
        self._rest: Any = None  # rows that came along, where there are any
        self.missed = np.zeros(total, bool)
        if (name := rest_name(number)) in places:
            self.missed = np.diff(host[name][: total + 1]) > 0
            if self.missed.any():
                self._rest = places[name].values.view(held.dtype).reshape(-1, held.shape[1])
                self._rest_starts = places[name].offsets[:total]
                self._is_missed = places[name].offsets[: total + 1].diff() > 0

    def _either(self, gather: Any, is_missed: Any = None) -> Any:
        """What ``gather(rows, starts)`` finds among the rows that are held, or for some samples among those that came."""
        import torch

        if self._rest is None:
            return gather(self._held, self._starts)
        came = gather(self._rest, self._rest_starts)
        if self.missed.all() or not len(self._held):
            return came
        there = gather(self._held, self._starts)
        which = self._is_missed if is_missed is None else is_missed
        return torch.where(which.reshape(-1, *[1] * (there.ndim - 1)), came, there)

    def dense(self, field: Field) -> Any:
        """Rows ``first .. first + length`` of each span: runs of rows as one strided view, of which samples are chosen."""
        length, width = field.length or 0, self._held.shape[1]
        items = _run(field) if len(self._tail) <= 1 else None
        begin, stop = items or (0, width)

        def gather(rows: Any, starts: Any) -> Any:
            count = len(rows) - field.first - length + 1
            if count < 1:  # then no sample has its rows here
                return rows.new_zeros((len(starts), length, stop - begin))
            first = rows.storage_offset() + field.first * width + begin
            runs = rows.as_strided((count, length, stop - begin), (width, width, 1), first)
            return runs.index_select(0, starts if self._rest is None else starts.clamp(0, count - 1))

        return self._either(gather)

    def padded(self, field: Field) -> Any:
        import torch

        assert self._lengths is not None
        places = torch.arange(field.pad or 0, device=self._starts.device)

        def gather(rows: Any, starts: Any) -> Any:
            if not len(rows):
                return rows.new_zeros((len(starts), len(places), rows.shape[1]))
            wanted = (starts[:, None] + places).clamp(0, len(rows) - 1)
            return rows.index_select(0, wanted.reshape(-1)).reshape(len(starts), len(places), -1)

        found = self._either(gather)
        return found.masked_fill((places >= self._lengths[:, None])[..., None], 0)

    def filled(self, values: Any, field: Field) -> Any:
        """Padded rows as they are delivered, with the bits of ``fill`` behind the rows of each sample."""
        import torch

        assert self._lengths is not None
        is_behind = torch.arange(field.pad or 0, device=values.device) >= self._lengths[:, None]
        bits = values.view(getattr(torch, f"int{8 * field.dtype.itemsize}"))
        fill = np.array(field.fill, field.dtype).view(f"i{field.dtype.itemsize}").item()
        is_behind = is_behind.reshape(*is_behind.shape, *[1] * (bits.ndim - 2))
        return bits.masked_fill(is_behind, fill).view(values.dtype)

    def ragged(self, field: Field, count: int) -> list[Any]:
        """The values of each batch and their offsets; the host knows how many there are."""
        import torch

        assert self._lengths is not None
        assert self._host_lengths is not None
        lengths, size = self._lengths, self._total // count
        sums = self._host_lengths[: self._total].reshape(count, size).sum(axis=1).tolist()
        total, device = sum(sums), lengths.device
        ends = lengths.cumsum(0)
        samples = torch.arange(self._total, device=device).repeat_interleave(lengths, output_size=total)
        inside = torch.arange(total, device=device) - (ends - lengths)[samples]

        def gather(rows: Any, starts: Any) -> Any:
            if not len(rows):
                return rows.new_zeros((total, rows.shape[1]))
            wanted = starts[samples] + inside
            return rows.index_select(0, wanted if self._rest is None else wanted.clamp(0, len(rows) - 1))

        stored = self._either(gather, self._is_missed[samples] if self._rest is not None else None)
        values = self.delivered(stored, field).reshape(-1, *field.tail)
        starts = (ends - lengths).reshape(count, size)
        offsets = torch.cat((starts, ends.reshape(count, size)[:, -1:]), 1) - starts[:, :1]
        parts = values.split(sums)
        if count > 1:
            parts = [part.clone() for part in parts]
        return [Ragged.trusted(part, own.clone()) for part, own in zip(parts, offsets, strict=True)]

    def delivered(self, stored: Any, field: Field) -> Any:
        """Stored values as they are delivered: chosen items, bits as floats, wider integers."""
        if field.items is not None and (len(self._tail) > 1 or field.length is None or _run(field) is None):
            stored = stored.reshape(*stored.shape[:-1], *self._tail) if self._tail else stored
            stored = stored[..., list(field.items)]
        return _widened(stored, self._dtype, field)


def _run(field: Field) -> tuple[int, int] | None:
    """[first, last) of the items where they are neighbours."""
    return None if field.items is None else neighbours(field.items)


def _widened(bits: Any, stored: np.dtype[Any], field: Field) -> Any:
    import torch

    if field.is_bits:
        return (bits.to(torch.int32) << 16).view(torch.float32)
    if stored == field.dtype or (stored == np.uint64 and field.dtype == np.int64):
        return bits.contiguous().view(torch_dtype(field.dtype))
    if field.dtype == np.int64 and stored.kind in "iu":
        wide = bits.to(torch.int64)
        return wide & MASKS[stored.str[1:]] if stored.kind == "u" else wide
    if stored == np.float16 and field.dtype == np.float32:
        return _wide_half(bits)
    raise ConfigError(f"tier='device' cannot deliver {stored} as {field.dtype} for {field.name!r}; take tier='ram'")


def _wide_half(bits: Any) -> Any:
    """float16 as float32 by integer arithmetic: a GPU's own conversion changes the bits of NaNs."""
    import torch

    bits = bits.to(torch.int32)
    rest, sign = bits & 0x7FFF, (bits & 0x8000) << 16
    normal = (rest << 13) + (112 << 23)
    small = (rest.to(torch.float32) * 2.0**-24).view(torch.int32)
    wide = torch.where(rest >= 0x7C00, normal + (112 << 23), normal)
    return (torch.where(rest < 0x400, small, wide) | sign).view(torch.float32)


def _split(group: Any, count: int) -> list[Any]:
    """Each batch of a group. Every column starts at an aligned address, as it does alone: a kernel may depend on it."""
    parts = group.reshape(count, -1, *group.shape[1:]).unbind(0)
    own_bytes = parts[0].numel() * parts[0].element_size()
    is_aligned = count == 1 or own_bytes % ALIGN == 0
    return list(parts) if is_aligned else [part.clone() for part in parts]
