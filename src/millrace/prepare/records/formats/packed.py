"""Chunks of MosaicML MDS and LitData: a table of offsets, and samples whose columns lie one after the other.

Both are read whole and taken apart by arrays: sizes of all samples at once, then each column as runs of bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.inflate import InflatedFile
from millrace.prepare.records.formats.format import Chunk, Source, unreadable
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import copy_runs, offsets_of
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column

MAX_INDEX = 64 << 20  # bytes of an index.json


class Packed(NamedTuple):
    """How one column is packed."""

    column: Column | None  # None: decided by the header of the first array
    size: int | None  # bytes in every sample; None: each sample says
    header: Any = None  # for arrays with a header: (bytes of a sample) -> array


def read_index(source: Source) -> dict[str, Any]:
    """``index.json`` beside a chunk."""
    path = os.path.join(os.path.dirname(source.location), "index.json")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_INDEX + 1)
        index = json.loads(data)
        if len(data) > MAX_INDEX or not isinstance(index, dict):
            raise ValueError("it is too large, or no object")
        return index
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(
            f"{source.path!r}: the index.json beside it cannot be read: {error}; copy it again", source=source.path
        ) from error


@contextmanager
def reading_index(source: Source) -> Iterator[None]:
    """Names the file where its index is not as it should be."""
    try:
        yield
    except MillraceError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"{source.path!r}: the index.json beside it is damaged: {error!r}; copy it again", source=source.path
        ) from error


def in_order(
    files: Sequence[Source], names_of: Callable[[dict[str, Any]], Sequence[Sequence[str]]], options: RecordOptions
) -> tuple[list[Source], list[str]]:
    """The files of each folder in the order of its index, and notes. ``names_of`` gives what one chunk may be called.

    Of a chunk that is there twice, as packed and unpacked shards are in a cache, the first name is taken.
    """
    folders: dict[str, list[Source]] = {}
    for file in files:
        folders.setdefault(os.path.dirname(file.location), []).append(file)
    found, notes, same = list[Source](), list[str](), list[Source]()
    for folder, mine in folders.items():
        with reading_index(mine[0]):
            chunks = [[os.path.basename(name) for name in names] for names in names_of(read_index(mine[0]))]
        by_name = {os.path.basename(file.location): file for file in mine}
        for names in chunks:
            used = [by_name.pop(name) for name in names if name in by_name]
            found += used[:1]
            if names and not used and not any(os.path.exists(os.path.join(folder, name)) for name in names):
                note = f"{names[0]!r}, which the index.json beside {mine[0].path!r} names, is missing"
                if options.on_error == "stop":
                    raise SourceError(f"{note}; copy it too, or go on with --on-error skip", source=mine[0].path)
                notes.append(note)
            same += used[1:]
        found += by_name.values()  # refused by name when they are opened
    if same:
        more = f" and {len(same) - 1:,} more" if len(same) > 1 else ""
        notes.append(f"{same[0].path!r}{more} left out: each is the same shard as a file that is read")
    return found, notes


def not_in_index(source: Source) -> SourceError:
    return SourceError(f"{source.path!r} is not in the index.json beside it; copy both again", source=source.path)


def read_chunk(source: Source, compression: str | None, options: RecordOptions, first: int = 0) -> Array:
    """All bytes of a chunk, decompressed; the compressed ones begin at byte ``first``."""
    try:
        if compression is None:
            return np.fromfile(source.location, np.uint8)
        with InflatedFile(source, compression, options.max_ratio, (first, 0)) as file:
            return np.frombuffer(file.readall() or b"", np.uint8)  # it has a limit of its own
    except OSError as error:
        raise unreadable(source, "chunk", error) from error


def split_samples(data: Array, packed: Sequence[Packed], source: Source) -> list[tuple[Int64s, Int64s]]:
    """For each column where it begins and ends in every sample. Tables that point outside are refused."""
    count = int(data[:4].view("<u4")[0]) if len(data) >= 4 else -1
    head = 4 * (count + 2)
    if count < 0 or head > len(data):
        raise damaged(source, f"its table claims {count:,} samples in {len(data):,} bytes")
    offsets = data[4:head].view("<u4").astype(np.int64)
    if count and (offsets[0] < head or np.any(np.diff(offsets) < 0) or offsets[-1] > len(data)):
        raise damaged(source, "its table of offsets points outside of it")
    varying = [k for k, one in enumerate(packed) if one.size is None]
    starts = offsets[:-1]
    if np.any(starts + 4 * len(varying) > offsets[1:]):
        raise damaged(source, "a sample is shorter than its sizes")
    places = starts[:, None] + np.arange(4 * len(varying))
    sizes = np.ascontiguousarray(data[places]).view("<u4").astype(np.int64).reshape(count, len(varying))
    at, found = starts + 4 * len(varying), []
    for k, one in enumerate(packed):
        stop = at + (one.size if one.size is not None else sizes[:, varying.index(k)])
        found.append((at, stop))
        at = stop
    if count and np.any(at > offsets[1:]):
        raise damaged(source, "the sizes of a sample are larger than it")
    return found


def damaged(source: Source, problem: str) -> SourceError:
    return SourceError(f"{source.path!r} is damaged: {problem}; copy it again", source=source.path)


def packed_chunk(data: Array, packed: Mapping[str, Packed], wanted: Mapping[str, Column], source: Source) -> Chunk:
    """The wanted columns of all samples of a chunk."""
    edges = dict(zip(packed, split_samples(data, list(packed.values()), source), strict=True))
    columns: dict[str, Array] = {}
    offsets: dict[str, Int64s] = {}
    count = len(next(iter(edges.values()))[0])
    for name, column in wanted.items():
        starts, stops = edges[name]
        if packed[name].header is not None:
            arrays = [
                packed[name].header(data[a:b], column) for a, b in zip(starts.tolist(), stops.tolist(), strict=True)
            ]
            columns[name] = np.concatenate([np.zeros((0, *column.shape), column.storage), *arrays])
            offsets[name] = offsets_of(np.array([len(array) for array in arrays], np.int64))
            continue
        runs = copy_runs(data, np.ascontiguousarray(np.stack((starts, stops), axis=1)))
        if column.per == "record" and column.dtype != "string":
            if len(runs) != count * column.item_bytes:
                raise damaged(source, f"column {name!r} has {len(runs):,} bytes for {count:,} samples")
            columns[name] = runs.view(column.storage).reshape(count, *column.shape)
        else:
            lengths = stops - starts
            if np.any(lengths % column.item_bytes):
                raise damaged(source, f"column {name!r} has no whole number of {column.dtype}")
            columns[name] = runs.view(column.storage).reshape(-1, *column.shape)
            offsets[name] = offsets_of(lengths // column.item_bytes)
    return Chunk(columns, offsets, count, "sample {}".format)


def with_headers(
    data: Array, packed: Mapping[str, Packed], source: Source, asked: Sequence[str] | None
) -> dict[str, Column]:
    """The columns; those of arrays from the header of the first sample."""
    edges = dict(zip(packed, split_samples(data, list(packed.values()), source), strict=True))
    found: dict[str, Column] = {}
    for name, one in packed.items():
        if asked is not None and name not in asked:
            continue
        if one.column is not None:
            found[name] = one.column
        elif len(edges[name][0]):
            array = one.header(data[int(edges[name][0][0]) : int(edges[name][1][0])], None)
            found[name] = Column(array.dtype, array.shape[1:], axis=name)
    return found


def lengths_of(
    data: Array, packed: Mapping[str, Packed], columns: Mapping[str, Column], source: Source, most: int
) -> dict[str, Int64s]:
    """How long the first arrays are, by column; bytes of files share no axis."""
    edges = dict(zip(packed, split_samples(data, list(packed.values()), source), strict=True))
    found = {}
    for name, column in columns.items():
        one = packed[name]
        if one.header is not None and column.axis is not None:
            firsts = zip(edges[name][0][:most].tolist(), edges[name][1][:most].tolist(), strict=True)
            found[name] = np.array([len(one.header(data[a:b], column)) for a, b in firsts], np.int64)
        elif column.axis is not None and column.dtype != "uint8":
            found[name] = (edges[name][1] - edges[name][0])[:most] // column.item_bytes
    return found


def refuse_pickle(name: str, source: Source) -> ConfigError:
    return ConfigError(
        f"{source.path!r}: column {name!r} is pickled, which may run code and is never loaded; leave it out with --columns, or "
        "write it with another encoding"
    )


def array_of(data: Array, dtype: str, shape: Sequence[int], at: int, column: Column | None) -> Array:
    """An array behind its header, of the type and shape that the first one has."""
    size = np.dtype(dtype).itemsize * int(np.prod([int(n) for n in shape], dtype=np.int64))
    if not shape or len(data) - at != size or any(n < 0 for n in shape):
        raise ConfigError(f"an array claims the shape {tuple(shape)} of {dtype} in {len(data) - at} bytes")
    array = np.frombuffer(data[at:].tobytes(), dtype).reshape([int(n) for n in shape])
    if column is not None and (array.shape[1:] != column.shape or array.dtype != column.storage):
        raise ConfigError(
            f"an array is {array.dtype} of {array.shape}; the first has {column.dtype} with {column.shape} per row"
        )
    return array


@contextmanager
def arrays_of(source: Source) -> Iterator[None]:
    """Names the file in what is wrong with an array in it."""
    try:
        yield
    except ConfigError as error:
        raise SourceError(f"{source.path!r}: {error}", source=source.path) from error
