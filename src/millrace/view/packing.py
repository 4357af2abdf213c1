"""Which documents share a block: best-fit-decreasing packing, as a function of their lengths alone.

A document fills as many whole blocks as it can, alone. Its rest shares a block with others. ``Packed`` asks for the plan.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millrace.errors import ConfigError
from millrace.identity import digest
from millrace.native import cache_folder, core, make_private
from millrace.ragged import Array, Int64s, as_int64s

MAX_LENGTH = 1 << 24
MAX_DOCUMENTS = (1 << 32) - 2
MIN_CACHED = 1 << 20  # documents: fewer are packed in a tenth of a second


class Packing(NamedTuple):
    """Block i holds the rests of ``documents[offsets[i]:offsets[i + 1]]``; blocks that one document fills come after."""

    documents: Array  # uint32
    offsets: Int64s

    def __len__(self) -> int:
        return len(self.offsets) - 1


def whole_blocks(index: Any, length: int) -> tuple[Int64s, Int64s]:
    """The documents that fill blocks alone, and how many blocks they and those before them fill."""
    owners, counts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for first, offsets in index.chunks():
        wholes = np.diff(offsets) // length
        owners.append(first + np.flatnonzero(wholes))
        counts.append(wholes[wholes > 0])
    return np.concatenate(owners), np.cumsum(np.concatenate(counts))


def packing_of(index: Any, length: int, key: str | None) -> Packing:
    """The packing of documents, by ``store.axis_index``; ranks of one machine share it by ``key`` in a cache folder."""
    if len(index) > MAX_DOCUMENTS:
        raise ConfigError(f"{len(index):,} documents; Packed takes at most {MAX_DOCUMENTS:,}: use Blocks")
    if key is None or len(index) < MIN_CACHED:
        return pack(index.joined, length)
    folder = cache_folder() / f"packing-{digest(key, str(length))}"
    found = _cached(folder, len(index))
    if found is None:
        found = pack(index.joined, length)
        _keep(folder, found)
    return found


def pack(offsets: Int64s, length: int) -> Packing:
    if core is None:
        return reference_pack(offsets, length)
    documents, blocks = core.pack(as_int64s(offsets), length)
    return Packing(np.frombuffer(documents, np.uint32), np.frombuffer(blocks, np.int64))


def reference_pack(offsets: Int64s, length: int) -> Packing:
    """The twin of the core's ``pack``."""
    rests = np.diff(offsets) % length
    blocks: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # blocks with this much room, the last one changed last
    rooms: list[int] = []  # sorted
    order = np.argsort(-rests, kind="stable")
    for document in order[rests[order] > 0].tolist():
        rest = int(rests[document])
        at = bisect.bisect_left(rooms, rest)
        if at == len(rooms):
            block, room = len(blocks), length
            blocks.append([])
        else:
            room = rooms[at]
            block = by_room[room].pop()
            if not by_room[room]:
                del rooms[at]
        blocks[block].append(document)
        if room > rest:
            if not by_room.setdefault(room - rest, []):
                bisect.insort(rooms, room - rest)
            by_room[room - rest].append(block)
    edges = np.concatenate(([0], np.cumsum([len(block) for block in blocks], dtype=np.int64))).astype(np.int64)
    return Packing(np.array([document for block in blocks for document in block], np.uint32), edges)


def _cached(folder: Path, num_documents: int) -> Packing | None:
    """A packing that this or another process kept; None if there is none, or if it was damaged."""
    try:
        found = Packing(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in Packing._fields))
        is_right = found.documents.dtype == np.uint32 and found.offsets.dtype == np.int64
        is_whole = is_right and (folder / "hash").read_text() == _hash(found)
    except (OSError, ValueError, EOFError):  # EOFError: of an empty file, as a crash may leave it
        return None
    return found if is_whole and int(found.documents.max(initial=0)) < max(1, num_documents) else None


def _keep(folder: Path, packing: Packing) -> None:
    """Keeps a packing for other processes. A full or read-only disk only costs them time."""
    aside = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        make_private(aside)
        for name, array in packing._asdict().items():
            np.save(aside / f"{name}.npy", array)
        (aside / "hash").write_text(_hash(packing))
        if folder.exists():  # damaged, or of another process that was faster
            shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _hash(packing: Packing) -> str:
    import xxhash

    state = xxhash.xxh3_128()
    for array in packing:
        state.update(array.data if array.size else b"")
    return str(state.hexdigest())
