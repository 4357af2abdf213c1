"""The options of ``prepare_records``, as a value that goes to workers and into the plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from millrace.errors import ConfigError, did_you_mean
from millrace.store.layout import DTYPES

# These decide what is in a part. The others may change between two attempts: what was read stays valid.
READING = (
    *("format", "columns", "rename", "cast", "axis", "key", "decode", "check", "tree", "offsets", "filter"),
    *("split_folders", "part_bytes"),
)
# An append must have the same.
FIXED = ("format", "columns", "rename", "cast", "axis", "key", "decode", "tree", "offsets", "filter", "val", "test")
IMAGES = ("imagefolder", "webdataset")
ONLY = {"decode": IMAGES, "check": IMAGES, "tree": ("root",), "offsets": ("hdf5",)}  # option -> formats that look at it
OWN = "own"  # as ``axis``: every list has an axis of its own


class RecordOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How sources become records, and records become shards."""

    format: str | None = None  # None: guessed from the names of the files
    columns: tuple[str, ...] | None = None  # None: all
    rename: dict[str, str] = {}  # old name -> new name
    cast: dict[str, str] = {}  # new name -> dtype, or dtype[n] for a list of n numbers in every record
    axis: dict[str, tuple[str, ...]] | str | None = None  # axis -> columns that share it; "own"; None: guessed
    key: str | None = None  # the column that a record is known by; None: "key", where there is one
    decode: int | None = None  # images: scaled and cut to so many pixels each way
    check: bool = False  # images: decode every one to see whether it is whole
    tree: str | None = None  # ROOT: the tree to read, where there are several
    offsets: dict[str, str] = {}  # HDF5: axis -> the dataset that says where records begin, or how long they are
    filter: str | None = None  # module:function, which says whether to keep a record
    on_error: str = "stop"
    max_ratio: int = 1000
    val: float = 0.0
    test: float = 0.0
    val_tail: bool = False
    val_keys: tuple[str, ...] = ()
    test_keys: tuple[str, ...] = ()
    val_list: str | None = None  # a file with a key in every line
    test_list: str | None = None
    split_folders: bool = False
    shard_bytes: int = 256 << 20
    part_bytes: int = 64 << 20

    def check_values(self) -> None:
        if self.on_error not in ("stop", "skip"):
            raise ConfigError(f"--on-error {self.on_error!r}; expected stop or skip")
        for name in ("decode", "max_ratio", "shard_bytes", "part_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value}; expected a positive number")
        if self.decode is not None and self.decode > 16_384:
            raise ConfigError(f"--decode {self.decode}; expected at most 16384 pixels")
        if not (0 <= self.val < 1 and 0 <= self.test < 1 and self.val + self.test < 1):
            raise ConfigError(f"val={self.val}, test={self.test}; expected shares from 0 that leave some for train")
        if isinstance(self.axis, str) and self.axis != OWN:
            raise ConfigError(f"--axis {self.axis!r}; expected NAME=COLUMNS, or own")
        for name, dtype in self.cast.items():
            parse_dtype(dtype, name)
        for path in (self.val_list, self.test_list):
            if path is not None:
                read_keys(path)

    def check_format(self, name: str) -> None:
        """Refuses options that this format would not look at."""
        for option, formats in ONLY.items():
            if getattr(self, option) and name not in formats:
                raise ConfigError(
                    f"--{option} is for {' and '.join(formats)}, and these records are {name}; leave it out"
                )

    @property
    def has_split(self) -> bool:
        return bool(self.val or self.test or self.names_keys or self.split_folders)

    @property
    def names_keys(self) -> bool:
        return bool(self.val_keys or self.test_keys or self.val_list or self.test_list)

    def keys_of(self, split: str) -> list[str]:
        """The keys that were named for a split."""
        named, path = getattr(self, f"{split}_keys"), getattr(self, f"{split}_list")
        return [*named, *(read_keys(path) if path else ())]


def read_keys(path: str) -> list[str]:
    """The lines of a file of keys."""
    try:
        with open(path, encoding="utf-8") as file:
            return [line.rstrip("\r\n") for line in file if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--split list: {path!r} cannot be read: {error}; give a text file with a key per line"
        ) from error


def parse_dtype(text: str, name: str) -> tuple[str, tuple[int, ...] | None]:
    """``float32`` or ``float32[4]``: the dtype, and how many numbers every record has of it.

    >>> parse_dtype("float32[2,3]", "x")
    ('float32', (2, 3))
    """
    match = re.fullmatch(r"(\w+)(?:\[(\d+(?:,\d+)*)\])?", text.replace(" ", ""))
    known = [dtype for dtype in DTYPES if dtype not in ("string", "dictionary")]
    if match is None or match[1] not in known:
        raise ConfigError(f"--cast {name}={text}; expected one of {', '.join(known)}, with a shape as in float32[4]")
    return match[1], tuple(map(int, match[2].split(","))) if match[2] else None


def parse_options(given: Mapping[str, Any]) -> RecordOptions:
    """Options by name, checked. Names may be one text or many."""
    known = RecordOptions.__struct_fields__
    if unknown := set(given) - set(known):
        shown = sorted({*known, "split"} - {"part_bytes"})
        near = did_you_mean(min(unknown), shown)
        raise ConfigError(f"unknown options {sorted(unknown)}{near}; expected {', '.join(shown)}")
    plain = {name: _plain(name, value) for name, value in given.items()}
    try:
        options = msgspec.convert(plain, RecordOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"an option has the wrong type: {error}; see --help") from error
    options.check_values()
    return options


def _plain(name: str, value: Any) -> Any:
    if name in ("columns", "val_keys", "test_keys") and isinstance(value, str):
        return (value,)
    if name == "cast" and isinstance(value, Mapping):
        return {column: dtype if isinstance(dtype, str) else _dtype_text(dtype) for column, dtype in value.items()}
    if name == "axis" and isinstance(value, Mapping):
        return {axis: (names,) if isinstance(names, str) else tuple(names) for axis, names in value.items()}
    if name in ("val_list", "test_list") and value is not None:
        return str(value)
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _dtype_text(dtype: Any) -> str:
    """``np.float32`` as a text."""
    import numpy as np

    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)
