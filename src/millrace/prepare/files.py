"""Finds input files and knows them again: order, identity, and what has changed since a plan was made.

The order is that of the arguments, and of names by their bytes within a folder or pattern.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import xxhash

from millrace.errors import ConfigError, SourceError

ENDS = 64 << 10  # bytes of either end that stand for a file's contents in a plan


class InputFile(msgspec.Struct, frozen=True):
    """One file, and how to know it again."""

    path: str  # as it is shown and stored: bytes that are not utf-8 as \\xNN
    size: int
    mtime_ns: int
    ends: str
    location: str  # as the system knows it
    folders: tuple[
        str, ...
    ] = ()  # between it and what was given: a folder, the first * of a pattern, what all files share


def find_files(paths: Sequence[str], is_known: Callable[[str], bool], expected: str) -> list[InputFile]:
    """Every file of the arguments, looked at before any work is done; in folders those that ``is_known``."""
    found: list[tuple[str, int]] = []
    named = [Path(path).parent for path in paths if not os.path.isdir(path) and os.path.lexists(path)]
    shared = len(Path(os.path.commonpath(named)).parts) if len({path.is_absolute() for path in named}) == 1 else 0
    for argument in paths:
        found += ((path, _depth(argument, shared)) for path in _expand(argument, is_known))
    if not found:
        raise ConfigError(f"no files in {', '.join(map(repr, paths))}; give files, folders or patterns of {expected}")
    files = [
        msgspec.structs.replace(describe(path), folders=tuple(map(printable, Path(path).parent.parts[depth:])))
        for path, depth in found
    ]
    known: dict[object, str] = {}
    for file in files:
        status = os.stat(file.location)
        for name in ((status.st_dev, status.st_ino), file.path):
            if name in known:
                raise ConfigError(f"a file is given twice: {known[name]!r} and {file.path!r}; name each once")
            known[name] = file.path
    return files


def printable(path: str) -> str:
    return os.fsencode(path).decode(errors="backslashreplace")


def _depth(argument: str, shared: int) -> int:
    """How many parts of a path are what was given, and no finding."""
    parts = Path(argument).parts
    if os.path.isdir(argument):
        return len(parts)
    if os.path.lexists(argument):
        return shared
    return next((k for k, part in enumerate(parts) if glob.has_magic(part)), len(parts))


def _expand(argument: str, is_known: Callable[[str], bool]) -> list[str]:
    if os.path.isdir(argument):
        return _walk(argument, is_known)
    if os.path.lexists(argument):
        return [argument]
    matches = sorted(glob.glob(argument, recursive=True), key=os.fsencode)
    if not matches:
        raise ConfigError(f"{argument!r} does not exist and matches nothing; check the path")
    # ** matches a folder as well as what is in it.
    return list(
        dict.fromkeys(
            path for match in matches for path in (_walk(match, is_known) if os.path.isdir(match) else [match])
        )
    )


def _walk(folder: str, is_known: Callable[[str], bool]) -> list[str]:
    """Files below a folder whose ending is known, by name; other files are left alone."""
    found = []
    try:
        names = sorted(os.listdir(folder), key=os.fsencode)
    except OSError as error:
        raise SourceError(f"{folder!r} cannot be read: {error.strerror}", source=printable(folder)) from error
    for name in names:
        path = os.path.join(folder, name)
        if name.startswith("."):
            continue
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            if not os.path.exists(path):
                raise SourceError(f"{path!r} is a broken or circular link; remove it", source=printable(path))
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise SourceError(
                    f"{path!r} is a link to a folder, which could be a loop; name that folder itself",
                    source=printable(path),
                )
        if stat.S_ISDIR(mode):
            found += _walk(path, is_known)
        elif not stat.S_ISREG(mode):
            raise SourceError(
                f"{path!r} is not a plain file (a pipe, socket or device); remove it from the folder",
                source=printable(path),
            )
        elif is_known(path):
            found.append(path)
    return found


def describe(path: str) -> InputFile:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path!r} is not a plain file; give a file", source=printable(path))
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, status.st_size - ENDS))
            ends = xxhash.xxh3_128_hexdigest(head + file.read(ENDS))
    except OSError as error:
        raise SourceError(f"{path!r} cannot be read: {error.strerror}", source=printable(path)) from error
    return InputFile(printable(path), status.st_size, status.st_mtime_ns, ends, path)


def check_unchanged(file: InputFile) -> None:
    """A source must be what it was when the plan was made."""
    try:
        status = os.stat(file.location)
    except OSError as error:
        raise SourceError(
            f"{file.path!r} has gone since the plan was made ({error.strerror}); bring it back, then run again",
            source=file.path,
        ) from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        what = f"{status.st_size} bytes, planned {file.size}" if status.st_size != file.size else "it was written again"
        raise SourceError(f"{file.path!r} changed while it was prepared: {what}; start anew", source=file.path)
