"""Parts whose documents are all in shards: their tokens are given back at once, so that hardly any lie on disk twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.prepare.parts import part_folder
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.shards.shards import ShardTask
from millrace.store import platform

FILES = ("tokens.bin", "mask.bin")  # which only shards are made of; the rest says what stands where


class Spending:
    """Of the shards that are yet to be written."""

    def __init__(self, folder: Path, parts: Sequence[PartDone], shards: Sequence[ShardTask]) -> None:
        self._folder = folder
        self._parts: Mapping[int, PartDone] = {part.number: part for part in parts}
        self._users = Counter(number for shard in shards for number in shard.parts)

    def missing(self) -> list[int]:
        """Parts that were given back and are needed all the same: a shard was damaged since."""
        return [number for number in sorted(self._users) if any(not size for size in self._left(number).values())]

    def after(self, shard: ShardTask) -> None:
        """This one is journaled: a restart needs no part for it."""
        for number in shard.parts:
            self._users[number] -= 1
            if self._users[number] == 0:
                for path in self._left(number):
                    platform.truncate(path)

    def _left(self, number: int) -> dict[Path, int]:
        """How large the files are now that were not empty."""
        part = self._parts[number]
        folder = part_folder(self._folder, part.key)
        paths = [folder / name for name in FILES if part.sizes.get(name)]
        return {path: path.stat().st_size for path in paths}
