"""What ``verify`` looks for in the files beside the shards: the tokenizer, the provenance, the quarantine.

The manifest has the hash of ``tokenizer.json``. The other two are outside the fingerprint and have no hash; they may
be missing, but what is there must be what an append can read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from millrace.errors import MillraceError, StoreError
from millrace.store import manifest as manifests
from millrace.store.folder import Folder
from millrace.store.manifest import Manifest

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
        return f"{self.path}{where}{records}: {self.problem}"


def check_side_files(folder: Folder, snapshots: Sequence[Manifest]) -> list[Damage]:
    """The damage of these files; ``snapshots`` begins with the current one."""
    found: list[Damage] = []
    hashes = dict.fromkeys(str(one.tokenizer["hash"]) for one in snapshots if one.tokenizer is not None)
    for expected in hashes:  # one: an append keeps the tokenizer of its store
        _check_tokenizer(folder, expected, found)
    runs = _check_provenance(folder, found)
    mine = [run for run in runs if run.get("fingerprint") == snapshots[0].fingerprint]
    _check_quarantine(folder, mine[-1].get("quarantine_bytes", 0) if mine else 0, found)
    return found


def _check_tokenizer(folder: Folder, expected: str, damage: list[Damage]) -> None:
    try:
        data = folder.side_file(manifests.TOKENIZER_FILE, manifests.MAX_TOKENIZER_BYTES)
    except MillraceError as error:
        damage.append(_damage(folder, manifests.TOKENIZER_FILE, error))
        return
    if (actual := manifests.digest(data)) != expected:
        problem = f"not the tokenizer of this store (hash {actual}, expected {expected}); copy it again"
        damage.append(_damage(folder, manifests.TOKENIZER_FILE, problem))


def _check_provenance(folder: Folder, damage: list[Damage]) -> list[dict[str, Any]]:
    """What every run said of itself."""
    name = "provenance.json"
    if not _is_there(folder, name):
        return []
    runs: list[dict[str, Any]] = []
    try:
        for number, line in enumerate(folder.side_file(name).splitlines(), start=1):
            run = json.loads(line)
            if not isinstance(run, dict):
                raise ValueError(f"line {number} is not an object")
            runs.append(run)
    except (MillraceError, ValueError, RecursionError) as error:
        is_ours = isinstance(error, MillraceError)
        damage.append(_damage(folder, name, error if is_ours else f"not lines of JSON ({error}); copy it again"))
    return runs


def _check_quarantine(folder: Folder, expected: Any, damage: list[Damage]) -> None:
    if not isinstance(expected, int) or not (expected or _is_there(folder, QUARANTINE)):
        return
    try:
        with folder.opened(QUARANTINE, os.path.join(folder.path, QUARANTINE)) as (_, size):
            if size < expected:
                damage.append(_damage(folder, QUARANTINE, f"has {size} bytes, expected {expected}; copy it again"))
    except MillraceError as error:
        damage.append(_damage(folder, QUARANTINE, error))


def _is_there(folder: Folder, name: str) -> bool:
    try:
        folder.stat(name)
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


def _damage(folder: Folder, name: str, problem: str | Exception) -> Damage:
    path = os.path.join(folder.path, name)
    text = str(problem)
    return Damage(path, text.removeprefix(f"{path} ") if isinstance(problem, StoreError) else text)
