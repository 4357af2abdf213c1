"""What ``--on-error skip`` leaves out: counted and limited, and listed in ``quarantine.jsonl``, copied block by block."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from millrace.errors import ConfigError, SourceError
from millrace.prepare.parts import part_folder
from millrace.store import platform
from millrace.store.plain_file import open_file

QUARANTINE = "quarantine.jsonl"  # of a part, and of the store
BLOCK = 1 << 20
FEW = 10  # records that may be left out, whatever their share
MAX_SKIPPED = 0.01  # of the records that are read


class Skips(msgspec.Struct, frozen=True):
    """How many records of a part were read, how many of them were left out as unreadable, and the first of those."""

    count: int = 0
    read: int = 0
    first: str = ""  # file, place and problem

    @staticmethod
    def total(skips: Iterable[Skips]) -> Skips:
        every = list(skips)
        first = next((one.first for one in every if one.count), "")
        return Skips(sum(one.count for one in every), sum(one.read for one in every), first)


def check_max_skipped(most: float) -> None:
    if not 0 <= most <= 1:
        raise ConfigError(f"--max-skipped {most}; expected a share of the records, from 0 to 1")


def check_skips(skips: Skips, most: float) -> None:
    """Stops a run that would leave out more than a few records, and more than this share of them.

    Many unreadable records are more likely good ones in another form than damage.
    """
    if skips.count <= FEW or skips.count <= most * skips.read:
        return
    share = skips.count / skips.read
    enough = math.ceil(share * 1000) / 1000
    raise SourceError(
        f"{skips.first}: the first of {skips.count:,} unreadable records among {skips.read:,} ({share:.1%}), which is more than "
        f"--max-skipped {most:g}; if they are good, read them by other options or apart from the others; if they are damaged, "
        f"go on without them: --max-skipped {enough:g}; what was read is kept"
    )


def count_lines(opened: Callable[[], IO[bytes]]) -> int:
    """The lines of a file that is left out whole, as far as it can be read; at least 1."""
    count, is_ended = 0, True
    with contextlib.suppress(Exception), opened() as file:  # whatever is wrong with the file
        while block := file.read(BLOCK):
            count += block.count(b"\n")
            is_ended = block.endswith(b"\n")
    return max(1, count + (not is_ended))


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
