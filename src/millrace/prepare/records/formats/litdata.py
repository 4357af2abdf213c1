"""LitData chunks of items that are dicts, lists or single values."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.prepare.records.formats.arrow_columns import arrow
from millrace.prepare.records.formats.arrow_files import ArrowFiles
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Format, Outline, Reading, Source
from millrace.prepare.records.formats.litdata_json import as_json
from millrace.prepare.records.formats.packed import (
    Packed,
    array_of,
    arrays_of,
    damaged,
    in_order,
    lengths_of,
    not_in_index,
    packed_chunk,
    read_chunk,
    read_index,
    reading_index,
    refuse_pickle,
    with_headers,
)  # fmt: skip
from millrace.prepare.records.options import RecordOptions
from millrace.ragged import Array
from millrace.store.layout import Column

NUMBERS = {"int": "int64", "float": "float64", "bool": "bool"}
TEXTS = ("str", "string", "text")
BYTES = ("bytes", "jpeg", "image", "audio", "video", "pdf", "tifffile", "file")
NUMPY = ("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
NUMPY_CODES = dict(enumerate(NUMPY)) | {13: "?"}
TORCH_CODES = {
    0: "<f4",
    1: "<f4",
    2: "<f8",
    3: "<f8",
    8: "<f2",
    9: "<f2",
    11: "u1",
    12: "i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
}
TORCH_CODES |= {16: "<i4", 17: "<i8", 18: "<i8", 19: "?", 20: "<u2"}
MAX_DEPTH = 32
FRAMED = b"LDFZ01\0\0\1\0\0\0"  # a chunk in batches: then 3 numbers, where samples begin, and a table of the batches
TABLE_END = b"size" + b"LDARW01\0"  # of a chunk with a table: its size in 4 bytes, and this
FRAME = np.dtype([("first", "<u4"), ("count", "<u4"), ("at", "<u8"), ("packed", "<u4"), ("bytes", "<u4")])


class LitData(Format):
    """Chunks of LitData, without encryption; compressed as a whole or in batches of samples."""

    name = "litdata"
    endings = (".bin",)
    expected = "LitData chunks, with their index.json"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """The chunks in the order of their index: by name chunk-0-10 would come before chunk-0-2."""
        return in_order(files, lambda index: [[str(chunk["filename"])] for chunk in index["chunks"]], options)

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        packed, compression = _chunk_form(source, options)
        if _table_bytes(source):
            return TABLE.outline(source, options)
        data = _read(source, compression, options)
        with arrays_of(source):
            columns = with_headers(data, packed, source, options.columns)
            return Outline(columns, [(0, -1, source.size)], lengths_of(data, packed, columns, source, SAMPLE))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        packed, compression = _chunk_form(source, reading.options)
        if _table_bytes(source):
            yield from TABLE.chunks(source, start, stop, reading)
            return
        data = _read(source, compression, reading.options)
        with arrays_of(source):
            chunk = packed_chunk(data, packed, reading.wanted, source)
        yield chunk


class _Table(ArrowFiles):
    """Items of plain values are an Arrow table at the end of a chunk, and the packed samples before it are empty."""

    def table(self, source: Source) -> Any:
        size = _table_bytes(source)
        data = np.fromfile(source.location, np.uint8, size, offset=max(source.size - size - len(TABLE_END), 0))
        return arrow("LitData").BufferReader(data)

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        found = super().outline(source, options)
        return found._replace(pieces=[(0, len(found.pieces), source.size)] if found.pieces else [])  # it is read whole


TABLE = _Table()


def _table_bytes(source: Source) -> int:
    """The size of the table at the end of a chunk; 0 where there is none."""
    with open(source.location, "rb") as file:
        file.seek(max(source.size - len(TABLE_END), 0))
        end = file.read()
    return int.from_bytes(end[:4], "little") if end[4:] == TABLE_END[4:] else 0


def _chunk_form(source: Source, options: RecordOptions) -> tuple[dict[str, Packed], str | None]:
    """How the columns of a chunk are packed and how it is compressed, as its index says."""
    index = read_index(source)
    with reading_index(source):
        config = index["config"]
        known = [os.path.basename(chunk["filename"]) for chunk in index["chunks"]]
        if os.path.basename(source.path) not in known:
            raise not_in_index(source)
        if config.get("encryption"):
            raise ConfigError(f"{source.path!r} is encrypted; write it without encryption")
        if config.get("item_loader", "PyTreeLoader") != "PyTreeLoader":
            raise ConfigError(
                f"{source.path!r} is written for {config['item_loader']}; only items of PyTreeLoader are read"
            )
        compression, level = str(config.get("compression") or ""), config.get("compression_level") or "chunk"
        if compression.partition(":")[0] not in ("", "zstd") or level not in ("chunk", "batch"):
            raise ConfigError(
                f"{source.path!r} is compressed by {compression!r} per {level}; write it with compression='zstd' per batch or chunk"
            )
        formats = [str(name) for name in config["data_format"]]
        names = (
            _names(json.loads(config["data_spec"])[1])
            if config.get("data_spec")
            else [str(k) for k in range(len(formats))]
        )
        asked = options.columns
        pairs = zip(names, formats, strict=True)
        packed = {name: _packed(name, kind, source, asked is None or name in asked) for name, kind in pairs}
    is_whole = compression and source.path.endswith(f".{compression}.bin")  # it may be "zstd:4"
    return packed, "batch" if compression and level == "batch" else "zstd" if is_whole else None


def _read(source: Source, compression: str | None, options: RecordOptions) -> Array:
    """All bytes of a chunk as if it had been written without compression."""
    if compression != "batch":
        return read_chunk(source, compression, options)
    with open(source.location, "rb") as file:
        head = np.frombuffer(file.read(24), np.uint8)
        if head[:12].tobytes() != FRAMED or len(head) < 24:
            raise damaged(source, "it does not begin as a chunk of version 1 that is compressed per batch")
        count, _, num_frames = head[12:].view("<u4").tolist()
        first = 24 + 4 * (count + 1) + FRAME.itemsize * num_frames
        if first > source.size:
            raise damaged(source, f"its tables claim {count:,} samples in {source.size:,} bytes")
        offsets = np.fromfile(file, "<u4", count + 1).astype(np.int64) + 4 * (count + 2)
        frames = np.fromfile(file, FRAME, num_frames)
    ends = first + np.cumsum(frames["packed"], dtype=np.uint64)
    if not np.array_equal(frames["at"], [first, *ends[:-1]][:num_frames]) or offsets[-1] >= 1 << 32:
        raise damaged(source, "its batches do not lie one after the other")
    samples = read_chunk(source, "zstd", options, first)
    table = np.array([count, *offsets], "<u4")
    return np.concatenate((table.view(np.uint8), samples))


def _names(spec: Any, prefix: str = "", depth: int = 0) -> list[str]:
    """The names of the leaves of an item: keys of dicts, places in lists."""
    children = spec.get("children_spec") or []
    if spec.get("type") is None:
        return [prefix.removesuffix(".") or "value"]
    if depth > MAX_DEPTH:
        raise ValueError("its items nest too deeply")
    context = json.loads(spec["context"]) if isinstance(spec.get("context"), str) else spec.get("context")
    keys = context if isinstance(context, list) and len(context) == len(children) else range(len(children))
    return [
        name for key, child in zip(keys, children, strict=True) for name in _names(child, f"{prefix}{key}.", depth + 1)
    ]


def _packed(name: str, kind: str, source: Source, is_asked: bool) -> Packed:
    base, _, code = kind.partition(":")
    if base in NUMBERS:
        return Packed(Column(NUMBERS[base], per="record"), None)
    if base in TEXTS:
        return Packed(Column("string", per="record"), None)
    if base == "json":
        return Packed(Column("string", per="record"), None, as_json)
    if base in BYTES or not is_asked:
        return Packed(Column("uint8", axis=name), None)
    if base == "pickle":
        raise refuse_pickle(name, source)
    if base in ("no_header_numpy", "no_header_tensor"):
        dtype = (NUMPY_CODES if "numpy" in base else TORCH_CODES)[int(code)]
        return Packed(Column("bool" if dtype == "?" else dtype, axis=name), None)
    if base in ("numpy", "tensor"):
        return Packed(None, None, lambda data, column: _array(data, base, column))
    raise ConfigError(
        f"{source.path!r}: column {name!r} is stored as {kind!r}, which is not read; leave it out with --columns, or write it as "
        "bytes, jpeg or an array"
    )


def _array(data: Array, base: str, column: Column | None) -> Any:
    """An array behind its header: the code of its type, the number of sizes, and the sizes."""
    order, codes = ("<", NUMPY_CODES) if base == "numpy" else (">", TORCH_CODES)
    if len(data) < 8:
        raise ConfigError("an array is shorter than its header")
    code, ndim = data[:8].copy().view(f"{order}u4").tolist()
    if code not in codes or ndim > MAX_DEPTH or len(data) < 8 + 4 * ndim:
        raise ConfigError(f"an array has the type {code} and {ndim} sizes, which cannot be")
    return array_of(data, codes[code], data[8 : 8 + 4 * ndim].copy().view(f"{order}u4").tolist(), 8 + 4 * ndim, column)
