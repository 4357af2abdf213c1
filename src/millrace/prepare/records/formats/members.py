"""Formats in which a file is a record: many files are one source, and dicts become chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from millrace.errors import ConfigError, SourceError
from millrace.prepare.records.formats.format import CHUNK_BYTES, Chunk, Source
from millrace.prepare.runs import offsets_of
from millrace.ragged import Array
from millrace.store.layout import Column

FILE_BYTES = 4 << 10  # what opening a file costs, in bytes read


def folder_source(path: str, files: Sequence[Source], format_: str, label: int = 0) -> Source:
    """Some files as one source: a plan of a million files would be large, and slow to compare."""
    identity = xxhash.xxh3_128()
    for file in files:
        identity.update(f"{file.path}\0{file.size}\0{file.mtime_ns}\0{file.ends}\0".encode())
    first = files[0]
    keys = tuple("/".join((*file.folders, os.path.basename(file.path))) for file in files)
    return Source(
        path=path, size=sum(file.size for file in files), mtime_ns=max(file.mtime_ns for file in files),
        ends=identity.hexdigest(), location=os.path.dirname(first.location), folders=first.folders, format=format_,
        split=first.split, members=tuple(file.location for file in files), sizes=tuple(file.size for file in files),
        keys=keys, label=label,
    )  # fmt: skip


def top_folder(file: Source) -> str:
    """The first folder of a file below what was given; below it there may be others."""
    path = os.path.dirname(file.path)
    for _ in range(max(len(file.folders) - 1 - (file.split is not None), 0)):
        path = os.path.dirname(path)
    return path


def record_chunks(records: Iterable[Any], wanted: Mapping[str, Column], source: str) -> Iterator[Chunk]:
    """Dicts as chunks of about ``CHUNK_BYTES``; one that does not fit is refused."""
    parts: dict[str, list[Array]] = {name: [] for name in wanted}
    first = num_bytes = 0
    number = -1
    for number, record in enumerate(records):
        num_bytes += _add(parts, record, wanted, source, number)
        if num_bytes >= CHUNK_BYTES:
            yield _joined(parts, wanted, first)
            parts, first, num_bytes = {name: [] for name in wanted}, number + 1, 0
    if number >= first:
        yield _joined(parts, wanted, first)


def _add(
    parts: Mapping[str, list[Array]], record: Mapping[str, Any], wanted: Mapping[str, Column], source: str, number: int
) -> int:
    num_bytes = 0
    for name, column in wanted.items():
        if name not in record:
            problem = f"it has no {name!r}; every record needs a value for each column"
            raise SourceError(f"{source}, record {number}: {problem}", source=source)
        try:
            array = _as_array(record[name], column)
        except (ConfigError, TypeError, ValueError, UnicodeEncodeError) as error:
            raise SourceError(f"{source}, record {number}: column {name!r}: {error}", source=source) from error
        parts[name].append(array)
        num_bytes += array.nbytes
    return num_bytes


def _as_array(value: Any, column: Column) -> Array:
    if column.dtype == "string":
        if not isinstance(value, str):
            raise ConfigError(f"it is {type(value).__name__}; expected a text, as in the first record")
        return np.frombuffer(value.encode(), np.uint8)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return np.frombuffer(bytes(value), np.uint8)
    array = np.array(value)  # a copy: the caller may fill the same buffer for the next record
    if array.size == 0 and array.shape[:1] == (0,):
        return np.zeros((0, *column.shape), column.storage)
    if array.dtype.kind not in "biuf" or array.shape[column.per == "row" :] != column.shape:
        what = f"{array.dtype} of shape {array.shape}"
        raise ConfigError(f"it is {what}; the first record has {column.dtype} with {column.shape} per {column.per}")
    return array


def _joined(parts: Mapping[str, list[Array]], wanted: Mapping[str, Column], first: int) -> Chunk:
    columns, offsets = {}, {}
    count = len(next(iter(parts.values())))
    for name, arrays in parts.items():
        column = wanted[name]
        if column.per == "record" and column.dtype != "string":
            columns[name] = np.stack(arrays)
            continue
        columns[name] = np.concatenate(arrays)
        offsets[column.axis or name] = offsets_of(np.array([len(array) for array in arrays], np.int64))
    where: Callable[[int], str] = lambda k: f"record {first + k}"  # noqa: E731
    return Chunk(columns, offsets, count, where)
