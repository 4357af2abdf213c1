"""Keeps standard input in a file: a restart could not read it again."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import IO, Any

import msgspec
import xxhash

from millrace.errors import ConfigError
from millrace.prepare.files import ENDS, InputFile, describe_file
from millrace.prepare.text.read.sources import STDIN
from millrace.store import platform

BLOCK = 1 << 20


def spool(folder: Path) -> InputFile:
    """Standard input as a file. A restart must be given the same again, unless it runs at a terminal."""
    path = folder / "stdin.txt"
    if not path.exists():
        with platform.writing(path), open(f"{path}.tmp", "wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
            file.flush()
            os.fsync(file.fileno())
        platform.rename(f"{path}.tmp", path)
    elif not sys.stdin.isatty():
        _check_same(path, sys.stdin.buffer)
    return msgspec.structs.replace(describe_file(str(path), "text"), path=STDIN)


def read_through(before: list[Any] | None) -> InputFile:
    """The size and ends of standard input, for a finished store; ``before`` is what they were then."""
    size, mtime_ns, ends = before or (0, 0, "")
    if before is None or not sys.stdin.isatty():
        head = tail = b""
        size = 0
        while block := sys.stdin.buffer.read(BLOCK):
            size += len(block)
            head += block[: ENDS - len(head)]
            tail = (tail + block)[-ENDS:]
        ends = xxhash.xxh3_128_hexdigest(head + tail)
    return InputFile(STDIN, size, mtime_ns, ends, STDIN)


def _check_same(path: Path, stream: IO[bytes]) -> None:
    at = 0
    with open(path, "rb") as file:
        while True:
            block = file.read(BLOCK)
            given = stream.read(len(block) or 1)
            if block != given:
                differs = next((k for k, (a, b) in enumerate(zip(block, given, strict=False)) if a != b), len(given))
                raise ConfigError(
                    f"standard input differs from byte {at + min(differs, len(block))} on from what {path.parent} was begun "
                    "with; give the same to continue, or begin afresh with --restart"
                )
            if not block:
                return
            at += len(block)
