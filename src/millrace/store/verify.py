"""Reads every byte of a store again and compares it with the hashes written with it.

A flipped bit is located to shard, file, 4 MiB block and the records in it. Threads share the files; hashing
and reading release the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from millrace.errors import StoreCorrupt, StoreError
from millrace.native import num_cores
from millrace.ragged import Array
from millrace.store import manifest as manifests
from millrace.store import strict_json
from millrace.store.compressed import CompressedShards
from millrace.store.folder import Folder
from millrace.store.layout import block_ends, num_blocks
from millrace.store.manifest import Manifest
from millrace.store.reader import DiskShards
from millrace.store.shard import check_blocks
from millrace.store.verify_side_files import Damage, check_side_files, noting


class Verification(msgspec.Struct):
    """What was checked, and the damage."""

    path: str
    fingerprint: str
    snapshots: int
    shards: int
    files: int
    bytes: int
    damage: list[Damage]


class _File(msgspec.Struct):
    """One file to read, and the hashes it must have."""

    shards: Any
    shard: int
    file: int
    num_bytes: int
    hashes: Any


def verify_store(
    path: str | os.PathLike[str], *, workers: int | None = None, progress: Callable[[int], None] | None = None
) -> Verification:
    """Checks every snapshot, table, shard and side file; ``progress`` is called with bytes as they are read.

    Damage to the data is listed in the report. A manifest too damaged to say what the data should be raises.
    """
    folder = Folder(path)
    current, _ = folder.manifest(None)
    damage: list[Damage] = []
    files: dict[str, _File] = {}
    snapshots = _check_snapshots(folder, current, damage)
    damage += check_side_files(folder, snapshots)
    with noting(damage, folder.path):
        folder.check_folder("shards")
    for manifest in snapshots:
        with noting(damage, folder.path):
            files |= {name: file for name, file in _files(folder, manifest, damage) if name not in files}
    step = progress or (lambda num_bytes: None)
    with ThreadPoolExecutor(workers or num_cores()) as pool:
        # Largest first, so that no thread ends with one big file alone.
        tasks = sorted(files.values(), key=lambda file: -file.num_bytes)
        for found in pool.map(lambda file: _check_file(file, step), tasks):
            damage += found
    return Verification(
        folder.path, current.fingerprint, len(snapshots), len({name.rsplit("/", 1)[0] for name in files}), len(files),
        sum(file.num_bytes for file in files.values()), sorted(damage, key=lambda item: (item.path, item.block or 0)),
    )  # fmt: skip


def _check_snapshots(folder: Folder, current: Manifest, damage: list[Damage]) -> list[Manifest]:
    """Every snapshot that can be read, the current one first; its file must hold exactly what was written."""
    found, names = [current], []
    root = Path(folder.path)
    with noting(damage, str(root / "snapshots")):
        folder.check_folder("snapshots")
        names = sorted(name for name in os.listdir(root / "snapshots") if name.endswith(".json"))
        if f"{current.fingerprint}.json" not in names:
            missing = str(root / "snapshots" / f"{current.fingerprint}.json")
            damage.append(Damage(missing, "missing: store.json names it"))
    for name in ("store.json", *(f"snapshots/{name}" for name in names)):
        path = root / name
        with noting(damage, str(path)):
            data = folder.side_file(name, strict_json.MAX_BYTES)
            manifest = manifests.decode(data, str(path))
            if manifests.encode(manifest) != data:
                damage.append(Damage(str(path), "not the bytes that were written"))
            if name != "store.json" and path.stem != manifest.fingerprint:
                damage.append(Damage(str(path), f"holds snapshot {manifest.fingerprint}"))
            elif manifest.fingerprint != current.fingerprint:
                found.append(manifest)
    return found


def _files(folder: Folder, manifest: Manifest, damage: list[Damage]) -> Iterator[tuple[str, _File]]:
    """All files of a snapshot with their hashes; a shard whose folder is missing is one damage, not one per file."""
    data = folder.read(manifest.shards.name, manifest.shards.bytes)
    table = manifests.check_table(manifest, data, os.path.join(folder.path, manifest.shards.name))
    hashes = np.frombuffer(folder.read(manifest.hashes.name, manifest.hashes.bytes, manifest.hashes.hash), "<u8")
    counts = manifests.table_counts(table)
    kind = DiskShards if manifest.codec is None else CompressedShards
    shards = kind(folder, manifest, table, counts)
    sizes = shards.layout.file_bytes(counts)
    ends = block_ends(sizes)
    for shard in range(len(table)):
        where = os.path.join(folder.path, "shards", shards.name(shard))
        if not os.path.isdir(where) or os.path.islink(where):
            missing = Damage(where, "expected a folder, found none; copy this shard again", shards.name(shard))
            damage += [missing] if missing.path not in {known.path for known in damage} else []
            continue
        for k, file in enumerate(shards.layout.files):
            first = int(ends[shard, k] - num_blocks(sizes[shard, k]))
            block_hashes = hashes[first : int(ends[shard, k])]
            yield f"{shards.name(shard)}/{file.name}", _File(shards, shard, k, int(sizes[shard, k]), block_hashes)


def _check_file(file: _File, step: Callable[[int], None]) -> list[Damage]:
    shards: DiskShards = file.shards
    path = shards.path(file.shard, file.file)
    try:
        fd = shards.open(file.shard, file.file, alone=True)
    except StoreCorrupt as error:
        return [Damage(path, f"expected {error.expected}, found {error.found}", shards.name(file.shard))]
    except StoreError as error:  # the system refuses to open it
        return [Damage(path, str(error), shards.name(file.shard))]
    damage = []
    try:
        read = shards.reader(fd, file.shard, file.file)
        for block, (first, last, problem) in enumerate(check_blocks(read, file.num_bytes, file.hashes.tolist())):
            if problem is not None:
                records = _records(file, first, last)
                damage.append(Damage(path, problem, shards.name(file.shard), block, (first, last), records))
            step(last - first)
    except StoreCorrupt as error:  # a block table that cannot be
        damage.append(Damage(path, str(error), shards.name(file.shard)))
    finally:
        os.close(fd)
    return damage


def _records(file: _File, first: int, last: int) -> tuple[int, int] | None:
    """Which records of the shard have bytes in [first, last) of a file."""
    spec = file.shards.layout.files[file.file]
    first_item, last_item = first // spec.item_bytes, -(-last // spec.item_bytes)
    if spec.counter == 0:
        records = file.shards.records(file.shard)
        return min(max(first_item - spec.extra, 0), records), min(last_item, records)
    try:
        offsets: Array = file.shards.rows(file.shard, spec.counter - 1, 0, file.shards.records(file.shard) + 1)
    except StoreCorrupt:
        return None  # its offsets are damaged too, and reported by themselves
    return int(np.searchsorted(offsets, first_item, side="right")) - 1, int(np.searchsorted(offsets, last_item))
