"""What a preparation says of itself: how far it is, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.prepare.text.part import PartDone
from millrace.prepare.text.shards import Assignment
from millrace.prepare.text.sources import Part, Source, Unit
from millrace.text.tokenizer import Tokenizer


class TextReport(msgspec.Struct):
    """What a preparation did."""

    path: str
    fingerprint: str
    is_new: bool
    documents: dict[str, int]  # by split
    tokens: dict[str, int]
    shards: dict[str, int]
    dropped: dict[str, int]
    bytes_read: int
    characters: int
    seconds: float
    tokenizer: str
    engine: str
    notes: list[str] = []  # what was left out of folders, and what may not be meant


class Tally:
    """How much is read: ``done`` of ``total`` bytes of the files as they lie on disk, compressed or not."""

    def __init__(self, sources: Sequence[Source], parts: Sequence[Part]) -> None:
        self._sources = sources
        self._units = Counter(unit.source for part in parts for unit in part.units)
        self._left = Counter(self._units)
        self._done = 0.0
        self.total = sum(sources[number].size for number in self._units)
        self.facts = {"files": len(sources) - len(self._units), "all_files": len(sources)}
        self.facts |= dict.fromkeys(("bytes", "tokens", "documents", "repeats"), 0)

    @property
    def done(self) -> int:
        return round(self._done)

    def add(self, part: Part, result: PartDone) -> None:
        for unit in part.units:
            self._done += self._size(unit)
            self._left[unit.source] -= 1
            self.facts["files"] += self._left[unit.source] == 0
        for name, count in (("bytes", result.bytes_read), ("tokens", result.tokens), ("documents", result.documents)):
            self.facts[name] += count
        self.facts["repeats"] += result.dropped.get("duplicate", 0)

    def _size(self, unit: Unit) -> float:
        source = self._sources[unit.source]
        if unit.stop < 0 or source.format == "parquet":
            return source.size / self._units[unit.source]
        return unit.stop - unit.start


def summary(
    done: Sequence[PartDone], assignment: Assignment, planned: Mapping[str, Sequence[Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """What a run did, as its report and provenance say."""
    dropped: Counter[str] = Counter()
    for part in done:
        dropped.update(part.dropped)
    if assignment.dropped["documents"]:
        dropped.update({"duplicate": assignment.dropped["documents"], "duplicate bytes": assignment.dropped["bytes"]})
    return {
        "documents": {split: count for split, count in assignment.documents.items() if count},
        "tokens": {split: count for split, count in assignment.tokens.items() if count},
        "shards": {split: len(shards) for split, shards in planned.items()},
        "dropped": dict(sorted(dropped.items())),
        "bytes_read": sum(part.bytes_read for part in done),
        "characters": assignment.characters,
        "tokenizer": tokenizer.name,
        "engine": getattr(tokenizer, "engine", tokenizer.kind),
    }
