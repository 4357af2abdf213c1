"""A seeded sample of a store: some shards, and some records of each. What is read does not grow with the store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from millrace.ragged import Array, Int64s
from millrace.report.blocks import Bars, Histogram
from millrace.store.store import Store

SHARDS = 16  # at most; of a store in a bucket one, since a shard is downloaded whole
RECORDS = 2048  # whose lengths and names are read
CONTENTS = 256  # whose rows are read
BINS = 30
MOST_BARS = 12


@dataclass(frozen=True)
class Piece:
    """One shard of the sample, and the chosen records of it, counted within it."""

    number: int
    store: Store
    records: Int64s
    contents: Int64s  # the first of them, whose rows may be read


class Sample:
    """Some records of a store, chosen by a seed, each as likely as the others up to the choice of shards."""

    def __init__(self, store: Store, seed: int = 0) -> None:
        self.store, rng = store, np.random.default_rng(seed)
        sizes = (
            np.array([store.shard(k).num_records for k in range(store.num_shards)]) if store.num_shards < 4096 else None
        )
        most = 1 if "://" in (store.path or "") else SHARDS
        numbers = np.arange(store.num_shards) if sizes is None else np.flatnonzero(sizes)
        if len(numbers) > most:
            weights = None if sizes is None else sizes[numbers] / sizes[numbers].sum()
            numbers = np.sort(rng.choice(numbers, most, replace=False, p=weights))
        shards = [store.shard(int(k)) for k in numbers]
        counts = np.array([shard.num_records for shard in shards], np.int64)
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        chosen = rng.choice(total, min(RECORDS, total), replace=False) if total < 1 << 22 else _draw(rng, total)
        self.pieces = []
        for k, shard in enumerate(shards):
            first = int(ends[k] - counts[k])
            places = np.flatnonzero((chosen >= first) & (chosen < ends[k]))
            records = chosen[places] - first
            self.pieces.append(Piece(int(numbers[k]), shard, np.sort(records), np.sort(records[places < CONTENTS])))
        self.num_records = sum(len(piece.records) for piece in self.pieces)
        self.num_contents = sum(len(piece.contents) for piece in self.pieces)

    def lengths(self, axis: str | None = None) -> Int64s:
        """Rows of each chosen record."""
        found = []
        for piece in self.pieces:
            starts, stops = piece.store.record_spans(axis)
            found.append(np.asarray(stops[piece.records] - starts[piece.records]))
        return np.concatenate([np.empty(0, np.int64), *found])

    def column(self, name: str) -> Array:
        """A record column of the chosen records."""
        return np.concatenate([np.asarray(piece.store.columns[name][piece.records]) for piece in self.pieces])

    def said(self) -> str:
        """What was read, in words."""
        if self.num_records == self.store.num_records:
            return {0: "no records", 1: "the only record"}.get(self.num_records, f"all {self.num_records:,} records")
        shards = f"{len(self.pieces):,} of {self.store.num_shards:,} shards"
        return f"a sample of {self.num_records:,} of {self.store.num_records:,} records, from {shards}"


def _draw(rng: np.random.Generator, total: int) -> Int64s:
    """Different numbers below a large one, without a permutation of all."""
    drawn = np.unique(rng.integers(0, total, RECORDS))
    rng.shuffle(drawn)
    return drawn


def histogram(title: str, values: Any, note: str = "") -> Histogram | None:
    """The distribution of the finite values, in equal steps; whole numbers have whole steps. None without any."""
    numbers = np.asarray(values, np.float64).reshape(-1)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return None
    low, high = float(numbers.min()), float(numbers.max())
    if not math.isfinite(high - low):  # no axis is as long as from -1e308 to 1e308
        return None
    if np.asarray(values).dtype.kind in "iu":
        step = max(1.0, np.ceil((high - low + 1) / BINS))  # bars of as many values each
        edges = np.arange(low, high + step + 1, step)
    else:
        edges = np.linspace(low, high if high > low else low + 1, BINS + 1)
    counts, edges = np.histogram(numbers, edges)
    return Histogram(title, edges.tolist(), counts.tolist(), note, high)


def bars(title: str, totals: dict[str, float], note: str = "") -> Bars | None:
    """The largest totals, and the rest in one bar."""
    if not totals:
        return None
    ranked = sorted(totals.items(), key=lambda item: (-item[1], item[0]))
    shown, rest = ranked[:MOST_BARS], ranked[MOST_BARS:]
    if rest:
        shown.append((f"({len(rest):,} others)", sum(count for _, count in rest)))
    return Bars(title, [name for name, _ in shown], [float(count) for _, count in shown], note)


def present(blocks: Sequence[Any]) -> list[Any]:
    """The blocks that there are."""
    return [block for block in blocks if block is not None]
