"""Folders of .npz or .npy files: each file is a record. Arrays of objects, which are pickles, are never loaded."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import IO, Any

import msgspec
import numpy as np
from numpy.lib import format as npy

from millrace.errors import ConfigError, SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import printable
from millrace.prepare.inflate import FREE_EXPANSION
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Format, Outline, Reading, Source
from millrace.prepare.records.formats.members import FILE_BYTES, folder_source, record_chunks
from millrace.prepare.records.options import RecordOptions
from millrace.ragged import Array
from millrace.store.layout import Column, dtype_name

ARRAY = "array"  # the column of a .npy file


class NumpyFiles(Format):
    """A record per .npz or .npy file."""

    name = "npz"
    endings = (".npz", ".npy")
    expected = ".npz or .npy files, a record each"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        groups: dict[tuple[str, str], list[Source]] = {}
        for file in files:
            groups.setdefault((file.split or "", os.path.dirname(file.path)), []).append(file)
        return [folder_source(folder or ".", mine, "npz") for (_, folder), mine in groups.items()], []

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        """The arrays of all files, from their headers; a file that differs is refused by name."""
        columns: dict[str, Column] = {}
        lengths: dict[str, list[int]] = {}
        first = ""
        for number, path in enumerate(source.members):
            try:
                headers = _headers(path, source.sizes[number], options)
                mine = {name: _column(name, *header) for name, header in headers.items()}
                if first and mine != columns:
                    _differ(mine, columns, printable(path), first, options)
            except SourceError:
                if options.on_error == "stop":
                    raise
                continue  # it is refused when it is read
            if not first:
                first, columns = printable(path), mine
            for name, (_, shape) in headers.items():
                if shape and number < SAMPLE:
                    lengths.setdefault(name, []).append(shape[0])
        if not first:
            raise SourceError(f"none of the files in {source.path!r} can be read as records", source=source.path)
        if "key" not in columns:
            columns = {**columns, "key": Column("string", per="record")}
        ends = np.cumsum([size + FILE_BYTES for size in source.sizes])
        edges = np.unique([*np.searchsorted(ends, np.arange(0, ends[-1], options.part_bytes)), len(ends)]).tolist()
        starts = np.concatenate(([0], ends))
        pieces = [(a, b, int(starts[b] - starts[a])) for a, b in pairwise(edges)]
        return Outline(columns, pieces, {name: np.array(found, np.int64) for name, found in lengths.items()})

    def narrow(self, source: Source, start: int, stop: int) -> Source:
        mine = {name: getattr(source, name)[start:stop] for name in ("members", "sizes", "keys")}
        return msgspec.structs.replace(source, **mine)

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        yield from record_chunks(
            _records(source, reading),
            reading.wanted,
            reading.options,
            lambda place, problem: reading.refuse(place, "", problem),
        )


def _column(name: str, dtype: str, shape: tuple[int, ...]) -> Column:
    return Column(dtype, shape[1:], axis=name) if shape else Column(dtype, per="record")


def _records(source: Source, reading: Reading) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, size, key in zip(source.members, source.sizes, source.keys, strict=True):
        try:
            record = _load(path, size, reading.options, reading.wanted)
        except SourceError as error:
            reading.refuse(printable(path), "", str(error).partition(": ")[2] or str(error))
            continue
        if "key" in reading.wanted:
            record.setdefault("key", key.rpartition(".")[0])
        alive(bytes=size, records=1)
        yield printable(path), record


def _differ(
    mine: Mapping[str, Column], first: Mapping[str, Column], path: str, one: str, options: RecordOptions
) -> None:
    for name in {**first, **mine}:
        a, b = mine.get(name), first.get(name)
        if a is None or b is None:
            lacking, having = (path, one) if a is None else (one, path)
            raise SourceError(
                f"{lacking!r} has no array {name!r}, which {having!r} has; choose with --columns", source=path
            )
        is_alike = (a.shape, a.axis) == (b.shape, b.axis)
        if a != b and not (is_alike and options.rename.get(name, name) in options.cast):
            raise SourceError(
                f"array {name!r} is {a.dtype} with {a.shape} per {a.per} in {path!r} and {b.dtype} with {b.shape} per {b.per} in "
                f"{one!r}; {f'give --cast {name}={b.dtype}, or ' if is_alike else ''}leave it out with --columns",
                source=path,
            )


@contextmanager
def _arrays(path: str, size: int, options: RecordOptions) -> Iterator[Iterator[tuple[str, IO[bytes]]]]:
    """The arrays of a file as streams by name."""
    shown = printable(path)
    try:
        if not path.lower().endswith(".npz"):
            with open(path, "rb") as file:
                yield iter([(ARRAY, file)])
            return
        with zipfile.ZipFile(path) as archive:
            infos = archive.infolist()
            names = [info.filename.removesuffix(".npy") for info in infos]
            if len(set(names)) != len(names):
                raise SourceError(f"{shown!r}: two arrays have one name", source=shown)
            total = sum(info.file_size for info in infos)
            if total > max(FREE_EXPANSION, size * options.max_ratio):
                raise SourceError(
                    f"{shown!r}: it expands to {total:,} bytes; if that is right, raise --max-ratio", source=shown
                )
            yield ((name, archive.open(info)) for name, info in zip(names, infos, strict=True))
    except (OSError, zipfile.BadZipFile, ValueError, EOFError, NotImplementedError, RuntimeError) as error:
        raise SourceError(f"{shown!r}: it is no readable .npz or .npy file: {error}", source=shown) from error


def _headers(path: str, size: int, options: RecordOptions) -> dict[str, tuple[str, tuple[int, ...]]]:
    with _arrays(path, size, options) as arrays:
        found = {}
        for name, file in arrays:
            if options.columns is None or name in options.columns:
                found[name] = _header(file, f"{printable(path)!r}: array {name!r}")
        return found


def _header(file: IO[bytes], what: str) -> tuple[str, tuple[int, ...]]:
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    return _dtype(dtype, shape, what), shape


def _dtype(dtype: Any, shape: tuple[int, ...], what: str) -> str:
    if dtype.hasobject:
        raise SourceError(f"{what} holds objects, which are pickles and are never loaded; leave it out with --columns")
    if dtype.kind in "SU" and shape:
        raise SourceError(
            f"{what} is a list of texts; a record holds one text in a column: leave it out with --columns"
        )
    if dtype.kind in "SU":
        return "string"
    try:
        return dtype_name(dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype)
    except ConfigError as error:
        raise SourceError(f"{what}: {error}; leave it out with --columns") from error


def _load(path: str, size: int, options: RecordOptions, wanted: Mapping[str, Column]) -> dict[str, Any]:
    with _arrays(path, size, options) as arrays:
        found: dict[str, Any] = {}
        for name, file in arrays:
            if name in wanted:
                array = read_array(file, f"{printable(path)!r}: array {name!r}")
                array = np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array
                found[name] = str(array) if array.dtype.kind == "U" else array
        return found


def read_array(file: IO[bytes], what: str) -> Array:
    """One .npy stream of numbers, or of one text; objects are refused."""
    try:
        array: Array = npy.read_array(file, allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, zipfile.BadZipFile) as error:
        raise SourceError(f"{what} is no readable .npy: {error}") from error
    dtype = _dtype(array.dtype, array.shape, what)
    return array if dtype == "string" else array.astype(np.dtype(dtype), copy=False)
