"""``quarantine.jsonl``: the documents or records that all runs set aside, copied block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from millrace.prepare.parts import part_folder
from millrace.store import platform
from millrace.store.plain_file import open_file

QUARANTINE = "quarantine.jsonl"  # of a part, and of the store
BLOCK = 1 << 20


class Quarantine:
    """The first ``old_bytes`` of a store that is appended to, and the lines of new parts."""

    def __init__(self, out: Path, folder: Path, done: Sequence[Any], old_bytes: int) -> None:
        self._old, self._old_bytes = out / QUARANTINE, old_bytes
        self._parts = [part_folder(folder, part.key) / QUARANTINE for part in done if QUARANTINE in part.sizes]
        self.num_bytes = self._old_bytes + sum(part.sizes.get(QUARANTINE, 0) for part in done)

    def __bool__(self) -> bool:
        """Whether there is anything new."""
        return bool(self._parts)

    def blocks(self) -> Iterator[bytes]:
        # A killed append may have left its own lines after the old ones.
        yield from _read(self._old, self._old_bytes)
        for path in self._parts:
            yield from _read(path, path.stat().st_size)


def _read(path: Path, num_bytes: int) -> Iterator[bytes]:
    if num_bytes:
        with open_file(str(path)) as (fd, _):
            first = 0
            while first < num_bytes and (block := platform.pread(fd, min(BLOCK, num_bytes - first), first)):
                first += len(block)
                yield block
