"""The store that an append adds to, and what earlier runs said of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.prepare.text.columns import LINES, check_continues
from millrace.prepare.text.options import ReadOptions, parted
from millrace.ragged import Array
from millrace.store.layout import Column
from millrace.store.open import open_store
from millrace.store.reader import read_base
from millrace.text.load import load_tokenizer
from millrace.text.tokenizer import Tokenizer


class Existing:
    """A store made by an earlier preparation; ``base`` is what its next snapshot continues."""

    def __init__(self, out: Path, options: ReadOptions) -> None:
        self._out, self.base = out, read_base(out)
        self.manifest = self.base.manifest
        if self.manifest.tokenizer is None:
            raise ConfigError(f"{out} was not made by prepare text; only such a store can be appended to")
        check_continues(options, self.manifest.columns, out)

    def made(self) -> dict[str, Any]:
        """What the run that made this snapshot said of itself; a killed append may have written behind it."""
        mine = [run for run in runs(self._out) if run.get("fingerprint") == self.manifest.fingerprint]
        return mine[-1] if mine else {}

    @property
    def sources(self) -> Column:
        return self.manifest.layout.columns["source"]

    @property
    def num_lines(self) -> int:
        return self.manifest.totals.rows.get(LINES, 0)

    def tokenizer(self) -> Tokenizer:
        assert self.manifest.tokenizer is not None
        path = self._out / "tokenizer.json"
        return load_tokenizer(self.manifest.tokenizer, path.read_bytes(), str(path))

    def documents(self, column: str) -> Iterator[Array]:
        """What documents are compared by, piece by piece: ``hash`` or, where it has them, ``bands``."""
        found: Any = open_store(self._out).columns[column]
        for _, piece in found.pieces():
            yield piece

    def lines(self) -> Iterator[Array]:
        """Hashes of its lines."""
        column: Any = open_store(self._out).columns["line"]
        for _, piece in column.pieces():
            yield piece


def runs(out: Path) -> list[dict[str, Any]]:
    """What the first run and every append said of themselves; the last line may be of one that was killed."""
    path = out / "provenance.json"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def as_made(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an append: those that decide what a document is and where it goes are the store's own.

    One that was given and says something else is refused; the default says nothing.
    """
    plan = (next(iter(runs(out)), {}) or {}).get("plan") or {}
    stored = {**(plan.get("options") or {}), **(plan.get("shards") or {})}
    reading, cutting = parted({})
    options = dict(given)
    for name in ("tokenizer", "normalize", "val", "test", "val_tail"):
        default = getattr(reading if name in reading.__struct_fields__ else cutting, name)
        if name not in stored or stored[name] == options.get(name, default):
            continue
        if options.get(name, default) != default:
            raise ConfigError(
                f"{out} was made with {name}={stored[name]!r}; an append cannot have {options[name]!r}: leave it out, or "
                "prepare another store"
            )
        if name != "tokenizer":  # which the store keeps itself
            options[name] = stored[name]
    return options
