"""Columns of text: strings and dictionary-coded values, decoded on top of the columns of numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from millrace.errors import ConfigError, StoreCorrupt
from millrace.ragged import Array, Int64s, Ragged
from millrace.store.columns import ColumnArray, index_of, is_int, rows_of
from millrace.store.offsets import Offsets


class StringColumn:
    """Text per record: an integer gives a ``str``, anything else an object array of them.

    ``raw`` is the bytes of all, ``ragged(start, stop)`` those of some records with their offsets.
    """

    dtype = np.dtype(object)

    def __init__(self, name: str, raw: ColumnArray, offsets: Callable[[], Offsets]) -> None:
        self.raw, self._name, self._offsets = raw, name, offsets

    def __len__(self) -> int:
        return len(self._offsets())

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self),)

    def ragged(self, start: int, stop: int) -> Ragged:
        offsets = self._offsets().slice(start, stop)
        return Ragged(self.raw.span(int(offsets[0]), int(offsets[-1])), offsets - offsets[0])

    def __getitem__(self, key: Any) -> Any:
        if is_int(key):
            record = index_of(int(key), len(self))
            return self._texts(np.array([record]))[0]
        if isinstance(key, slice):
            return self._texts(np.arange(len(self))[key])
        return self._texts(rows_of(key, len(self)))

    def spans(self, records: Int64s) -> tuple[Int64s, Int64s]:
        """Where the bytes of these records begin and end in ``raw``."""
        return self._offsets().spans(records)

    def _texts(self, records: Int64s) -> Array:
        starts, stops = self.spans(records)
        if len(records) and np.array_equal(starts[1:], stops[:-1]):  # neighbours
            data = self.raw.span(int(starts[0]), int(stops[-1]))
        else:
            parts = [self.raw.span(start, stop) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
            data = np.concatenate([np.empty(0, np.uint8), *parts])
        return self.decode(Ragged(data, np.concatenate(([0], np.cumsum(stops - starts)))), records)

    def decode(self, found: Ragged, records: Int64s) -> Array:
        """The texts of these records, whose bytes were found."""
        data, offsets = found.values.tobytes(), found.offsets.tolist()
        texts = np.empty(len(records), object)
        for place in range(len(records)):
            try:
                texts[place] = data[offsets[place] : offsets[place + 1]].decode()
            except UnicodeDecodeError as error:
                problem = f"column {self._name!r} of record {records[place]} is not utf-8; run millrace verify"
                raise StoreCorrupt(problem, column=self._name) from error
        return texts

    def __iter__(self) -> Iterator[str]:
        for first in range(0, len(self), 4096):
            yield from self[first : first + 4096]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return self._texts(np.arange(len(self)))

    def __repr__(self) -> str:
        return f"<column of {len(self)} strings>"


class DictionaryColumn:
    """Text with few values: ``codes`` is the int32 column that models use, indexing gives the text."""

    dtype = np.dtype(object)

    def __init__(self, name: str, codes: ColumnArray, values: tuple[str, ...]) -> None:
        self.codes, self.values, self._name = codes, values, name
        self._texts = np.array([*values, None], object)[:-1]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def __getitem__(self, key: Any) -> Any:
        codes = np.asarray(self.codes[key])
        if codes.size and not (codes.min() >= 0 and codes.max() < len(self.values)):
            wrong = codes.min() if codes.min() < 0 else codes.max()
            problem = f"column {self._name!r} holds code {wrong} of {len(self.values)} values; run millrace verify"
            raise StoreCorrupt(problem, column=self._name)
        return self._texts[codes]

    def code(self, value: str) -> int:
        """The code of one value."""
        if value not in self.values:
            raise ConfigError(f"{value!r} is not among the {len(self.values)} values of column {self._name!r}")
        return self.values.index(value)

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self), 4096):
            yield from self[first : first + 4096]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype=object)

    def __repr__(self) -> str:
        return f"<column {self.shape} of {len(self.values)} dictionary values>"
