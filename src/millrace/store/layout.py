"""What lies in a shard folder: names, dtypes, and the files each column becomes.

A ``Layout`` is computed from the columns of a store and shared by writer, reader and verify; nobody else
knows a file's name or how long it must be. docs/format.md says the same in prose.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from millrace.errors import ConfigError
from millrace.lazy import cached_property
from millrace.ragged import Array, Int64s

BLOCK_BYTES = 4 << 20  # one hash per block: damage is located to this, and a download is checked by it
PRIMARY_AXIS = "rows"
MAX_RECORDS = 1 << 36  # of a store: their offsets alone take half a terabyte
MAX_ITEMS = 1 << 62  # rows, records and bytes stay below this, so that sums of two fit int64
MAX_COLUMNS = 4096
MAX_DICTIONARY = 65_536  # a dictionary lives in the manifest; more values are strings

# name -> (dtype on disk, file ending). bfloat16 has no numpy type: its bits are stored as uint16.
DTYPES: dict[str, tuple[np.dtype[Any], str]] = {
    "bool": (np.dtype("?"), "bool"),
    "float16": (np.dtype("<f2"), "f16"),
    "bfloat16": (np.dtype("<u2"), "bf16"),
    "float32": (np.dtype("<f4"), "f32"),
    "float64": (np.dtype("<f8"), "f64"),
    "string": (np.dtype("u1"), "utf8"),
    "dictionary": (np.dtype("<i4"), "i32"),
}
for _bytes in (1, 2, 4, 8):
    DTYPES[f"int{8 * _bytes}"] = (np.dtype(f"<i{_bytes}"), f"i{8 * _bytes}")
    DTYPES[f"uint{8 * _bytes}"] = (np.dtype(f"<u{_bytes}"), f"u{8 * _bytes}")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


def check_name(name: object, what: str) -> str:
    """A name that may become a file name: plain, short, without a leading dot or a path."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{what} name {name!r} is not usable; take 1 to 128 of A-Z a-z 0-9 . _ - and no leading dot")
    return name


@dataclass(frozen=True)
class Column:
    """One array over rows or over records.

    ``Column("float32", (6,))`` is six floats per row; ``Column("int64", per="record")`` one integer per
    record; ``Column("uint8", axis="image")`` rows counted by their own offsets; ``Column("string",
    per="record")`` text; ``Column("dictionary")`` text with few different values, kept as int32 codes.

    >>> Column(np.float32, (6,)).dtype
    'float32'
    """

    dtype: str
    shape: tuple[int, ...] = ()
    per: str = "row"
    axis: str | None = None
    values: tuple[str, ...] | None = None

    def __init__(
        self,
        dtype: str | npt.DTypeLike,
        shape: int | tuple[int, ...] = (),
        *,
        per: str = "row",
        axis: str | None = None,
        values: tuple[str, ...] | None = None,
    ) -> None:
        set_ = object.__setattr__
        set_(self, "dtype", dtype_name(dtype))
        set_(self, "shape", tuple(int(n) for n in ((shape,) if isinstance(shape, int) else shape)))
        set_(self, "per", per)
        set_(self, "axis", None if per == "record" else axis or PRIMARY_AXIS)
        set_(self, "values", None if values is None else tuple(values))
        self._check(axis)

    def _check(self, axis: str | None) -> None:
        if self.per not in ("row", "record"):
            raise ConfigError(f"per={self.per!r}; expected 'row' or 'record'")
        if self.per == "record" and axis is not None:
            raise ConfigError(f"axis={axis!r} on a record column; only row columns have an axis")
        if any(n < 1 for n in self.shape) or len(self.shape) > 8:
            raise ConfigError(f"shape={self.shape}; expected at most 8 sizes of 1 or more")
        if self.dtype == "string" and (self.per != "record" or self.shape):
            raise ConfigError("a string column is per='record' and has no shape; per row take Column('dictionary')")
        if self.item_bytes > 1 << 31:
            raise ConfigError(f"shape={self.shape} makes {self.item_bytes} bytes per item; at most 2 GiB")
        if self.values is None:
            return
        if self.dtype != "dictionary":
            raise ConfigError(f"values= given for a {self.dtype} column; only 'dictionary' columns have values")
        if len(set(self.values)) != len(self.values) or len(self.values) > MAX_DICTIONARY:
            raise ConfigError(f"{len(self.values)} dictionary values; expected at most {MAX_DICTIONARY}, all different")

    def with_values(self, values: tuple[str, ...] | None) -> Column:
        """The same column with another dictionary."""
        return Column(self.dtype, self.shape, per=self.per, axis=self.axis, values=values)

    @property
    def storage(self) -> np.dtype[Any]:
        """The numpy dtype of the bytes on disk."""
        return DTYPES[self.dtype][0]

    @property
    def item_bytes(self) -> int:
        size = self.storage.itemsize
        for n in self.shape:
            size *= n
        return size


def dtype_name(dtype: Any) -> str:
    """The format's name of a dtype given by name, numpy dtype or type."""
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    try:
        found = np.dtype(dtype)
        name = found.name if found.isnative or found.str.startswith("<") else str(dtype)  # big-endian is refused
    except TypeError:
        name = str(dtype)
    name = "string" if name.startswith("str") else name
    if name not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} cannot be stored; expected one of {', '.join(DTYPES)}")
    return name


@dataclass(frozen=True)
class File:
    """One file of every shard: ``count`` items of ``dtype`` x ``tail``, counted by an axis or by records."""

    name: str
    dtype: np.dtype[Any]
    tail: tuple[int, ...]
    counter: int  # which count of the shard table: 0 is records, 1 + k the rows of axis k
    extra: int  # 1 for offsets, which have one more than there are records
    column: str | None  # None for offsets
    axis: str | None  # the axis whose offsets these are

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.tail, dtype=np.int64))


class Layout:
    """The files of a shard, from the columns of a store.

    >>> layout = Layout({"hits": Column("float32", (6,)), "key": Column("string", per="record")})
    >>> layout.axes, [file.name for file in layout.files]
    (('rows', 'key'), ['offsets.i64', 'offsets.key.i64', 'hits.f32', 'key.utf8'])
    """

    def __init__(self, columns: Mapping[str, Column]) -> None:
        self.columns = dict(columns)
        if len(self.columns) > MAX_COLUMNS:
            raise ConfigError(f"{len(self.columns)} columns; at most {MAX_COLUMNS}: join related ones in a shape")
        for name in self.columns:
            check_name(name, "column")
            if name == "offsets" or name.startswith("offsets."):
                raise ConfigError(f"column name {name!r} is taken by the offsets files; choose another")
        lowered = [name.lower() for name in self.columns]
        if len(set(lowered)) != len(lowered):
            twice = [name for name in self.columns if lowered.count(name.lower()) > 1]
            raise ConfigError(
                f"columns {twice[0]!r} and {twice[1]!r} differ only in case; some file systems cannot hold both"
            )
        if not self.columns:
            raise ConfigError("no column; a store needs at least one")
        # Where all columns are per record, records have no rows.
        axes = dict.fromkeys(column.axis for column in self.columns.values() if column.axis is not None) or {
            PRIMARY_AXIS: None
        }
        strings = [name for name, column in self.columns.items() if column.dtype == "string"]
        for axis in axes:
            check_name(axis, "axis")
            if axis in strings:
                raise ConfigError(f"axis {axis!r} is named like a string column; rename one of them")
        self.row_axes: tuple[str, ...] = tuple(axes)
        self.axes = (*self.row_axes, *strings)  # a string column is an axis of bytes
        self.primary = self.axes[0]

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.columns,)

    @cached_property
    def files(self) -> tuple[File, ...]:
        names = ["offsets.i64", *(f"offsets.{axis}.i64" for axis in self.axes[1:])]
        both = zip(names, self.axes, strict=True)
        offsets = [File(name, np.dtype("<i8"), (), 0, 1, None, axis) for name, axis in both]
        columns = [
            File(f"{name}.{DTYPES[column.dtype][1]}", column.storage, column.shape, self.counter(name), 0, name, None)
            for name, column in self.columns.items()
        ]
        return (*offsets, *columns)

    @cached_property
    def file_of(self) -> dict[str, int]:
        """Column name -> its place in ``files``."""
        return {file.column: k for k, file in enumerate(self.files) if file.column is not None}

    def counter(self, name: str) -> int:
        """Which count says how many items a column has: 0 records, 1 + k rows of axis k."""
        axis = self.column_axis(name)
        return 0 if axis is None else 1 + self.place_of[axis]

    @cached_property
    def place_of(self) -> dict[str, int]:
        """Axis -> its place in ``axes``."""
        return {axis: k for k, axis in enumerate(self.axes)}

    def column_axis(self, name: str) -> str | None:
        """The axis whose rows a column's items are, also for the bytes of a string; None per record."""
        column = self.columns[name]
        return name if column.dtype == "string" else column.axis

    @property
    def item_bytes(self) -> Int64s:
        return np.array([file.item_bytes for file in self.files], np.int64)

    def file_items(self, counts: Int64s) -> Int64s:
        """Items of every file of every shard, (shards, files), from (shards, 1 + axes) counts."""
        counters = [file.counter for file in self.files]
        return counts[:, counters] + np.array([file.extra for file in self.files], np.int64)

    def file_bytes(self, counts: Int64s) -> Int64s:
        return self.file_items(counts) * self.item_bytes


def num_blocks(num_bytes: Any) -> Any:
    """Hash blocks of files of these sizes; an empty file has none."""
    return (num_bytes + (BLOCK_BYTES - 1)) // BLOCK_BYTES


def block_ends(sizes: Int64s) -> Int64s:
    """Where the hash blocks of every file end in the list of all, (shards, files) like the sizes."""
    return np.cumsum(num_blocks(sizes)).reshape(sizes.shape)


def bfloat16_bits(array: Array) -> npt.NDArray[np.uint16]:
    """float32 -> bfloat16 bits, to nearest even; NaN stays NaN."""
    bits = np.asarray(array, np.float32, order="C").view(np.uint32)  # ascontiguousarray would make one value a row
    rounded = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def bfloat16_values(bits: Array) -> npt.NDArray[np.float32]:
    """bfloat16 bits -> the float32 they stand for, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
