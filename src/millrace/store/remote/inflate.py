"""Inflater: a compressed file as it arrives, as plain bytes; download.py checks those against the store's hashes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from millrace.errors import StoreCorrupt
from millrace.store.codec import Codec
from millrace.store.compressed import decode_table, table_bytes
from millrace.store.remote.objects import WrongBytes

OUT_BYTES = 1 << 20  # of plain bytes at a time: a frame that claims more than it may hold never gets more


class Inflater:
    """Frame after frame, then the block table, which must be that of the frames. Any attempt may go on at a frame."""

    def __init__(self, codec: Codec, num_bytes: int) -> None:
        self._codec, self._num_bytes = codec, num_bytes
        self._starts = [(0, 0)]  # of the frames, in the file and in the plain bytes
        self._frame: Any = None
        self._tail = b""
        self._stored = self._plain = self._skipped = 0

    def resume(self, done: int) -> int:
        """Goes on with the frame that holds the plain byte ``done``; returns where it begins in the file."""
        while self._starts[-1][1] > done:
            self._starts.pop()
        self._frame, self._tail = None, b""
        self._stored, self._plain = self._starts[-1]
        self._skipped = done - self._plain
        return self._stored

    def add(self, chunk: memoryview) -> Iterator[memoryview]:
        """The plain bytes of a chunk of the file, in parts."""
        data = bytes(chunk)
        while data:
            if self._plain == self._num_bytes and self._frame is None:
                self._tail += data
                if len(self._tail) > table_bytes(len(self._starts) - 1):
                    raise WrongBytes("more bytes came after its blocks than their table has")
                return
            self._frame = self._codec.decompressor() if self._frame is None else self._frame
            yield from self._inflate(data)
            unused = bytes(self._frame.unused_data or b"") if self._frame.eof else b""
            self._stored += len(data) - len(unused)
            if self._frame.eof:
                self._frame = None
                self._starts.append((self._stored, self._plain))
            data = unused

    def _inflate(self, data: bytes) -> Iterator[memoryview]:
        """The plain bytes of the frame under way."""
        while True:
            try:
                plain = self._frame.decompress(data, OUT_BYTES)
            except self._codec.failures as error:
                raise WrongBytes(f"it is not {self._codec.name} at byte {self._stored:,} or after it") from error
            self._plain += len(plain)
            if self._plain > self._num_bytes:
                raise WrongBytes(f"it holds more than its {self._num_bytes:,} bytes")
            skipped = min(self._skipped, len(plain))
            self._skipped -= skipped
            yield memoryview(plain)[skipped:]
            data = b""
            if self._frame.eof or self._frame.needs_input:
                return

    def check_end(self) -> None:
        """The table must say what came."""
        if self._frame is not None or self._plain != self._num_bytes:
            raise WrongBytes(f"{self._plain:,} of {self._num_bytes:,} plain bytes came")
        try:
            starts, block_bytes = decode_table(
                self._tail, self._num_bytes, self._stored + len(self._tail), "the end of the file"
            )
        except StoreCorrupt as error:
            raise WrongBytes(str(error)) from error
        plain = [min(number * block_bytes, self._num_bytes) for number in range(len(starts))]
        if self._starts != list(zip(starts.tolist(), plain, strict=True)):
            raise WrongBytes("its block table is not that of its blocks")
