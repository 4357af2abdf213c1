"""Hypothesis strategies for everything a store can hold: columns, records, datasets, stores in memory.

Values are drawn as bits, so that NaN payloads, infinities, -0.0 and the extreme integers all come up; texts are
empty, non-ASCII and hold NULs. This is the only module of ``millrace.testing`` that needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from millrace.ragged import Array
from millrace.store.layout import DTYPES, Column, Layout, bfloat16_values
from millrace.store.memory import array_store
from millrace.store.store import Store
from millrace.store.values import Normaliser

AXES = ("rows", "image", "axis.3")
SPLITS = ("train", "val", "extra-1")
TEXTS = ("", "a", "a\0", "\0", "ß", "日本語", "\U0001f30a", "line\u2028line\r\n", " lead", "x" * 40)
Record = dict[str, Any]
_NAME_LETTERS = "abcxyzABC019_-"
_BITS: dict[int, Any] = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}


def texts() -> st.SearchStrategy[str]:
    """Strings that have been trouble somewhere, and any others."""
    return st.one_of(st.sampled_from(TEXTS), st.text(max_size=6))


@st.composite
def columns(draw: st.DrawFn, *, max_axes: int = 3, max_per_axis: int = 2, max_record: int = 3) -> dict[str, Column]:
    """Columns of a store: any dtypes and shapes, one to three axes with row columns each, and record columns."""
    axes = AXES[: draw(st.integers(1, max_axes))]
    per_axis = [draw(st.integers(1, max_per_axis)) for _ in axes]
    per_record = draw(st.integers(0, max_record))
    names = draw(_names(sum(per_axis) + per_record))
    made: dict[str, Column] = {}
    for axis, count in zip(axes, per_axis, strict=True):
        for _ in range(count):
            dtype = draw(st.sampled_from([dtype for dtype in DTYPES if dtype != "string"]))
            made[names.pop()] = _column(draw, dtype, per="row", axis=axis)
    for _ in range(per_record):
        made[names.pop()] = _column(draw, draw(st.sampled_from(list(DTYPES))), per="record")
    return made


def _names(count: int) -> st.SearchStrategy[list[str]]:
    first, inside = st.sampled_from(_NAME_LETTERS), st.text(_NAME_LETTERS + ".", max_size=6)
    name = st.builds(str.__add__, first, inside).filter(lambda name: name.lower() not in ("offsets", *AXES))
    return st.lists(name, min_size=count, max_size=count, unique_by=str.lower)


def _column(draw: st.DrawFn, dtype: str, **where: Any) -> Column:
    if dtype == "string":
        return Column("string", per="record")
    shape = draw(st.lists(st.integers(1, 3), max_size=2))
    declared = dtype == "dictionary" and draw(st.booleans())
    values = tuple(draw(st.lists(texts(), min_size=1, max_size=4, unique=True))) if declared else None
    return Column(dtype, tuple(shape), values=values, **where)


def values(column: Column, count: int) -> st.SearchStrategy[Array]:
    """``count`` items of a column as ``StoreWriter`` takes them; every bit pattern of the dtype may occur."""
    if column.dtype == "dictionary":
        return _texts_array(st.sampled_from(column.values) if column.values else texts(), (count, *column.shape))
    if column.dtype == "string":
        return _texts_array(texts(), (count,))
    size = column.storage.itemsize
    shape = (count, *column.shape)
    if column.dtype == "bool":
        return arrays_of.arrays(np.bool_, shape)
    bits = arrays_of.arrays(_BITS[size], shape, elements=_patterns(column.dtype, 8 * size))
    if column.dtype == "bfloat16":
        # It is written from float32, whose signalling NaNs become quiet ones by the format's rule.
        quiet = bits.map(lambda found: np.where((found & 0x7FFF) > 0x7F80, found | 0x40, found).astype(np.uint16))
        return quiet.map(bfloat16_values)
    return bits.map(lambda found: found.view(column.storage))


def _patterns(dtype: str, width: int) -> st.SearchStrategy[int]:
    top = (1 << width) - 1
    special = {0, 1, top, top >> 1, 1 << (width - 1)}  # extreme ints; -0.0; NaN with every payload bit set
    exponents = {"float16": 5, "bfloat16": 8, "float32": 8, "float64": 11}
    if dtype in exponents:
        fraction = width - 1 - exponents[dtype]
        infinity = ((1 << exponents[dtype]) - 1) << fraction
        special |= {infinity, infinity | 1 << (width - 1), infinity | 1, infinity | 1 << (fraction - 1) | 5}
    return st.one_of(st.sampled_from(sorted(special)), st.integers(0, top))


def _texts_array(element: st.SearchStrategy[str], shape: tuple[int, ...]) -> st.SearchStrategy[Array]:
    count = int(np.prod(shape))

    def fill(found: list[str]) -> Array:
        array = np.empty(count, object)
        array[:] = found
        return array.reshape(shape)

    return st.lists(element, min_size=count, max_size=count).map(fill)


@st.composite
def records(
    draw: st.DrawFn, columns: Mapping[str, Column], *, max_records: int = 12, max_rows: int = 4
) -> list[Record]:
    """Records of these columns; some have no rows on some axes."""
    # integers() would mostly give very few: a store that is never cut into shards shows little.
    count = draw(st.sampled_from([n for n in (3, 0, 1, 2, 5, 7, 9, 12) if n <= max_records]))
    layout = Layout(columns)
    lengths = {
        axis: draw(st.lists(st.integers(0, max_rows), min_size=count, max_size=count))
        for axis in dict.fromkeys(column.axis for column in columns.values() if column.axis is not None)
    }
    made: list[Record] = [{} for _ in range(count)]
    for name, column in layout.columns.items():
        if column.axis is None:
            items = draw(values(column, count))
            for record, item in zip(made, items, strict=True):
                record[name] = item
        else:
            ends = np.cumsum([0, *lengths[column.axis]])
            items = draw(values(column, int(ends[-1])))
            for place, record in enumerate(made):
                record[name] = items[ends[place] : ends[place + 1]]
    return made


@dataclass(frozen=True)
class StoreContents:
    """What to write and what must be read back: records with the split of each, and where shards are cut."""

    columns: dict[str, Column]
    records: list[Record]
    splits: list[str]
    shard_bytes: int

    def of(self, split: str) -> list[Record]:
        """The records of one split, in order."""
        return [record for record, mine in zip(self.records, self.splits, strict=True) if mine == split]


@st.composite
def datasets(draw: st.DrawFn) -> StoreContents:
    """Columns, records of them, a split for each, and a shard size from one record per shard to one shard."""
    made = draw(columns())
    found = draw(records(made))
    splits = draw(st.lists(st.sampled_from(SPLITS), min_size=len(found), max_size=len(found)))
    shard_bytes = draw(st.sampled_from([1, 17, 60, 200, 1000, 1 << 20]))
    return StoreContents(made, found, splits, shard_bytes)


def as_arrays(columns: Mapping[str, Column], records: Sequence[Record]) -> tuple[dict[str, Any], dict[str, Array]]:
    """Records joined as ``StoreWriter.extend`` takes them: one array per column, offsets per axis."""
    joined: dict[str, Any] = {}
    offsets: dict[str, Array] = {}
    for name, column in columns.items():
        items = [record[name] for record in records]
        if column.axis is None:
            joined[name] = _stacked(column, items)
            continue
        parts = [np.asarray(item) for item in items]
        empty = np.empty((0, *column.shape), parts[0].dtype if parts else _given_dtype(column))
        joined[name] = np.concatenate([empty, *parts])
        offsets[column.axis] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return joined, offsets


def _given_dtype(column: Column) -> Any:
    """The dtype users hold a column in."""
    return {"dictionary": np.dtype(object), "bfloat16": np.dtype(np.float32)}.get(column.dtype, column.storage)


def _stacked(column: Column, items: list[Any]) -> Any:
    if column.dtype == "string":
        return list(items)
    array = np.empty((len(items), *column.shape), _given_dtype(column))
    for place, item in enumerate(items):
        array[place] = item
    return array


@st.composite
def array_stores(draw: st.DrawFn) -> Store:
    """Stores in memory of up to three shards and two splits, with any columns."""
    made = draw(columns())
    normaliser = Normaliser(Layout(made))
    shards = []
    for number in range(draw(st.integers(1, 3))):
        stored, offsets = normaliser.records(*as_arrays(made, draw(records(made))))
        shards.append((f"memory-{number}", stored, offsets))
    layout = Layout(normaliser.columns())
    files = [
        (name, [stored[file.column] if file.column else offsets[str(file.axis)] for file in layout.files])
        for name, stored, offsets in shards
    ]
    split_of = draw(st.lists(st.integers(0, 1), min_size=len(files), max_size=len(files)))
    return array_store(layout, files, kind="records", splits=("train", "val"), split_of=sorted(split_of))
