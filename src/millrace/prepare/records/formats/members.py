"""Formats in which a file is a record: many files are one source, and dicts become chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from millrace.errors import ConfigError
from millrace.prepare.records.formats.format import CHUNK_BYTES, Chunk, Source
from millrace.prepare.records.options import RecordOptions, parse_dtype
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


def record_chunks(
    records: Iterable[tuple[str, Mapping[str, Any]]],
    wanted: Mapping[str, Column],
    options: RecordOptions,
    refuse: Callable[[str, str], None],
) -> Iterator[Chunk]:
    """Dicts, each with its place, as chunks of about ``CHUNK_BYTES``. One that does not fit goes to ``refuse``."""
    wanted = {name: stored(name, column, options) for name, column in wanted.items()}
    waiting: list[dict[str, Array]] = []
    places: list[str] = []
    num_bytes = 0
    for place, record in records:
        try:
            waiting.append(_arrays(record, wanted, is_strict=options.columns is None))
        except ConfigError as error:
            refuse(place, str(error))
            continue
        places.append(place)
        num_bytes += sum(array.nbytes for array in waiting[-1].values())
        if num_bytes >= CHUNK_BYTES:
            yield _joined(waiting, wanted, places)
            waiting, places, num_bytes = [], [], 0
    if waiting:
        yield _joined(waiting, wanted, places)


def stored(name: str, column: Column, options: RecordOptions) -> Column:
    """The column with the type that ``--cast`` gives it: that says which values fit."""
    dtype = options.cast.get(options.rename.get(name, name))
    return column if dtype is None else replace(column, dtype=parse_dtype(dtype, name)[0])


def _arrays(record: Mapping[str, Any], wanted: Mapping[str, Column], *, is_strict: bool) -> dict[str, Array]:
    found = {}
    for name, column in wanted.items():
        if name not in record:
            raise ConfigError(f"it has no {name!r}; every record needs a value for each column")
        try:
            found[name] = _as_array(record[name], column)
        except (TypeError, ValueError) as error:  # also ConfigError and what texts raise
            raise ConfigError(f"column {name!r}: {error}") from error
    extra = [name for name in record if name not in wanted] if is_strict else ()
    if extra:
        raise ConfigError(f"it has {extra[0]!r}, which the first record lacks; choose columns with --columns")
    return found


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
    return fitted(array, column)


def fitted(array: Array, column: Column) -> Array:
    """Numbers of a kind that the column holds: neighbours of another kind would become floats with them."""
    kind = "f" if "float" in column.dtype else column.storage.kind
    width = {"b": 0, "u": 1, "i": 1, "f": 2}
    if width[array.dtype.kind] > width[kind]:
        raise ConfigError(f"it is {array.dtype}, and {column.dtype} is stored; --cast NAME=TYPE stores another type")
    if kind in "ui" and array.dtype.kind in "ui" and array.dtype != column.storage:
        limits = np.iinfo(column.storage)
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            raise ConfigError(f"it holds {array.min()} to {array.max()}, which {column.dtype} does not")
        return array.astype(column.storage)
    return array


def _joined(records: Sequence[Mapping[str, Array]], wanted: Mapping[str, Column], places: Sequence[str]) -> Chunk:
    columns, offsets = {}, {}
    for name, column in wanted.items():
        arrays = [record[name] for record in records]
        if column.per == "record" and column.dtype != "string":
            columns[name] = np.stack(arrays)
            continue
        columns[name] = np.concatenate(arrays)
        offsets[column.axis or name] = offsets_of(np.array([len(array) for array in arrays], np.int64))
    return Chunk(columns, offsets, len(records), lambda k: places[k])
