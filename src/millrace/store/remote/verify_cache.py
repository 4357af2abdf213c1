"""``verify --cache``: reads every file of a cache again, whatever was noted of it, and compares it with the stores' hashes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from millrace.errors import ConfigError
from millrace.native import num_cores
from millrace.store import checked_files
from millrace.store.checked_files import CheckedFiles
from millrace.store.folder import Folder
from millrace.store.layout import BLOCK_BYTES
from millrace.store.plain_file import open_file
from millrace.store.remote.cache import CACHED_FILE
from millrace.store.remote.contents import Contents, RemoteFile
from millrace.store.shard import check_blocks
from millrace.store.verify_side_files import Damage, noting

REMEDY = "is fetched again when it is needed"


class CacheVerification(msgspec.Struct):
    """What was checked, and the damage."""

    path: str
    stores: int
    files: int
    bytes: int
    unknown_files: int  # of stores whose tables are not here any more
    damage: list[Damage]


def verify_cache(
    base: Path, *, workers: int | None = None, progress: Callable[[int], None] | None = None
) -> CacheVerification:
    """Checks the files and tables in a cache folder. A damaged file is never served: the next reader fetches it again."""
    if not all((base / name).is_dir() for name in ("shards", "stores")):
        raise ConfigError(f"{base} is no cache folder; give the one that stores at a URL were read with: --cache-dir")
    report, step = CacheVerification(str(base), 0, 0, 0, 0, []), progress or (lambda num_bytes: None)
    cached = {name for name in os.listdir(base / "shards") if CACHED_FILE.fullmatch(name)}
    files: dict[str, RemoteFile] = {}
    for tables in sorted((base / "stores").glob("[0-9a-f]*")):
        with noting(report.damage, str(tables)):
            contents = Contents.of(Folder(tables))
            report.stores += 1
            files |= {file.key: file for file in _files(contents, len(cached)) if file.key in cached}
    notes = CheckedFiles(base / checked_files.NAME)

    def check(file: RemoteFile) -> None:
        path = base / "shards" / file.key
        with contextlib.suppress(FileNotFoundError):  # another process made room
            notes.forget(file.key, os.lstat(path))
            if notes.is_right(str(path), file.key, file.num_bytes, file.hashes) is None:
                report.damage.append(_damage(path, file))
            step(file.num_bytes)

    with ThreadPoolExecutor(workers or num_cores()) as pool:
        list(pool.map(check, files.values()))
    report.files, report.bytes = len(files), sum(file.num_bytes for file in files.values())
    report.unknown_files = len(cached) - len(files)
    return report


def _files(contents: Contents, most: int) -> Iterator[RemoteFile]:
    """The files of a store, and the blocks of 4 MiB that may lie there in their stead."""
    for file in contents.files() if most else ():
        yield file
        if file.codec is None and file.num_bytes > BLOCK_BYTES:
            yield from (file.part(block) for block in range(len(file.hashes)))


def _damage(path: Path, file: RemoteFile) -> Damage:
    """What is wrong with a cached file: its first block that is."""
    where = f"{path} ({file.name})"
    found: list[Damage] = []
    with noting(found, where), open_file(str(path)) as (fd, size):
        if size != file.num_bytes:
            return Damage(where, f"has {size} bytes, expected {file.num_bytes}; it {REMEDY}")
        for block, (first, last, problem) in enumerate(check_blocks(fd, size, file.hashes.tolist())):
            if problem is not None:
                return Damage(where, f"changed since it was downloaded; it {REMEDY}", None, block, (first, last))
    return found[0] if found else Damage(where, f"changed while it was read; it {REMEDY}")
