"""The plan of a preparation of text: what it reads and how."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.prepare.plan import make_plan
from millrace.prepare.text.existing import Existing
from millrace.prepare.text.options import EARLIER, ReadOptions, relax_options
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.tokens.vocabulary import file_identity

VERSION = 5  # of what parts hold: a run of another version cannot use them
SOURCES = ("sources", "order", "appended to")  # keys of a plan that may change while finished parts stay


def part_plan(reading: ReadOptions, sources: Sequence[Source], existing: Existing | None = None) -> dict[str, Any]:
    """What parts are made of. Where lines are compared with those of a store, parts depend on its snapshot."""
    more = {"tokenizer": file_identity(reading.tokenizer)}
    if existing is not None and reading.dedup_unit == "line":
        more["appended to"] = existing.manifest.fingerprint
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
