"""Records: every record whole, its row columns ragged or padded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.gather.reference import Field
from millrace.ragged import Int64s, Spans, as_integer
from millrace.view.view import StoreLike, View, column_field, store_spec


class Records(View):
    """Sample ``i`` is record ``i``: each row column a ``Ragged`` (values + offsets), each record column one item.

    ``columns`` picks what is delivered; nothing else is read. ``pad=64`` makes row columns dense, cut or filled
    with zeros to 64 rows.

    >>> from millrace import from_arrays
    >>> view = Records(from_arrays({"hits": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "label": [7, 8]}, offsets=[0, 4, 6]))
    >>> view[1]["hits"].tolist(), int(view[1]["label"]), view[[1, 0]]["hits"].offsets.tolist()
    ([4.0, 5.0], 8, [0, 2, 6])
    """

    def __init__(self, store: StoreLike, *, columns: Sequence[str] | None = None, pad: int | None = None) -> None:
        if store.cuts is not None:
            raise ConfigError(f"split {store.split_name!r} is a split by time, which cuts records; use Windows")
        pad = None if pad is None else as_integer("pad", pad)
        if pad is not None and pad < 1:
            raise ConfigError(f"pad={pad}; expected 1 or more rows")
        if columns is not None and not len(columns):
            raise ConfigError("columns=[] asks for nothing; leave it out for every column")
        self.store, self.pad = store, pad
        names = list(store.layout.columns if columns is None else columns)
        fields = [column_field(store, name) for name in names]
        self._chosen = None if columns is None else names
        rows = [replace(field, pad=pad) for field in fields if field.axis is not None]
        self.fields: tuple[Field, ...] = (*rows, *(field for field in fields if field.axis is None))

    def __len__(self) -> int:
        return self.store.num_records

    def spans(self, samples: npt.ArrayLike, axis: str | None = None) -> Spans:
        records = self._checked(samples)
        offsets = self.store.axis_offsets(axis or self.store.layout.primary)
        return Spans(offsets[records], offsets[records + 1])

    def records(self, samples: npt.ArrayLike) -> Int64s:
        return self._checked(samples)

    def plan(self) -> list[tuple[Any, ...]] | None:
        return [("offsets", self)] if type(self) is Records else None

    def unused_rows(self) -> int:
        return 0

    def spec(self) -> dict[str, Any]:
        return {"view": "records", **store_spec(self.store), "columns": self._chosen, "pad": self.pad}
