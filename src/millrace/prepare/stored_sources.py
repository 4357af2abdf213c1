"""The sources that a store was made from, by which an append skips what is in it already.

``provenance.json`` says for each run what it read: a path with the size and the hash of both ends of each file. A file
of an append is the same if its real path is there, or its size and ends. Files that are records themselves (images) are
part of a folder in the plan; a run describes each of them in a hash for its place and one for its contents.
"""

from __future__ import annotations

import base64
import filecmp
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash

from millrace.errors import ConfigError, SourceError, StoreCorrupt
from millrace.prepare.files import ENDS, InputFile, describe_file
from millrace.store.folder import Folder
from millrace.store.history import NAME
from millrace.store.manifest import Manifest

File = TypeVar("File", bound=InputFile)
CHANCE = 0.1  # of images may have the name and size of another one
SAME_SOURCE = ("skip", "keep")


class _Plan(msgspec.Struct):
    sources: dict[str, tuple[int, int, str]] = {}


class _Run(msgspec.Struct):
    """What is read again of a line of ``provenance.json``."""

    fingerprint: str | None = None
    plan: _Plan | None = None
    folder: str | None = None  # that relative paths count from; runs of earlier versions do not say
    links: dict[str, str] = {}  # the real paths of sources that a link led to
    members: list[str] | None = None  # hashes of the places, contents and likenesses of files in the sources
    parent: str | None = None  # the fingerprint of the store that was appended to
    same_source: str | None = None


def check_same_source(choice: str | None, *, append: bool) -> None:
    if choice is not None and choice not in SAME_SOURCE:
        raise ConfigError(f"--same-source {choice!r}; expected skip or keep")
    if choice is not None and not append:
        raise ConfigError(f"--same-source {choice} is for --append: a new store has no sources yet; leave it out")


class RealPaths:
    """Real paths of files, with one look at each folder."""

    def __init__(self) -> None:
        self._folder = lru_cache(maxsize=1024)(os.path.realpath)

    def of(self, file: InputFile) -> str | None:
        """The real path of a file, or its URL; None for what is no file, such as standard input."""
        if "://" in file.path:
            return file.path
        return self.at(file.location) if file.location and file.path != "-" else None

    def at(self, path: str) -> str:
        folder, name = os.path.split(path)
        place = os.path.join(self._folder(folder or "."), name)
        return os.path.realpath(place) if not name or os.path.islink(place) else place


def describe_sources(files: Sequence[InputFile], planned: Mapping[str, Any]) -> dict[str, Any]:
    """What a run notes about its files, besides the sources in its plan."""
    real, folder = RealPaths(), os.getcwd()
    links: dict[str, str] = {}
    members: list[tuple[int, int, int]] = []
    for file in files:
        place = real.of(file)
        if place is None:
            continue
        if file.path not in planned:
            members.append((_hash(place), _contents(file), _likeness(file)))
        elif "://" not in file.path and place != os.path.normpath(os.path.join(folder, file.location)):
            links[file.path] = place
    more: dict[str, Any] = {"links": links} if links else {}
    if members:
        columns = np.array(members, "<u8").T
        more["members"] = [base64.b64encode(column.tobytes()).decode() for column in columns]
    return {"folder": folder, **more}


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(os.fsencode(text))


def _contents(file: InputFile) -> int:
    """What a file holds, as far as it is known: of an image that is its name, size and time."""
    ends = file.ends or f"{os.path.basename(file.path)}\0{file.mtime_ns}"
    return _hash(f"{file.size}\0{ends}")


def _likeness(file: InputFile) -> int:
    """What a copy of an image has in common with it: the name with that of its folder, and the size."""
    folder, name = os.path.split(file.path)
    return _hash(f"{file.size}\0{os.path.basename(folder)}/{name}")


def _is_told_apart(file: InputFile) -> bool:
    """Whether no other file has these contents. Archives give whole seconds, which many images of one size share."""
    return bool(file.ends) or file.mtime_ns % 1_000_000_000 != 0


class StoredSources:
    """The files that are in a store. ``choice`` is that of ``--same-source``."""

    def __init__(self, out: Path, manifest: Manifest, choice: str | None) -> None:
        self._choice, self._real = choice, RealPaths()
        self._places: set[int] = set()
        self._contents: Counter[int] = Counter()
        self._likenesses: set[int] = set()
        self._sources: list[str] = []  # real paths of the files and folders that were given
        self._originals: dict[int, list[str]] | None = (
            None  # by size: those with bytes between their ends, when asked for
        )
        self._folders: set[str] = set()  # real paths of sources of runs that do not describe the files in them
        runs = _runs_of(out, manifest)
        for run in runs:
            self._add(run)
        self.was_kept = bool(runs) and runs[-1].same_source == "keep"

    def _add(self, run: _Run) -> None:
        for path, (size, _, ends) in (run.plan.sources if run.plan is not None else {}).items():
            self._contents[_hash(f"{size}\0{ends}")] += 1
            if not size:  # nothing of it is in the store, and it may have grown since
                continue
            place = path if "://" in path else run.links.get(path)
            if place is None:
                place = self._real.at(os.path.join(run.folder or "", path))
            self._places.add(_hash(place))
            if size > 2 * ENDS and "://" not in place:
                self._sources.append(place)
            if run.members is None:
                self._folders.add(place)
        columns: tuple[set[int] | Counter[int], ...] = (self._places, self._contents, self._likenesses)
        for hashes, known in zip(run.members or (), columns, strict=False):
            known.update(np.frombuffer(base64.b64decode(hashes), "<u8").tolist())

    def without(self, files: Sequence[File]) -> tuple[list[File], list[str]]:
        """The files that are new, and a note on the others. Files that have changed since they were read are refused."""
        if self._choice == "keep":
            return list(files), []
        fresh: list[File] = []
        same: list[File] = []
        changed: list[File] = []
        unsure: list[File] = []
        for file in files:
            place = self._real.of(file)
            is_at_old_place = place is not None and (_hash(place) in self._places or self._is_below_old(place))
            if _contents(file) in self._contents and is_at_old_place:
                same.append(file)
            elif _contents(file) in self._contents and not self._is_another(file):
                (same if _is_told_apart(file) else unsure).append(file)
            elif is_at_old_place:
                changed.append(file)
            else:
                fresh.append(file)
        if changed and self._choice is None:
            raise _changed(changed)
        alike = [file for file in fresh if not file.ends and _likeness(file) in self._likenesses]
        if len(alike) > CHANCE * len(files):
            copies = {file.path for file in alike}
            fresh, unsure = [file for file in fresh if file.path not in copies], unsure + alike
        if unsure and self._choice is None:
            raise _unsure(unsure)
        same += unsure
        notes = [f"{_listed(same)}: in the store already, and skipped"] if same else []
        if changed:
            notes.append(f"{_listed(changed)}: changed since the store was made, and skipped (--same-source skip)")
        return fresh, notes

    def _is_another(self, file: InputFile) -> bool:
        """Whether it differs, between its ends, from all files with these ends, which are still there to be compared."""
        if not file.ends or file.size <= 2 * ENDS:
            return False
        if self._originals is None:
            self._originals = {}
            for place in filter(self._is_stored, dict.fromkeys(_files_at(self._sources))):
                self._originals.setdefault(os.path.getsize(place), []).append(place)
        answers = [_differs(file, original) for original in self._originals.get(file.size, ())]
        return False not in answers and answers.count(True) >= self._contents[_contents(file)]

    def _is_stored(self, place: str) -> bool:
        return _hash(place) in self._places and os.path.isfile(place)

    def _is_below_old(self, place: str) -> bool:
        """Whether a file lies in a folder that an earlier version read as one source."""
        return any(folder in self._folders for folder in _parents(os.path.dirname(place)))


def _files_at(places: Iterable[str]) -> Iterable[str]:
    for place in places:
        yield place
        for folder, _, names in os.walk(place):  # a file has none
            yield from (os.path.join(folder, name) for name in names)


def _differs(file: InputFile, original: str) -> bool | None:
    """Whether another file has other bytes; None if it has other ends, and False if it cannot be compared."""
    try:
        if describe_file(original, "files").ends != file.ends:
            return None
        return not filecmp.cmp(original, file.location, shallow=False)
    except (OSError, SourceError):
        return False


@lru_cache(maxsize=1024)
def _parents(folder: str) -> tuple[str, ...]:
    return (folder, *map(str, Path(folder).parents))


def _listed(files: Sequence[InputFile]) -> str:
    return f"{files[0].path!r}{f' and {len(files) - 1:,} more' if len(files) > 1 else ''}"


def _changed(files: Sequence[InputFile]) -> SourceError:
    return SourceError(
        f"{_listed(files)}: the store was made from this path, which has other contents now; give new records in "
        "files of their own, or prepare everything into another --out; --same-source skip leaves such files out, and "
        "--same-source keep adds all that they hold, which is right if nothing of it is in the store",
        source=files[0].path,
    )


def _unsure(files: Sequence[InputFile]) -> SourceError:
    return SourceError(
        f"{_listed(files)}: the store holds images of another place with these names and sizes; if they are the same, "
        "--same-source skip leaves them out; if they are others, --same-source keep adds all that you give",
        source=files[0].path,
    )


def _runs_of(out: Path, manifest: Manifest) -> list[_Run]:
    """The runs that made a store, oldest first. A killed append may have left a line, and is no part of it."""
    folder = Folder(out)
    if not os.path.lexists(out / NAME):
        return []
    lines = folder.side_file(NAME).splitlines()
    runs = _parsed(lines[:-1], out / NAME)
    try:
        runs += _parsed(lines[-1:], out / NAME, first=len(lines))
    except StoreCorrupt:
        # The line of the run that made the store must be whole; one after it is what a killed append left.
        if manifest.fingerprint not in {run.fingerprint for run in runs}:
            raise
    by_name = {run.fingerprint: run for run in runs}
    ancestry: set[str] = set()
    step: str | None = manifest.fingerprint
    while step is not None:
        ancestry.add(step)
        run = by_name.get(step)
        if run is not None and run.folder is not None:
            step = run.parent
        elif os.path.exists(out / "snapshots" / f"{step}.json"):  # written by an earlier version, or no preparation
            step = folder.decode(f"snapshots/{step}.json").parent
        else:
            break
    # Of snapshots that gc removed only the lines are left.
    first = 0 if step is None else next((k for k, run in enumerate(runs) if run.fingerprint in ancestry), len(runs))
    return [run for k, run in enumerate(runs) if k < first or run.fingerprint in ancestry]


def _parsed(lines: Iterable[bytes], path: Path, first: int = 1) -> list[_Run]:
    runs = []
    for number, line in enumerate(lines, start=first):
        try:
            runs.append(msgspec.convert(json.loads(line), _Run))
        except (ValueError, RecursionError) as error:
            raise StoreCorrupt(
                f"{path}, line {number}, is damaged: {error}; copy it again from where the store was made",
                path=str(path),
            ) from error
    return runs
