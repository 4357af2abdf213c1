"""A hash for each record, by which splits are decided: of its key, or of all its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from millrace.prepare.records.formats.format import Chunk, axis_of
from millrace.prepare.runs import offsets_of
from millrace.ragged import Array, Int64s
from millrace.store.layout import Column
from millrace.text.documents import Documents, hash_documents

HASHES = "record_hashes.bin"
HASH_BYTES = 16


def record_hashes(chunk: Chunk, columns: Mapping[str, Column], key: str | None) -> bytes:
    """The hashes of all records, one after the other."""
    if key is not None:
        return _hash_keys(chunk, columns[key], key)
    # The hashes of all columns together: of one column each record is a run of bytes.
    each = []
    for name, array in chunk.columns.items():
        axis = axis_of(name, columns[name])
        edges = np.arange(chunk.num_records + 1) if axis is None else chunk.offsets[axis]
        each.append(
            np.frombuffer(_hash_runs(array, edges * columns[name].item_bytes), np.uint8).reshape(-1, HASH_BYTES)
        )
    joined = np.ascontiguousarray(np.concatenate(each, axis=1))
    width = joined.shape[1]
    return _hash_runs(joined, np.arange(chunk.num_records + 1, dtype=np.int64) * width)


def _hash_keys(chunk: Chunk, column: Column, key: str) -> bytes:
    if column.dtype == "string":
        return _hash_runs(chunk.columns[key], chunk.offsets[key])
    return hash_texts([str(value) for value in chunk.columns[key].tolist()])


def hash_texts(keys: Sequence[str]) -> bytes:
    """The hashes of keys, as records that have them get."""
    texts = [key.encode() for key in keys]
    joined = np.frombuffer(b"".join(texts), np.uint8)
    return _hash_runs(joined, offsets_of(np.array([len(text) for text in texts], np.int64)))


def _hash_runs(array: Array, edges: Int64s) -> bytes:
    """Of bytes [edges[k], edges[k + 1]) each."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hash_documents(Documents(data.data, edges[:-1].copy(), edges[1:].copy()))  # type: ignore[arg-type]
