"""Compressed files of shards: blocks of equal length, each a frame of its own, and a table of them at the end.

The table lies in a frame that readers of zstd and lz4 skip, so their tools can unpack a file. ``compressed`` writes it for
push.py; ``CompressedFile`` reads any bytes of a file by its table; remote/inflate.py reads a file that arrives in order.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator

import numpy as np

from millrace.errors import corrupt
from millrace.ragged import Array, Int64s
from millrace.store import platform
from millrace.store.codec import Codec
from millrace.store.folder import Folder
from millrace.store.layout import BLOCK_BYTES
from millrace.store.manifest import Manifest
from millrace.store.reader import DiskShards

DEFAULT_BLOCK = 256 << 10  # bytes before compression: larger ones hardly compress better, and jumps read whole ones
_SKIP = 0x184D2A5E  # begins a frame that zstd and lz4 skip
_HEAD, _FOOT = struct.Struct("<II"), struct.Struct("<II8s")  # kind, length; block_bytes, blocks, mark
_MARK = b"MRBLOCKS"
_REMEDY = "copy this file again, or compress the store again"


def compressed(
    read: Callable[[int, int], bytes], num_bytes: int, codec: Codec, block_bytes: int = DEFAULT_BLOCK
) -> Iterator[bytes]:
    """The bytes of a compressed file; ``read(length, offset)`` gives those of the plain one."""
    sizes = []
    for first in range(0, num_bytes, block_bytes):
        frame = codec.compress(read(min(block_bytes, num_bytes - first), first))
        sizes.append(len(frame))
        yield frame
    yield encode_table(sizes, block_bytes)


def encode_table(sizes: list[int], block_bytes: int) -> bytes:
    """The end of a file: the bytes of each compressed block, the length of a plain one, and how many there are."""
    body = np.array(sizes, "<u4").tobytes() + _FOOT.pack(block_bytes, len(sizes), _MARK)
    return _HEAD.pack(_SKIP, len(body)) + body


def table_bytes(blocks: int) -> int:
    return _HEAD.size + 4 * blocks + _FOOT.size


def decode_table(tail: bytes, num_bytes: int, stored_bytes: int, where: str) -> tuple[Int64s, int]:
    """Where each block begins, and where the last ends; and the length of a plain block.

    ``tail`` is the end of the file, the table and nothing before it. All of it is checked against the size of the plain
    file in the manifest and that of the file, so that nothing larger is ever read or made.
    """
    block_bytes, blocks = _foot(tail, num_bytes, stored_bytes, where)
    if len(tail) != table_bytes(blocks) or _HEAD.unpack_from(tail) != (_SKIP, len(tail) - _HEAD.size):
        raise corrupt(where, "its block table does not begin as one", _REMEDY)
    sizes = np.frombuffer(tail, "<u4", blocks, _HEAD.size).astype(np.int64)
    most = block_bytes + (block_bytes >> 7) + 1024  # what cannot be compressed grows a little
    if blocks and (int(sizes.min()) < 1 or int(sizes.max()) > most):
        raise corrupt(where, f"its block table has a block of {sizes.min()} or {sizes.max()} bytes", _REMEDY)
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    if int(starts[-1]) + len(tail) != stored_bytes:
        problem = f"its blocks and table make {int(starts[-1]) + len(tail):,} bytes, the file has {stored_bytes:,}"
        raise corrupt(where, problem, _REMEDY)
    return starts, block_bytes


def _foot(foot: bytes, num_bytes: int, stored_bytes: int, where: str) -> tuple[int, int]:
    """Length and number of the blocks, from the last bytes of a file."""
    if len(foot) < _FOOT.size or stored_bytes < table_bytes(0):
        raise corrupt(where, f"has {stored_bytes} bytes and no block table", _REMEDY)
    block_bytes, blocks, mark = _FOOT.unpack(foot[-_FOOT.size :])
    if mark != _MARK or not 1 <= block_bytes <= BLOCK_BYTES:
        raise corrupt(where, f"does not end with a block table (blocks of {block_bytes:,} bytes)", _REMEDY)
    if blocks != -(-num_bytes // block_bytes) or table_bytes(blocks) > stored_bytes:
        problem = f"its table has {blocks:,} blocks of {block_bytes:,} bytes; the manifest says {num_bytes:,} bytes"
        raise corrupt(where, problem, _REMEDY, expected=num_bytes)
    return block_bytes, blocks


class CompressedFile:
    """A compressed file by its table: any bytes of the plain one. It keeps one block; one thread uses it."""

    def __init__(self, fd: int, num_bytes: int, codec: Codec, where: str) -> None:
        self._fd, self._num_bytes, self._codec, self._where = fd, num_bytes, codec, where
        self.stored_bytes = os.fstat(fd).st_size
        foot = platform.pread(fd, _FOOT.size, max(0, self.stored_bytes - _FOOT.size))
        _, blocks = _foot(foot, num_bytes, self.stored_bytes, where)
        tail = platform.pread(fd, table_bytes(blocks), self.stored_bytes - table_bytes(blocks))
        self._starts, self._block_bytes = decode_table(tail, num_bytes, self.stored_bytes, where)
        self._number, self._block = -1, b""

    def read_into(self, buffer: memoryview, offset: int) -> int:
        """Fills ``buffer`` with the plain bytes from ``offset`` on; returns how many there were."""
        done, length = 0, min(len(buffer), self._num_bytes - offset)
        while done < length:
            number, first = divmod(offset + done, self._block_bytes)
            part = self._read(number)[first : first + length - done]
            buffer[done : done + len(part)] = part
            done += len(part)
        return done

    def read(self, length: int, offset: int) -> bytes:
        data = bytearray(max(0, min(length, self._num_bytes - offset)))
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def _read(self, number: int) -> bytes:
        if number != self._number:
            self._block, self._number = self._unpack(number), number
        return self._block

    def _unpack(self, number: int) -> bytes:
        start, stop = self._starts[number : number + 2].tolist()
        expected = min(self._block_bytes, self._num_bytes - number * self._block_bytes)
        frame = self._codec.decompressor()
        try:
            block: bytes = frame.decompress(platform.pread(self._fd, stop - start, start), expected)
            if len(block) == expected and not frame.eof:  # the end of a frame may come after its last byte
                block += frame.decompress(b"", 1)
        except self._codec.failures as error:
            raise corrupt(self._where, f"compressed block {number} cannot be read: {error}", _REMEDY) from error
        if len(block) != expected or not frame.eof or frame.unused_data:
            raise corrupt(self._where, f"compressed block {number} does not hold {expected:,} bytes", _REMEDY)
        return block


class CompressedShards(DiskShards):
    """The files of a compressed store on disk, read block by block. verify and push read a store once, from end to end;
    feeds read it through the cache (remote/shards.py)."""

    def __init__(self, folder: Folder, manifest: Manifest, table: Array, counts: Int64s) -> None:
        super().__init__(folder, manifest, table, counts, may_map=False)
        assert manifest.codec is not None
        self._codec = manifest.codec

    def path(self, shard: int, file: int) -> str:
        return super().path(shard, file) + self._codec.suffix

    def open(self, shard: int, file: int, *, alone: bool = False) -> int:
        name = self.layout.files[file].name + self._codec.suffix
        try:
            return self._folder.open(f"shards/{self.name(shard)}/{name}")
        except OSError as error:
            raise self._refused(shard, name, "a compressed file", error) from error

    def reader(self, fd: int, shard: int, file: int) -> Callable[[memoryview, int], int]:
        return CompressedFile(fd, int(self._bytes[shard, file]), self._codec, self.path(shard, file)).read_into

    def rows(self, shard: int, file: int, start: int, stop: int, *, wait: bool = True) -> Array:
        size = self.layout.files[file].item_bytes
        data = memoryview(bytearray((stop - start) * size))
        fd = self.open(shard, file)
        try:
            length = self.reader(fd, shard, file)(data, start * size)
        finally:
            os.close(fd)
        return self._read(shard, file, start, stop, bytes(data[:length]))
