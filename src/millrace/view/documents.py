"""What views of tokens share: the columns they read, and the marks that keep the documents of a block apart."""

from __future__ import annotations

from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.gather.gather import Allocate, Field
from millrace.native import core
from millrace.ragged import Array, Int64s, as_int64s, concatenated_ranges
from millrace.view.view import StoreLike, row_column

MARKS: dict[str, np.dtype[Any]] = {
    "document": np.dtype(np.int32),
    "place": np.dtype(np.int64),
    "mask": np.dtype(np.bool_),
}


def token_column(store: StoreLike, column: str | None, view: str) -> tuple[str, Any]:
    """The column of tokens that a view reads, and how it is stored."""
    if store.cuts is not None:
        raise ConfigError(f"split {store.split_name!r} is a split by time, which has no token stream; use Windows")
    if store.chosen is not None:
        raise ConfigError(
            f"where({store.condition!r}) leaves out records, so that there is no token stream; use Records, or Subset"
        )
    name = row_column(store, column, "tokens", view)
    declared = store.layout.columns.get(name)
    if declared is None or declared.axis is None or declared.shape or declared.storage.kind not in "iu":
        held = "nothing" if declared is None else f"{declared.dtype}{list(declared.shape)} per {declared.per}"
        raise ConfigError(
            f"column {name!r} holds {held}; {view} needs a row column of single integers, such as tokens. "
            "For series use Windows, for whole records Records"
        )
    if declared.dtype in ("bfloat16", "dictionary") or declared.axis != store.layout.primary:
        raise ConfigError(
            f"column {name!r} is {declared.dtype} on axis {declared.axis!r}; {view} needs tokens on the first axis"
        )
    return name, declared


def mask_column(store: StoreLike, column: str) -> Any:
    """The store's own mask of its tokens (``prepare text --mask-field``), or None."""
    declared = store.layout.columns.get("mask")
    if declared is None or column != "tokens" or declared.dtype not in ("bool", "uint8") or declared.shape:
        return None
    return declared if declared.axis == store.layout.primary else None


def mark_fields(column: str, axis: str | None, length: int) -> tuple[Field, ...]:
    """``document``: which document of the block, -1 for padding; ``place``: in it; ``mask``: whether y counts."""
    return tuple(Field(name, column, axis, dtype, length=length) for name, dtype in MARKS.items())


def mark_documents(
    shape: tuple[int, int], counts: Int64s, lengths: Int64s, places: Int64s, is_last: Array, allocate: Allocate
) -> dict[str, Array]:
    """The marks of blocks. Block i has ``counts[i]`` pieces, one after the other from its begin.

    Of each piece: its length, the place of its first token in its document, and whether y after it is another's.
    """
    marks = {name: allocate(name, shape, dtype) for name, dtype in MARKS.items()}
    mark(as_int64s(counts), lengths, places, is_last, shape[1], *marks.values())
    return marks


def mark_numpy(counts: Int64s, lengths: Int64s, places: Int64s, is_last: Array, length: int, *marks: Array) -> None:
    """Writes the document, place and mask of each token; the twin of the core's."""
    document, place, mask = (array.reshape(-1) for array in marks)
    for array, value in ((document, -1), (place, 0), (mask, False)):
        array.fill(value)
    firsts = np.cumsum(counts) - counts
    inside = np.concatenate(([0], np.cumsum(lengths)))
    starts = inside[:-1] + np.repeat(np.arange(len(counts)) * length - inside[firsts], counts)
    cells = concatenated_ranges(starts, lengths)
    document[cells] = np.repeat(np.arange(len(lengths)) - np.repeat(firsts, counts), lengths)
    place[cells] = concatenated_ranges(places, lengths)
    mask[cells] = True
    mask[(starts + lengths - 1)[is_last]] = False


mark = mark_numpy if core is None else core.mark_documents
