"""Rows of a store that is appended to, copied into the shards that replace its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from millrace.ragged import Array
from millrace.scaling.scaler import Scaling
from millrace.store.layout import bfloat16_bits
from millrace.store.open import open_store

COPY_ROWS = 1 << 16


class OldRows:
    """The records of one snapshot of a store, as they are stored, or rescaled."""

    def __init__(self, store: tuple[str, str], rescale: dict[str, Any] | None, dtype: str) -> None:
        self._store = open_store(store[0], snapshot=store[1])
        self._old = None if rescale is None else Scaling.from_manifest(rescale)
        self._dtype = dtype
        layout = self._store.layout
        self._names = [name for name, column in layout.columns.items() if column.axis is not None]

    def _bounds(self, record: int) -> tuple[int, int]:
        start, stop = self._store.offsets[record : record + 2].tolist()
        return start, stop

    def rows(self, record: int, scaling: Scaling) -> Iterator[dict[str, Array]]:
        """The row columns of a record, some rows at a time."""
        start, stop = self._bounds(record)
        for first in range(start, stop, COPY_ROWS):
            rows = slice(first, min(first + COPY_ROWS, stop))
            columns = {name: np.asarray(self._stored(name)[rows]) for name in self._names}
            if self._old is not None:
                columns["values"] = self._rescaled(np.asarray(self._store.columns["values"][rows]), scaling)
            yield columns

    def _stored(self, name: str) -> Any:
        column = self._store.columns[name]
        return getattr(column, "codes", getattr(column, "raw", column))

    def _rescaled(self, values: Array, scaling: Scaling) -> Array:
        assert self._old is not None
        is_bits = self._dtype == "bfloat16"
        scaled = scaling.transform(self._old.inverse(values), "float32" if is_bits else self._dtype)
        return bfloat16_bits(scaled) if is_bits else scaled

    def last_time(self, record: int) -> Any:
        return self._store.columns["time"][self._bounds(record)[1] - 1]

    def end(self, record: int, center: Array, scale: Array) -> tuple[int, Any, Array]:
        """The number of rows of a record, the time of the last, and its unscaled values."""
        start, stop = self._bounds(record)
        last = np.asarray(self._store.columns["values"][stop - 1 : stop], np.float64)[0]
        unscaled = last * scale + center if self._old is None else self._old.inverse(last)
        return stop - start, self.last_time(record), unscaled
