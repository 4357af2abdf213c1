"""The store that an append adds to: its options, columns and classes stay."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError
from millrace.prepare.quarantine import QUARANTINE
from millrace.prepare.records.formats.known import ITERABLE
from millrace.prepare.records.options import FIXED, RecordOptions
from millrace.prepare.records.read.schema import show
from millrace.store.layout import Column
from millrace.store.plain_file import read_plain
from millrace.store.reader import read_base
from millrace.store.snapshot import Base

FREE = ("format", "cast")  # other files may need others; the columns must be the same


def options_of_append(out: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an append: those given, else those of the store. Another value is refused."""
    if not os.path.exists(out / "store.json"):
        return dict(given)  # refused when the store is opened
    stored = _stored(out, read_base(out).manifest.meta)
    usual = {**msgspec.to_builtins(RecordOptions()), **stored}
    for name, value in given.items():
        if name in FIXED and name not in FREE and value is not None and _listed(value) != usual[name]:
            raise ConfigError(
                f"{out} was made with {name}={usual[name]!r}; an append cannot have {name}={value!r}: leave it out, or "
                "prepare another store"
            )
    # Other files may have another format; records from Python have none.
    kept = {name: stored[name] for name in FIXED if name in stored and name != "format"}
    if "cast" in given:
        given = {**given, "cast": {**stored.get("cast", {}), **given["cast"]}}
    format_ = stored.get("format")
    return {**kept, **({} if format_ in (None, ITERABLE) else {"format": format_}), **given}


def _listed(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _stored(out: Path, meta: Mapping[str, Any]) -> dict[str, Any]:
    options = meta.get("options")
    if (
        not isinstance(options, dict)
        or "format" not in options
        or meta.get("report", {}).get("format") != options["format"]
    ):
        raise ConfigError(f"{out} was not made by prepare records; only such a store can be appended to")
    return options


def classes_in_meta(classes: Mapping[str, Any]) -> Any:
    """The names of classes for ``meta``: of one column as a list, of several by column."""
    plain = {name: list(names) for name, names in classes.items()}
    return next(iter(plain.values())) if len(plain) == 1 else plain or None


class Existing:
    """A store made by an earlier preparation."""

    def __init__(self, out: Path, base: Base) -> None:
        self._out, self._manifest = out, base.manifest
        _stored(out, base.manifest.meta)

    def check(self, columns: Mapping[str, Column], classes: Mapping[str, Any]) -> None:
        """Refuses records with other columns, or with other names for the same numbers."""
        known = self._manifest.layout.columns
        for name in {**known, **columns}:
            mine, theirs = columns.get(name), known.get(name)
            if mine != theirs:
                found = "missing here" if mine is None else show(mine)
                was = "not there" if theirs is None else show(theirs)
                raise ConfigError(
                    f"column {name!r} of {self._out} is {was}, and {found} in what is added; give --columns or --cast"
                )
        stored, given = self._manifest.meta.get("classes"), classes_in_meta(classes)
        if given is not None and stored != given:
            raise ConfigError(
                f"the classes of {self._out} are {_some(stored)}, those of what is added {_some(given)}; use the same folders, "
                "or prepare everything again"
            )

    def quarantine_bytes(self) -> int:
        """How much of ``quarantine.jsonl`` belongs to this snapshot."""
        path = self._out / "provenance.json"
        runs = [json.loads(line) for line in read_plain(str(path)).splitlines()] if path.exists() else []
        mine = [run for run in runs if run.get("fingerprint") == self._manifest.fingerprint]
        size = (self._out / QUARANTINE).stat().st_size if (self._out / QUARANTINE).exists() else 0
        return int(mine[-1].get("quarantine_bytes", size)) if mine else size

    def meta(self, report: Mapping[str, Any]) -> dict[str, Any]:
        """What the next snapshot says: as before, with the counts of both."""
        before = self._manifest.meta.get("report", {})
        counts = {
            name: {key: value.get(key, 0) + report[name].get(key, 0) for key in {**value, **report[name]}}
            if isinstance(value, dict)
            else value + report[name]
            if isinstance(value, int)
            else value
            for name, value in before.items()
        }
        return {**self._manifest.meta, "report": counts}


def _some(names: Any) -> str:
    shown = list(map(str, names or ()))
    return f"{', '.join(shown[:4])}{f' and {len(shown) - 4:,} more' if len(shown) > 4 else ''}" or "none"
