"""What a preparation says of itself: how far it is, and what it did."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from millrace.prepare.text.part import PartDone
from millrace.prepare.text.sources import Part, Source, Unit


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
