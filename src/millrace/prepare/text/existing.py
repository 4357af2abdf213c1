"""The store that an append adds to, and what earlier runs said of themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.prepare.text.columns import LINES, check_continues
from millrace.prepare.text.options import ReadOptions
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


# Of the options of a store: an append must have the first, and takes the second where they are left out.
FIXED = ("tokenizer", "document", "normalize", "val", "test", "val_tail")
TAKEN = ("format", "text_field", "mask_field", "min_chars", "filter", "dedup", "dedup_unit")
CUT = ("max_document", "long_documents")  # fixed where documents were cut, or would be that the store has whole


def as_made(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options of an append: those that decide what a document is and where it goes are the store's own.

    One that was given and says something else is refused, also if it is the default. What was not recorded is free.
    """
    plans = [plan for run in runs(out) if isinstance(plan := run.get("plan"), dict)]
    made = [{**(plan.get("options") or {}), **(plan.get("shards") or {})} for plan in plans] or [{}]
    stored, has_cut = made[0], False
    for later in made:
        if later.get("long_documents") == "split":
            stored, has_cut = {**stored, **{name: later[name] for name in CUT}}, True
            break
    if stored.get("document") == "record":  # as they have it without saying so
        stored = {**stored, "document": None}
    options = {**{name: stored[name] for name in (*FIXED, *TAKEN, *CUT) if name in stored}, **given}
    fixed = (*FIXED, *CUT) if has_cut or _cuts_wholes(stored, options) else FIXED
    for name in fixed:
        if name in stored and options[name] not in (stored[name], "record"):
            raise ConfigError(
                f"{out} was made with {name}={stored[name]!r}; an append cannot have {options[name]!r}: leave it out, or "
                "prepare another store"
            )
    if "tokenizer" not in given:
        options.pop("tokenizer", None)  # which the store keeps itself
    return options


def _cuts_wholes(stored: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    most = stored.get("max_document", 0)
    return options.get("long_documents") == "split" and options.get("max_document", most) < most
