"""What a worker compares with its hashes before it makes a batch of it: its copy of the store may be damaged.

The trainer cannot see that: what a worker puts into the queue has the right checksums, of wrong rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from millrace.condition import names, parse
from millrace.feed.batch import Batch
from millrace.feed.line import Line
from millrace.feed.stages import Counters, Make
from millrace.store.checked_copy import CheckedCopy
from millrace.store.store import Store
from millrace.view.compose import leaves


class Copies:
    """The stores of a worker on its own disk. ``trust`` says which of their files need no check (``TRUST``)."""

    def __init__(self, trust: str) -> None:
        self._trust = trust
        self._copies: dict[str, CheckedCopy | None] = {}  # by fingerprint

    def of(self, stores: Iterable[Store], spec: dict[str, Any]) -> list[CheckedCopy]:
        """Those that a view reads, after comparing what says which rows its samples have."""
        copies = []
        for store in stores:
            if store.fingerprint not in self._copies:
                self._copies[store.fingerprint] = CheckedCopy.of(store, self._trust)
            copy = self._copies[store.fingerprint]
            if copy is not None:
                columns, has_offsets = _index(spec, store)
                copy.check_columns(columns, with_offsets=has_offsets)
                copies.append(copy)
        return copies


def _index(spec: dict[str, Any], store: Store) -> tuple[set[str], bool]:
    """The columns that choose rows or records of a store in a view, and whether the view asks where records begin."""
    if spec["view"] in ("subset", "concat"):
        parts = [spec["of"]] if spec["view"] == "subset" else spec["of"]
        each = [_index(part, store) for part in parts]
        return set().union(*(columns for columns, _ in each)), any(has_offsets for _, has_offsets in each)
    if spec["store"] != store.root.fingerprint:
        return set(), False
    cuts = set() if store.root.time_cuts is None else {store.root.time_cuts.column}
    where = set() if spec.get("where") is None else names(parse(spec["where"]))
    return cuts | where, spec["view"] != "blocks"


class CheckedMake:
    """Makes batches of blocks that were compared with their hashes."""

    def __init__(self, make: Make[Batch], line: Line, copies: Sequence[CheckedCopy]) -> None:
        self._make, self._line, self._copies = make, line, copies
        self._columns = {(leaf.store, field.column) for leaf in leaves(line.view) for field in leaf.fields}
        self._is_done = False

    def make(self, batch: int) -> Batch:
        if not self._is_done:
            self._check(batch)
        return self._make.make(batch)

    def _check(self, batch: int) -> None:
        line = self._line
        # Where all files of these columns are right, later batches have nothing to ask: it took half a millisecond each.
        columns = [(copy, name) for store, name in self._columns for copy in self._copies if copy.has(store)]
        self._is_done = all(copy.is_right(name) for copy, name in columns)
        for stored, starts, stops in line.view.reads(line.order.samples(line.read_positions(batch))):
            for shards, shard, file, blocks in stored.blocks(starts, stops):
                for copy in self._copies:
                    if copy.is_of(shards):
                        copy.check(shard, file, blocks)

    def report(self) -> Counters:
        return self._make.report()
