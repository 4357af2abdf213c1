"""Packed: whole documents side by side in blocks of one length, with what keeps them apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.gather import Allocate, Field, Located, Sources, new_array
from millrace.lazy import cached_property
from millrace.ragged import Int64s, Spans, as_integer, concatenated_ranges
from millrace.view.documents import mark_documents, mark_fields, mask_column, token_column
from millrace.view.packing import MAX_LENGTH, packing_of, whole_blocks
from millrace.view.view import StoreLike, View, check_store, source, store_spec


class Packed(View):
    """Blocks of ``length`` tokens that hold whole documents, packed so that almost nothing is padding.

    A document longer than a block is cut into pieces of ``length``. A sample has ``x`` and ``y`` (the next token),
    ``document`` (which document of the block, -1 for padding), ``place`` (of the token in its document) and ``mask`` (whether
    ``y`` counts: not at the last token of a piece, nor where the store's own mask says no). The blocks are a function of
    the documents' lengths, the same in every epoch.

    >>> from millrace import from_arrays
    >>> view = Packed(from_arrays({"tokens": np.arange(9, dtype=np.uint16)}, offsets=[0, 2, 6, 9]), length=5)
    >>> len(view), view[1]["x"].tolist(), view[1]["document"].tolist()
    (2, [6, 7, 8, 0, 1], [0, 0, 0, 1, 1])
    """

    def __init__(self, store: StoreLike, *, length: int, column: str | None = None) -> None:
        check_store(store)
        self.length = as_integer("length", length)
        if not 1 <= self.length <= MAX_LENGTH:
            raise ConfigError(f"length={length}; expected 1 to {MAX_LENGTH:,} tokens")
        self.store = store
        self.column, declared = token_column(store, column, "Packed")
        axis = declared.axis
        tokens = (Field(name, self.column, axis, np.dtype(np.int64), length=length) for name in ("x", "y"))
        self.fields = (*tokens, *mark_fields(self.column, axis, length))
        columns = {"x": self.column} | ({} if mask_column(store, self.column) is None else {"mask": "mask"})
        kinds: dict[str, np.dtype[Any]] = {"x": np.dtype(np.int64), "mask": np.dtype(np.uint8)}
        self._rows = tuple(Field(name, own, axis, kinds[name], pad=length) for name, own in columns.items())
        index = store.axis_index(axis)
        self._owners, self._ends = whole_blocks(index, self.length)
        path = getattr(store.root, "path", None)
        self._packing = packing_of(index, self.length, None if path is None else f"{store_spec(store)}")

    def __len__(self) -> int:
        return len(self._packing) + (int(self._ends[-1]) if len(self._ends) else 0)

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        wanted = self._checked(samples)
        counts, documents, wholes = self._pieces(wanted)
        starts, ends = self.store.axis_index(axis or self.store.layout.primary).spans(documents)
        is_whole = wholes >= 0
        starts = np.where(is_whole, starts + wholes * self.length, ends - (ends - starts) % self.length)
        stops = np.where(is_whole, starts + self.length, ends)
        return Spans(starts, stops, np.concatenate(([0], np.cumsum(counts))))

    def _pieces(self, samples: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        """Pieces of each sample; of each piece its document, and which whole block of it, or -1 for its rest."""
        packed = len(self._packing)
        is_packed = samples < packed
        blocks = np.where(is_packed, samples, 0)
        firsts = self._packing.offsets[blocks] if packed else np.zeros_like(blocks)
        counts = np.where(is_packed, self._packing.offsets[blocks + is_packed] - firsts if packed else 1, 1)
        documents = np.zeros(int(counts.sum()), np.int64)
        wholes = np.full(len(documents), -1, np.int64)
        of_rest = np.repeat(is_packed, counts)
        documents[of_rest] = self._packing.documents[concatenated_ranges(firsts, counts)[of_rest]] if packed else 0
        numbers = samples[~is_packed] - packed
        owners = np.searchsorted(self._ends, numbers, side="right")
        documents[~of_rest] = self._owners[owners]
        wholes[~of_rest] = numbers - np.concatenate(([0], self._ends))[owners]
        return counts, documents, wholes

    def records(self, samples: npt.ArrayLike) -> Int64s:
        """The first document of each sample."""
        counts, documents, _ = self._pieces(self._checked(samples))
        firsts: Int64s = documents[np.cumsum(counts) - counts]
        return firsts

    def located(self, samples: Int64s) -> Located:
        return _LocatedPacked(self, samples)

    @cached_property
    def _sources(self) -> Sources:
        return Sources({field.column: source(self.store.columns[field.column], field) for field in self._rows})

    def unused_rows(self) -> int:
        return 0

    @property
    def fill(self) -> float:
        """The share of tokens that are no padding."""
        return self.store.num_rows / max(1, len(self) * self.length)

    def spec(self) -> dict[str, Any]:
        return {"view": "packed", **store_spec(self.store), "column": self.column, "length": self.length}

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}; {self.fill:.3%} filled>"


class _LocatedPacked(Located):
    """Blocks of several pieces, found in their shards."""

    def __init__(self, view: Packed, samples: Int64s) -> None:
        self._length, self._blocks = view.length, view.spans(samples)
        axis = view.fields[0].axis or ""
        self._located = Located(view._sources, view._rows, {axis: self._blocks}, None)
        documents = view._pieces(samples)[1]
        # Of the first token of each piece.
        self._places = self._blocks.starts - view.store.axis_index(axis).spans(documents)[0]

    def is_cold(self) -> bool | None:
        return self._located.is_cold()

    def fill(self, first: int, last: int, allocate: Allocate = new_array) -> dict[str, Any]:
        spans, shape = self._blocks, (last - first, self._length)
        rows = self._located.fill(
            first, last, lambda name, *own: allocate("own_mask" if name == "mask" else name, *own)
        )
        x, y = rows["x"], allocate("y", shape, np.dtype(np.int64))
        y[:, :-1], y[:, -1] = x[:, 1:], 0
        assert spans.offsets is not None
        pieces = slice(spans.offsets[first], spans.offsets[last])
        counts, lengths = np.diff(spans.offsets[first : last + 1]), (spans.stops - spans.starts)[pieces]
        marks = mark_documents(shape, counts, lengths, self._places[pieces], np.ones(len(lengths), bool), allocate)
        if "mask" in rows:  # the store says it of the target, which stands one place later in x
            marks["mask"][:, :-1] &= rows["mask"][:, 1:] != 0
        return {"x": x, "y": y, **marks}


def cu_seqlens(document: Any) -> Any:
    """Where each run of one document begins in the flattened tokens, int32, for attention of variable lengths.

    Takes ``document`` of a batch, as an array or a tensor. Padding at the end of a block is a run of its own.

    >>> cu_seqlens(np.array([[0, 0, 1, -1], [0, 1, 1, 1]])).tolist()
    [0, 2, 3, 4, 5, 8]
    """
    blocks, length = document.shape
    if isinstance(document, np.ndarray):
        begins = np.ones((blocks, length), bool)
        begins[:, 1:] = document[:, 1:] != document[:, :-1]
        return np.append(np.flatnonzero(begins), blocks * length).astype(np.int32)
    import torch

    changes: Any = torch.ones_like(document, dtype=torch.bool)
    changes[:, 1:] = document[:, 1:] != document[:, :-1]
    starts = changes.flatten().nonzero().flatten()
    return torch.cat((starts, starts.new_tensor([blocks * length]))).to(torch.int32)
