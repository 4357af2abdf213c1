"""Where a store comes from: its snapshots with their dates, and the source files of each.

``millrace info`` and ``explain`` read this. The dates and files are what ``provenance.json`` says; it is outside the
fingerprint and may be missing or damaged, and then a snapshot has the date of its file and no sources.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import StoreError
from millrace.store.folder import Folder

NAME, DATE = "provenance.json", "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True)
class Snapshot:
    """One committed state of a store: its fingerprint, when it was written (UTC), and what was read for it."""

    fingerprint: str
    date: str
    sources: tuple[str, ...]


def snapshots(path: str) -> list[Snapshot]:
    """The snapshots that ``open_store(snapshot=)`` can open, oldest first."""
    folder, names = os.path.join(path, "snapshots"), []
    with contextlib.suppress(OSError):
        names = [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
    # In the order of their lines, whatever the clock said; those without a line are older than the file.
    lines = {str(line.get("fingerprint")): (number, line) for number, line in enumerate(commits(path))}
    found = []
    for fingerprint in names:
        number, line = lines.get(fingerprint, (-1, {}))
        date = line.get("time")
        if not isinstance(date, str):
            written = os.lstat(os.path.join(folder, f"{fingerprint}.json")).st_mtime
            date = time.strftime(DATE, time.gmtime(written))
        found.append((number, date, Snapshot(fingerprint, date, _sources(line))))
    return [snapshot for *_, snapshot in sorted(found, key=lambda entry: entry[:2])]


def source_files(path: str, fingerprint: str) -> list[str]:
    """Every file that was read for a snapshot or for those before it, as preparation named it, in that order."""
    lines = commits(path)
    last = max((k for k, line in enumerate(lines) if line.get("fingerprint") == fingerprint), default=len(lines) - 1)
    return list(dict.fromkeys(source for line in lines[: last + 1] for source in _sources(line)))


def commits(path: str) -> list[Mapping[str, Any]]:
    """One entry for each commit, oldest first; nothing where the file is missing or damaged."""
    found: list[Mapping[str, Any]] = []
    with contextlib.suppress(OSError, StoreError):
        for line in Folder(path).side_file(NAME).splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                found += [value] if isinstance(value := json.loads(line), Mapping) else []
    return found


def _sources(line: Mapping[str, Any]) -> tuple[str, ...]:
    plan = line.get("plan")
    sources = plan.get("sources") if isinstance(plan, Mapping) else None
    return tuple(map(str, sources)) if isinstance(sources, (Mapping, list)) else ()
