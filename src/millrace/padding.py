"""Padding and cropping of ragged rows: by the C core, by numpy (its twin), or by torch on any device."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.native import core

_PADDED = 2  # the kind of field, numbered as in core.h


def fits(value: Any, values: Any) -> bool:
    """Whether whole numbers hold a value: those of 16 bits hold no 70,000, and none hold NaN or 0.5. Floats hold any."""
    bounds = _bounds(values)
    try:
        return bounds is None or (int(value) == value and bounds[0] <= value <= bounds[1])
    except (TypeError, ValueError, OverflowError):
        return False


def _bounds(values: Any) -> tuple[int, int] | None:
    """The least and the largest whole number of a type; None of floats, and of truths, which any number is."""
    if isinstance(values, np.ndarray):
        limits: Any = np.iinfo(values.dtype) if values.dtype.kind in "iu" else None
    else:
        import torch

        is_whole = not (values.is_floating_point() or values.is_complex() or values.dtype == torch.bool)
        limits = torch.iinfo(values.dtype) if is_whole else None
    return None if limits is None else (int(limits.min), int(limits.max))


def padded(values: Any, offsets: Any, value: Any, length: int | None) -> Any:
    """(items, length, ...) of ``values[offsets[i]:offsets[i + 1]]``, with ``value`` behind the last row of each."""
    lengths = offsets[1:] - offsets[:-1]
    if length is None:
        length = int(lengths.max()) if len(lengths) else 0
    if isinstance(values, np.ndarray):
        return _padded_array(values, offsets, value, length)
    if values.device.type == "cpu" and not values.requires_grad:
        array = _as_array(values)
        if array is not None:
            import torch

            return torch.from_numpy(_padded_array(array, offsets.numpy(), value, length))
    return _padded_tensor(values, offsets, value, length)


def _as_array(tensor: Any) -> Any:
    """The same memory as an array, or None: numpy has no bfloat16."""
    try:
        return tensor.numpy()
    except TypeError:
        return None


def _padded_array(values: Any, offsets: Any, value: Any, length: int) -> Any:
    count, tail = len(offsets) - 1, values.shape[1:]
    row_items = int(np.prod(tail, dtype=np.int64))
    if core is None or not length or not count or not row_items or values.dtype.kind not in "biufc":
        return numpy_padded(values, offsets, value, length)
    out = np.empty((count, length, *tail), values.dtype)
    column = core.Column(np.array([0, len(values)]), row_items * values.itemsize)
    column.give(0, np.ascontiguousarray(values))
    fill = np.array(value).astype(values.dtype).tobytes()
    field = ("rows", 0, _PADDED, 0, 0, 0, length, row_items, 1, values.itemsize, None, fill)
    bounds = np.ascontiguousarray(offsets, np.int64)
    core.Gather((column,), (field,)).fill(((bounds[:-1], bounds[1:], None),), None, 0, count, (out,), (None,), 1)
    return out


def numpy_padded(values: Any, offsets: Any, value: Any, length: int) -> Any:
    """The twin of the core's padding."""
    starts, counts = offsets[:-1], np.minimum(np.diff(offsets), length)
    out = np.full((len(counts), length, *values.shape[1:]), value, values.dtype)
    items, inside = np.nonzero(np.arange(length) < counts[:, None])
    out[items, inside] = values[starts[items] + inside]
    return out


def _padded_tensor(values: Any, offsets: Any, value: Any, length: int) -> Any:
    """On any device, without waiting for it once ``length`` is known; gradients go back to the values."""
    items, inside = item_of_rows(values, offsets)
    # One row more at the end takes what is cut.
    count = len(offsets) - 1
    places = (items * length + inside).masked_fill(inside >= length, count * length)
    out = values.new_full((count * length + 1, *values.shape[1:]), value)
    return out.index_put((places,), values)[:-1].view(count, length, *values.shape[1:])


def item_of_rows(values: Any, offsets: Any) -> tuple[Any, Any]:
    """The item that each row is of, and its place there."""
    rows = len(values)
    if isinstance(values, np.ndarray):
        items: Any = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        return items, np.arange(rows) - offsets[items]
    import torch

    numbers = torch.arange(len(offsets) - 1, device=values.device)
    items = torch.repeat_interleave(numbers, offsets[1:] - offsets[:-1], output_size=rows)
    return items, torch.arange(rows, device=values.device) - offsets[items]


def cropped(values: Any, offsets: Any, length: int, at: Any) -> tuple[Any, Any]:
    """Values and offsets of at most ``length`` rows of each item: the first (``at`` 0), the last (1), or between."""
    lengths: Any = offsets[1:] - offsets[:-1]
    kept: Any
    if isinstance(values, np.ndarray):
        kept = np.minimum(lengths, length)
        firsts: Any = np.minimum(np.floor(np.asarray(at) * (lengths - kept + 1)).astype(np.int64), lengths - kept)
        ends: Any = np.concatenate(([0], np.cumsum(kept)))
    else:
        import torch

        kept = lengths.clamp(max=length)
        share = torch.as_tensor(at, dtype=torch.float64, device=values.device)
        firsts = torch.minimum((share * (lengths - kept + 1)).floor().long(), lengths - kept)
        ends = torch.cat((kept.new_zeros(1), kept.cumsum(0)))
    items, inside = item_of_rows(values, offsets)
    inside = inside - firsts[items]
    return values[(inside >= 0) & (inside < kept[items])], ends
