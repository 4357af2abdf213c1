"""``.npy`` files, one or a folder of them: numpy reads the header, the data are mapped, nothing is unpickled.

Called by foreign.py.
"""

from __future__ import annotations

import io
import math
import tokenize
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy

from millrace.errors import ConfigError
from millrace.store.foreign_files import (
    SPELLINGS,
    Found,
    MappedFile,
    Shard,
    check_given,
    corrupt,
    is_integer,
    list_folder,
    map_file,
    map_files,
    one_record,
)
from millrace.store.layout import Column

MAX_HEADER_BYTES = 1 << 16  # numpy itself refuses headers over 10,000 characters
# What numpy's parser raises for bytes that are no header, besides ValueError.
_MALFORMED = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, tokenize.TokenError,
    RecursionError, MemoryError,
)  # fmt: skip


def read_npy(path: str, given: str | None) -> Found:
    """One ``.npy``: tokens where it is a line of integers, else values; one record."""
    part = _part(map_file(path), given)
    return _found("npy", f".npy of {part.dtype} {list(part.shape)}", [part])


def read_npy_folder(folder: str, given: str | None) -> Found:
    """Only ``.npy`` files, alike but for their length: a shard and a record each, by name."""
    parts = [_part(file, given) for file in map_files(folder, list_folder(folder, ".npy"))]
    first = parts[0]
    for part in parts:
        if (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:]):
            raise corrupt(
                part.file.path, f"{part.dtype} {list(part.shape)}, but {first.file.path} has {first.dtype} {list(first.shape)}",
                "keep only files with the same dtype and the same shape after the first axis",
            )  # fmt: skip
    rows = sum(part.shape[0] for part in parts)
    return _found("npy-folder", f"{len(parts)} .npy of {first.dtype} {[rows, *first.shape[1:]]}", parts)


@dataclass(frozen=True, eq=False)
class _Part:
    file: MappedFile
    dtype: str
    shape: tuple[int, ...]
    start: int


def _part(file: MappedFile, given: str | None) -> _Part:
    shape, fortran, dtype, start = _header(file)
    if not shape or min(shape) < 0 or 0 in shape[1:]:
        raise _refused(file, f"shape {shape}, expected one or more axes, empty only in the first", "reshape(-1)")
    if fortran and len(shape) > 1:
        raise _refused(file, f"Fortran order {shape}, expected C order", "np.ascontiguousarray(...)")
    if dtype.str[0] == ">":
        raise _refused(file, f"big-endian {dtype.str}", f".astype({dtype.newbyteorder('<').str!r})")
    name = SPELLINGS.get(dtype.str)
    if name is None or dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise _refused(file, f"dtype {dtype}, expected plain numbers", ".astype(...) a number type")
    expected = start + math.prod(shape) * dtype.itemsize
    if file.num_bytes != expected:
        raise corrupt(
            file.path, f"{file.num_bytes} bytes, expected {expected} by its header ({name} {shape})",
            expected=expected, found=file.num_bytes,
        )  # fmt: skip
    check_given(given, name, file.path)
    return _Part(file, name, shape, start)


def _header(file: MappedFile) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, Fortran order, dtype, and the byte where the data begin."""
    head = io.BytesIO(file.data[:MAX_HEADER_BYTES].tobytes())
    try:
        version = npy.read_magic(head)
        if version not in ((1, 0), (2, 0), (3, 0)):
            raise ValueError(f"version {version}, expected 1 to 3")
        # 3 differs from 2 only in non-Latin field names, and dtypes with fields are refused anyway.
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(head)
    except _MALFORMED as error:
        problem = f"no .npy header that can be read ({' '.join(str(error).split())[:200]})"
        raise corrupt(file.path, problem, "write it again with np.save") from error
    return tuple(int(n) for n in shape), bool(fortran), dtype, head.tell()


def _refused(file: MappedFile, problem: str, convert: str) -> Exception:
    return corrupt(
        file.path, f"{problem}; it cannot be used in place", f"convert it with {convert} and np.save it again"
    )


def _found(layout: str, phrase: str, parts: list[_Part]) -> Found:
    first = parts[0]
    tokens = len(first.shape) == 1 and is_integer(first.dtype)
    name, kind = ("tokens", "text") if tokens else ("values", "records")
    try:
        column = Column(first.dtype, first.shape[1:])
    except ConfigError as error:
        raise corrupt(first.file.path, str(error), "reshape it and np.save it again") from error
    shards = []
    for part in parts:
        rows = part.file.items(part.dtype, part.start).reshape(part.shape)
        shards.append(Shard(part.file.name, None, [one_record(len(rows)), rows]))
    return Found(layout, phrase, kind, {name: column}, shards, [part.file for part in parts])
