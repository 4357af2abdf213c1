"""Which rows of which columns lie on a device: all of them, or as many as fit, the most used first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.gather.gather import Field
from millrace.order.orders import Order
from millrace.view.compose import Concat, Subset, leaves
from millrace.view.view import View, source

ADVICE = "give device_bytes= for a part of the rows, or take tier='ram'"


class Extent(NamedTuple):
    """The rows of one axis of one store, by its shards."""

    tier: int  # the id of its Shards, which a column keeps alive
    shards: tuple[int, ...]
    axis: str


@dataclass(eq=False)
class Column:
    """A row column of a store, and how many of its first rows lie on the device."""

    stored: Any  # as a gather reads it
    extent: Extent
    row_items: int
    num_held: int = 0

    @property
    def num_rows(self) -> int:
        return len(self.stored)

    @property
    def row_bytes(self) -> int:
        return self.row_items * int(self.stored.dtype.itemsize)

    @property
    def key(self) -> Any:
        shards, files = self.stored.files()
        return id(shards), tuple(files)


@dataclass(eq=False)
class Table:
    """The columns that one field reads, that of each leaf of the view: one after the other on the device."""

    columns: list[Column]  # distinct
    which: list[int]  # of them, for each leaf
    position: int  # of the first field that reads it, among the fields of a leaf
    fields: list[Field] = field(default_factory=list)  # that read it, as the first leaf has them

    @property
    def bases(self) -> list[int]:
        """Where the rows of each leaf's column begin."""
        ends = np.concatenate(([0], np.cumsum([column.num_held for column in self.columns]))).tolist()
        return [ends[k] for k in self.which]

    @property
    def num_held(self) -> int:
        return sum(column.num_held for column in self.columns)

    @property
    def is_whole(self) -> bool:
        return all(column.num_held == column.num_rows for column in self.columns)

    @property
    def num_bytes(self) -> int:
        return sum(column.num_rows * column.row_bytes for column in self.columns)

    @property
    def held_bytes(self) -> int:
        return sum(column.num_held * column.row_bytes for column in self.columns)


def tables_of(view: View) -> list[Table]:
    """The tables of a view; refuses views whose samples are not runs of rows."""
    parts = leaves(view)
    columns: dict[Any, Column] = {}
    tables: dict[tuple[int, ...], Table] = {}
    for leaf in parts:
        _check_leaf(leaf)
    for number, first in enumerate(view.fields):
        if first.axis is None or first.measure is not None:
            continue
        each = [_column(leaf, leaf.fields[number], columns) for leaf in parts]
        _check_alike(first, [leaf.fields[number] for leaf in parts], each)
        distinct = list({id(column): column for column in each}.values())
        which = [next(k for k, own in enumerate(distinct) if own is column) for column in each]
        key = tuple(id(column) for column in each)
        tables.setdefault(key, Table(distinct, which, number)).fields.append(first)
    return list(tables.values())


def _check_leaf(leaf: View) -> None:
    is_own = type(leaf).located is not View.located and getattr(leaf, "documents", True)
    if is_own:
        name = "Blocks(documents=True)" if type(leaf).__name__ == "Blocks" else type(leaf).__name__
        raise ConfigError(f"tier='device' cannot make the samples of {name} on a GPU; take tier='ram'")


def _column(leaf: View, field: Field, known: dict[Any, Column]) -> Column:
    stored = source(leaf.store.whole.columns[field.column], field)
    shards, files = stored.files()
    extent = Extent(id(shards), tuple(shard for shard, _ in files), field.axis or "")
    column = Column(stored, extent, math.prod(stored.shape[1:]))
    return known.setdefault(column.key, column)


def _check_alike(first: Field, fields: Sequence[Field], columns: Sequence[Column]) -> None:
    """Rows of several stores lie in one table, so they must be stored alike."""
    kinds = {
        (own.first, own.items, own.is_bits, column.stored.dtype, column.row_items)
        for own, column in zip(fields, columns, strict=True)
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"tier='device': the views store {first.name!r} in different types or places; prepare them alike, or take tier='ram'"
        )


def choose_rows(tables: Sequence[Table], limit: int | None, view: View, order: Order, position: int) -> None:
    """Notes how many rows of each column are held: all, or at most ``limit`` bytes.

    The stores with the most expected use of each byte come first; of a store they are the first rows.
    """
    columns = list({id(column): column for table in tables for column in table.columns}.values())
    times = {id(column): sum(column in table.columns for table in tables) for column in columns}
    sizes: dict[tuple[int, tuple[int, ...]], int] = {}
    for column in columns:
        place = column.extent[:2]
        sizes[place] = sizes.get(place, 0) + column.num_rows * column.row_bytes * times[id(column)]
    left = sum(sizes.values()) if limit is None else limit
    use = _use_of_each(tables, view, order, position)
    for place in sorted(sizes, key=lambda own: -use.get(own, 0.0) / max(sizes[own], 1)):
        share = min(1.0, left / max(sizes[place], 1))
        left -= int(sizes[place] * share)
        for column in columns:
            if column.extent[:2] == place:
                column.num_held = int(column.num_rows * share)


def _use_of_each(
    tables: Sequence[Table], view: View, order: Order, position: int
) -> dict[tuple[int, tuple[int, ...]], float]:
    """The share of the samples that each store has, as the order draws them at a position."""
    found: dict[tuple[int, tuple[int, ...]], float] = {}
    for k, share in enumerate(_shares(view, _weights(order, position))):
        for place in {table.columns[table.which[k]].extent[:2] for table in tables}:
            found[place] = found.get(place, 0.0) + share
    return found


def _weights(order: Order, position: int) -> Sequence[float] | None:
    """Of the sources of a mixture."""
    segments = getattr(order, "segments", None)
    return None if segments is None else [seg.parts for seg in segments if seg.position <= position][-1]


def _shares(view: View, weights: Sequence[float] | None = None) -> list[float]:
    """Of each leaf of a view; without weights by the number of samples."""
    if isinstance(view, Subset):
        return _shares(view.view)
    if not isinstance(view, Concat):
        return [1.0]
    parts = weights if weights is not None and len(weights) == len(view.views) else [len(own) for own in view.views]
    return [part / sum(parts) * own for part, inner in zip(parts, view.views, strict=True) for own in _shares(inner)]
