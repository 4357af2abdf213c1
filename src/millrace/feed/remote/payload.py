"""A batch as bytes: a fixed head that says what it is, the packed batch, and the text that says where columns lie.

Whoever reads one trusts nothing: every number is checked before it is used, and nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import re
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash

from millrace.distribution import install_command
from millrace.errors import ConfigError, QueueError
from millrace.feed.batch import MARKS, Batch, aligned, check_names
from millrace.feed.processes.packing import HEAD_BYTES, MAX_TEXT, Layout, Packed
from millrace.queues.protocol import MAX_PAYLOAD
from millrace.ragged import Array, Int64s

MAGIC, VERSION = b"MILLRACE", 1
PREFIX = struct.Struct(
    "<8sI16s40s16s16s16s16sqq"
)  # magic, version, run, attempt, store, view, order, functions, first, count
SIZES = struct.Struct("<IIQ")  # flags, bytes of the text, bytes of the packed batch
CHECKSUM = PREFIX.size + SIZES.size  # where it lies: 16 bytes, over all else
ZSTD = 1
FIELDS = (
    "magic",
    "version",
    "run",
    "attempt",
    "store",
    "view",
    "order",
    "transform, decode or seed",
    "first position",
    "count",
)
DTYPE = re.compile(r"[<>|][biufcSU][1-9]\d{0,5}|[<>][mM]8(\[\d{0,6}[A-Za-z]{1,2}\])?")
assert CHECKSUM + 16 <= HEAD_BYTES


class PayloadRefused(QueueError):
    """These bytes are not the batch that was asked for."""


class Stamp(NamedTuple):
    """What every payload of a line belongs to."""

    run: str
    attempt: str
    store: str
    view: str
    order: str
    functions: str

    def prefix(self, first: int, count: int) -> bytes:
        run, store, view, order, functions = map(
            bytes.fromhex, (self.run, self.store, self.view, self.order, self.functions)
        )
        return PREFIX.pack(MAGIC, VERSION, run, self.attempt.encode(), store, view, order, functions, first, count)


def pack(batch: Batch, stamp: Stamp, first: int, buffer: Callable[[int], Array], *, compress: bool = False) -> Any:
    """The payload of a batch, in ``buffer(num_bytes)`` unless it is compressed."""
    packed = Packed(batch)
    total = packed.num_bytes + len(packed.text)
    if total > MAX_PAYLOAD:
        raise ConfigError(
            f"a batch of {total:,} bytes is too large for a queue, which takes {MAX_PAYLOAD:,}; lower batch"
        )
    memory = buffer(total)
    memory[:] = 0  # also between columns: equal batches have equal bytes
    packed.write(memory)
    memory[packed.num_bytes :] = np.frombuffer(packed.text, np.uint8)
    sizes = SIZES.pack(ZSTD if compress else 0, len(packed.text), packed.num_bytes)
    head = stamp.prefix(first, batch.num_samples) + sizes
    body: Any = memory[HEAD_BYTES:]
    if compress:
        body = _zstd().compress(body, level=1)
    head += _checksum(head, body)
    memory[: len(head)] = np.frombuffer(head, np.uint8)
    return bytes(memory[:HEAD_BYTES]) + body if compress else memory


def unpack(payload: Array, prefix: bytes, new_memory: Callable[[int], Array]) -> tuple[bytes, Array]:
    """The text and the packed batch, checked; a compressed one is unpacked into ``new_memory(num_bytes)``."""
    if len(payload) < HEAD_BYTES:
        raise PayloadRefused(f"a payload of {len(payload)} bytes is shorter than its head")
    head = payload[: CHECKSUM + 16].tobytes()
    if not head.startswith(prefix):
        fields = zip(FIELDS, PREFIX.unpack(prefix), PREFIX.unpack_from(head), strict=True)
        wrong = [name for name, own, found in fields if own != found]
        raise PayloadRefused(f"a payload has another {', '.join(wrong)}")
    flags, text_bytes, num_bytes = SIZES.unpack_from(head, PREFIX.size)
    total = num_bytes + text_bytes
    if flags not in (0, ZSTD) or not HEAD_BYTES <= num_bytes <= total <= MAX_PAYLOAD or text_bytes > MAX_TEXT:
        raise PayloadRefused(f"a payload declares {num_bytes:,} and {text_bytes:,} bytes")
    if _checksum(head[:CHECKSUM], payload[HEAD_BYTES:]) != head[CHECKSUM:]:
        raise PayloadRefused("the checksum of a payload is wrong")
    if flags == ZSTD:
        payload = _decompressed(payload, total, new_memory)
    if len(payload) != total:
        raise PayloadRefused(f"a payload has {len(payload):,} bytes, and declares {total:,}")
    text, count = payload[num_bytes:].tobytes(), PREFIX.unpack(prefix)[-1]
    try:
        _check_text(text, payload[:num_bytes], count)
    except (ValueError, TypeError, RecursionError, OverflowError, AttributeError, LookupError) as error:
        raise PayloadRefused(f"the text of a payload is wrong: {error}") from error
    return text, payload[:num_bytes]


def check_marks(packed: Array, positions: Int64s) -> None:
    """Refuses a packed batch whose rows are of other positions, or which marks others as padding (-1)."""
    size, begin = len(positions), HEAD_BYTES
    marks = []
    for dtype in MARKS.values():
        marks.append(packed[begin : begin + size * dtype.itemsize].view(dtype))
        begin += aligned(size * dtype.itemsize)
    is_real = positions >= 0
    if not all(map(np.array_equal, marks, (positions, np.where(is_real, marks[1], -1), is_real))):
        raise PayloadRefused("a payload marks other rows as padding, or has other positions")


def _checksum(head: bytes, body: Any) -> bytes:
    state = xxhash.xxh3_128(head)
    state.update(body)
    return state.digest()


def _decompressed(payload: Array, total: int, new_memory: Callable[[int], Array]) -> Array:
    zstd = _zstd()
    reader = zstd.ZstdDecompressor()
    try:
        body = reader.decompress(payload[HEAD_BYTES:], max_length=total - HEAD_BYTES)
    except zstd.ZstdError as error:
        raise PayloadRefused(f"a payload cannot be decompressed: {error}") from error
    if not reader.eof or len(body) != total - HEAD_BYTES:
        raise PayloadRefused("a payload is compressed from another size than it declares")
    memory = new_memory(total)
    memory[HEAD_BYTES:] = np.frombuffer(body, np.uint8)
    return memory


def _zstd() -> Any:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError as error:
        raise ConfigError(f"compress=1 needs backports.zstd; {install_command('redis')}") from error
    return zstd


def _check_text(text: bytes, memory: Array, count: int) -> None:
    size, columns = json.loads(text)
    if type(size) is not int or size != count:
        raise ValueError(f"it is of {size} samples, not {count}")
    if HEAD_BYTES + sum(aligned(count * dtype.itemsize) for dtype in MARKS.values()) > len(memory):
        raise ValueError("its marks do not fit")
    check_names(list(columns))
    for entry in columns.values():
        if isinstance(entry[0], list):
            values, offsets = entry
            _check_ragged(values, offsets, memory, count)
        elif _checked_shape(entry, memory)[0] != count:
            raise ValueError(f"a column has {entry[2]} rows")


def _check_ragged(values: Any, offsets: Any, memory: Array, count: int) -> None:
    rows = _checked_shape(values, memory)[0]
    if (
        _checked_shape(offsets, memory) != (count + 1,)
        or offsets[1] != "<i8"
        or offsets[0] not in ("array", "torch.int64")
    ):
        raise ValueError("the offsets of a ragged column are no offsets")
    numbers = memory[offsets[3] : offsets[3] + 8 * (count + 1)].view("<i8")
    if numbers[0] != 0 or numbers[-1] != rows or np.any(numbers[1:] < numbers[:-1]):
        raise ValueError("the offsets of a ragged column are not in order")


def _checked_shape(part: Any, memory: Array) -> tuple[int, ...]:
    """The shape of a part that lies inside the memory."""
    kind, dtype, shape, begin = part
    if not shape or not all(type(n) is int and 0 <= n <= len(memory) for n in (*shape, begin)) or begin < HEAD_BYTES:
        raise ValueError(f"a part has shape {str(shape)[:80]} at {str(begin)[:20]}")
    if kind in ("list", "tuple", "text"):
        num_bytes = int(dtype)
        items = json.loads(memory[begin : begin + num_bytes].tobytes())
        if type(items) is not list or len(items) != math.prod(shape):
            raise ValueError("a list has another length than it declares")
    else:
        if DTYPE.fullmatch(dtype) is None or not (kind == "array" or _is_tensor(kind)):
            raise ValueError(f"a part is {str(kind)[:40]} of {str(dtype)[:40]}")
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    if not 0 <= num_bytes <= len(memory) - begin:
        raise ValueError(f"a part of {num_bytes:,} bytes does not fit")
    return tuple(shape)


def _is_tensor(kind: str) -> bool:
    if not kind.startswith("torch."):
        return False
    import torch

    return isinstance(getattr(torch, kind.removeprefix("torch."), None), torch.dtype)


def layout_of(text: bytes, known: dict[bytes, Layout], most: int = 64) -> Layout:
    """The layout of a text; few differ, except those of ragged batches."""
    layout = known.get(text)
    if layout is None:
        if len(known) >= most:
            known.clear()
        layout = known[text] = Layout(text)
    return layout
