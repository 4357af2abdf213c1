"""Small results on disk for a later attempt, each behind its digest: a damaged one counts as absent."""

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
        both = path.read_bytes()
    except OSError:
        return None
    digest, data = both[:DIGEST_BYTES], both[DIGEST_BYTES:]
    return data if xxhash.xxh3_128_digest(data) == digest else None


def digest_of(path: Path) -> str:
    """The digest of a whole file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
