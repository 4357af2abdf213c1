"""The plan of a preparation: what it reads and how; and how the documents of a store were made.

That is in the ``meta`` of its manifest; earlier versions used ``provenance.json``.

An append makes documents in the same way. The store decides every option that says what a document is or where it
goes; another value is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, StoreCorrupt
from millrace.prepare.functions import source_digest
from millrace.prepare.plan import make_plan
from millrace.prepare.quarantine import QUARANTINE
from millrace.prepare.text.options import EARLIER, ReadOptions, ShardOptions, relax_options
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.shards.columns import check_continues
from millrace.prepare.text.tokens.vocabulary import file_identity
from millrace.ragged import Array
from millrace.store.folder import Folder
from millrace.store.layout import Column
from millrace.store.manifest import Manifest
from millrace.store.open import open_store
from millrace.store.plain_file import read_plain
from millrace.store.reader import read_base
from millrace.store.snapshot import Base
from millrace.text.load import stored_tokenizer, tokenizer_by_name
from millrace.text.tokenizer import Tokenizer

# An append must have the first. The second are defaults for it: its files may name their fields otherwise.
FIXED = ("document", "html", "normalize", "min_chars", "filter", "dedup", "dedup_unit", "val", "test", "val_tail")
TAKEN = ("format", "text_field", "mask_field")
# These are fixed if documents were cut, or if some that the store has whole would now be cut.
CUT = ("max_document", "long_documents")
OPTIONS, NAMES, FILTER = "options", "names", "filter source"  # in the meta of a manifest
FROM_ROOT = "from root"  # sources are named from the folder that they share; in earlier versions, as they were given
VERSION = 5  # of what parts hold: a run of another version cannot use them
SOURCES = ("sources", "order", "appended to")  # keys of a plan that may change while finished parts stay


def part_plan(reading: ReadOptions, sources: Sequence[Source], base: str | None = None) -> dict[str, Any]:
    """What parts are made of. Where lines are compared with those of a store, parts depend on its snapshot ``base``."""
    more = {"tokenizer": file_identity(reading.tokenizer)}
    if base is not None and reading.dedup_unit == "line":
        more["appended to"] = base
    return make_plan(VERSION, reading, sources, {"filter": reading.filter}, **more)


def allow_changes(old: Any, new: Any, sources: Sequence[Source]) -> Any:
    """The old plan with those changes of the new one that leave finished parts as they are."""
    has_records = any(source.format != "text" for source in sources)
    options = relax_options(old["options"], new["options"], has_records=has_records)
    # Parts belong to their sources: those of unchanged ones stay, whichever others come and go.
    return {**old, "options": options, **{name: new[name] for name in SOURCES if name in new}}


def store_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan without what a finished store does not depend on: how its parts were cut and kept."""
    options = {name: value for name, value in plan.get("options", {}).items() if name != "part_bytes"}
    return {name: value for name, value in plan.items() if name != "version"} | {"options": {**EARLIER, **options}}


def options_for_meta(reading: ReadOptions, cutting: ShardOptions) -> dict[str, Any]:
    """How documents are made, for the manifest of a new store."""
    options = {**msgspec.to_builtins(reading), **msgspec.to_builtins(cutting)}
    kept = {name: options[name] for name in (*FIXED, *TAKEN, *CUT)}
    if reading.filter is not None:
        kept[FILTER] = source_digest(reading.filter, "--filter")
    return {OPTIONS: kept, NAMES: FROM_ROOT}


def read_runs(out: Path) -> list[dict[str, Any]]:
    """The lines of ``provenance.json``: the first run and every append. The last one may have been killed."""
    path = out / "provenance.json"
    found = []
    for number, line in enumerate(read_plain(str(path)).splitlines() if os.path.lexists(path) else (), start=1):
        try:
            found.append(json.loads(line))
            msgspec.convert(found[-1], _Run)
        except (ValueError, RecursionError) as error:
            raise StoreCorrupt(
                f"{path}, line {number}, is damaged: {error}; copy it again from where the store was made",
                path=str(path),
            ) from error
    return found


class _TextPlan(msgspec.Struct):
    """What is read again of the plan of a run."""

    options: dict[str, Any] = {}
    shards: dict[str, Any] = {}
    sources: dict[str, tuple[int, int, str]] = {}
    order: list[str] = []


class _Run(msgspec.Struct):
    fingerprint: str | None = None
    plan: _TextPlan | None = None
    report: dict[str, Any] = {}
    root: str | None = None
    quarantine_bytes: int = 0


def check_is_text(out: Path, manifest: Manifest) -> None:
    if manifest.tokenizer is None:
        raise ConfigError(f"{out} was not made by prepare text; only such a store can be appended to")


def options_of_append(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an append: those given, else those of the store. A contradiction is refused."""
    if not os.path.exists(out / "store.json"):
        return dict(given)  # refused when the store is opened
    manifest = read_base(out).manifest
    check_is_text(out, manifest)
    stored, has_cut = _stored(out, manifest)
    stored = {**EARLIER, **stored}
    if stored.get("document") == "record":  # as they have it without saying so
        stored = {**stored, "document": None}
    options = {**{name: stored[name] for name in (*FIXED, *TAKEN, *CUT) if name in stored}, **given}
    for name in (*FIXED, *CUT) if has_cut or _cuts_wholes(stored, options) else FIXED:
        if name in stored and options[name] not in (stored[name], "record"):
            raise _refused(out, name, stored[name], options[name])
    if "tokenizer" in given and not _is_tokenizer(given["tokenizer"], manifest.tokenizer or {}):
        raise _refused(out, "tokenizer", (manifest.tokenizer or {}).get("name"), given["tokenizer"])
    return options


def changed_filter(manifest: Manifest, reading: ReadOptions) -> list[str]:
    """A note if the function that chooses documents has changed since the store was made."""
    options = manifest.meta.get(OPTIONS, {})
    if reading.filter is None or FILTER not in options or options[FILTER] == source_digest(reading.filter, "--filter"):
        return []
    return [
        f"--filter {reading.filter} has changed since the store was made: older documents were chosen as it was then"
    ]


def _refused(out: Path, name: str, stored: Any, given: Any) -> ConfigError:
    return ConfigError(
        f"{out} was made with {name}={stored!r}; an append cannot have {name}={given!r}: leave it out, or prepare another "
        "store"
    )


def _stored(out: Path, manifest: Manifest) -> tuple[dict[str, Any], bool]:
    """The options of a store, and whether long documents were cut."""
    if OPTIONS in manifest.meta:
        stored = _checked(manifest.meta[OPTIONS], out / "store.json")
        return stored, stored.get("long_documents") == "split"
    plans = [plan for run in read_runs(out) if (plan := run.get("plan")) and plan.get("options")]
    if not plans:
        raise ConfigError(
            f"{out} does not say how its documents were made: an earlier version wrote that to provenance.json, which is "
            "missing or empty; copy it back to append, or prepare another store"
        )
    made = [_checked({**plan["options"], **plan.get("shards", {})}, out / "provenance.json") for plan in plans]
    for later in made:
        if later.get("long_documents") == "split":
            return {**made[0], **{name: later[name] for name in CUT if name in later}}, True
    return made[0], False


def _checked(options: Any, path: Path) -> dict[str, Any]:
    """Options with the types they are declared with; unknown ones come from another version."""
    try:
        if not isinstance(options, dict):
            raise ValueError(f"options are a {type(options).__name__}")
        for kind in (ReadOptions, ShardOptions):
            msgspec.convert({name: options[name] for name in kind.__struct_fields__ if name in options}, kind)
    except ValueError as error:
        raise StoreCorrupt(f"{path} is damaged: {error}; copy it again", path=str(path)) from error
    return options


def _is_tokenizer(given: str, stored: Mapping[str, Any]) -> bool:
    """Whether this names the tokenizer of a store: by its name, or by a file with the same contents."""
    if Path(given).is_file():
        return bool(tokenizer_by_name(given).describe()["hash"] == stored.get("hash"))
    return given == stored.get("name")


def _cuts_wholes(stored: Mapping[str, Any], options: Mapping[str, Any]) -> bool:
    most = stored.get("max_document", 0)
    return options.get("long_documents") == "split" and options.get("max_document", most) < most


class TextBase:
    """The store that an append adds to."""

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
