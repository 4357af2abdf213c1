"""HDF5: datasets by name. A dataset as long as the records is a record column; rows are cut by offsets or counts.

Nothing outside the file is ever opened: external links, external storage and virtual datasets are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError, MillraceError, SourceError
from millrace.prepare.inflate import max_bytes
from millrace.prepare.records.formats.format import (
    CHUNK_BYTES,
    SAMPLE,
    Chunk,
    Format,
    Outline,
    Reading,
    Source,
    need,
    unreadable,
)
from millrace.prepare.records.formats.hdf5_axes import MAX_RECORDS, Axis, axes_of, axis_of
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import offsets_of
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column, dtype_name


class Layout5(NamedTuple):
    """What a file holds: datasets by column, axes by name, and how many records."""

    datasets: dict[str, tuple[Any, str | None]]  # dataset, and the field of it where it is a structure
    columns: dict[str, Column]
    axes: dict[str, Axis]
    num_records: int
    single: tuple[str, ...]  # datasets of one value, which belong to no record


class Hdf5(Format):
    """Datasets of HDF5 files."""

    name = "hdf5"
    endings = (".h5", ".hdf5", ".he5", ".hdf")
    expected = "HDF5 files"

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        with _opened(source) as file:
            layout = _layout(file, source, options)
            count = layout.num_records
            if not count:
                return Outline({}, [])
            rows = {axis.name: int(axis.offsets[-1]) for axis in layout.axes.values()}
            total = sum(column.item_bytes * rows.get(column.axis or "", count) for column in layout.columns.values())
            most = max_bytes(source, options.max_ratio)
            if total > most:
                raise SourceError(
                    f"{source.path!r} claims {total:,} bytes of data in a file of {source.size:,}; if that is right, raise "
                    "--max-ratio",
                    source=source.path,
                )
            num_pieces = min(count, max(1, -(-total // options.part_bytes)))
            edges = [k * count // num_pieces for k in range(num_pieces + 1)]
            pieces = [(a, b, max(1, total * (b - a) // count)) for a, b in pairwise(edges)]
            lengths = {}
            for name, column in layout.columns.items():
                if column.axis == name and name not in layout.axes:  # a dataset of arrays
                    head = layout.datasets[name][0][: min(SAMPLE, count)]
                    lengths[name] = np.array([len(item) for item in head], np.int64)
        single = [name for name in layout.single if options.columns is None]
        notes = (f"{source.path!r}: {', '.join(single)} left out: one value, not one per record",) if single else ()
        return Outline(layout.columns, pieces, lengths, notes=notes)

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        with _opened(source) as file:
            layout = _layout(file, source, reading.options)
            sizes = np.zeros(stop - start, np.int64)
            for name, column in reading.wanted.items():
                axis = layout.axes.get(layout.columns[name].axis or "")
                sizes += (
                    column.item_bytes if axis is None else np.diff(axis.offsets[start : stop + 1]) * column.item_bytes
                )
            ends = np.cumsum(sizes)
            first = 0
            while first < stop - start:
                before = int(ends[first - 1]) if first else 0
                last = max(first + 1, int(np.searchsorted(ends, before + CHUNK_BYTES, side="right")))
                yield _chunk(layout, start + first, start + last, source, reading)
                first = last


def _chunk(layout: Layout5, first: int, last: int, source: Source, reading: Reading) -> Chunk:
    columns: dict[str, Array] = {}
    offsets: dict[str, Int64s] = {}
    for name, column in reading.wanted.items():
        dataset, field = layout.datasets[name]
        axis = layout.axes.get(column.axis or "")
        start, stop = (first, last) if axis is None else axis.offsets[[first, last]].tolist()
        try:
            values = dataset[start:stop] if field is None else dataset[field, start:stop]
        except (OSError, ValueError, RuntimeError) as error:
            raise unreadable(source, f"HDF5 in dataset {dataset.name!r}", error) from error
        if column.dtype == "string":
            texts = [_text(value) for value in values.tolist()]
            columns[name] = np.frombuffer(b"".join(texts), np.uint8)
            offsets[name] = offsets_of(np.array([len(text) for text in texts], np.int64))
        elif axis is None and column.axis is not None:  # every item is an array
            columns[name] = np.concatenate([np.zeros(0, column.storage), *values])
            offsets[name] = offsets_of(np.array([len(value) for value in values], np.int64))
        else:
            columns[name] = values
            if axis is not None:
                offsets[axis.name] = axis.offsets[first : last + 1] - start
    return Chunk(columns, offsets, last - first, lambda k: f"record {first + k}")


def _text(value: Any) -> bytes:
    """A text of fixed length ends at its first NUL."""
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogateescape")


@contextmanager
def _opened(source: Source) -> Iterator[Any]:
    h5py = need("h5py", "hdf5", "HDF5")
    try:
        file = h5py.File(source.location, "r", locking=False)
    except (OSError, ValueError, RuntimeError) as error:
        raise unreadable(source, "HDF5", error) from error
    try:
        with file:
            yield file
    except MillraceError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:  # what damaged bytes raise
        raise unreadable(source, "HDF5", error) from error


def _layout(file: Any, source: Source, options: RecordOptions) -> Layout5:
    found: dict[str, Any] = {}
    for name, dataset in _datasets(file, source):
        if name in found:
            raise SourceError(
                f"{source.path!r}: {dataset.name!r} and {found[name].name!r} are both called {name!r} here; rename one of them",
                source=source.path,
            )
        found[name] = dataset
    axes = axes_of(found, options, source)
    names = {axis.dataset for axis in axes.values()}
    num_records = next((axis.num_records for axis in axes.values()), -1)
    for axis in axes.values():
        if axis.num_records != num_records:
            raise SourceError(
                f"{source.path!r}: {axis.dataset!r} makes {axis.num_records:,} records, another axis {num_records:,}; "
                "give --offsets AXIS=DATASET for axes of the same records",
                source=source.path,
            )
    datasets: dict[str, tuple[Any, str | None]] = {}
    columns: dict[str, Column] = {}
    for name, dataset in found.items():
        if name in names or not dataset.shape or not _is_asked(name, options):
            continue
        if num_records < 0:
            num_records = len(dataset)
        own_axis = axis_of(name, len(dataset), axes, num_records, options, source)
        for field, dtype in _fields(dataset):
            own = name if field is None else f"{name}.{field}"
            datasets[own] = dataset, field
            columns[own] = _column(own, dtype, dataset.shape[1:], own_axis, source)
    if num_records > MAX_RECORDS:
        raise SourceError(f"{source.path!r} claims {num_records:,} records; that cannot be", source=source.path)
    single = tuple(name for name, dataset in found.items() if not dataset.shape)
    return Layout5(datasets, columns, axes, max(num_records, 0), single)


def _is_asked(name: str, options: RecordOptions) -> bool:
    asked = options.columns
    return asked is None or any(
        own == name or own.startswith(f"{name}.") or name.startswith(f"{own}.") for own in asked
    )


def _datasets(
    group: Any, source: Source, prefix: str = "", seen: frozenset[Any] = frozenset()
) -> Iterator[tuple[str, Any]]:
    """All datasets of a file by name, with dots for slashes. Soft links are not followed: what they name is there itself."""
    h5py = need("h5py", "hdf5", "HDF5")
    for name in sorted(group):
        link, full = group.get(name, getlink=True), f"{prefix}{name}"
        if isinstance(link, h5py.ExternalLink):
            raise SourceError(
                f"{source.path!r}: {full!r} is a link to another file ({link.filename!r}); copy what it names into this file",
                source=source.path,
            )
        if not isinstance(link, h5py.HardLink):
            continue
        item = group.get(name)
        if isinstance(item, h5py.Group):
            token = h5py.h5o.get_info(item.id).addr
            if token not in seen:  # groups may contain each other
                yield from _datasets(item, source, f"{full}.", seen | {token})
        elif isinstance(item, h5py.Dataset):
            if item.external is not None or item.is_virtual:
                what = "lies in other files" if item.external is not None else "is made of other files"
                raise SourceError(
                    f"{source.path!r}: dataset {full!r} {what}; copy its data into this file", source=source.path
                )
            yield full, item


def _fields(dataset: Any) -> list[tuple[str | None, Any]]:
    names = dataset.dtype.names
    return [(None, dataset.dtype)] if names is None else [(name, dataset.dtype[name]) for name in names]


def _column(name: str, dtype: Any, tail: tuple[int, ...], axis: str | None, source: Source) -> Column:
    h5py = need("h5py", "hdf5", "HDF5")
    if dtype.subdtype is not None:
        dtype, tail = dtype.subdtype[0], (*tail, *dtype.subdtype[1])
    if (h5py.check_string_dtype(dtype) is not None or dtype.kind == "S") and not tail and axis is None:
        return Column("string", per="record")
    base = h5py.check_vlen_dtype(dtype)
    try:
        if base is not None and axis is None and not tail and isinstance(base, np.dtype):
            return Column(dtype_name(base), axis=name)
        known = dtype_name(dtype.newbyteorder("<") if dtype.byteorder == ">" else dtype)
        return Column(known, tail, per="record") if axis is None else Column(known, tail, axis=axis)
    except ConfigError as error:
        raise SourceError(
            f"{source.path!r}: dataset {name!r} is {dtype} with {tail} per item, which cannot be stored; leave it out with "
            "--columns",
            source=source.path,
        ) from error
