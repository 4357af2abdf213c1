"""Arrow files (Feather, IPC, and the streams that Hugging Face datasets are saved as): read batch by batch."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

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
            known.setdefault(folder := os.path.dirname(file.location), _saved(folder, file))
        used = [file for file in files if _is_saved(file, known[os.path.dirname(file.location)])]
        left = [file.path for file in files if file not in used]
        return used, [f"{left[0]!r} left out: state.json beside it does not name it"] if left else []

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
        schema = asked_schema(plain_media(schema), options.columns)
        return Outline(outline_columns(schema), pieces, lengths, class_labels(schema))

    def chunks(self, source: Source, start: int, stop: int, reading: Reading) -> Iterator[Chunk]:
        with _opened(source, self.table) as reader:
            is_file = hasattr(reader, "num_record_batches")
            first = sum(reader.get_batch(k).num_rows for k in range(start)) if is_file else 0
            names = top_names(reader.schema.names, reading.wanted)
            batches = (reader.get_batch(k) for k in range(start, stop)) if is_file else iter(reader)
            chosen = (plain_batch(batch.select(names)) for batch in batches)
            yield from batch_chunks(_named(chosen, source), first, source.path, reading)


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


def plain_media(schema: Any) -> Any:
    """The schema with the bytes of images and recordings in their place."""
    pyarrow, media = arrow(), _media(schema)
    fields = [pyarrow.field(field.name, pyarrow.binary()) if field.name in media else field for field in schema]
    return pyarrow.schema(fields, schema.metadata)


def plain_batch(batch: Any) -> Any:
    pyarrow, media = arrow(), _media(batch.schema)
    if not media:
        return batch
    arrays = [
        array.flatten()[array.type.get_field_index("bytes")] if name in media else array
        for name, array in zip(batch.schema.names, batch.columns, strict=True)
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, names=batch.schema.names)


def class_labels(schema: Any) -> dict[str, Sequence[str]]:
    """By column: the names of classes that Hugging Face datasets keep in the schema."""
    return {
        name: tuple(map(str, feature["names"]))
        for name, feature in _features(schema).items()
        if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list)
    }
