"""Arrow files (Feather, IPC, and the streams that Hugging Face datasets are saved as): read batch by batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.records.formats.arrow_columns import (
    arrow,
    arrow_errors,
    asked_schema,
    batch_chunks,
    free_lengths,
    outline_columns,
    top_names,
)  # fmt: skip
from millrace.prepare.records.formats.format import SAMPLE, Chunk, Format, Outline, Reading, Source, need, unreadable
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.runs import offsets_of
from millrace.ragged import Int64s

MAGIC = b"ARROW1"
FEATURES = b"huggingface"  # the key of the metadata that names classes


class ArrowFiles(Format):
    """Arrow tables in files or streams."""

    name = "arrow"
    endings = (".arrow", ".feather", ".ipc")
    expected = "Arrow or Feather files"

    def sources(self, files: Sequence[Source], options: RecordOptions) -> tuple[list[Source], list[str]]:
        """All files; of a saved Hugging Face dataset those that its state.json names."""
        known: dict[str, set[str] | None] = {}
        for file in files:
            if (folder := os.path.dirname(file.location)) not in known:
                known[folder] = _saved(folder, file)
        are_saved = [_is_saved(file, known[os.path.dirname(file.location)]) for file in files]
        used = [file for file, is_saved in zip(files, are_saved, strict=True) if is_saved]
        left = [file.path for file, is_saved in zip(files, are_saved, strict=True) if not is_saved]
        notes = [f"{left[0]!r} left out: state.json beside it does not name it"] if left else []
        for folder, names in known.items():
            if missing := sorted(name for name in names or () if not os.path.exists(os.path.join(folder, name))):
                note = f"{missing[0]!r}, which state.json in {folder!r} names, is missing"
                if options.on_error == "stop":
                    raise SourceError(f"{note}; copy it too, or go on with --on-error skip", source=folder)
                notes.append(note)
        return used, notes

    def table(self, source: Source) -> Any:
        """The bytes of the table, as a file of Arrow."""
        pyarrow = arrow("Arrow")
        return pyarrow.memory_map(os.fsencode(source.location)) if source.size else pyarrow.BufferReader(b"")

    def outline(self, source: Source, options: RecordOptions) -> Outline:
        with _opened(source, self.table) as reader:
            schema, is_file = reader.schema, hasattr(reader, "num_record_batches")
            head = _first(reader, is_file)
            count = reader.num_record_batches if is_file else 1
            whole = 0 if head is None else source.size
            size = whole // max(count, 1)
            # A stream is read from its start: it is one piece.
            pieces = [(k, k + 1, size) for k in range(count)] if whole else []
            lengths = {} if head is None else free_lengths(head)
        schema = asked_schema(plain_schema(schema), options.columns)
        return Outline(outline_columns(schema, options.columns), pieces, lengths, class_labels(schema))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        with _opened(source, self.table) as reader:
            is_file = hasattr(reader, "num_record_batches")
            first = int(_starts(self, source)[start]) if is_file and start else 0
            names = top_names(reader.schema.names, reading.wanted)
            batches = (reader.get_batch(k) for k in range(start, stop)) if is_file else iter(reader)
            chosen = (plain_batch(batch.select(names)) for batch in batches)
            yield from batch_chunks(_named(chosen, source), first, source.path, reading)


@lru_cache(maxsize=1)  # a slice is a batch: to count those before it for each would take their number squared
def _starts(format_: ArrowFiles, source: Source) -> Int64s:
    """The record where each batch of a file begins."""
    with _opened(source, format_.table) as reader:
        rows = [reader.get_batch(k).num_rows for k in range(reader.num_record_batches)]
    return offsets_of(np.array(rows, np.int64))


def _first(reader: Any, is_file: bool) -> Any:
    """The first records as one batch; None where there are none."""
    found = (reader.get_batch(k) for k in range(reader.num_record_batches)) if is_file else iter(reader)
    batches, count = [], 0
    for batch in found:
        batch.validate(full=True)
        batches.append(batch)
        count += batch.num_rows
        if count >= SAMPLE:
            break
    return arrow().Table.from_batches(batches).combine_chunks().to_batches()[0] if count else None


def _named(batches: Iterator[Any], source: Source) -> Iterator[Any]:
    with arrow_errors(source, "Arrow"):
        for batch in batches:
            batch.validate(full=True)  # offsets that point outside would be read
            yield batch


@contextmanager
def _opened(source: Source, table: Callable[[Source], Any]) -> Iterator[Any]:
    ipc = need("pyarrow.ipc", "table", "Arrow")
    with arrow_errors(source, "Arrow"):
        native = table(source)
        is_file = native.read(len(MAGIC)) == MAGIC
        native.seek(0)
        with native, ipc.open_file(native) if is_file else ipc.open_stream(native) as reader:
            yield reader


def _saved(folder: str, file: Source) -> set[str] | None:
    """The files of a dataset that was saved to this folder; None where none was."""
    path = os.path.join(folder, "state.json")
    if not os.path.exists(path):
        return None
    try:
        with open(path, "rb") as opened:
            return {str(entry["filename"]) for entry in json.loads(opened.read(1 << 24))["_data_files"]}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise unreadable(file, "as a saved dataset: state.json beside it is damaged", error) from error


def _is_saved(file: Source, names: set[str] | None) -> bool:
    return names is None or os.path.basename(file.location) in names


def _features(schema: Any) -> dict[str, Any]:
    """What Hugging Face datasets say of their columns."""
    try:
        found = json.loads((schema.metadata or {})[FEATURES])["info"]["features"]
        return {name: feature for name, feature in found.items() if isinstance(feature, dict) and name in schema.names}
    except (LookupError, TypeError, ValueError, AttributeError):
        return {}


def _media(schema: Any) -> list[str]:
    """Columns of images and recordings, which are structures of bytes and a path."""
    types = arrow().types
    named = [name for name, feature in _features(schema).items() if feature.get("_type") in ("Image", "Audio")]
    return [
        name for name in named if types.is_struct(schema.field(name).type) and "bytes" in schema.field(name).type.names
    ]


def _shapes(schema: Any) -> dict[str, list[int | None]]:
    """Columns of arrays, Array2D to Array5D, whose first size may be open."""
    found = {name: one.get("shape") for name, one in _features(schema).items() if "Array" in str(one.get("_type"))}
    return {name: shape for name, shape in found.items() if isinstance(shape, list) and all(shape[1:])}


def plain_schema(schema: Any) -> Any:
    """The schema with the bytes of images and recordings in their place, and arrays as lists of fixed size."""
    pyarrow, media, shapes = arrow(), _media(schema), _shapes(schema)

    def plain(field: Any) -> Any:
        if field.name in media:
            return pyarrow.field(field.name, pyarrow.binary())
        if field.name not in shapes:
            return field
        kind = getattr(field.type, "storage_type", field.type)
        for _ in shapes[field.name]:
            kind = kind.value_type
        for size in reversed(shapes[field.name]):
            kind = pyarrow.list_(kind, -1 if size is None else size)
        return pyarrow.field(field.name, kind)

    return pyarrow.schema([plain(field) for field in schema], schema.metadata)


def plain_batch(batch: Any) -> Any:
    """A batch with the columns of ``plain_schema``."""
    schema = batch.schema
    media, shapes = _media(schema), _shapes(schema)
    if not media and not shapes:
        return batch

    def plain(name: str, array: Any) -> Any:
        return _bytes_of(name, array) if name in media else _fixed_array(name, array, shapes[name])

    known = {*media, *shapes}
    arrays = [
        plain(name, array) if name in known else array for name, array in zip(schema.names, batch.columns, strict=True)
    ]
    return arrow().RecordBatch.from_arrays(arrays, names=schema.names)


def _bytes_of(name: str, array: Any) -> Any:
    """The bytes of images; where there are only paths of files, these are not read."""
    fields = dict(zip(array.type.names, array.flatten(), strict=True))
    found, paths = fields["bytes"], fields.get("path")
    if found.null_count and paths is not None and len(paths.filter(found.is_null()).drop_null()):
        raise ConfigError(
            f"column {name!r} holds paths of files without their bytes, and paths in data are not followed; give the files as an "
            "image folder, or embed them: datasets.table.embed_table_storage"
        )
    return found


def _fixed_array(name: str, array: Any, shape: Sequence[int | None]) -> Any:
    """Lists in lists of a known shape as lists of fixed size; where the first size is open, a list of those."""
    pyarrow, compute = arrow(), need("pyarrow.compute", "table", "this format")
    items, places, counts = getattr(array, "storage", array), None, None
    if items.null_count:
        is_valid = items.is_valid().to_numpy(zero_copy_only=False)
        places = pyarrow.array(np.cumsum(is_valid) - 1, mask=~is_valid)
        items = items.drop_null()
    for size in shape:
        lengths = compute.list_value_length(items).to_numpy(zero_copy_only=False)
        if items.null_count or (size is not None and np.any(lengths != size)):
            raise ConfigError(f"column {name!r} holds an array that is not {tuple(shape)}; leave it out with --columns")
        counts = lengths if size is None else counts
        items = items.flatten()
    for size in reversed([size for size in shape if size is not None]):
        items = pyarrow.FixedSizeListArray.from_arrays(items, size)
    if counts is not None:
        items = pyarrow.LargeListArray.from_arrays(offsets_of(counts.astype(np.int64)), items)
    return items if places is None else items.take(places)


def class_labels(schema: Any) -> dict[str, Sequence[str]]:
    """By column: the names of classes that Hugging Face datasets keep in the schema."""
    return {
        name: tuple(map(str, feature["names"]))
        for name, feature in _features(schema).items()
        if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }
