"""What a report says about records: labels, lengths, values, and a grid of images where there are any."""

from __future__ import annotations

import math
import struct
import zlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import ConfigError, MillraceError
from millrace.images.options import decode
from millrace.ragged import Array
from millrace.report.blocks import Note, Pictures, Section
from millrace.report.sample import Sample, bars, histogram, present

TEXTS = ("string", "dictionary")
ROWS, PLACES = 1 << 16, 8  # of all records that are read, and of a row, whose values are drawn
FEW = 50  # different values that are counted one by one
PICTURES, SIDE, MOST_IMAGE_BYTES = 24, 112, 32 << 20
STARTS = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM")  # of image files


def sections(sample: Sample, made: Mapping[str, Any]) -> list[Section]:
    store, said = sample.store, f"From {sample.said()}."
    columns = store.layout.columns
    labels = [_column(sample, name) for name, column in columns.items() if column.per == "record" and not column.shape]
    text_axes = {name for name, column in columns.items() if column.dtype == "string"}
    axes = [axis for axis in store.layout.row_axes if axis not in text_axes and _has_column(store, axis)]
    lengths = [histogram(f"{_rows_of(store, axis)} in a record", sample.lengths(axis)) for axis in axes]
    images = [name for name in columns if _is_image(sample, name)]
    arrays = [block for name in columns if name not in images for block in _values(sample, name)]
    return [
        Section("Labels and values", said, present(labels)),
        Section(
            "Numbers",
            f"Values of at most {ROWS // sample.num_contents:,} rows of {sample.num_contents:,} of {store.num_records:,} records.",
            arrays,
        ),
        Section("Lengths", said, present(lengths)),
        *(_images(sample, name) for name in images),
    ]


def _rows_of(store: Any, axis: str) -> str:
    found = {name: column for name, column in store.layout.columns.items() if column.axis == axis}
    is_files = all(column.dtype == "uint8" and not column.shape for column in found.values())
    return f"{'Bytes' if is_files else 'Rows'} of {', '.join(found)}"


def _has_column(store: Any, axis: str) -> bool:
    return any(column.axis == axis for column in store.layout.columns.values())


def _column(sample: Sample, name: str) -> Any:
    column = sample.store.layout.columns[name]
    values = sample.column(name)
    if column.dtype == "string":
        counts = Counter(map(str, values.tolist()))
        return bars(name, dict(counts), "records") if len(counts) <= FEW else None  # more are names, such as keys
    if column.dtype == "dictionary" or (values.dtype.kind in "iub" and len(np.unique(values)) <= FEW):
        counts = Counter(class_name(sample.store, name, value) for value in values.tolist())
        return bars(name, dict(counts), "records")
    return histogram(name, values)


def _values(sample: Sample, name: str) -> list[Any]:
    """The distributions of a column of numbers, one for each place of a row: of row columns, and of arrays of records."""
    column = sample.store.layout.columns[name]
    is_row = column.per != "record"
    if column.dtype in TEXTS or column.dtype == "uint8" or len(column.shape) > 1 or not (is_row or column.shape):
        return []
    width, most = math.prod(column.shape), ROWS // sample.num_contents
    parts = [np.empty((0, width))]
    for piece in sample.pieces:
        starts, stops = piece.store.record_spans(column.axis) if is_row else (np.arange(0), np.arange(0))
        for record in piece.contents.tolist():
            first, last = (int(starts[record]), int(stops[record])) if is_row else (record, record + 1)
            some = piece.store.columns[name][first : min(last, first + most)]
            parts.append(np.asarray(some, np.float64).reshape(-1, width))
    values = np.concatenate(parts)
    found = []
    for k in range(min(width, PLACES)):
        odd = float(1 - np.isfinite(values[:, k]).mean()) if len(values) else 0.0
        notes = [f"the first {PLACES} of {width:,}"] if k == 0 and width > PLACES else []
        notes += [f"{odd:.1%} NaN or infinite"] if odd else []
        found.append(histogram(f"{name}[{k}]" if column.shape else name, values[:, k], ", ".join(notes)))
    return present(found)


def class_name(store: Any, column: str, value: Any) -> str:
    """A label with the name of its class, where the store's meta names it."""
    named = store.meta.get("classes")
    names = named.get(column) if isinstance(named, Mapping) else named if column == "label" else None
    is_known = isinstance(names, (list, tuple)) and isinstance(value, int) and 0 <= value < len(names)
    return f"{value} {names[value]}" if is_known else str(value)  # type: ignore[index]


def _is_image(sample: Sample, name: str) -> bool:
    """Whether a column holds pixels (height, width, 3), or the bytes of image files by the look of the first."""
    column = sample.store.layout.columns[name]
    if column.dtype != "uint8" or (column.shape and (len(column.shape) != 3 or column.shape[2] != 3)):
        return False
    if column.shape:
        return True
    if column.per == "record":
        return False
    data = next(
        (_data(piece.store, name, r, 8) for piece in sample.pieces for r in piece.contents.tolist()),
        np.empty(0, np.uint8),
    )
    return data.tobytes().startswith(STARTS)


def _data(store: Any, name: str, record: int, most: int) -> Array:
    """The bytes or pixels of a record, none if they are more than ``most``, unless only the beginning is asked for."""
    column = store.layout.columns[name]
    if column.per == "record":
        return np.asarray(store.columns[name][record])
    starts, stops = store.record_spans(column.axis)
    first, last = int(starts[record]), int(stops[record])
    if last - first > most > 8:
        return np.empty(0, np.uint8)
    return np.asarray(store.columns[name][first : min(last, first + most)])


def _images(sample: Sample, name: str) -> Section:
    title = f"Images: {name}"
    try:
        decoder = decode(name, size=SIDE, crop="center", dtype="uint8", layout="hwc")
    except ConfigError as error:
        return Section(title, "", [Note(f"Not drawn: {error}")])
    found: list[tuple[str, bytes]] = []
    bad = 0
    chosen = [(piece.store, r) for piece in sample.pieces for r in piece.contents.tolist()]
    for store, record in chosen[:: max(1, len(chosen) // PICTURES)][:PICTURES]:
        pixels = np.zeros((SIDE, SIDE, 3), np.uint8)
        try:
            decoder.decode_into(pixels, _data(store, name, record, MOST_IMAGE_BYTES), [1.0] * 16)
        except MillraceError:
            bad += 1
            continue
        found.append((_caption(store, record), png(pixels)))
    note = f"{bad:,} more could not be read." if bad else ""
    about = f"{len(found):,} of {sample.store.num_records:,} records, the centre of each, scaled to {SIDE} x {SIDE} pixels. {note}"
    return Section(title, about.strip(), [Pictures(found)])


def _caption(store: Any, record: int) -> str:
    columns = store.layout.columns
    names = [
        name
        for name in ("label", "class", "key")
        if name in columns and columns[name].per == "record" and not columns[name].shape
    ]
    values = [store.columns[name][record] for name in names]
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    return ", ".join(class_name(store, name, value)[:60] for name, value in zip(names, plain, strict=True))


def png(pixels: Array) -> bytes:
    """Pixels (height, width, 3) uint8 as a PNG file."""
    height, width = pixels.shape[:2]
    lines = np.concatenate((np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)), axis=1).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
