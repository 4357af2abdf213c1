"""Megatron's ``.bin/.idx``: tokens in one file, the lengths of its sequences in the other.

The index is checked against both file sizes before anything of its claimed size is allocated; what stays in
memory is 16 bytes per sequence. Called by foreign.py.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array, Int64s
from millrace.store import foreign_files as files
from millrace.store.foreign_files import Foreign, MappedFile, Shard, corrupt
from millrace.store.layout import DTYPES, MAX_RECORDS, Column

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents
CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CHUNK = 1 << 20  # sequences checked at once, so that checking needs no second array of their size


def has_index(stem: str, given: str | None) -> bool:
    """Whether Megatron's index lies beside a .bin; another .idx there is refused unless ``dtype=`` was given."""
    where = f"{stem}.idx"
    if not os.path.lexists(where):
        return False
    if _is_index(files.map_file(where)):
        return True
    if given is None:
        # A damaged index would otherwise turn a Megatron file into other tokens without a word.
        remedy = f"copy it again, or give dtype= to open {stem}.bin as headerless tokens"
        raise corrupt(where, "does not begin as a Megatron index", remedy)
    return False


def _is_index(file: MappedFile) -> bool:
    return file.data[: len(MAGIC)].tobytes() == MAGIC


def read_megatron(prefix: str, given: str | None) -> Foreign:
    """The pair ``prefix.bin`` and ``prefix.idx``; a sequence is a record."""
    pair = _read_pair(files.map_file(f"{prefix}.idx"), files.map_file(f"{prefix}.bin"), given)
    return _foreign("megatron", "Megatron .bin/.idx", [pair], [None])


def read_megatron_folder(folder: str, names: list[str], given: str | None) -> Foreign:
    """Several pairs in a folder, a shard each by name; splits where all names say one."""
    stems = [name.removesuffix(".idx") for name in names if name.endswith(".idx")]
    if lone := [name for name in names if name.endswith(".bin") and name.removesuffix(".bin") not in stems]:
        problem = f"{os.path.join(folder, lone[0])} has no .idx beside it as others in its folder have"
        raise ConfigError(f"{problem}; copy that too, or move it away", path=folder)
    mapped = files.map_files(folder, [f"{stem}{ending}" for stem in stems for ending in (".idx", ".bin")])
    pairs = [_read_pair(index, data, given) for index, data in zip(mapped[::2], mapped[1::2], strict=True)]
    phrase = f"folder of {len(pairs)} Megatron .bin/.idx"
    return _foreign("megatron-folder", phrase, pairs, files.split_by_name(folder, stems))


@dataclass(frozen=True, eq=False)
class _Pair:
    data: MappedFile
    index: MappedFile
    dtype: str
    offsets: Int64s
    documents: Int64s  # which sequences each document holds: [documents[d], documents[d + 1])


def _read_pair(index: MappedFile, data: MappedFile, given: str | None) -> _Pair:
    dtype, lengths, pointers, documents = _read_index(index)
    files.check_given(given, dtype, index.path)
    size = DTYPES[dtype][0].itemsize
    offsets = _offsets(index, lengths, pointers, size)
    if data.num_bytes != (expected := int(offsets[-1]) * size):
        raise corrupt(
            data.path, f"{data.num_bytes} bytes, expected {expected} by {index.path} ({len(lengths)} sequences of {dtype})",
            "copy both files again", expected=expected, found=data.num_bytes,
        )  # fmt: skip
    return _Pair(data, index, dtype, offsets, _documents(index, documents, len(lengths)))


def _foreign(layout: str, phrase: str, pairs: list[_Pair], splits: list[str | None]) -> Foreign:
    dtype = pairs[0].dtype
    name, kind = ("tokens", "text") if files.is_integer(dtype) else ("values", "records")
    shards, before = [], 0
    for pair, split in zip(pairs, splits, strict=True):
        if pair.dtype != dtype:
            raise corrupt(
                pair.index.path, f"says {pair.dtype}, but {pairs[0].index.path} {dtype}", "open them one by one",
                expected=dtype, found=pair.dtype,
            )  # fmt: skip
        each = before + np.repeat(np.arange(len(pair.documents) - 1), np.diff(pair.documents))
        shards.append(Shard(pair.data.name, split, [pair.offsets, pair.data.items(dtype), each]))
        before += len(pair.documents) - 1
    columns = {name: Column(dtype), "document": Column("int64", per="record")}
    own = [file for pair in pairs for file in (pair.data, pair.index)]
    return Foreign(layout, phrase, kind, columns, shards, own, identity=lambda: _identity(pairs), derived=("document",))


def _identity(pairs: list[_Pair]) -> bytes:
    """The boundaries of sequences, and of documents where those are not the same."""
    parts = []
    for pair in pairs:
        parts.append(pair.offsets.tobytes())
        if not np.array_equal(pair.documents, np.arange(len(pair.offsets))):
            parts.append(pair.documents.tobytes())
    return b"".join(parts)


def _read_index(index: MappedFile) -> tuple[str, Array, Array, Array]:
    """dtype, lengths, byte pointers and documents of an index whose size is what its header claims."""
    if index.num_bytes < HEADER.size or not _is_index(index):
        raise corrupt(
            index.path, f"{index.num_bytes} bytes that do not begin with Megatron's {HEADER.size}-byte header",
            "give a .idx that Megatron's preprocess_data wrote",
        )  # fmt: skip
    _, version, code, sequences, documents = HEADER.unpack(index.data[: HEADER.size].tobytes())
    if version != 1:
        raise corrupt(index.path, f"index version {version}, expected 1", "write it again with a current Megatron")
    if code not in CODES:
        raise corrupt(index.path, f"dtype code {code}, expected 1 to 8", found=code)
    if max(sequences, documents) > MAX_RECORDS + 1:
        raise corrupt(
            index.path, f"{sequences} sequences in {documents} documents; at most {MAX_RECORDS}",
            "write the pair again with Megatron's preprocess_data, in parts", expected=MAX_RECORDS, found=sequences,
        )  # fmt: skip
    expected = HEADER.size + 12 * sequences + 8 * documents
    if index.num_bytes not in (expected, expected + sequences):  # multimodal indexes add one mode per sequence
        raise corrupt(
            index.path, f"{index.num_bytes} bytes, expected {expected} for {sequences} sequences in {documents} documents",
            expected=expected, found=index.num_bytes,
        )  # fmt: skip
    middle = HEADER.size + 4 * sequences
    end = middle + 8 * sequences
    lengths = index.items("int32", HEADER.size, middle)
    return CODES[code], lengths, index.items("int64", middle, end), index.items("int64", end, expected)


def _documents(index: MappedFile, documents: Array, sequences: int) -> Int64s:
    """Where each document begins among the sequences; where an index does not say, each sequence is one."""
    if len(documents) < 2:
        return np.arange(sequences + 1)
    again = "write the pair again with Megatron's preprocess_data"
    if documents[0] != 0 or documents[-1] != sequences:
        raise corrupt(
            index.path, f"its {len(documents) - 1} documents go from sequence {documents[0]} to {documents[-1]}, expected from 0 "
            f"to {sequences}", again, found=int(documents[-1]),
        )  # fmt: skip
    if (falls := documents[1:] < documents[:-1]).any():
        at = int(np.argmax(falls))
        raise corrupt(
            index.path, f"document {at + 1} begins at sequence {documents[at + 1]}, before document {at} at {documents[at]}", again,
            found=int(documents[at + 1]),
        )  # fmt: skip
    return np.asarray(documents, np.int64)


def _offsets(index: MappedFile, lengths: Array, pointers: Array, size: int) -> Int64s:
    """Record offsets from the lengths; the pointers must say the same, one sequence right after the other."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    for at in range(0, len(lengths), CHUNK):
        part = lengths[at : at + CHUNK]
        if part.min() < 0:
            sequence = at + int(np.argmax(part < 0))
            raise corrupt(index.path, f"sequence {sequence} has length {lengths[sequence]}, expected 0 or more")
        stop = at + len(part)
        offsets[at + 1 : stop + 1] = offsets[at] + np.cumsum(part, dtype=np.int64)
        wrong = pointers[at:stop] != offsets[at:stop] * size
        if wrong.any():
            sequence = at + int(np.argmax(wrong))
            raise corrupt(
                index.path, f"sequence {sequence} begins at byte {pointers[sequence]}, expected "
                f"{offsets[sequence] * size}: only sequences that follow each other without gaps are opened in place",
                "write the pair again with Megatron's preprocess_data or merge_datasets",
                expected=int(offsets[sequence]) * size, found=int(pointers[sequence]),
            )  # fmt: skip
    return offsets
