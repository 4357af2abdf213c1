"""The report of a preparation, and its progress while it runs."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import StoreCorrupt
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.read.sources import Part, Source, SourceSlice
from millrace.prepare.text.shards.assignment import Assignment
from millrace.text.tokenizer import Tokenizer

PENDING, DONE, WITHOUT = range(3)  # a slice: not finished, finished, finished without a document


class TextReport(msgspec.Struct):
    """What a preparation did."""

    path: str
    fingerprint: str
    is_new: bool
    documents: dict[str, int]  # by split; a cut document counts once
    tokens: dict[str, int]
    shards: dict[str, int]
    dropped: dict[str, int]
    bytes_read: int  # of the documents in their files, decompressed; of a record, those of its text
    characters: int
    seconds: float
    tokenizer: str
    encoder: str = ""  # that ran the tokenizer
    cut: int = 0  # documents that were too long
    pieces: int = 0  # records that they were cut into
    notes: list[str] = []  # files that were left out, and what the user may not have meant


class _Slice(msgspec.Struct):
    size: float
    state: int = PENDING


class ByteTally:
    """How much is read: ``done`` of ``total`` bytes of the files on disk, compressed or not.

    A slice in which no document begins is read by the slice before it, so it is not done before that one.
    """

    def __init__(self, sources: Sequence[Source], parts: Sequence[Part]) -> None:
        self._sources, self._parts = sources, parts
        pieces = [piece for part in parts for piece in part.slices]
        self._counts = Counter(piece.source for piece in pieces)  # slices of each source
        self._slices: dict[int, dict[int, _Slice]] = {}  # of sources with several, by where they start
        for piece in pieces:
            if self._counts[piece.source] > 1:
                self._slices.setdefault(piece.source, {})[piece.start] = _Slice(self._size(piece))
        self._starts = {source: list(slices) for source, slices in self._slices.items()}
        self._num_left = Counter(self._counts)
        self._done = 0.0
        self._held: dict[int, float] = {}  # by source: bytes of slices that others are still reading
        self._moving: dict[int, Mapping[str, int]] = {}  # by part: the counts of unfinished ones
        self.total = sum(sources[number].size for number in self._counts)
        self._facts = {"files": len(sources) - len(self._counts), "all_files": len(sources)}
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
        """Takes the counts of a part that is not finished."""
        part = self._parts[number]
        is_plain = not any(self._counts_itself(piece) for piece in part.slices)
        read, size = counts.get("bytes" if is_plain else "read", 0), int(sum(map(self._size, part.slices)))
        self._moving[part.number] = {**counts, "read": min(read, size + self._following(part.slices[-1]))}

    def _counts_itself(self, piece: SourceSlice) -> bool:
        """Whether the stream of the file counts the bytes that are read."""
        source = self._sources[piece.source]
        return source.compression is not None or source.format in ("csv", "parquet")

    def _following(self, piece: SourceSlice) -> int:
        """Bytes of the next slices in which no document begins, as far as that is known."""
        size, slices = 0.0, self._slices.get(piece.source, {})
        starts = self._starts.get(piece.source, ())
        for k in range(bisect.bisect_right(starts, piece.start), len(starts)):
            if (slice_ := slices[starts[k]]).state != WITHOUT:
                break
            size += slice_.size
        return int(size)

    def add(self, number: int, result: PartDone) -> None:
        part = self._parts[number]
        self._moving.pop(part.number, None)
        for piece in part.slices:
            self._done += self._size(piece)
            self._num_left[piece.source] -= 1
            self._facts["files"] += self._num_left[piece.source] == 0
            if piece.source in self._slices:
                is_without = piece.source - part.first_source in result.without
                self._finish(piece, is_without and not self._counts_itself(piece))
        documents = result.documents - result.pieces
        for name, count in (("bytes", result.bytes_read), ("tokens", result.tokens), ("documents", documents)):
            self._facts[name] += count
        self._facts["repeats"] += result.dropped.get("duplicate", 0)

    def _finish(self, piece: SourceSlice, is_without: bool) -> None:
        slices = self._slices[piece.source]
        slices[piece.start].state = WITHOUT if is_without else DONE
        if not is_without and piece.source not in self._held:
            return
        held, is_open = 0.0, False
        for slice_ in slices.values():
            if slice_.state == WITHOUT:
                held += slice_.size * is_open
            else:
                is_open = slice_.state == PENDING
        self._held[piece.source] = held

    def _size(self, piece: SourceSlice) -> float:
        source = self._sources[piece.source]
        if piece.stop < 0 or source.compression or source.format == "parquet":
            return source.size / self._counts[piece.source]
        return piece.stop - piece.start


def summary(
    done: Sequence[PartDone], assignment: Assignment, planned: Mapping[str, Sequence[Any]], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The counts of a run, for its report and provenance."""
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
        "encoder": getattr(tokenizer, "encoder", tokenizer.kind),
    }


def existing_report(out: Path, fingerprint: str, report: Mapping[str, Any]) -> TextReport:
    """The report of a store that is there already, from the ``report`` in its provenance."""
    known = {"path": str(out), "fingerprint": fingerprint, "is_new": False, "seconds": 0.0, "notes": []}
    try:
        encoder = report.get("encoder", report.get("engine", ""))  # its name in older stores
        return msgspec.convert({**report, **known, "encoder": encoder}, TextReport)
    except msgspec.ValidationError as error:
        path = str(out / "provenance.json")
        raise StoreCorrupt(f"{path} is damaged: report: {error}; copy it again", path=path) from error


def add_reports(before: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """The counts of a store: those ``before``, if any, and those of an append.

    The encoder is left out: another machine may use another and make the same store.
    """
    whole = {key: value for key, value in report.items() if key != "encoder"}
    for key, value in before.items():
        if isinstance(value, dict):
            names = dict.fromkeys((*value, *report[key]))
            whole[key] = {name: value.get(name, 0) + report[key].get(name, 0) for name in names}
        elif isinstance(value, int):
            whole[key] = value + report[key]
    return whole
