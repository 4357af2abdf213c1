"""Frees the tokens of parts whose documents are all in shards, so that few are on disk twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.prepare.parts import part_folder
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.shards.shards import ShardTask
from millrace.store import platform

FILES = ("tokens.bin", "mask.bin")  # needed for shards alone; the others say where documents are


class Reclaim:
    """Counts the shards that still need each part."""

    def __init__(self, folder: Path, parts: Sequence[PartDone], shards: Sequence[ShardTask]) -> None:
        self._folder = folder
        self._parts: Mapping[int, PartDone] = {part.number: part for part in parts}
        self._users = Counter(number for shard in shards for number in shard.parts)

    def missing(self) -> list[int]:
        """Parts whose files were freed but are needed again: a shard was damaged since."""
        return [number for number in sorted(self._users) if any(not size for size in self._sizes(number).values())]

    def after(self, shard: ShardTask) -> None:
        """Frees the parts that no other shard needs; this one is in the journal."""
        for number in shard.parts:
            self._users[number] -= 1
            if self._users[number] == 0:
                for path in self._sizes(number):
                    platform.truncate(path)

    def _sizes(self, number: int) -> dict[Path, int]:
        """Sizes now of the files that were not empty."""
        part = self._parts[number]
        folder = part_folder(self._folder, part.key)
        paths = [folder / name for name in FILES if part.sizes.get(name)]
        return {path: path.stat().st_size for path in paths}
