"""Blocks: fixed runs of tokens, and the same run one token later as the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.gather import Allocate, Field, Located, new_array
from millrace.ragged import Int64s, Spans, as_integer, concatenated_ranges
from millrace.view.documents import mark_documents, mark_fields, mask_column, token_column
from millrace.view.view import StoreLike, View, check_store, source, store_spec


class Blocks(View):
    """Sample ``i`` is rows ``[i * stride, i * stride + length + 1)`` of the stream: x the first, y the last ``length``.

    The stream is the rows of the store or split one after the other, over the ends of documents and shards. Where the
    store has a row column ``mask`` (``prepare text --mask-field``), a sample has it too, aligned with y. With ``documents``
    a sample also has ``document``, ``place`` and ``mask`` as in ``Packed``: y at the end of a document does not count.

    >>> from millrace import from_arrays
    >>> view = Blocks(from_arrays({"tokens": np.arange(10, dtype=np.uint16)}), length=4)
    >>> len(view), view[1]["x"].tolist(), view[1]["y"].tolist()
    (2, [4, 5, 6, 7], [5, 6, 7, 8])
    """

    def __init__(
        self,
        store: StoreLike,
        *,
        length: int,
        stride: int | None = None,
        column: str | None = None,
        documents: bool = False,
    ) -> None:
        check_store(store)
        length, stride = as_integer("length", length), None if stride is None else as_integer("stride", stride)
        if length < 1 or (stride is not None and stride < 1):
            raise ConfigError(f"length={length}, stride={stride}; both count tokens: expected 1 or more")
        self.store, self.length, self.stride = store, length, stride or length
        self.column, declared = token_column(store, column, "Blocks")
        wide, axis = np.dtype(np.int64), declared.axis
        self.documents = bool(documents)
        self._rows = (
            Field("x", self.column, axis, wide, length=length),
            Field("y", self.column, axis, wide, first=1, length=length),
            *self._mask(),
        )
        self.fields = (*self._rows[:2], *mark_fields(self.column, axis, length)) if documents else self._rows

    def _mask(self) -> tuple[Field, ...]:
        """Whether each token of y counts for the loss, where the store says so."""
        declared = mask_column(self.store, self.column)
        if declared is None:
            return ()
        return (Field("mask", "mask", declared.axis, declared.storage, first=1, length=self.length),)

    def __len__(self) -> int:
        return max(0, (self.store.num_rows - self.length - 1) // self.stride + 1)

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        starts = self._checked(samples) * self.stride
        return Spans(starts, starts + (self.length + 1))

    def plan(self) -> list[tuple[Any, ...]] | None:
        is_plain = type(self) is Blocks and not self.documents
        return [("stride", self, len(self), self.stride, self.length + 1)] if is_plain else None

    def located(self, samples: Int64s) -> Located:
        return _LocatedDocuments(self, samples) if self.documents else super().located(samples)

    def unused_rows(self) -> int:
        count, rows = len(self), self.store.num_rows
        if count == 0:
            return rows
        gaps = max(0, self.stride - self.length - 1) * (count - 1)
        return rows - ((count - 1) * self.stride + self.length + 1) + gaps

    def spec(self) -> dict[str, Any]:
        options = {"column": self.column, "length": self.length, "stride": self.stride}
        later = {"documents": True} if self.documents else {}
        return {"view": "blocks", **store_spec(self.store), **options, **later}


class _LocatedDocuments(Located):
    """Blocks with the marks of their documents."""

    def __init__(self, view: Blocks, samples: Int64s) -> None:
        self._length, self._starts = view.length, samples * view.stride
        self._index = view.store.axis_index(view.fields[0].axis or "")
        columns = {field.column: source(view.store.columns[field.column], field) for field in view._rows}
        super().__init__(columns, view._rows, {view.fields[0].axis or "": view.spans(samples)}, None)

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        rows = super().fill(first, last, lambda name, *own: allocate("own_mask" if name == "mask" else name, *own))
        starts = self._starts[first:last]
        stops = starts + self._length
        begins, ends = self._index.owners(starts), self._index.owners(stops - 1) + 1
        counts = ends - begins
        documents = concatenated_ranges(begins, counts)
        own_starts, own_stops = np.repeat(starts, counts), np.repeat(stops, counts)
        firsts, lasts = self._index.spans(documents)
        froms, tos = np.maximum(firsts, own_starts), np.minimum(lasts, own_stops)
        stays = tos > froms  # documents without tokens have no piece
        counts = np.add.reduceat(stays, np.cumsum(counts) - counts)
        froms, tos = froms[stays], tos[stays]
        places, is_last = froms - firsts[stays], tos == lasts[stays]
        marks = mark_documents((last - first, self._length), counts, tos - froms, places, is_last, allocate)
        if "mask" in rows:
            marks["mask"] &= rows["mask"] != 0
        return {"x": rows["x"], "y": rows["y"], **marks}
