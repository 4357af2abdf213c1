"""``--restart``: what an interrupted preparation left behind goes, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

from millrace.store import platform
from millrace.store.ownership import OWNER, is_lease


def begin_afresh(folder: Path) -> None:
    """Empties the folder of an interrupted preparation, whose lock is held, but for what shows that it is ours."""
    with platform.writing(folder, "removing"):
        for name in sorted(os.listdir(folder)):
            if name != OWNER and not is_lease(name):
                platform.remove(folder / name)
        platform.sync_dir(folder)
