"""The plan of a preparation of text: what it reads and how, by which a restart knows whether it is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.prepare.functions import source_digest
from millrace.prepare.plan import differences
from millrace.prepare.text.existing import Existing
from millrace.prepare.text.options import EARLIER, ReadOptions, ShardOptions, relax_options
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.tokens.vocabulary import file_identity

VERSION = 5  # of what parts hold: another one does not continue them
SOURCES = ("sources", "order", "appended to")  # of a plan, what may change while finished parts stay


class TextPlan:
    """The plans of these options for given sources."""

    def __init__(self, reading: ReadOptions, cutting: ShardOptions) -> None:
        self._reading, self._cutting = reading, cutting

    def of_parts(self, sources: Sequence[Source], existing: Existing | None = None) -> dict[str, Any]:
        """What parts are made of; where lines of the store are compared, they hold for that snapshot alone."""
        described = {source.path: [source.size, source.mtime_ns, source.ends] for source in sources}
        plan = {
            "version": VERSION, "options": msgspec.to_builtins(self._reading), "sources": described,
            "order": list(described), "tokenizer": file_identity(self._reading.tokenizer),
        }  # fmt: skip
        if self._reading.filter is not None:
            plan["filter"] = source_digest(self._reading.filter, "--filter")
        if existing is not None and self._reading.dedup_unit == "line":
            plan["appended to"] = existing.manifest.fingerprint
        return json.loads(json.dumps(plan))  # type: ignore[no-any-return]

    @property
    def of_shards(self) -> dict[str, Any]:
        """How they are cut."""
        return msgspec.to_builtins(self._cutting)  # type: ignore[no-any-return]

    def whole(self, sources: Sequence[Source]) -> dict[str, Any]:
        return {**self.of_parts(sources), "shards": self.of_shards}

    def changed(self, made: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
        """How this plan differs from that of a finished store, which does not depend on how its parts were cut and kept."""
        return differences(_of_store(made), _of_store(self.whole(sources)))

    def allowed(self, sources: Sequence[Source]) -> Callable[[Any, Any], Any]:
        """(old, new) -> the old plan with those changes of the new one that leave finished parts as they are."""
        has_records = any(source.format != "text" for source in sources)

        def allow(old: Any, new: Any) -> Any:
            options = relax_options(old["options"], new["options"], has_records=has_records)
            # Parts belong to their sources: those of unchanged ones stay, whichever others come and go.
            return {**old, "options": options, **{name: new[name] for name in SOURCES if name in new}}

        return allow


def _of_store(plan: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in plan.get("options", {}).items() if name != "part_bytes"}
    options = {**EARLIER, **options}
    return {name: value for name, value in plan.items() if name != "version"} | {"options": options}
