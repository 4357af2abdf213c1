"""The names of what a push sends. Every push has its own, so none ever writes over what another one sent.

The name of a push follows from what is pushed and from the manifest that it replaces: run again after an interruption it
goes on, and beside any other push it meets nothing. Its shards are numbered from a place of its own (numbers are names
alone) and its tables bear its name. ``store.json`` says which of all that readers see. An object ``pushes/<push>`` stands
while a push is under way: where one stands, files may lie that nobody will ever need.

Why ``reclaim`` is safe: a push can only commit over the manifest that it is named after, and the caller has replaced that.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable
from datetime import timedelta

import numpy as np

from millrace.errors import StoreError
from millrace.identity import digest
from millrace.store import manifest as manifests
from millrace.store.remote.contents import FIRST_PUSHED, MANIFEST, Contents, read_manifest, tokenizer_name
from millrace.store.remote.objects import Objects

MARKS = "pushes"
DEAD_AFTER = timedelta(days=1)  # a push that stands in the way so long was killed
_SHARD_FILE = re.compile(r"shards/.+-([0-9]{5,})/[^/]+")


def push_of(contents: Contents, before: bytes | None) -> str:
    """The name of the push of this snapshot over the manifest ``before``."""
    return digest(contents.data[MANIFEST], before or b"")[:16]


def mark_of(push: str) -> str:
    return f"{MARKS}/{push}"


def marked_pushes(objects: Objects) -> set[str]:
    """The pushes that are under way at a URL, or were killed."""
    return {name.removeprefix(f"{MARKS}/") for name in objects.listed(MARKS)}


def rivals(objects: Objects, push: str) -> set[str]:
    """The other pushes that may be under way."""
    marks = objects.listed(MARKS)
    now = max((mark["last_modified"] for mark in marks.values()), default=None)  # by the clock of the server
    alive = {name.removeprefix(f"{MARKS}/") for name, mark in marks.items() if now - mark["last_modified"] < DEAD_AFTER}
    return alive - {push}


def placed(contents: Contents, there: Contents | None, push: str) -> Contents:
    """The store as this push lays it: shards that the URL has in ``there`` stay where they are."""
    numbers_there: dict[tuple[str, bytes, bytes], list[int]] = {}
    if there is not None:
        shards = list(zip(there.shard_keys(), there.table[:, 1].tolist(), strict=True))
        for key, number in reversed(shards):  # of equal ones the first is taken first
            numbers_there.setdefault(key, []).append(number)
    taken = {number for numbers in numbers_there.values() for number in numbers}
    first = FIRST_PUSHED + int(push, 16) % (manifests.MAX_NUMBER - 2 * manifests.MAX_SHARDS)
    while taken and not taken.isdisjoint(range(first, first + len(contents.table))):
        first = FIRST_PUSHED + (first + len(contents.table)) % (manifests.MAX_NUMBER - 2 * manifests.MAX_SHARDS)
    numbers = np.zeros(len(contents.table), "<u8")
    for shard, key in enumerate(contents.shard_keys()):
        same = numbers_there.get(key)
        numbers[shard] = same.pop() if same else first + shard
    return contents.renumbered(numbers, f"shards-{push}.bin", f"hashes-{push}.bin")


def beside_shards(push: str) -> tuple[str, str, str]:
    """What a push sends beside shards and under its own name."""
    return f"shards-{push}.bin", f"hashes-{push}.bin", tokenizer_name(push)


def reclaim(objects: Objects, pushes: Collection[str], names: Iterable[str]) -> None:
    """Removes what these pushes left: those of ``names`` and of their tables that no snapshot needs, and their marks.

    The caller saw the pushes and the names before the manifest at the URL was replaced.
    """
    with contextlib.suppress(StoreError):  # a snapshot that cannot be read: nobody knows what it needs
        needed = _needed(objects)
        numbers = {name: found[1] for name in names if (found := _SHARD_FILE.fullmatch(name))}
        files = [name for name, number in numbers.items() if int(number) >= FIRST_PUSHED]
        objects.remove_all([name for name in files if name not in needed])
        for push in pushes:
            for name in (*beside_shards(push), mark_of(push)):
                if name not in needed:
                    objects.remove(name)  # one by one: not all of them need be there


def _needed(objects: Objects) -> set[str]:
    """Every object that a snapshot at the URL names."""
    found: set[str] = set()
    for name in (MANIFEST, *objects.listed("snapshots")):
        contents = Contents.read(objects, read_manifest(objects, name))
        found |= {file.stored_name for file in contents.files()}
        found |= {contents.manifest.shards.name, contents.manifest.hashes.name}
        if contents.push is not None:
            found.add(tokenizer_name(contents.push))
    return found
