"""Downloads one file: every 4 MiB block is checked, and the file gets its name when all of it is right."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

import xxhash

from millrace.errors import StoreCorrupt, StoreUnreachable, corrupt
from millrace.store import platform
from millrace.store.layout import BLOCK_BYTES
from millrace.store.remote.contents import RemoteFile
from millrace.store.remote.inflate import Inflater
from millrace.store.remote.objects import ObjectMissing, Objects, WrongBytes

Progress = Callable[[int], None]


def download(
    objects: Objects, file: RemoteFile, path: str, progress: Progress | None = None, *, durable: bool = True
) -> None:
    """Brings a file to ``path``, atomically. After a failure it goes on behind the last block that was right."""
    aside = f"{path}.tmp"
    with platform.writing(aside, "downloading"):
        platform.remove(aside)
        fd = platform.create(aside)
        try:
            try:
                write_checked(objects, file, fd, aside, progress)
                with contextlib.suppress(AttributeError):
                    os.fchmod(fd, 0o444)
                if durable:
                    platform.sync(fd, aside)
            finally:
                os.close(fd)
            platform.rename(aside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                platform.remove(aside)
            raise


def write_checked(objects: Objects, file: RemoteFile, fd: int, path: str, progress: Progress | None = None) -> None:
    """Writes the bytes of a file to a descriptor, which stands at its beginning."""
    blocks, where = _Blocks(file, fd, path, progress or (lambda num_bytes: None)), objects.where(file.stored_name)
    inflater = None if file.codec is None else Inflater(file.codec, file.num_bytes)
    is_wrong = False

    def attempt() -> None:
        nonlocal is_wrong
        is_wrong = False
        try:
            _receive(objects, file, blocks, inflater)
        except WrongBytes as error:
            is_wrong = blocks.wrong is not None or inflater is not None
            if is_wrong and objects.is_local:  # it will not change
                raise corrupt(where, str(error), "copy or push the store again") from error
            raise

    try:
        objects.tried(file.stored_name, attempt, lambda: blocks.done)
    except StoreUnreachable as error:
        if not is_wrong:
            raise
        number = blocks.number if file.block is None else file.block
        problem = f"block {number} is not the one that was written, also after several downloads"
        raise StoreCorrupt(f"{where}: {problem}; push the store again", path=where) from error


def is_whole(objects: Objects, file: RemoteFile) -> bool:
    """Whether an object holds the bytes of a file: all of it is read, and nothing is kept."""
    fd = os.open(os.devnull, os.O_WRONLY)
    blocks = _Blocks(file, fd, os.devnull, lambda num_bytes: None)
    inflater = None if file.codec is None else Inflater(file.codec, file.num_bytes)

    def attempt() -> bool:
        with contextlib.suppress(WrongBytes):
            _receive(objects, file, blocks, inflater)
            return True
        return False

    try:
        return objects.tried(file.stored_name, attempt, lambda: blocks.done)
    except ObjectMissing:
        return False
    finally:
        os.close(fd)


def _receive(objects: Objects, file: RemoteFile, blocks: _Blocks, inflater: Inflater | None) -> None:
    """One attempt."""
    blocks.begin()
    done, began = blocks.done, time.perf_counter()
    if not blocks.is_whole or inflater is not None:
        first = blocks.done if inflater is None else inflater.resume(blocks.done)
        if file.block is None:
            chunks = objects.stream(file.stored_name, first)
        else:
            start = file.block * BLOCK_BYTES
            chunks = objects.stream(file.stored_name, start + first, start + file.num_bytes)
        for chunk in chunks:
            for part in (memoryview(chunk),) if inflater is None else inflater.add(memoryview(chunk)):
                blocks.add(part)
    if inflater is not None:
        inflater.check_end()
    blocks.check_end()
    objects.pace.note(file.num_bytes - done, time.perf_counter() - began)


class _Blocks:
    """The blocks of a file as they arrive. ``done`` counts the bytes that are checked; those after it are written over."""

    def __init__(self, file: RemoteFile, fd: int, path: str, progress: Progress) -> None:
        self._file, self._fd, self._path, self._progress = file, fd, path, progress
        self._hash, self._filled = xxhash.xxh3_64(), 0  # of the block that is under way
        self.done = 0
        self.wrong: int | None = None  # the block that was wrong in the last attempt

    @property
    def number(self) -> int:
        """Of the block that is under way."""
        return self.done // BLOCK_BYTES

    @property
    def is_whole(self) -> bool:
        return self.done == self._file.num_bytes

    def begin(self) -> None:
        """Goes on behind the last block that was right."""
        self._filled, self.wrong = 0, None
        self._hash.reset()
        os.lseek(self._fd, self.done, os.SEEK_SET)

    def add(self, chunk: memoryview) -> None:
        if len(chunk) > self._file.num_bytes - self.done - self._filled:
            raise WrongBytes(f"more than its {self._file.num_bytes:,} bytes came")
        platform.write(self._fd, chunk, self._path)
        while len(chunk):
            block_bytes = min(BLOCK_BYTES, self._file.num_bytes - self.done)
            part, chunk = chunk[: block_bytes - self._filled], chunk[block_bytes - self._filled :]
            self._hash.update(part)
            self._filled += len(part)
            if self._filled == block_bytes:
                self._end_block()

    def _end_block(self) -> None:
        number = self.number
        if self._hash.intdigest() != int(self._file.hashes[number]):
            self.wrong = number
            raise WrongBytes(f"block {number} came with wrong bytes")
        self.done += self._filled
        self._progress(self._filled)
        self._hash.reset()
        self._filled = 0

    def check_end(self) -> None:
        if not self.is_whole:
            raise WrongBytes(f"{self.done + self._filled:,} of {self._file.num_bytes:,} bytes came")
