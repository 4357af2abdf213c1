"""What a preparation says of itself: how far it is, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import StoreCorrupt
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.read.sources import Part, Source, Unit
from millrace.prepare.text.shards.assignment import Assignment
from millrace.text.tokenizer import Tokenizer

PENDING, DONE, WITHOUT = range(3)  # a slice: not finished, finished, finished and no document begins in it


class TextReport(msgspec.Struct):
    """What a preparation did."""

    path: str
    fingerprint: str
    is_new: bool
    documents: dict[str, int]  # by split; one that is cut is one
    tokens: dict[str, int]
    shards: dict[str, int]
    dropped: dict[str, int]
    bytes_read: int  # of documents as they stand in their files, unpacked: of a record those of its text
    characters: int
    seconds: float
    tokenizer: str
    engine: str
    cut: int = 0  # documents that were too long
    pieces: int = 0  # records that they were cut into
    notes: list[str] = []  # what was left out of folders, and what may not be meant


class _Slice(msgspec.Struct):
    size: float
    state: int = PENDING


class Tally:
    """How much is read: ``done`` of ``total`` bytes of the files as they lie on disk, compressed or not.

    Slices in which no document begins are read by the slice before them, so they are not done before that is.
    """

    def __init__(self, sources: Sequence[Source], parts: Sequence[Part]) -> None:
        self._sources, self._parts = sources, parts
        self._units = Counter(unit.source for part in parts for unit in part.units)
        self._slices: dict[
            int, dict[int, _Slice]
        ] = {}  # by source, of those that have several, and by where they start
        for unit in (unit for part in parts for unit in part.units if self._units[unit.source] > 1):
            self._slices.setdefault(unit.source, {})[unit.start] = _Slice(self._size(unit))
        self._left = Counter(self._units)
        self._done = 0.0
        self._held: dict[int, float] = {}  # by source: bytes of slices that others are still reading
        self._moving: dict[int, Mapping[str, int]] = {}  # by part: what unfinished ones said of themselves
        self.total = sum(sources[number].size for number in self._units)
        self._facts = {"files": len(sources) - len(self._units), "all_files": len(sources)}
        self._facts |= dict.fromkeys(("bytes", "tokens", "documents", "repeats"), 0)

    @property
    def done(self) -> int:
        moving = sum(counts.get("read", 0) for counts in self._moving.values())
        return round(self._done - sum(self._held.values())) + moving

    @property
    def facts(self) -> dict[str, int]:
        moving = {name: sum(counts.get(name, 0) for counts in self._moving.values()) for name in self._facts}
        return {name: count + moving[name] for name, count in self._facts.items()}

    def move(self, number: int, counts: Mapping[str, int]) -> None:
        """A part that is not finished has come so far; for some that is only known in the end."""
        part = self._parts[number]
        is_plain = not any(self._tells(unit) for unit in part.units)
        read, size = counts.get("bytes" if is_plain else "read", 0), int(sum(map(self._size, part.units)))
        self._moving[part.number] = {**counts, "read": min(read, size + self._behind(part.units[-1]))}

    def _tells(self, unit: Unit) -> bool:
        """Whether what is read of the file itself is told."""
        source = self._sources[unit.source]
        return source.compression is not None or source.format in ("csv", "parquet")

    def _behind(self, unit: Unit) -> int:
        """Bytes of the slices behind one in which no document begins, as far as they are known."""
        found = 0.0
        for start, slice_ in self._slices.get(unit.source, {}).items():
            if start > unit.start:
                if slice_.state != WITHOUT:
                    break
                found += slice_.size
        return int(found)

    def add(self, number: int, result: PartDone) -> None:
        part = self._parts[number]
        self._moving.pop(part.number, None)
        for unit in part.units:
            self._done += self._size(unit)
            self._left[unit.source] -= 1
            self._facts["files"] += self._left[unit.source] == 0
            if unit.source in self._slices:
                self._finish(unit, unit.source - part.first_source in result.without and not self._tells(unit))
        documents = result.documents - result.pieces
        for name, count in (("bytes", result.bytes_read), ("tokens", result.tokens), ("documents", documents)):
            self._facts[name] += count
        self._facts["repeats"] += result.dropped.get("duplicate", 0)

    def _finish(self, unit: Unit, is_without: bool) -> None:
        slices = self._slices[unit.source]
        slices[unit.start].state = WITHOUT if is_without else DONE
        if not is_without and unit.source not in self._held:
            return
        held, is_open = 0.0, False
        for slice_ in slices.values():
            if slice_.state == WITHOUT:
                held += slice_.size * is_open
            else:
                is_open = slice_.state == PENDING
        self._held[unit.source] = held

    def _size(self, unit: Unit) -> float:
        source = self._sources[unit.source]
        if unit.stop < 0 or source.compression or source.format == "parquet":
            return source.size / self._units[unit.source]
        return unit.stop - unit.start


def summary(
    done: Sequence[PartDone], assignment: Assignment, planned: Mapping[str, Sequence[Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """What a run did, as its report and provenance say."""
    return {
        "documents": {split: count for split, count in assignment.documents.items() if count},
        "tokens": {split: count for split, count in assignment.tokens.items() if count},
        "shards": {split: len(shards) for split, shards in planned.items()},
        "dropped": assignment.all_dropped(),
        "bytes_read": sum(part.bytes_read for part in done),
        "characters": assignment.characters,
        "cut": assignment.cut,
        "pieces": assignment.pieces,
        "tokenizer": tokenizer.name,
        "engine": getattr(tokenizer, "engine", tokenizer.kind),
    }


def reported(out: Path, fingerprint: str, report: Mapping[str, Any], notes: Sequence[str] = ()) -> TextReport:
    """The report of what is there already; ``report`` is what its run said of itself."""
    known = {"path": str(out), "fingerprint": fingerprint, "is_new": False, "seconds": 0.0, "notes": list(notes)}
    try:
        return msgspec.convert({**report, **known}, TextReport)
    except msgspec.ValidationError as error:
        path = str(out / "provenance.json")
        raise StoreCorrupt(f"{path} is damaged: report: {error}; copy it again, or move it away", path=path) from error


def joined(before: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """What a store says of all runs that made it: of those ``before``, if any, and of an append.

    The engine is left out: another machine has another, and makes the same store.
    """
    whole = {key: value for key, value in report.items() if key != "engine"}
    for key, value in before.items():
        if isinstance(value, dict):
            names = dict.fromkeys((*value, *report[key]))
            whole[key] = {name: value.get(name, 0) + report[key].get(name, 0) for name in names}
        elif isinstance(value, int):
            whole[key] = value + report[key]
    return whole
