"""Which shards of an unfinished store are durable: lines of JSON in ``<out>.partial/``, each synced.

The first line says what is being written, every other one is a ``ShardEntry``. publish.py writes it, and reads
it when a killed run is continued.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from millrace.store import platform
from millrace.store.shard import ShardEntry

NAME = "journal.jsonl"


class Header(msgspec.Struct, frozen=True):
    """What a journal belongs to: the hash of the options, and the snapshot that is appended to."""

    plan: str
    base: str | None


class Journal:
    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME

    def read(self) -> tuple[Header | None, list[ShardEntry], bool]:
        """The header, the entries, and whether that was all; it ends at the first line that is not whole."""
        data = self.path.read_bytes() if self.path.exists() else b""
        lines = data.split(b"\n")
        try:
            # What follows the last newline is a line that the kill cut off, or nothing.
            header = msgspec.json.decode(lines[0], type=Header) if len(lines) > 1 else None
        except msgspec.DecodeError:
            header = None
        entries: list[ShardEntry] = []
        for line in lines[1:-1] if header is not None else ():
            try:
                entries.append(msgspec.json.decode(line, type=ShardEntry))
            except msgspec.DecodeError:
                return header, entries, False
        return header, entries, not lines[-1]

    def write(self, header: Header, entries: Iterable[ShardEntry] = ()) -> None:
        """Starts the journal, whole or not at all."""
        lines = [msgspec.json.encode(line) + b"\n" for line in (header, *entries)]
        platform.write_file(self.path, b"".join(lines), mode=0o644)
        platform.sync_dir(self.path.parent)

    def note(self, entry: ShardEntry) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | platform.O_BINARY)
        try:
            platform.write(fd, msgspec.json.encode(entry) + b"\n", self.path)
            platform.sync(fd, self.path)
        finally:
            os.close(fd)
