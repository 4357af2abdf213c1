"""Blocks: fixed runs of tokens, and the same run one token later as the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.gather import Field
from millrace.ragged import Spans, as_integer
from millrace.view.view import StoreLike, View, check_store, row_column, store_spec


class Blocks(View):
    """Sample ``i`` is rows ``[i * stride, i * stride + length + 1)`` of the stream: x the first, y the last ``length``.

    The stream is the rows of the store or split one after the other, over the ends of documents and shards. Where the
    store has a row column ``mask`` (``prepare text --mask-field``), a sample has it too, aligned with y.

    >>> from millrace import from_arrays
    >>> view = Blocks(from_arrays({"tokens": np.arange(10, dtype=np.uint16)}), length=4)
    >>> len(view), view[1]["x"].tolist(), view[1]["y"].tolist()
    (2, [4, 5, 6, 7], [5, 6, 7, 8])
    """

    def __init__(self, store: StoreLike, *, length: int, stride: int | None = None, column: str | None = None) -> None:
        check_store(store)
        length, stride = as_integer("length", length), None if stride is None else as_integer("stride", stride)
        if length < 1 or (stride is not None and stride < 1):
            raise ConfigError(f"length={length}, stride={stride}; both count tokens: expected 1 or more")
        if store.cuts is not None:
            raise ConfigError(f"split {store.split_name!r} is a split by time, which has no token stream; use Windows")
        self.store, self.length, self.stride = store, length, stride or length
        self.column = column or row_column(store, "tokens")
        declared = store.layout.columns.get(self.column)
        if declared is None or declared.axis is None or declared.shape or declared.storage.kind not in "iu":
            held = "nothing" if declared is None else f"{declared.dtype}{list(declared.shape)} per {declared.per}"
            raise ConfigError(
                f"column {self.column!r} holds {held}; Blocks needs a row column of single integers, such as tokens. "
                "For series use Windows, for whole records Records"
            )
        if declared.dtype in ("bfloat16", "dictionary") or declared.axis != store.layout.primary:
            raise ConfigError(
                f"column {self.column!r} is {declared.dtype} on axis {declared.axis!r}; Blocks needs tokens on the first axis"
            )
        wide, axis = np.dtype(np.int64), declared.axis
        self.fields = (
            Field("x", self.column, axis, wide, length=length),
            Field("y", self.column, axis, wide, first=1, length=length),
            *self._mask(),
        )

    def _mask(self) -> tuple[Field, ...]:
        """Whether each token of y counts for the loss, where the store says so."""
        declared = self.store.layout.columns.get("mask")
        if declared is None or self.column != "tokens" or declared.dtype not in ("bool", "uint8") or declared.shape:
            return ()
        if declared.axis != self.store.layout.primary:
            return ()
        return (Field("mask", "mask", declared.axis, declared.storage, first=1, length=self.length),)

    def __len__(self) -> int:
        return max(0, (self.store.num_rows - self.length - 1) // self.stride + 1)

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        starts = self._checked(samples) * self.stride
        return Spans(starts, starts + (self.length + 1))

    def plan(self) -> list[tuple[Any, ...]] | None:
        return [("stride", self, len(self), self.stride, self.length + 1)] if type(self) is Blocks else None

    def unused_rows(self) -> int:
        count, rows = len(self), self.store.num_rows
        if count == 0:
            return rows
        gaps = max(0, self.stride - self.length - 1) * (count - 1)
        return rows - ((count - 1) * self.stride + self.length + 1) + gaps

    def spec(self) -> dict[str, Any]:
        options = {"column": self.column, "length": self.length, "stride": self.stride}
        return {"view": "blocks", **store_spec(self.store), **options}
