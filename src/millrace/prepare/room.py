"""Whether the disk has room for a preparation: told before it starts, refused only where it cannot be enough."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

from millrace.errors import StoreWriteFailed


def check_room(folder: Path, likely: int, certain: int) -> tuple[int, int]:
    """(still needed, free), less what an interrupted run has written; raises where it cannot be enough."""
    places = [path for name in ("parts", "shards") for path in (folder / name).rglob("*")]
    written = sum(path.stat().st_size for path in places if path.is_file())
    free = shutil.disk_usage(folder).free
    if certain - written > free:
        raise StoreWriteFailed(
            f"{folder} needs at least {certain - written:,} bytes, {free:,} are free; free space or choose another disk, "
            "then run the same command again",
            path=str(folder), errno=errno.ENOSPC,
        )  # fmt: skip
    return max(0, likely - written), free
