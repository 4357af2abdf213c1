"""What a snapshot of a store is, computed from its shards: manifest, shard table and block hashes.

Pure, so that reruns are identical; publish.py writes the result, reader.py gives the ``Base`` an append continues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.store import manifest as manifests
from millrace.store.layout import Layout, check_name, num_blocks
from millrace.store.manifest import Manifest, TableFile, Totals, digest
from millrace.store.shard import ShardEntry


class Base:
    """The store an append continues: its manifest, shard table and block hashes."""

    def __init__(self, manifest: Manifest, table: bytes, hashes: bytes) -> None:
        self.manifest, self.table, self.hashes = manifest, table, hashes
        self.replaced: dict[tuple[str, int], ShardEntry] = {}  # shards of it written again; they keep their places

    def tables(self, splits: tuple[str, ...]) -> tuple[bytes, bytes]:
        """Its table and hashes, with the shards that were replaced."""
        if not self.replaced:
            return self.table, self.hashes
        rows = np.frombuffer(self.table, "<u8").reshape(-1, 3 + len(self.manifest.axes)).copy()
        blocks = num_blocks(self.manifest.layout.file_bytes(manifests.table_counts(rows))).sum(axis=1)
        ends = 8 * np.cumsum(blocks)
        hashes = []
        for k, row in enumerate(rows):
            entry = self.replaced.get((splits[int(row[0])], int(row[1])))
            if entry is None:
                hashes.append(self.hashes[int(ends[k]) - 8 * int(blocks[k]) : int(ends[k])])
            else:
                rows[k, 1:] = [entry.number, entry.records, *entry.rows]
                hashes.append(_hashes([entry]))
        return rows.tobytes(), b"".join(hashes)

    def next_number(self, split: str) -> int:
        """The first shard number of a split that no snapshot of this line uses."""
        rows = np.frombuffer(self.table, "<u8").reshape(-1, 3 + len(self.manifest.axes))
        numbers = [number for own, number in rows[:, :2].tolist() if self.manifest.splits[own] == split]
        return max(numbers, default=-1) + 1


def build(
    fields: Mapping[str, Any], splits: tuple[str, ...], entries: Iterable[ShardEntry], base: Base | None
) -> tuple[Manifest, bytes, bytes]:
    """Manifest, shard table and block hashes of a store with these shards; pure, so that reruns are identical."""
    columns = fields["columns"]
    layout = Layout(columns)
    for split in splits:
        check_name(split, "split")
    order = {split: k for k, split in enumerate(splits)}
    replaced = set() if base is None else {(entry.split, entry.number) for entry in base.replaced.values()}
    fresh = [entry for entry in entries if (entry.split, entry.number) not in replaced]
    rows = [[order[entry.split], entry.number, entry.records, *entry.rows] for entry in fresh]
    table, hashes = np.array(rows, "<u8").reshape(-1, 3 + len(layout.axes)).tobytes(), _hashes(fresh)
    if base is not None:
        before = base.tables(base.manifest.splits)
        table, hashes = before[0] + table, before[1] + hashes
    whole = np.frombuffer(table, "<u8").reshape(-1, 3 + len(layout.axes))
    counts = manifests.table_counts(whole)
    sums, num_bytes = [sum(column) for column in counts.T.tolist()], int(layout.file_bytes(counts).sum())

    def described(name: str, data: bytes) -> TableFile:
        # A snapshot's tables never replace those of another one, which a reader may be about to open.
        found = digest(data)
        return TableFile(f"{name}.bin" if base is None else f"{name}-{found[:16]}.bin", len(data), found)

    manifest = Manifest(
        version=manifests.VERSION,
        kind=fields["kind"],
        columns={name: manifests.as_entry(column) for name, column in columns.items()},
        axes=layout.axes,
        splits=splits,
        totals=Totals(len(whole), sums[0], dict(zip(layout.axes, sums[1:], strict=True)), num_bytes),
        shards=described("shards", table),
        hashes=described("hashes", hashes),
        parent=None if base is None else base.manifest.fingerprint,
        fingerprint="",
        **{key: fields[key] for key in ("tokenizer", "scaling", "cuts", "meta") if fields.get(key) is not None},
    )
    if manifest.cuts is not None:
        manifests.check_cuts(manifest.cuts, layout)
    manifest.fingerprint = manifests.fingerprint(manifest, whole)
    return manifest, table, hashes


def append_fields(given: Mapping[str, Any], old: Manifest, out: Path) -> dict[str, Any]:
    """The fields of a snapshot that continues ``old``: its identity stays, meta and splits may gain."""
    columns = {name: manifests.as_column(entry) for name, entry in old.columns.items()}
    # A dictionary that is appended to may grow: codes that exist keep their meaning.
    grown = {name: column if column.values is None else column.with_values(None) for name, column in columns.items()}
    for name, column in (given["columns"] or {}).items():
        if name not in grown or grown[name] != column.with_values(None):
            raise ConfigError(f"{out} has column {name!r} as {columns.get(name)}; {column} cannot be appended")
        if column.values is not None:
            if column.values[: len(columns[name].values or ())] != columns[name].values:
                raise ConfigError(f"values of {name!r} must begin with those {out} has, so that codes stay")
            grown[name] = column
    if given["columns"] is not None and given["columns"].keys() != grown.keys():
        raise ConfigError(f"{out} has columns {list(grown)}; got {list(given['columns'])}")
    identity = {key: getattr(old, key) for key in ("kind", "tokenizer", "scaling", "cuts")}
    splits = tuple(dict.fromkeys((*old.splits, *given["splits"])))
    return {**identity, "columns": grown, "splits": tuple(splits), "meta": {**old.meta, **given["meta"]}}


def _hashes(entries: Iterable[ShardEntry]) -> bytes:
    return b"".join(bytes.fromhex(block)[::-1] for entry in entries for block in entry.hashes)


def split_rank(split: str) -> tuple[int, str]:
    """Undeclared splits in an order that no timing changes: train, val, test, then by name."""
    known = ("train", "val", "test")
    return (known.index(split) if split in known else len(known), split)
