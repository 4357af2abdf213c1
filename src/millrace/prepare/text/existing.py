"""The store that an append adds to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.part import QUARANTINE
from millrace.prepare.text.recipe import CUT, NAMES, OPTIONS, check_is_text, read_runs
from millrace.prepare.text.shards.columns import check_continues
from millrace.ragged import Array
from millrace.store.folder import Folder
from millrace.store.layout import Column
from millrace.store.open import open_store
from millrace.store.snapshot import Base
from millrace.text.load import stored_tokenizer
from millrace.text.tokenizer import Tokenizer


class Existing:
    """A store made by an earlier preparation."""

    def __init__(self, out: Path, base: Base, options: ReadOptions) -> None:
        self._out, self.manifest = out, base.manifest
        check_is_text(out, self.manifest)
        check_continues(options, self.manifest.columns, out)

    def made(self) -> dict[str, Any]:
        """What the run that made this snapshot wrote down. A killed append may have written more."""
        mine = [run for run in read_runs(self._out) if run.get("fingerprint") == self.manifest.fingerprint]
        return mine[-1] if mine else {}

    def root(self) -> str | None:
        """The folder that the names of its sources count from, by its first run."""
        found: str | None = next((run.get("root") for run in read_runs(self._out)), None)
        return found

    def quarantine_bytes(self) -> int:
        """How much of ``quarantine.jsonl`` belongs to this snapshot: all of it if nothing says so."""
        path = self._out / QUARANTINE
        return int(self.made().get("quarantine_bytes", path.stat().st_size if path.exists() else 0))

    def meta(self, options: ReadOptions) -> dict[str, Any]:
        """How documents are made, for the next snapshot: as before, but an append may begin to cut long ones."""
        kept = {name: self.manifest.meta[name] for name in (OPTIONS, NAMES) if name in self.manifest.meta}
        if OPTIONS in kept and options.cuts_documents:
            kept[OPTIONS] = {**kept[OPTIONS], **{name: getattr(options, name) for name in CUT}}
        return kept

    @property
    def sources(self) -> Column:
        return self.manifest.layout.columns["source"]

    def tokenizer(self) -> Tokenizer:
        assert self.manifest.tokenizer is not None
        return stored_tokenizer(Folder(self._out), self.manifest.tokenizer)

    def documents(self, column: str) -> Iterator[Array]:
        """What documents are compared by, piece by piece: ``hash``, ``bands`` if it has them, or ``line`` for lines."""
        found: Any = open_store(self._out).columns[column]
        for _, piece in found.pieces():
            yield piece
