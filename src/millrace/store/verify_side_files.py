"""Damage, and how ``verify`` finds it in the files beside the shards: the tokenizer, the provenance, the quarantine.

The manifest has the hash of ``tokenizer.json``. The other two are outside the fingerprint and have no hash; they may
be missing, but what is there must be what an append can read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from millrace.errors import MillraceError, corrupt
from millrace.identity import digest
from millrace.store import manifest as manifests
from millrace.store.folder import Folder
from millrace.store.manifest import Manifest
from millrace.terminal import printable

QUARANTINE = "quarantine.jsonl"


class Damage(msgspec.Struct, omit_defaults=True):
    """One thing that is not as it was written."""

    path: str
    problem: str
    shard: str | None = None
    block: int | None = None
    bytes: tuple[int, int] | None = None  # of the file, half-open
    records: tuple[int, int] | None = None  # of the shard, half-open

    def __str__(self) -> str:
        where = "" if self.block is None else f", block {self.block} (bytes {self.bytes[0]:,} to {self.bytes[1]:,})"  # type: ignore[index]
        records = "" if self.records is None else f", records {self.records[0]:,} to {self.records[1] - 1:,}"
        return printable(f"{self.path}{where}{records}: {self.problem}")


@contextlib.contextmanager
def noting(damage: list[Damage], path: str) -> Iterator[None]:
    """Adds an error of the block to the damage: of the path it names, else of this one."""
    try:
        yield
    except MillraceError as error:
        where = str(getattr(error, "path", None) or path)
        damage.append(Damage(where, str(error).removeprefix(f"{where}: ")))


def check_side_files(folder: Folder, snapshots: Sequence[Manifest]) -> list[Damage]:
    """The damage of these files; ``snapshots`` begins with the current one."""
    damage: list[Damage] = []
    hashes = dict.fromkeys(str(one.tokenizer["hash"]) for one in snapshots if one.tokenizer is not None)
    for expected in hashes:  # one: an append keeps the tokenizer of its store
        with noting(damage, folder.path):
            actual = digest(folder.side_file(manifests.TOKENIZER_FILE, manifests.MAX_TOKENIZER_BYTES))
            if actual != expected:
                problem = f"not the tokenizer of this store (hash {actual}, expected {expected})"
                raise corrupt(os.path.join(folder.path, manifests.TOKENIZER_FILE), problem, "copy it again")
    runs: list[dict[str, Any]] = []
    with noting(damage, folder.path):
        runs = _read_provenance(folder)
    mine = [run for run in runs if run.get("fingerprint") == snapshots[0].fingerprint]
    with noting(damage, folder.path):
        _check_quarantine(folder, mine[-1].get("quarantine_bytes", 0) if mine else 0)
    return damage


def _read_provenance(folder: Folder) -> list[dict[str, Any]]:
    """What every run said of itself."""
    name = "provenance.json"
    if not folder.has(name):
        return []
    try:
        runs = [json.loads(line) for line in folder.side_file(name).splitlines()]
    except (ValueError, RecursionError) as error:
        raise corrupt(os.path.join(folder.path, name), f"not lines of JSON ({error})", "copy it again") from error
    if any(not isinstance(run, dict) for run in runs):
        raise corrupt(os.path.join(folder.path, name), "not lines of JSON objects", "copy it again")
    return runs


def _check_quarantine(folder: Folder, expected: Any) -> None:
    if not isinstance(expected, int) or not (expected or folder.has(QUARANTINE)):
        return
    with folder.open_file(QUARANTINE) as (_, size):
        if size < expected:
            path = os.path.join(folder.path, QUARANTINE)
            raise corrupt(path, f"has {size} bytes, expected {expected}", "copy it again")
