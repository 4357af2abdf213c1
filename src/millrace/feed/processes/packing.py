"""A batch in a slot of shared memory: a worker packs it, the loop's process unpacks it as views.

A slot begins with a head (what the worker is doing), then the marks, then the columns, each aligned. A short JSON text
says where every column lies. Numbers lie there as they are; lists and text as JSON. Nothing is pickled.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.batch import MARKS, Batch, Marks, aligned
from millrace.ragged import Array, Ragged, is_numeric

HEAD_BYTES = 256
HEAD = struct.Struct("<qq")  # a stage of STAGES, and the row that is being decoded
STAGES = ("gather", "decode", "transform", "packing")
MAX_TEXT = 1 << 16  # it goes through a socket, as one message
ITEMS = ("list", "tuple", "text")  # kinds that lie as JSON
PLAIN = (str, int, float, bool, type(None))  # items of lists that JSON keeps as they are


class Part(NamedTuple):
    """One array of a packed batch."""

    kind: str  # "array", a tensor's dtype as "torch.float32", "list", "tuple" or "text" (an array of objects)
    dtype: str
    shape: tuple[int, ...]
    begin: int


class Places(NamedTuple):
    """Where the marks and columns of a batch lie: the same for all batches with the same columns."""

    size: int
    columns: list[tuple[str, Any, tuple[int, ...]] | None]  # name, dtype and shape; None for what is not a plain array
    begins: list[int]
    num_bytes: int
    text: bytes


class Packed:
    """The columns of a batch as arrays with their places: what ``write`` copies into a slot."""

    def __init__(self, batch: Batch, like: Places | None = None) -> None:
        """``like`` are the places of another batch, which are also those of this one if its columns are alike."""
        marks = Marks.of(batch)
        self._arrays: list[Array] = [np.frombuffer(marks.memory, np.uint8)]
        plain = [
            (name, value.dtype, value.shape) if type(value) is np.ndarray and value.dtype != object else None
            for name, value in dict.items(batch)
        ]
        if like is not None and None not in plain and (marks.size, plain) == like[:2]:
            self.places = like
            self._arrays += dict.values(batch)
            return
        self._begins, self._end = [HEAD_BYTES], HEAD_BYTES + aligned(len(marks.memory))
        self._offsets: dict[int, Any] = {}  # by object: columns of one axis share theirs
        columns = {name: self._describe(name, value) for name, value in dict.items(batch)}
        text = _text(marks.size, tuple(columns.items()))
        if len(text) > MAX_TEXT:
            raise ConfigError(f"{len(columns):,} columns are too many for processes; return fewer, or use threads")
        self.places = Places(marks.size, plain, self._begins, self._end, text)

    @property
    def num_bytes(self) -> int:
        return self.places.num_bytes

    @property
    def text(self) -> bytes:
        return self.places.text

    def _place(self, array: Array) -> int:
        begin = self._end
        self._begins.append(begin)
        self._arrays.append(array)
        self._end += aligned(array.nbytes)
        return begin

    def _describe(self, name: str, value: Any) -> Any:
        if isinstance(value, Ragged):
            rows, key = self._describe(name, value.values), id(value.offsets)
            if key not in self._offsets:
                self._offsets[key] = self._describe(name, value.offsets)
            return rows, self._offsets[key]
        if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
            return self._describe_items(name, value)
        kind = "array"
        if hasattr(value, "detach"):  # a tensor
            kind, value = str(value.dtype), _tensor_array(name, value)
        elif not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise _unsendable(name, type(value).__name__)
        if value.dtype.kind not in "biufcmMSU":
            raise _unsendable(name, f"an array of {value.dtype}")
        return Part(kind, value.dtype.str, value.shape, self._place(value))

    def _describe_items(self, name: str, value: Any) -> Part:
        is_array = isinstance(value, np.ndarray)
        items = value.ravel().tolist() if is_array else list(value)
        if not all(type(item) in PLAIN for item in items):
            raise _unsendable(name, f"{type(value).__name__} of objects")
        kind = "text" if is_array else "tuple" if isinstance(value, tuple) else "list"
        data = np.frombuffer(json.dumps(items).encode(), np.uint8)
        return Part(kind, str(len(data)), value.shape if is_array else (len(items),), self._place(data))

    def write(self, memory: Array, targets: dict[bytes, list[Array]] | None = None) -> None:
        """``targets`` keeps the places in this memory, for batches that lie alike."""
        known = None if targets is None else targets.get(self.text)
        if known is None:
            each = zip(self.places.begins, self._arrays, strict=True)
            known = [np.ndarray(array.shape, array.dtype, memory.data, begin) for begin, array in each]
            if targets is not None:
                targets.clear()
                targets[self.text] = known
        for target, array in zip(known, self._arrays, strict=True):
            np.copyto(target, array)


@lru_cache(maxsize=256)
def _text(size: int, columns: tuple[Any, ...]) -> bytes:
    """Where the columns lie, as JSON: the same for most batches."""
    return json.dumps([size, dict(columns)], separators=(",", ":")).encode()


def _tensor_array(name: str, tensor: Any) -> Array:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:  # more than numbers, or none
        form = str(tensor.dtype if tensor.is_quantized else tensor.layout).removeprefix("torch.")
        raise _unsendable(name, f"a tensor {'without data' if tensor.is_meta else f'of {form}'}")
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    try:
        return tensor.numpy()  # type: ignore[no-any-return]
    except TypeError:  # numpy has no bfloat16
        return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16).numpy()  # type: ignore[no-any-return]


def _unsendable(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"column {name!r} is {what}; processes send arrays and tensors of numbers, Ragged, and lists of plain values: "
        "return one of these, or use threads (processes=False)"
    )


class Layout:
    """Where the columns of a packed batch lie, read from its text."""

    def __init__(self, text: bytes) -> None:
        self.size, columns = json.loads(text)
        self._marks_end = HEAD_BYTES + sum(aligned(self.size * dtype.itemsize) for dtype in MARKS.values())
        self._columns = {name: _parts(entry) for name, entry in columns.items()}

    @property
    def arrays(self) -> dict[str, Part] | None:
        """Its columns, if each is one array of numbers or text."""
        plain = {name: part for name, part in self._columns.items() if isinstance(part, Part)}
        is_plain = len(plain) == len(self._columns) and not any(part.kind in ITEMS for part in plain.values())
        return plain if is_plain else None

    def marks(self, memory: Array) -> Marks:
        """A copy: it may outlive the slot."""
        return Marks(memory[HEAD_BYTES : self._marks_end].tobytes(), self.size, self.size)

    def columns(self, memory: Array, view: Callable[[Array, Part], Any]) -> dict[str, Any]:
        """Every column, by ``view`` of each of its parts that is numbers."""
        offsets: dict[int, Any] = {}
        return {name: _column(memory, part, view, offsets) for name, part in self._columns.items()}

    def batch(self, memory: Array) -> Batch:
        """The batch in a slot, as views of it."""
        return Batch(self.columns(memory, array_view), marks=self.marks(memory))


def _column(memory: Array, part: Any, view: Callable[[Array, Part], Any], offsets: dict[int, Any]) -> Any:
    """``offsets`` are those that columns before it have, by their place."""
    if isinstance(part, list):
        rows, edges = part
        if edges.begin not in offsets:
            offsets[edges.begin] = view(memory, edges)
        return Ragged.trusted(_column(memory, rows, view, offsets), offsets[edges.begin])
    return _items(memory, part) if part.kind in ITEMS else view(memory, part)


def _parts(entry: Any) -> Any:
    if isinstance(entry[0], list):
        return [_parts(part) for part in entry]
    kind, dtype, shape, begin = entry
    return Part(kind, dtype, tuple(shape), begin)


def num_bytes(part: Part) -> int:
    return math.prod(part.shape) * np.dtype(part.dtype).itemsize


def array_view(memory: Array, part: Part) -> Any:
    """A part as an array over its slot, or as the tensor that the worker sent."""
    if part.kind == "array":
        return np.ndarray(part.shape, part.dtype, memory, part.begin)
    import torch

    array = memory[part.begin : part.begin + num_bytes(part)]
    return torch.from_numpy(array).view(tensor_dtype(part.kind, part.dtype)).reshape(part.shape)


@lru_cache
def tensor_dtype(kind: str, dtype: str) -> Any:
    """What a part is as a tensor; None for text and times."""
    import torch

    if kind != "array":
        return getattr(torch, kind.removeprefix("torch."))
    empty = np.empty(0, dtype)
    return torch.from_numpy(empty).dtype if is_numeric(empty) else None


def _items(memory: Array, part: Part) -> Any:
    items = json.loads(memory[part.begin : part.begin + int(part.dtype)].tobytes())
    if part.kind == "text":
        array = np.empty(len(items), object)
        array[:] = items
        return array.reshape(part.shape)
    return items if part.kind == "list" else tuple(items)
