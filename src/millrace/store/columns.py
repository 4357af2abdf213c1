"""What ``store.columns[name]`` is: a read-only array over all shards, indexed like numpy.

A slice within one shard is a view of the map, across shards a copy; nothing else is read. Strings and
dictionaries decode on top of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from millrace.ragged import Array, Int64s, as_indices, concatenated_ranges
from millrace.store.layout import BLOCK_BYTES, bfloat16_values
from millrace.store.shards import Shards

PAGE_BYTES = 4096
ASKED_SHARDS = 1024  # whose rows are asked for before the first is waited for, where they are not mapped


class ColumnArray:
    """One numeric column: ``len``, ``shape``, ``dtype``, slices, integer and boolean arrays, ``np.asarray``.

    bfloat16 is shown as the float32 it stands for; ``raw`` shows the stored bits.
    """

    def __init__(
        self,
        shards: Shards,
        ids: Int64s,
        file: int,
        starts: Int64s,
        dtype: np.dtype[Any],
        tail: tuple[int, ...],
        *,
        decode: bool = False,
    ) -> None:
        self._shards, self._ids, self._file, self.starts = shards, ids, file, starts
        self._storage, self._tail, self._decode = dtype, tail, decode

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float32) if self._decode else self._storage

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self._tail)

    @property
    def ndim(self) -> int:
        return 1 + len(self._tail)

    @property
    def raw(self) -> ColumnArray:
        """The same column without decoding."""
        return ColumnArray(self._shards, self._ids, self._file, self.starts, self._storage, self._tail)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def pieces(self) -> Iterator[tuple[int, Array]]:
        """Each shard's first row and its array, one after the other."""
        for k in range(len(self._ids)):
            yield int(self.starts[k]), self._piece(k, 0, int(self.starts[k + 1] - self.starts[k]))

    def whole(self, k: int) -> Array | None:
        """One shard's stored array, or None where rows are read rather than mapped."""
        return self._shards.array(int(self._ids[k]), self._file)

    def random(self, k: int) -> Array | None:
        """``whole`` for reading in random order: an array of the caller's own, without read-ahead."""
        return self._shards.array(int(self._ids[k]), self._file, random=True)

    def direct(self, k: int) -> int | None:
        """A descriptor of one shard's file that reads past the page cache, for the caller to close; None where there is none."""
        return self._shards.descriptor(int(self._ids[k]), self._file)

    def files(self, which: Iterable[int] | None = None) -> tuple[Shards, list[tuple[int, int]]]:
        """The files of these shards (default: all) as (shard, number of the file), and the tier that has them."""
        ids = self._ids.tolist() if which is None else [int(self._ids[k]) for k in which]
        return self._shards, [(shard, self._file) for shard in ids]

    def blocks(self, starts: Int64s, stops: Int64s) -> Iterator[tuple[Shards, int, int, list[int]]]:
        """The blocks of 4 MiB that these rows lie in: the tier, the shard, the number of the file, and the blocks."""
        item_bytes = self._storage.itemsize * math.prod(self._tail)
        for k in self.shards_of(starts, stops).tolist():
            base, end = self.starts[k], self.starts[k + 1]
            is_here = (starts < end) & (stops > base) & (starts < stops)
            first = np.maximum(starts[is_here] - base, 0) * item_bytes // BLOCK_BYTES
            last = (np.minimum(stops[is_here], end) - base) * item_bytes - 1
            blocks = concatenated_ranges(first, last // BLOCK_BYTES + 1 - first)
            yield self._shards, int(self._ids[k]), self._file, np.unique(blocks).tolist()

    def shards_of(self, starts: Int64s, stops: Int64s) -> Int64s:
        """The shards that hold rows of these spans."""
        first, last = np.searchsorted(self.starts, starts, side="right") - 1, np.searchsorted(self.starts, stops)
        steps = np.zeros(len(self.starts) + 1, np.int64)
        np.add.at(steps, first[starts < stops], 1)
        np.add.at(steps, last[starts < stops], -1)
        return np.flatnonzero((np.cumsum(steps)[: len(self._ids)] > 0) & (np.diff(self.starts) > 0))

    def _piece(self, k: int, start: int, stop: int) -> Array:
        return self._values(self._shards.rows(int(self._ids[k]), self._file, start, stop))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """The shards that rows [start, stop) lie in, and which rows of each."""
        first, last = np.searchsorted(self.starts, start, side="right") - 1, np.searchsorted(self.starts, stop)
        for k in range(first, last if start < stop else first):
            base, end = int(self.starts[k]), int(self.starts[k + 1])
            if base < end:
                yield k, max(start - base, 0), min(stop, end) - base

    def span(self, start: int, stop: int) -> Array:
        """Rows [start, stop): a view where they lie in one shard."""
        parts = [self._piece(*part) for part in self._parts(start, stop)]
        if not parts:
            return np.empty((0, *self._tail), self.dtype)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spans(self, starts: Int64s, stops: Int64s) -> list[Array]:
        """Many spans: the reading of all begins before the first is waited for."""
        edges = list(zip(starts.tolist(), stops.tolist(), strict=True))
        asked = [self._ask(*edge) for edge in edges]
        return [self.span(*edges[k]) if rows is None else self._values(rows) for k, rows in enumerate(asked)]

    def _ask(self, start: int, stop: int) -> Array | None:
        """A span, where it lies in one shard and takes no wait for the disk."""
        rows, ids, file = self._shards.rows, self._ids, self._file
        found = [rows(int(ids[k]), file, *part, wait=False) for k, *part in self._parts(start, stop)]
        return found[0] if len(found) == 1 else None

    def _mapped_span(self, start: int, stop: int) -> Array | None:
        """Rows [start, stop) where that is a view: in one mapped shard, without decoding."""
        k, last = (np.searchsorted(self.starts, (start, stop - 1), side="right") - 1).tolist()
        mapped = self._shards.array(int(self._ids[k]), self._file) if k == last and not self._decode else None
        return None if mapped is None else mapped[start - self.starts[k] : stop - self.starts[k]]

    def take(self, rows: Array) -> Array:
        """Any rows in any order, as a copy; each shard is visited once."""
        out = np.empty((len(rows), *self._tail), self.dtype)
        if not len(rows):
            return out
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        by_shard = np.argsort(shards, kind="stable")
        visited, firsts = np.unique(shards[by_shard], return_index=True)
        pieces = list(zip(visited.tolist(), np.split(by_shard, firsts[1:]), strict=True))
        for some in (pieces[k : k + ASKED_SHARDS] for k in range(0, len(pieces), ASKED_SHARDS)):
            begun = [self._begin(int(self._ids[k]), rows[places] - self.starts[k]) for k, places in some]
            for (_, places), finish in zip(some, begun, strict=True):
                out[places] = self._values(finish())
        return out

    def _begin(self, shard: int, inside: Int64s) -> Callable[[], Array]:
        """Rows of one shard: those that are not mapped are asked for here, and waited for by what is returned."""
        mapped = self._shards.array(shard, self._file)
        if mapped is not None:
            return lambda: mapped[inside]
        # Those less than a page apart are read together.
        distinct, places = np.unique(inside, return_inverse=True)
        item_bytes = self._storage.itemsize * int(np.prod(self._tail, dtype=np.int64))
        runs = np.split(distinct, np.flatnonzero(np.diff(distinct) * item_bytes > PAGE_BYTES) + 1)
        ends = [(int(run[0]), int(run[-1]) + 1) for run in runs]
        asked = [self._shards.rows(shard, self._file, *run, wait=False) for run in ends]

        def finish() -> Array:
            parts: list[Array] = []
            for run, end, found in zip(runs, ends, asked, strict=True):
                rows: Any = self._shards.rows(shard, self._file, *end) if found is None else found
                parts.append(rows[run - run[0]])
            return np.concatenate(parts)[places]

        return finish

    def _values(self, rows: Any) -> Array:
        return bfloat16_values(rows) if self._decode else rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, tuple):
            if not key:
                return self[:]
            found = self[key[0]]
            if is_int(key[0]):
                return found[key[1:]]
            # Rows by array pair up with arrays behind them, as in numpy.
            rows_of_found = slice(None) if isinstance(key[0], slice) else np.arange(len(found))
            return found[(rows_of_found, *key[1:])]
        if is_int(key):
            row = index_of(int(key), len(self))
            return self.span(row, row + 1)[0]
        if isinstance(key, slice):
            rows = range(len(self))[key]
            if rows.step == 1:
                return self.span(rows.start, rows.stop)
            view = self._mapped_span(rows[0], rows[-1] + 1) if rows.step > 1 and len(rows) else None
            if view is not None:
                return view[:: rows.step]
            return self.take(np.arange(rows.start, rows.stop, rows.step, dtype=np.int64))
        return self.take(rows_of(key, len(self)))

    def __iter__(self) -> Iterator[Any]:
        for _, piece in self.pieces():
            yield from piece

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        found = self.span(0, len(self))
        if dtype is not None and found.dtype != np.dtype(dtype):
            return found.astype(dtype)
        return found.copy() if copy else found

    def __repr__(self) -> str:
        return f"<column {self.dtype} {self.shape}>"


def is_int(key: Any) -> bool:
    return isinstance(key, (int, np.integer)) and not isinstance(key, bool)


def index_of(row: int, length: int) -> int:
    if not -length <= row < length:
        raise IndexError(f"row {row} is out of range; the column has {length}")
    return row % length


def rows_of(key: Any, length: int) -> Int64s:
    rows = np.asarray(key)
    if rows.dtype == bool:
        if rows.shape != (length,):
            raise IndexError(f"a mask of shape {rows.shape} for {length} rows")
        return np.flatnonzero(rows)
    return as_indices(rows, length, "row", "the column", "integers, a slice, or a 1-D array")
