"""MosaicML MDS shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from millrace.errors import ConfigError
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Format, Outline, Reading, Source
from millrace.prepare.records.formats.packed import (
    Packed,
    array_of,
    arrays_of,
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

NUMBERS = {"int": "int64"} | {f"{kind}{8 * n}": f"{kind}{8 * n}" for kind in ("int", "uint") for n in (1, 2, 4, 8)}
NUMBERS |= {name: name for name in ("float16", "float32", "float64")}
TEXTS = ("str", "str_int", "str_float", "str_decimal", "json")
BYTES = ("bytes", "jpeg", "png")
CODES = {
    8: "u1",
    9: "i1",
    16: "<u2",
    17: "<i2",
    18: "<f2",
    32: "<u4",
    33: "<i4",
    34: "<f4",
    64: "<u8",
    65: "<i8",
    66: "<f8",
}


class Mds(Format):
    """Shards of MosaicML streaming."""

    name = "mds"
    endings = (".mds", ".mds.zstd", ".mds.zst", ".mds.gz", ".mds.bz2", ".mds.br", ".mds.snappy")
    expected = "MDS shards, with their index.json"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """The shards in the order of their index."""
        return in_order(files, _shard_names, options)

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        packed, compression, count = _shard(source, options)
        if not count:
            return Outline({}, [])
        data = read_chunk(source, compression, options)
        with arrays_of(source):
            columns = with_headers(data, packed, source, options.columns)
            return Outline(columns, [(0, -1, source.size)], lengths_of(data, packed, columns, source, SAMPLE))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        packed, compression, _ = _shard(source, reading.options)
        data = read_chunk(source, compression, reading.options)
        with arrays_of(source):
            chunk = packed_chunk(data, packed, reading.wanted, source)
        yield chunk


def _shard_names(index: dict[str, Any]) -> list[list[str]]:
    forms = [[shard.get(key) for key in ("raw_data", "zip_data")] for shard in index.get("shards", ())]
    return [[str(form["basename"]) for form in both if form] for both in forms]


def _shard(source: Source, options: RecordOptions) -> tuple[dict[str, Packed], str | None, int]:
    """How the columns of a shard are packed, how it is compressed, and its samples, as its index says."""
    name = os.path.basename(source.path)
    for shard in read_index(source).get("shards", ()):
        with reading_index(source):
            files = [shard[key]["basename"] for key in ("raw_data", "zip_data") if shard.get(key)]
            if name not in files or shard.get("format", "mds") != "mds":
                continue
            is_packed = bool(shard.get("zip_data")) and shard["zip_data"]["basename"] == name
            algorithm = str(shard.get("compression") or "").partition(":")[0]
            codec = {"zstd": "zstd", "gz": "gzip"}.get(algorithm) if is_packed else None
            if is_packed and codec is None:
                raise ConfigError(
                    f"{source.path!r} is compressed by {algorithm!r}; unpack it, or write it with zstd or gz"
                )
            columns = zip(shard["column_names"], shard["column_encodings"], shard["column_sizes"], strict=True)
            asked = options.columns
            packed = {
                str(own): _packed(own, str(kind), size, source, asked is None or own in asked)
                for own, kind, size in columns
            }
            return packed, codec, int(shard["samples"])
    raise not_in_index(source)


def _packed(name: str, encoding: str, size: int | None, source: Source, is_asked: bool) -> Packed:
    kind, _, rest = encoding.partition(":")
    if kind in NUMBERS:
        return Packed(Column(NUMBERS[kind], per="record"), size)
    if kind in TEXTS:
        return Packed(Column("string", per="record"), size)
    if kind in BYTES or not is_asked:
        return Packed(Column("uint8", axis=name), size)
    if kind == "pkl":
        raise refuse_pickle(name, source)
    if kind == "ndarray":
        dtype, _, shape = rest.partition(":")
        if dtype and shape:
            sizes = tuple(map(int, shape.split(",")))
            return Packed(Column(dtype, sizes, per="record"), size)
        return Packed(None, size, lambda data, column: _array(data, dtype, column))
    raise ConfigError(
        f"{source.path!r}: column {name!r} is encoded as {encoding!r}, which is not read; leave it out with --columns, or write "
        "it as bytes, jpeg, png or ndarray"
    )


def _array(data: Array, dtype: str, column: Column | None) -> Any:
    """An array whose shape, and whose dtype if it is not known, are before it."""
    at = 0 if dtype else 1
    if len(data) <= at:
        raise ConfigError("an array is shorter than its header")
    kind = dtype or CODES.get(int(data[0]))
    if kind is None:
        raise ConfigError(f"an array has the unknown type {int(data[0])}")
    ndim, width = int(data[at]) >> 2, 1 << (int(data[at]) & 3)
    shape = data[at + 1 : at + 1 + ndim * width]
    if len(shape) < ndim * width:
        raise ConfigError("an array is shorter than its header")
    sizes = shape.copy().view(f"<u{width}").tolist()
    return array_of(data, kind, sizes, at + 1 + ndim * width, column)
