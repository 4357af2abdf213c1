"""Frees the large files of parts whose records are all in shards, so that few are on disk twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.prepare.parts import part_folder
from millrace.store import platform


class Reclaim:
    """Counts the shards that still need each part.

    A part has ``number``, ``key`` and ``sizes``, a shard the numbers of its ``parts``. ``files`` are those to free.
    """

    def __init__(self, folder: Path, parts: Sequence[Any], shards: Sequence[Any], files: Collection[str]) -> None:
        self._folder, self._files = folder, files
        self._parts: Mapping[int, Any] = {part.number: part for part in parts}
        self._users = Counter(number for shard in shards for number in shard.parts)

    def missing(self) -> list[int]:
        """Parts whose files were freed but are needed again: a shard was damaged since."""
        return [number for number in sorted(self._users) if any(not size for size in self._sizes(number).values())]

    def after(self, shard: Any) -> None:
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
        paths = [folder / name for name in self._files if part.sizes.get(name)]
        return {path: path.stat().st_size for path in paths}
