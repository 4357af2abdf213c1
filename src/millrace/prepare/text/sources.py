"""Finds the files of a corpus and cuts them into parts of about equal size.

The order of documents is the order of the arguments, of names by their bytes within a folder or pattern, and of
bytes within a file. A part is some byte ranges of some files: a pure function of them and the options.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from millrace.errors import ConfigError, SourceError

ARCHIVES = frozenset((".tar", ".tgz", ".tbz", ".txz", ".zip", ".7z", ".rar"))
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
RECORDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet"}
CODE = """c cc cpp cs css cu go h hpp hs html java jl js jsx kt lua md ml php pl py pyi r rb rs rst scala sh sql swift tex toml
ts tsx yaml yml"""
WHOLE = frozenset(f".{ending}" for ending in CODE.split())  # of which a file is a document
ENDS = 64 << 10  # bytes of either end that stand for a file's contents in the plan


class Source(msgspec.Struct, frozen=True):
    """One file: what it holds, and how to know it again."""

    path: str  # as it is shown and stored: bytes that are not utf-8 as \\xNN
    format: str  # text, jsonl, csv, parquet
    document: str  # line, blank-line, file, record
    compression: str | None
    size: int
    mtime_ns: int
    ends: str
    location: str  # as the system knows it

    @property
    def has_rows(self) -> bool:
        """Whether a place in it is a row, not a byte."""
        return self.format in ("csv", "parquet")

    @property
    def is_framed(self) -> bool:
        """Whether its documents are runs of lines of plain text."""
        return self.format == "text" and self.document != "file"


class Unit(msgspec.Struct, frozen=True):
    """A range of one source: bytes of a plain file, row groups of Parquet, or all of it (stop -1)."""

    source: int
    start: int
    stop: int


class Part(msgspec.Struct, frozen=True):
    """What one task prepares."""

    number: int
    units: tuple[Unit, ...]


def find_sources(paths: Sequence[str], document: str | None) -> list[Source]:
    """Every file of the arguments, looked at before any work is done."""
    found: list[str] = []
    for argument in paths:
        found += _expand(argument)
    if not found:
        raise ConfigError(
            f"no files in {', '.join(map(repr, paths))}; give files, folders or patterns of text, JSONL, CSV or Parquet"
        )
    sources = [_describe(path, document) for path in found]
    known: dict[object, str] = {}
    for source in sources:
        status = os.stat(source.location)
        for name in ((status.st_dev, status.st_ino), source.path):
            if name in known:
                raise ConfigError(f"a file is given twice: {known[name]!r} and {source.path!r}; name each once")
            known[name] = source.path
    return sources


def _printable(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _expand(argument: str) -> list[str]:
    if os.path.isdir(argument):
        return _walk(argument)
    if os.path.lexists(argument):
        return [argument]
    matches = sorted(glob.glob(argument, recursive=True), key=os.fsencode)
    if not matches:
        raise ConfigError(f"{argument!r} does not exist and matches nothing; check the path")
    # ** matches a folder as well as what is in it.
    return list(
        dict.fromkeys(path for match in matches for path in (_walk(match) if os.path.isdir(match) else [match]))
    )


def _walk(folder: str) -> list[str]:
    """Files below a folder whose ending is known, by name; other files are left alone."""
    found = []
    try:
        names = sorted(os.listdir(folder), key=os.fsencode)
    except OSError as error:
        raise SourceError(f"{folder!r} cannot be read: {error.strerror}", source=_printable(folder)) from error
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            if not os.path.exists(path):
                raise SourceError(f"{path!r} is a broken or circular link; remove it", source=_printable(path))
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise SourceError(
                    f"{path!r} is a link to a folder, which could be a loop; name that folder itself",
                    source=_printable(path),
                )
        if stat.S_ISDIR(mode):
            found += _walk(path)
        elif not stat.S_ISREG(mode):
            raise SourceError(
                f"{path!r} is not a plain file (a pipe, socket or device); remove it from the folder",
                source=_printable(path),
            )
        elif _kind(path)[0] is not None:
            found.append(path)
    return found


def _kind(path: str) -> tuple[str | None, str | None, str]:
    """Format (None: unknown ending), compression and the ending itself."""
    name = Path(path)
    compression = COMPRESSED.get(name.suffix.lower())
    ending = (Path(name.stem) if compression else name).suffix.lower()
    if ending in RECORDS:
        return RECORDS[ending], compression, ending
    return ("text" if ending in (".txt", ".text") or ending in WHOLE else None), compression, ending


def _describe(path: str, document: str | None) -> Source:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(
                f"{path!r} is not a plain file; give a file, or - for standard input", source=_printable(path)
            )
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, status.st_size - ENDS))
            ends = xxhash.xxh3_128_hexdigest(head + file.read(ENDS))
    except OSError as error:
        raise SourceError(f"{path!r} cannot be read: {error.strerror}", source=_printable(path)) from error
    kind, compression, ending = _kind(path)
    if ending in ARCHIVES:
        raise ConfigError(f"{path!r} is an archive; unpack it and give the files in it")
    default = "record" if kind in ("jsonl", "csv", "parquet") else "file" if ending in WHOLE else "blank-line"
    if default == "record":
        document = None  # the documents of JSONL, CSV and Parquet are their records, whatever plain text has
    elif document == "record":
        raise ConfigError(f"--document record for {path!r}; only JSONL, CSV and Parquet have records")
    if kind == "parquet" and compression:
        raise ConfigError(f"{path!r}: Parquet is compressed inside; unpack it first")
    return Source(
        _printable(path),
        kind or "text",
        document or default,
        compression,
        status.st_size,
        status.st_mtime_ns,
        ends,
        path,
    )


def check_unchanged(source: Source) -> None:
    """A source must be what it was when the plan was made."""
    try:
        status = os.stat(source.location)
    except OSError as error:
        raise SourceError(
            f"{source.path!r} has gone since the plan was made ({error.strerror}); bring it back, then run again",
            source=source.path,
        ) from error
    if (status.st_size, status.st_mtime_ns) != (source.size, source.mtime_ns):
        raise SourceError(
            f"{source.path!r} changed while it was prepared: {status.st_size} bytes, planned {source.size}; start anew",
            source=source.path,
        )


def cut_parts(sources: Sequence[Source], part_bytes: int) -> list[Part]:
    """Large plain files in slices, small ones together, compressed ones whole."""
    parts: list[Part] = []
    units: list[Unit] = []
    weight = 0

    def close() -> None:
        nonlocal weight
        if units:
            parts.append(Part(len(parts), tuple(units)))
            units.clear()
        weight = 0

    for number, source in enumerate(sources):
        for unit, size in _units(number, source, part_bytes):
            if weight and weight + size > part_bytes:
                close()
            units.append(unit)
            weight += size
            if len(units) >= 4096:
                close()
    close()
    return parts


def _units(number: int, source: Source, part_bytes: int) -> list[tuple[Unit, int]]:
    if source.format == "parquet":
        return _row_groups(number, source)
    if source.compression or source.document == "file" or source.format == "csv" or source.size <= part_bytes:
        return [(Unit(number, 0, -1), source.size)]
    slices = -(-source.size // part_bytes)
    edges = [k * source.size // slices for k in range(slices + 1)]
    return [(Unit(number, edges[k], edges[k + 1]), edges[k + 1] - edges[k]) for k in range(slices)]


def _row_groups(number: int, source: Source) -> list[tuple[Unit, int]]:
    pyarrow = arrow(source)
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(source.location) as file:
            metadata = file.metadata
    except (pyarrow.ArrowException, OSError) as error:
        raise SourceError(f"{source.path!r} is not readable Parquet: {error}", source=source.path) from error
    return [(Unit(number, k, k + 1), metadata.row_group(k).total_byte_size) for k in range(metadata.num_row_groups)]


def arrow(source: Source) -> Any:
    """pyarrow, which CSV and Parquet need."""
    try:
        import pyarrow
    except ImportError as error:
        raise SourceError(f"{source.path!r} needs pyarrow; pip install millrace[text]", source=source.path) from error
    return pyarrow
