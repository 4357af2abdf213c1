"""Where the marks and columns of a batch lie in a slot, on the host or on a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from millrace.feed.batch import MARKS, Batch, Marks, aligned
from millrace.gather.gather import Field
from millrace.ragged import Ragged

Views: TypeAlias = tuple[Any, list[tuple[str, Field | None, Any]]]  # of arrays, or of tensors


class SlotLayout:
    """Where the marks and fields of a batch of ``size`` samples lie in a slot.

    The offsets of ragged fields lie among the other fields, once for all fields of an axis. Their values follow at the
    end, field after field. ``parts`` are the fields of each view of a Concat: their axes may differ.
    """

    def __init__(self, fields: tuple[Field, ...], size: int, parts: Sequence[tuple[Field, ...]] = ()) -> None:
        self.fields, self.size = fields, size
        self.has_ragged = any(is_ragged(field) for field in fields)
        self._end = 0
        self.marks = tuple(self._reserve(size * dtype.itemsize) for dtype in MARKS.values())
        self._marks_bytes = self._end
        starts: list[int] = []
        axes: dict[Any, int] = {}
        for number, field in enumerate(fields):
            axis = tuple(own[number].axis for own in (fields, *parts)) if is_ragged(field) else number
            if axis not in axes:
                axes[axis] = self._reserve(self.num_bytes(field))
            starts.append(axes[axis])
        self.starts = tuple(starts)
        self.fixed_bytes = self._end
        self._places = [self._place(field, start) for field, start in zip(fields, self.starts, strict=True)]

    def _place(self, field: Field, start: int) -> tuple[Field, slice, np.dtype[Any], tuple[int, ...]]:
        """Where a field lies, its type and its shape: asked for every batch."""
        where = slice(start, start + self.num_bytes(field))
        if is_ragged(field):
            return field, where, np.dtype(np.int64), (self.size + 1,)
        return field, where, field.dtype, (self.size, *(n or 0 for n in field.shape))

    def _reserve(self, num_bytes: int) -> int:
        start = self._end
        self._end += aligned(num_bytes)
        return start

    def num_bytes(self, field: Field) -> int:
        """Bytes of a field in a slot, without ragged values."""
        if is_ragged(field):
            return (self.size + 1) * 8
        return int(np.prod([n or 0 for n in field.shape], dtype=np.int64)) * self.size * field.dtype.itemsize

    def views(self, memory: Any, dtype_of: Callable[[np.dtype[Any]], Any] = np.dtype) -> Views:
        """All marks, and (name, field if ragged, array) of every field, as views of a slot's memory.

        Ragged values are left out. The memory is an array, or a tensor if ``dtype_of`` gives tensor types.
        """
        fields = [
            (
                field.name,
                field if self.has_ragged and is_ragged(field) else None,
                memory[where].view(dtype_of(dtype)).reshape(shape),
            )
            for field, where, dtype, shape in self._places
        ]
        return memory[: self._marks_bytes], fields

    def add_ragged(self, values: dict[str, Any], views: Views, memory: Any, dtype_of: Any = np.dtype) -> None:
        """Replaces the offsets among ``values`` by ragged columns; ``views`` are those on the host."""
        end = self.fixed_bytes
        shared: dict[int, Any] = {}
        for (name, field, offsets), start in zip(views[1], self.starts, strict=True):
            if field is not None:
                rows = int(offsets[-1])
                num_bytes = rows * row_bytes(field)
                part = memory[end : end + num_bytes].view(dtype_of(field.dtype)).reshape(rows, *field.tail)
                values[name] = Ragged.trusted(part, shared.setdefault(start, values[name]))
                end += aligned(num_bytes)

    def batch(self, views: Views, memory: Any) -> Batch:
        """The batch in a slot: new views, and a copy of its marks, which may outlive the slot."""
        values = {name: array[:] for name, _, array in views[1]}
        if self.has_ragged:
            self.add_ragged(values, views, memory)
        return Batch(values, marks=Marks(views[0].tobytes(), self.size, self.size))


def torch_dtype(dtype: np.dtype[Any]) -> Any:
    import torch

    return torch.from_numpy(np.empty(0, dtype)).dtype


def is_ragged(field: Field) -> bool:
    return field.axis is not None and field.length is None and field.pad is None


def row_bytes(field: Field) -> int:
    return int(np.prod(field.tail, dtype=np.int64)) * field.dtype.itemsize
