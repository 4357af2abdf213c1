"""From what users hold to what is stored: checked casts of arrays, strings and dictionaries.

A value either fits its column exactly as the rules below say, or is refused with its name: integers never
wrap, floats never become integers, nothing is silently dropped.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s, as_offsets
from millrace.store.layout import MAX_DICTIONARY, Column, Layout, bfloat16_bits, bfloat16_values, dtype_name


class Normaliser:
    """Turns records and batches of records into storage arrays and offsets per axis.

    ``dictionaries`` grows with new values, except where a column declared its values; ``known`` are those an
    appended store has already.
    """

    def __init__(self, layout: Layout, known: Mapping[str, tuple[str, ...]] | None = None) -> None:
        self.layout = layout
        known = known or {}
        self.dictionaries = {
            name: {value: code for code, value in enumerate(column.values or known.get(name, ()))}
            for name, column in layout.columns.items()
            if column.dtype == "dictionary"
        }

    def columns(self) -> dict[str, Column]:
        """The columns with the dictionaries as they are now."""
        grown = {name: self.layout.columns[name].with_values(tuple(own)) for name, own in self.dictionaries.items()}
        return self.layout.columns | grown

    def record(self, record: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, int]]:
        """Storage arrays of one record, (rows, ...) or (1, ...), and its rows on each axis."""
        self._check_names(record)
        arrays: dict[str, Array] = {}
        lengths: dict[str, int] = {}
        for name, column in self.layout.columns.items():
            value = record[name]
            if column.dtype == "string":
                arrays[name] = _utf8(value, name)
            else:
                array = self.cast(name, value)
                arrays[name] = array[None] if column.per == "record" else array
                self._check_shape(name, arrays[name])
            axis, rows = self.layout.column_axis(name), len(arrays[name])
            if axis is not None and lengths.setdefault(axis, rows) != rows:
                raise ConfigError(f"column {name!r} has {rows} rows in this record, others of {axis!r} {lengths[axis]}")
        lengths.setdefault(self.layout.primary, 0)  # where all columns are per record
        return arrays, lengths

    def records(self, columns: Mapping[str, Any], offsets: Any) -> tuple[dict[str, Array], dict[str, Int64s]]:
        """Storage arrays of many records and their offsets; ``offsets`` by axis where there are several."""
        self._check_names(columns)
        row_axes = self.layout.row_axes
        given = dict(offsets) if isinstance(offsets, Mapping) else {self.layout.primary: offsets}
        if set(given) != set(row_axes):
            raise ConfigError(f"offsets for {sorted(given)}; expected one array for each of {sorted(row_axes)}")
        checked = {axis: as_offsets(given[axis]) for axis in row_axes}
        counts = {axis: len(array) - 1 for axis, array in checked.items()}
        if len(set(counts.values())) != 1:
            raise ConfigError(f"the axes have different numbers of records: {counts}")
        records = counts[self.layout.primary]
        arrays: dict[str, Array] = {}
        for name, column in self.layout.columns.items():
            if column.dtype == "string":
                texts = columns[name].tolist() if isinstance(columns[name], np.ndarray) else columns[name]
                parts = [_utf8(text, name) for text in texts]
                arrays[name] = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
                checked[name] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
                found, expected = len(parts), records
            else:
                arrays[name] = self.cast(name, columns[name])
                self._check_shape(name, arrays[name])
                found = len(arrays[name])
                expected = records if column.axis is None else int(checked[column.axis][-1])
            if found != expected:
                what = "records" if column.per == "record" else "rows"
                raise ConfigError(f"column {name!r} has {found} {what}; the offsets make {expected}")
        return arrays, checked

    def _check_names(self, given: Mapping[str, Any]) -> None:
        if given.keys() == self.layout.columns.keys():
            return
        missing = [name for name in self.layout.columns if name not in given]
        extra = [name for name in given if name not in self.layout.columns]
        problems = [f"lacks column {', '.join(map(repr, missing))}"] if missing else []
        problems += [f"has unknown column {', '.join(map(repr, extra))}"] if extra else []
        raise ConfigError(f"the record {' and '.join(problems)}; expected {list(self.layout.columns)}")

    def _check_shape(self, name: str, array: Array) -> None:
        column = self.layout.columns[name]
        if array.ndim == 0 or array.shape[1:] != column.shape:
            per = "record" if column.per == "record" else "row"
            found = "a single value" if array.ndim == 0 else f"shape {array.shape[1:]}"
            raise ConfigError(f"column {name!r} got {found} per {per}; expected an array with {column.shape} each")

    def cast(self, name: str, value: Any) -> Array:
        """The value in its storage dtype, refused where it does not fit."""
        column = self.layout.columns[name]
        if column.dtype == "dictionary":
            return self._codes(name, value)
        array = _as_array(name, column, value)
        if array.dtype == column.storage and column.dtype != "bfloat16":
            return array
        if array.size == 0 and array.dtype.kind == "f":
            return array.astype(column.storage)  # an empty list has no type of its own
        are_ints = array.dtype.kind in "iu" and column.storage.kind in "iu"
        if column.dtype == "bfloat16":
            if dtype_name(array.dtype) == "bfloat16":
                return array.view(np.uint16)
            if array.dtype.kind == "f":
                with np.errstate(over="ignore"):
                    single = array.astype(np.float32)
                _check_finite(name, column, array, single)
                return bfloat16_bits(single)
        elif are_ints or np.can_cast(array.dtype, column.storage, "same_kind"):
            if are_ints and array.size:
                _check_range(name, array, column.storage)
            with np.errstate(over="ignore"):
                stored = array.astype(column.storage)
            if column.storage.kind == "f" and array.dtype != column.storage:
                _check_finite(name, column, array, stored)
            return stored
        raise ConfigError(
            f"column {name!r} is {column.dtype}; {array.dtype} values cannot be stored in it without loss"
        )

    def _codes(self, name: str, value: Any) -> Array:
        column, codes = self.layout.columns[name], self.dictionaries[name]
        array = np.asarray(value)
        if array.dtype.kind in "US" and not isinstance(value, np.ndarray):
            array = np.asarray(value, object)  # numpy's own text drops NULs at the end, and makes text of numbers
        if array.dtype.kind in "iu" and column.values is not None:
            if array.size and not (int(array.min()) >= 0 and int(array.max()) < len(codes)):
                raise ConfigError(f"column {name!r} got code {array.max()}; expected 0 to {len(codes) - 1}")
            return array.astype("<i4")
        result = np.empty(array.shape, "<i4")
        flat = result.reshape(-1)
        for place, text in enumerate(array.reshape(-1).tolist()):
            if not isinstance(text, str):
                raise ConfigError(f"column {name!r} is a dictionary of strings; got {text!r}")
            code = codes.get(text)
            if code is None:
                code = self._new_code(name, text)
            flat[place] = code
        return result

    def _new_code(self, name: str, text: str) -> int:
        codes = self.dictionaries[name]
        if self.layout.columns[name].values is not None:
            raise ConfigError(f"column {name!r} got {text!r}, which is not among its {len(codes)} declared values")
        if len(codes) >= MAX_DICTIONARY:
            raise ConfigError(
                f"column {name!r} has more than {MAX_DICTIONARY} different values; make it Column('string', per='record')"
            )
        _utf8(text, name)
        return codes.setdefault(text, len(codes))


def _as_array(name: str, column: Column, value: Any) -> Array:
    """What the user gave as an array: also the bytes of a file for uint8, also a torch tensor."""
    if isinstance(value, (bytes, bytearray, memoryview)) and column.dtype == "uint8":
        return np.frombuffer(value, np.uint8)
    if np.ma.isMaskedArray(value):
        raise ConfigError(f"column {name!r} got a masked array, whose mask would be lost; fill it first")
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        bits = value.contiguous().view(sys.modules["torch"].uint16).numpy()
        return bfloat16_values(bits)
    return np.asarray(value)


def _check_finite(name: str, column: Column, given: Array, stored: Array) -> None:
    """A float is rounded to the column's precision, but never to infinity."""
    lost = np.isinf(stored) & np.isfinite(given)
    if lost.any():
        raise ConfigError(
            f"column {name!r} is {column.dtype} and cannot hold {given[lost].flat[0]}; choose a wider dtype"
        )


def _check_range(name: str, array: Array, storage: np.dtype[Any]) -> None:
    low, high = int(array.min()), int(array.max())
    info = np.iinfo(storage)
    if low < info.min or high > info.max:
        bad = low if low < info.min else high
        raise ConfigError(f"column {name!r} is {storage}, {info.min} to {info.max}; got {bad}: choose a wider dtype")


def _utf8(value: Any, name: str) -> Array:
    if not isinstance(value, str):
        raise ConfigError(f"column {name!r} is a string; got {type(value).__name__} {value!r}")
    try:
        return np.frombuffer(value.encode(), np.uint8)
    except UnicodeEncodeError as error:
        raise ConfigError(f"column {name!r} got {value!r}, which is not valid text: {error.reason}") from error
