"""``.npy`` files, one or a folder of them: numpy reads the header, the data are mapped, nothing is unpickled."""

from __future__ import annotations

import io
import math
import tokenize
from typing import Any

import numpy as np
from numpy.lib import format as npy

from millrace.store import foreign_files as files
from millrace.store.foreign_files import Foreign, MappedFile, Numbers, corrupt

MAX_HEADER_BYTES = 1 << 16  # numpy itself refuses headers over 10,000 characters
# What numpy's parser raises for bytes that are no header, besides ValueError.
_MALFORMED = (
    ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError, tokenize.TokenError,
    RecursionError, MemoryError,
)  # fmt: skip


def read_npy(path: str, given: str | None) -> Foreign:
    """One ``.npy``: tokens where it is a line of integers, else values; one record."""
    numbers = _read(files.map_file(path), given)
    return files.plain_numbers("npy", f".npy of {numbers.dtype} {list(numbers.shape)}", [numbers])


def read_npy_folder(folder: str, given: str | None) -> Foreign:
    """Only ``.npy`` files, alike but for their length: a shard and a record each, by name."""
    numbers = [_read(file, given) for file in files.map_files(folder, files.list_folder(folder, ".npy"))]
    first = numbers[0]
    for one in numbers:
        if (one.dtype, one.shape[1:]) != (first.dtype, first.shape[1:]):
            raise corrupt(
                one.file.path, f"{one.dtype} {list(one.shape)}, but {first.file.path} has {first.dtype} {list(first.shape)}",
                "keep only files with the same dtype and the same shape after the first axis",
            )  # fmt: skip
    shape = [sum(one.shape[0] for one in numbers), *first.shape[1:]]
    return files.plain_numbers("npy-folder", f"{len(numbers)} .npy of {first.dtype} {shape}", numbers)


def _read(file: MappedFile, given: str | None) -> Numbers:
    shape, fortran, dtype, start = _header(file)
    if not shape or min(shape) < 0 or 0 in shape[1:]:
        raise _refusal(file, f"shape {shape}, expected one or more axes, empty only in the first", "reshape(-1)")
    if fortran and len(shape) > 1:
        raise _refusal(file, f"Fortran order {shape}, expected C order", "np.ascontiguousarray(...)")
    if dtype.str[0] == ">":
        raise _refusal(file, f"big-endian {dtype.str}", f".astype({dtype.newbyteorder('<').str!r})")
    name = files.SPELLINGS.get(dtype.str)
    if name is None or dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        raise _refusal(file, f"dtype {dtype}, expected plain numbers", ".astype(...) a number type")
    expected = start + math.prod(shape) * dtype.itemsize
    if file.num_bytes != expected:
        raise corrupt(
            file.path, f"{file.num_bytes} bytes, expected {expected} by its header ({name} {shape})",
            expected=expected, found=file.num_bytes,
        )  # fmt: skip
    files.check_given(given, name, file.path)
    return Numbers(file, name, start, shape)


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


def _refusal(file: MappedFile, problem: str, convert: str) -> Exception:
    return corrupt(file.path, f"{problem}; unusable in place", f"convert it with {convert} and np.save it again")
