"""``--restart``: what an interrupted preparation left behind goes, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.errors import ConfigError
from millrace.store import platform

OWN = ("lease", "owner.json")  # by which the folder is ours; who holds its lock keeps them


def check_ours(folder: Path) -> None:
    """Before the lock is taken, which would leave its own files there: a folder of someone else is left alone."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "owner.json").is_file():
        raise ConfigError(
            f"--restart would remove {folder}, which no preparation of millrace made (it has no owner.json); "
            "move it away, or choose another --out"
        )


def begin_afresh(folder: Path) -> None:
    """Empties the folder of an interrupted preparation, whose lock is held."""
    with platform.writing(folder, "removing"):
        for name in sorted(os.listdir(folder)):
            if name not in OWN:
                platform.remove(folder / name)
        platform.sync_dir(folder)
