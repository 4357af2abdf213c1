"""WebDataset: tar files in which neighbours with one key are a record, and the ending of each is its column."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import IO, Any, TypeVar

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.engines import alive
from millrace.prepare.files import printable
from millrace.prepare.inflate import COMPRESSED, InflatedFile, max_bytes
from millrace.prepare.records.formats import images
from millrace.prepare.records.formats.format import CHUNK_BYTES, Chunk, Format, Outline, Reading, Source
from millrace.prepare.records.formats.members import fitted, stored
from millrace.prepare.records.formats.npy import read_array
from millrace.prepare.records.formats.tar_members import members
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import offsets_of
from millrace.ragged import Array
from millrace.store.layout import Column

HEAD = 16  # records from which the columns are taken
NUMBERS = ("cls", "cls2", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript", "json", "html", "caption")
PICKLES = ("pyd", "pkl", "pickle", "pth", "pt")
IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff")
T = TypeVar("T")
Sample = tuple[str, dict[str, bytes], str | None]  # key, bytes by ending, and what is wrong with it


class WebDataset(Format):
    """Samples in tar files."""

    name = "webdataset"
    endings = (".tar", ".tar.gz", ".tgz", ".tar.zst")
    expected = "tar files with samples"

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        columns: dict[str, Column] = {}
        count, first = 0, ""
        with _opened(source, options) as file:
            for key, parts, problem in islice(_samples(file, source, options), HEAD):
                if problem is not None:
                    first = first or f"sample {printable(key)!r}: {problem}"
                    continue
                count += 1
                for name, data in _images_as(columns, parts).items():
                    if options.columns is not None and name not in options.columns:
                        continue
                    columns.setdefault(name, _column(name, data, options, source))
        if not count and first:
            raise SourceError(f"{source.path!r}, {first}; leave the file out with --exclude", source=source.path)
        if not count:
            return Outline({}, [])
        return Outline({**columns, "key": Column("string", per="record")}, [(0, -1, source.size)])

    def align(self, outlines: Sequence[Outline]) -> list[Outline]:
        """A file that begins with a PNG may have JPEG too: the columns of images are called as in the first file."""
        first = outlines[0].columns
        found = []
        for outline in outlines:
            columns = {
                name: first[name] if name not in outline.columns else column
                for name, column in _images_as(first, outline.columns).items()
            }
            found.append(outline._replace(columns=columns))
        return found

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        waiting, num_bytes = list[tuple[str, dict[str, bytes]]](), 0
        with _opened(source, reading.options) as file:
            for key, given, problem in _samples(file, source, reading.options):
                parts = _images_as(reading.wanted, given)
                misfit = problem or _misfit(parts, reading)
                if misfit is not None:
                    reading.refuse(source.path, f"sample {printable(key)!r}", misfit)
                    continue
                waiting.append((key, parts))
                num_bytes += sum(map(len, parts.values()))
                if num_bytes >= CHUNK_BYTES:
                    yield _chunk(waiting, source, reading)
                    alive(bytes=num_bytes)
                    waiting, num_bytes = [], 0
            if waiting:
                yield _chunk(waiting, source, reading)


def _opened(source: Source, options: RecordOptions) -> IO[bytes]:
    ending = os.path.splitext(source.path)[1].lower()
    compression = "gzip" if ending == ".tgz" else COMPRESSED.get(ending)
    if compression is None:
        return open(source.location, "rb")
    return io.BufferedReader(InflatedFile(source, compression, options.max_ratio), 1 << 20)


def _samples(file: IO[bytes], source: Source, options: RecordOptions) -> Iterator[Sample]:
    """Neighbours with one key. A key that comes back later, and a column that comes twice, are refused."""
    most = source.size if source.path.lower().endswith(".tar") else max_bytes(source, options.max_ratio)
    key, parts, problem = None, dict[str, bytes](), None
    seen: set[str] = set()
    for member, data in members(file, source, most):
        own, column = _key(member.name)
        if member.problem is None and (not column or os.path.basename(member.name).startswith((".", "__"))):
            continue  # files of the writer, which are no sample
        if own != key:
            if key is not None:
                yield key, parts, problem
            key, parts, problem = own, {}, None
            if own in seen:
                problem = f"the key {printable(own)!r} comes again, apart from its first members"
            seen.add(own)
        if member.problem is not None:
            problem = problem or member.problem
        elif column in parts:
            problem = problem or f"two members are called {printable(member.name)!r}"
        parts[column] = data
    if key is not None:
        yield key, parts, problem


def _images_as(known: Mapping[str, Any], parts: Mapping[str, T]) -> dict[str, T]:
    """Images of one name are one column, whatever their ending: that of the first is its name."""

    def column_of(name: str) -> str:
        stem, _, kind = name.rpartition(".")
        if name in known or kind not in IMAGES:
            return name
        same = (f"{stem}.{other}".lstrip(".") for other in IMAGES)
        return next((own for own in same if own in known and own not in parts), name)

    return {column_of(name): part for name, part in parts.items()}


def _key(name: str) -> tuple[str, str]:
    """``a/b.seg.png`` -> ``a/b`` and ``seg.png``."""
    folder, slash, base = name.removeprefix("./").rpartition("/")
    stem, _, ending = base.partition(".")
    return f"{folder}{slash}{stem}", ending.lower()


def _column(name: str, data: bytes, options: RecordOptions, source: Source) -> Column:
    kind = name.rpartition(".")[2]
    if kind in PICKLES:
        raise ConfigError(
            f"{source.path!r}: members .{name} are pickles, which may run code and are never loaded; leave them out with "
            "--columns, or write them as .npy or .json"
        )
    if kind in NUMBERS:
        return Column("int64", per="record")
    if kind in TEXTS:
        return Column("string", per="record")
    if kind == "npy":
        array = read_array(io.BytesIO(data), f"{source.path!r}, .{name}")
        if array.dtype.kind in "SU":
            raise SourceError(f"{source.path!r}: members .{name} are texts; write them as .txt", source=source.path)
        return Column(array.dtype, per="record") if not array.ndim else Column(array.dtype, array.shape[1:], axis=name)
    if kind in IMAGES and options.decode is not None:
        return Column("uint8", (options.decode, options.decode, 3), per="record")
    return Column("uint8", axis=name)


def _misfit(parts: Mapping[str, bytes], reading: Reading) -> str | None:
    """What is wrong with the members of a sample."""
    missing = [name for name in reading.wanted if name != "key" and name not in parts]
    if missing:
        return f"it has no member .{missing[0]}"
    extra = [name for name in parts if name not in reading.wanted]
    if extra and reading.options.columns is None:
        return f"it has a member .{extra[0]}, which the first samples lack; choose with --columns"
    return None


def _chunk(samples: list[tuple[str, dict[str, bytes]]], source: Source, reading: Reading) -> Chunk:
    columns: dict[str, Array] = {}
    offsets = {}
    are_good = np.ones(len(samples), bool)
    keys = [printable(key) for key, _ in samples]
    for name, column in reading.wanted.items():
        texts = [key.encode() for key in keys] if name == "key" else [parts[name] for _, parts in samples]
        kind = name.rpartition(".")[2]
        if name != "key" and kind == "npy":
            columns[name], edges = _arrays(texts, name, column, are_good, keys, source, reading)
        elif name != "key" and kind in NUMBERS:
            columns[name], edges = _integers(texts, name, are_good, keys, source, reading), None
        else:
            edges = offsets_of(np.array([len(text) for text in texts], np.int64))
            columns[name] = np.frombuffer(b"".join(texts), np.uint8)
            options = reading.options
            if kind in IMAGES and (options.decode is not None or options.check):
                pixels = images.decode_all(columns[name], edges, are_good, options.decode, keys, reading)
                columns[name], edges = (columns[name], edges) if options.decode is None else (pixels, None)
        if edges is not None:
            offsets[name] = edges
    whole = Chunk(columns, offsets, len(samples), lambda k: f"sample {keys[k]!r}")
    return whole.take(are_good, reading.wanted)


def _integers(
    texts: list[bytes], name: str, are_good: Array, keys: list[str], source: Source, reading: Reading
) -> Array:
    found = np.zeros(len(texts), np.int64)
    for k, text in enumerate(texts):
        try:
            found[k] = int(text)
        except (ValueError, OverflowError):
            if are_good[k]:
                reading.refuse(
                    source.path, f"sample {keys[k]!r}", f".{name} holds {text[:40]!r}; expected a whole number"
                )
            are_good[k] = False
    return found


def _arrays(
    texts: list[bytes], name: str, column: Column, are_good: Array, keys: list[str], source: Source, reading: Reading
) -> tuple[Array, Any]:
    """Members that are .npy files as one array, and the rows of each."""
    found = []
    fitting = stored(name, column, reading.options)
    for k, text in enumerate(texts):
        empty = np.zeros((0, *column.shape) if column.axis else (), column.storage)
        try:
            array = read_array(io.BytesIO(text), f".{name}")
            if array.dtype.kind in "SU":
                raise SourceError(f".{name} is a text; the first samples have {column.dtype}")
            if array.shape[column.axis is not None :] != column.shape or (column.axis is not None and not array.ndim):
                raise SourceError(
                    f".{name} has the shape {array.shape}; the first samples have {column.shape} per {column.per}"
                )
            array = fitted(array, fitting)
        except (SourceError, ConfigError) as error:
            if are_good[k]:
                reading.refuse(source.path, f"sample {keys[k]!r}", str(error))
            are_good[k], array = False, empty
        found.append(array)
    if column.axis is None:
        return np.stack(found), None
    return np.concatenate(found), offsets_of(np.array([len(array) for array in found], np.int64))
