"""A disk that is really full: a small tmpfs of its own, for what a simulated ENOSPC cannot show."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path


class NotPossibleHere(RuntimeError):
    """The machine or the user cannot do what a fault tool needs; tests turn it into a skip with this reason."""


@contextlib.contextmanager
def small_disk(num_bytes: int) -> Iterator[Path]:
    """A folder on a file system of this size; needs root, to mount it."""
    if os.name != "posix" or os.geteuid() != 0:
        raise NotPossibleHere("small_disk mounts a tmpfs, which needs root")
    with tempfile.TemporaryDirectory(prefix="small-disk-") as folder:
        options = ["-t", "tmpfs", "-o", f"size={num_bytes},mode=755", "millrace-small-disk", folder]
        mounted = subprocess.run(["mount", *options], capture_output=True, text=True, check=False)
        if mounted.returncode:
            raise NotPossibleHere(f"mount is refused here, even to root: {mounted.stderr.strip()}")
        try:
            yield Path(folder)
        finally:
            # Lazily: a map that is still alive must not keep the test from ending.
            subprocess.run(["umount", "--lazy", folder], check=True)
