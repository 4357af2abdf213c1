"""Small results that are kept between two attempts, a digest before each: one that was damaged counts as not there."""

from __future__ import annotations

import hashlib
from pathlib import Path

import xxhash

from millrace.store import platform

DIGEST_BYTES = 16


def write_result(path: Path, data: bytes) -> None:
    with platform.writing(path):
        if path.is_dir():
            platform.remove(path)
        aside = platform.attempt_name(path)
        platform.write_file(aside, xxhash.xxh3_128_digest(data) + data, mode=0o644)
        platform.rename(aside, path)


def read_result(path: Path) -> bytes | None:
    try:
        found = path.read_bytes()
    except OSError:
        return None
    digest, data = found[:DIGEST_BYTES], found[DIGEST_BYTES:]
    return data if xxhash.xxh3_128_digest(data) == digest else None


def digest_of(path: Path) -> str:
    """Of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
