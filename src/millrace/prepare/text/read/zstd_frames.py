"""Finds the frames of zstd files without inflating them, so that a large file is cut into slices.

This needs frames that state the size of their text. Whoever inflates a frame checks what its header
states. The members of gzip cannot be found this way.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator
from typing import IO

from millrace.prepare.files import InputFile

MAX_FRAME = 256 << 20  # a larger one ends the search: a file of one frame is not read from end to end
BEFORE = 8  # bytes of text before a slice in which the end of a document is searched
FRAME, SKIPPABLE = 0xFD2FB528, range(0x184D2A50, 0x184D2A60)
RAW_BLOCK, RLE_BLOCK, PACKED_BLOCK = range(3)


class _Unstated(Exception):
    """Only inflating could show where the frames are."""


def frame_slices(source: InputFile, part_bytes: int) -> list[tuple[int, int, tuple[int, int] | None]]:
    """(start, stop, where to begin) of slices of about ``part_bytes`` compressed bytes; none for one frame.

    Start and stop count bytes of the text, and -1 is its end. Inflating begins at (byte of the file, byte of the text).
    """
    packed, texts = [0], [0]
    try:
        with open(source.location, "rb", buffering=0) as file:
            for length, text in _frames(file, source.size):
                packed.append(packed[-1] + length)
                texts.append(texts[-1] + text)
    except (_Unstated, struct.error, IndexError):
        return []
    starts = [0]
    for k in range(1, len(packed) - 1):
        if packed[k] - packed[starts[-1]] >= part_bytes and texts[k] > texts[starts[-1]]:
            starts.append(k)
    slices: list[tuple[int, int, tuple[int, int] | None]] = []
    for number, k in enumerate(starts):
        stop = texts[starts[number + 1]] if number + 1 < len(starts) else -1
        before = max(0, bisect_right(texts, texts[k] - BEFORE) - 1)
        slices.append((texts[k], stop, (packed[before], texts[before]) if number else None))
    return slices if len(slices) > 1 else []


def _frames(file: IO[bytes], size: int) -> Iterator[tuple[int, int]]:
    """(bytes of the frame, bytes of its text) of each."""
    at = 0
    while at < size:
        magic, first = struct.unpack("<IB", _bytes(file, at, 5))
        if magic in SKIPPABLE:
            end, text = at + 8 + struct.unpack("<I", _bytes(file, at + 4, 4))[0], 0
        elif magic == FRAME:
            end, text = _frame(file, at, first)
        else:
            raise _Unstated
        if end > size or end - at > MAX_FRAME:
            raise _Unstated
        yield end - at, text
        at = end


def _frame(file: IO[bytes], at: int, descriptor: int) -> tuple[int, int]:
    """Where a frame ends, and how much text it holds."""
    is_single, has_checksum = descriptor >> 5 & 1, descriptor >> 2 & 1
    width = (is_single, 2, 4, 8)[descriptor >> 6]
    if not width:
        raise _Unstated
    place = at + 5 + (not is_single) + (0, 1, 2, 4)[descriptor & 3]
    text = int.from_bytes(_bytes(file, place, width), "little") + (256 if width == 2 else 0)
    end, is_last = place + width, 0
    while not is_last:
        header = int.from_bytes(_bytes(file, end, 3), "little")
        is_last, kind, length = header & 1, header >> 1 & 3, header >> 3
        if kind > PACKED_BLOCK or end - at > MAX_FRAME:
            raise _Unstated
        end += 3 + (1 if kind == RLE_BLOCK else length)
    return end + 4 * has_checksum, text


def _bytes(file: IO[bytes], at: int, count: int) -> bytes:
    file.seek(at)
    data = file.read(count)
    if len(data) != count:
        raise _Unstated
    return data
