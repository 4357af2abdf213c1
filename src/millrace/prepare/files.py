"""Finds input files and knows them again: order, identity, and what has changed since a plan was made.

Files come in the order of the arguments; within a folder or pattern, by the bytes of their names. A note names what
was left out of a folder: links to folders, links that lead nowhere, a file met twice. None of these stops a run.
"""

from __future__ import annotations

import glob
import os
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from millrace.errors import ConfigError, SourceError
from millrace.prepare.exclude import Exclude

ENDS = 64 << 10  # bytes of either end; their hash stands for the contents in a plan
PACKED = frozenset((".gz", ".zst", ".bz2", ".xz"))  # endings that stand behind another
MAX_ENDINGS = 6  # named in a note


class InputFile(msgspec.Struct, frozen=True):
    """One file, and how to know it again."""

    path: str  # as it is shown and stored: bytes that are not utf-8 as \\xNN
    size: int
    mtime_ns: int
    ends: str
    location: str  # as the system knows it
    # Between the file and what was given: a folder, the first * of a pattern, the folder that all files share.
    folders: tuple[str, ...] = ()


Describe = Callable[[str, str, os.stat_result], InputFile]  # path, what is expected -> the file


class Found(NamedTuple):
    """The files of a call in their order, and notes on what was left out."""

    files: list[InputFile]
    notes: list[str]


def find_files(
    paths: Sequence[str],
    is_known: Callable[[str], object],
    expected: str,
    *,
    avoid: Collection[Path] = (),
    stage: Path | None = None,
    given: Mapping[str, InputFile] | None = None,
    exclude: Sequence[str] = (),
    describe: Describe | None = None,
    count_found: Callable[[int], None] | None = None,
) -> Found:
    """Every file of the arguments, before any work is done; from folders, those that ``is_known``.

    ``avoid``: folders (real paths) without input, such as the output. ``stage``: the folder that files of URLs come to.
    ``given``: files that stand for an argument.
    ``exclude``: patterns of files and folders to leave out (``exclude.py``). ``describe``: what knows a file again.
    ``count_found`` is called with the number of files after each.
    """
    finder = _Finder(is_known, expected, avoid, Exclude(exclude), describe or describe_file)
    finder.count_found = count_found
    given = given or {}
    named = [Path(path).parent for path in paths if not os.path.isdir(path) and os.path.lexists(path)]
    shared = len(Path(os.path.commonpath(named)).parts) if len({path.is_absolute() for path in named}) == 1 else 0
    for argument in paths:
        if argument in given:
            finder.add(given[argument])
        elif "://" in argument and stage is not None:
            finder.take_url(argument, stage)
        else:
            finder.take_all(argument, _depth(argument, shared))
    if not finder.files:
        left = f" ({'; '.join(finder.notes())})" if finder.notes() else ""
        raise ConfigError(
            f"no files in {', '.join(map(repr, paths))}{left}; give files, folders or patterns of {expected}"
        )
    return Found(finder.files, finder.notes())


def printable(path: str) -> str:
    return path if path.isascii() else os.fsencode(path).decode(errors="backslashreplace")


def ending(path: str) -> str:
    """The ending of a file name in lower case; ``.txt.gz`` where it is compressed."""
    name = Path(path)
    last = name.suffix.lower()
    return Path(name.stem).suffix.lower() + last if last in PACKED else last


def _depth(argument: str, shared: int) -> int:
    """How many parts of a path were given; the others were found."""
    parts = Path(argument).parts
    if os.path.isdir(argument):
        return len(parts)
    if os.path.lexists(argument):
        return shared
    return next((k for k, part in enumerate(parts) if glob.has_magic(part)), len(parts))


class _Finder:
    """Takes every file once, and remembers what it left out."""

    def __init__(
        self,
        is_known: Callable[[str], object],
        expected: str,
        avoid: Collection[Path],
        exclude: Exclude,
        describe: Describe,
    ) -> None:
        self._is_known, self._expected, self._avoid = is_known, expected, set(map(str, avoid))
        self._exclude, self._depth, self._describe = exclude, 0, describe
        self._real = lru_cache(maxsize=1024)(lambda folder: os.path.realpath(folder or "."))
        self._parts = lru_cache(maxsize=1024)(lambda folder: Path(printable(folder)).parts)
        self.files: list[InputFile] = []
        self._known: dict[object, tuple[str, bool]] = {}  # identity or name -> (name, whether the user named it)
        self._endings: Counter[str] = Counter()
        self._left: dict[str, dict[str, None]] = {}  # by reason, names in their order
        self.count_found: Callable[[int], None] | None = None

    def take_all(self, argument: str, depth: int) -> None:
        is_named = os.path.lexists(argument) and not os.path.isdir(argument)
        self._depth = depth
        for path in [argument] if is_named else self._expand(argument):
            if not self._is_excluded(path):
                self._take(path, depth, is_named)

    def _is_excluded(self, path: str, *, is_folder: bool = False) -> bool:
        if not self._exclude:  # as for most of a million files
            return False
        name = printable(path)
        return self._exclude.matches(name, Path(name).parts[self._depth :], is_folder=is_folder)

    def add(self, file: InputFile) -> None:
        if file.path in self._known:
            raise _twice(file.path, file.path)
        self._known[file.path] = file.path, True
        self.files.append(file)

    def take_url(self, url: str, stage: Path) -> None:
        """The files of a URL, which come into the folder ``stage``."""
        from millrace.prepare.elsewhere import stage_sources

        for file in stage_sources(url, stage, self._is_known, self._exclude.matches):
            self.add(file)

    def _take(self, path: str, depth: int, is_named: bool) -> None:
        try:
            status = os.stat(path)
        except OSError as error:
            raise SourceError(f"{path!r} cannot be read: {error.strerror}", source=printable(path)) from error
        identity, name = (status.st_dev, status.st_ino), printable(path)
        if identity in self._known:
            before, was_named = self._known[identity]
            if is_named and was_named:
                raise _twice(before, name)
            self._known[identity] = before, is_named or was_named
            self._leave("met again, and taken once", path)
            return
        if name in self._known:
            raise _twice(self._known[name][0], name)
        self._known[identity] = self._known[name] = name, is_named
        folders = self._parts(os.path.dirname(path))[depth:]
        found = self._describe(path, self._expected, status)
        self.files.append(msgspec.structs.replace(found, folders=folders) if folders else found)
        if self.count_found is not None:
            self.count_found(len(self.files))

    def _expand(self, argument: str) -> list[str]:
        if os.path.isdir(argument):
            return list(self._walk(argument, self._real(argument)))
        matches = sorted(set(self._matches(argument)), key=os.fsencode)
        if not matches:
            raise ConfigError(f"{argument!r} does not exist and matches nothing; check the path")
        paths: dict[str, None] = {}  # a folder may be matched as well as what is in it
        for match in matches:
            mode = self._mode(match)
            if mode is not None and stat.S_ISDIR(mode):
                if self._is_source(match, self._real(match)):
                    paths.update(dict.fromkeys(self._walk(match, self._real(match))))
            elif mode is not None and not self._is_avoided(self._real(os.path.dirname(match))):
                paths[match] = None
        return list(paths)

    def _matches(self, pattern: str) -> Iterator[str]:
        """As ``glob.glob``, but ``**`` follows no links, which could be a loop."""
        parts = pattern.split(os.sep)
        if "**" not in parts:
            yield from glob.glob(pattern)
            return
        k = parts.index("**")
        above = os.sep.join(parts[:k]) or os.sep
        tops = [top for top in glob.glob(above) if os.path.isdir(top)] if k else [""]
        for top in tops if not glob.has_magic(above) else [top for top in tops if self._mode(top) is not None]:
            for folder in self._folders(top):
                found = self._matches(os.path.join(glob.escape(folder), *(parts[k + 1 :] or ["*"])))
                # At the end of a pattern ** stands for files: folders come by themselves.
                yield from found if parts[k + 1 :] else (path for path in found if not os.path.isdir(path))

    def _folders(self, folder: str) -> Iterator[str]:
        if not self._is_source(folder, self._real(folder)):
            return
        yield folder
        for name in (entry.name for entry in _entries(folder)):
            path = os.path.join(folder, name)
            mode = None if name.startswith(".") else self._mode(path)
            if mode is not None and stat.S_ISDIR(mode):
                yield from self._folders(path)

    def _is_avoided(self, place: str) -> bool:
        return any(place == folder or place.startswith(folder + os.sep) for folder in self._avoid)

    def _is_source(self, folder: str, place: str) -> bool:
        """Whether to look into a folder that was not named itself."""
        if self._is_avoided(place) or self._is_excluded(folder, is_folder=True):
            return False
        if os.path.exists(os.path.join(folder, "store.json")) and os.path.isdir(os.path.join(folder, "snapshots")):
            self._leave("a store, which is no source", folder)
            return False
        return True

    def _walk(self, folder: str, place: str) -> Iterator[str]:
        """Files below a folder whose ending is known, by name; ``place`` is its real path."""
        for entry in _entries(folder):
            name = entry.name
            if name.startswith("."):
                continue
            path = os.path.join(folder, name)
            mode = self._mode(path) if entry.is_symlink() else _mode_of(entry)
            if mode is None:
                continue
            if stat.S_ISDIR(mode):
                if self._is_source(path, os.path.join(place, name)):
                    yield from self._walk(path, os.path.join(place, name))
            elif self._is_excluded(path):
                continue
            elif not self._is_known(path):
                self._endings[ending(path)] += 1
            elif stat.S_ISREG(mode):
                yield path
            else:
                raise SourceError(
                    f"{path!r} is not a plain file (a pipe, socket or device); remove it from the folder",
                    source=printable(path),
                )

    def _mode(self, path: str) -> int | None:
        """What a name in a folder is; None: a link that is not followed."""
        mode = os.lstat(path).st_mode
        if not stat.S_ISLNK(mode):
            return mode
        if not os.path.exists(path):
            self._leave("a link that leads nowhere", path)
            return None
        if os.path.isdir(path):  # it could be a loop
            self._leave("a link to a folder: name that folder to follow it", path)
            return None
        return os.stat(path).st_mode

    def _leave(self, why: str, path: str) -> None:
        self._left.setdefault(why, {})[printable(path)] = None

    def notes(self) -> list[str]:
        notes = [
            f"{next(iter(paths))!r}{f' and {len(paths) - 1:,} more' if len(paths) > 1 else ''} left out: {why}"
            for why, paths in sorted(self._left.items())
        ]
        if self._endings:
            shown = [f"{count:,} {name or 'without one'}" for name, count in self._endings.most_common(MAX_ENDINGS)]
            rest = len(self._endings) - MAX_ENDINGS
            more = f" and {rest:,} more endings" if rest > 0 else ""
            notes.append(f"files of other endings left out: {', '.join(shown)}{more}")
        return notes + self._exclude.notes()


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder, by name. The folder says what most of it is, which saves a call for each file."""
    try:
        with os.scandir(folder or ".") as found:
            return sorted(found, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise SourceError(f"{folder!r} cannot be read: {error.strerror}", source=printable(folder)) from error


def _mode_of(entry: os.DirEntry[str]) -> int:
    """The kind of what is no link, as ``st_mode`` has it; 0 for pipes, sockets and devices."""
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    return stat.S_IFDIR if entry.is_dir(follow_symlinks=False) else 0


def _twice(first: str, second: str) -> ConfigError:
    return ConfigError(f"a file is given twice: {first!r} and {second!r}; name each once")


def describe_file(path: str, expected: str, status: os.stat_result | None = None) -> InputFile:
    """A file with its size, its time and the hash of both its ends."""
    try:
        status = status or os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise SourceError(f"{path!r} is not a plain file; give files of {expected}", source=printable(path))
        with open(path, "rb") as file:
            head = file.read(ENDS)
            file.seek(max(0, status.st_size - ENDS))
            ends = xxhash.xxh3_128_hexdigest(head + file.read(ENDS))
    except OSError as error:
        raise SourceError(f"{path!r} cannot be read: {error.strerror}", source=printable(path)) from error
    return InputFile(printable(path), status.st_size, status.st_mtime_ns, ends, path)


def check_unchanged(file: InputFile) -> None:
    """Refuses a source that is not what it was when the plan was made."""
    try:
        status = os.stat(file.location)
    except OSError as error:
        raise SourceError(
            f"{file.path!r} has gone since the plan was made ({error.strerror}); bring it back, then run again",
            source=file.path,
        ) from error
    if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
        is_as_large = status.st_size == file.size
        what = "it was written again" if is_as_large else f"{status.st_size:,} bytes, planned {file.size:,}"
        raise SourceError(
            f"{file.path!r} changed while it was prepared: {what}; run the same command again", source=file.path
        )
