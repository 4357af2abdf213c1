"""The plans of a preparation of text: what it reads, how, and how it cuts shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from millrace.prepare.plan import differences, make_plan
from millrace.prepare.text.existing import Existing
from millrace.prepare.text.options import EARLIER, ReadOptions, ShardOptions, loosened
from millrace.prepare.text.read.sources import Source
from millrace.prepare.text.tokens.vocabulary import file_identity

VERSION = 5  # of what parts hold: a run of another version cannot use them
SOURCES = ("sources", "order", "appended to")  # keys of a plan that may change while finished parts stay


class TextPlan:
    """The plans of these options for given sources."""

    def __init__(self, reading: ReadOptions, cutting: ShardOptions) -> None:
        self._reading, self._cutting = reading, cutting

    def of_parts(self, sources: Sequence[Source], existing: Existing | None = None) -> dict[str, Any]:
        """What parts are made of. Where lines are compared with those of a store, parts depend on its snapshot."""
        is_compared = existing is not None and self._reading.dedup_unit == "line"
        more = {"appended to": existing.manifest.fingerprint} if existing is not None and is_compared else {}
        identity = file_identity(self._reading.tokenizer)
        return make_plan(VERSION, self._reading, sources, {"filter": self._reading.filter}, tokenizer=identity, **more)

    @property
    def of_shards(self) -> dict[str, Any]:
        return msgspec.to_builtins(self._cutting)  # type: ignore[no-any-return]

    def whole(self, sources: Sequence[Source]) -> dict[str, Any]:
        return {**self.of_parts(sources), "shards": self.of_shards}

    def changed(self, made: Mapping[str, Any], sources: Sequence[Source]) -> list[str]:
        """How this plan differs from that of a finished store; how its parts were cut does not matter."""
        return differences(_of_store(made), _of_store(self.whole(sources)))

    def allowed(self, sources: Sequence[Source]) -> Callable[[Any, Any], Any]:
        """(old, new) -> the old plan with those changes of the new one that leave finished parts as they are."""
        has_records = any(source.format != "text" for source in sources)

        def allow(old: Any, new: Any) -> Any:
            options = loosened(old["options"], new["options"], has_records=has_records)
            # Parts belong to their sources: those of unchanged ones stay, whichever others come and go.
            return {**old, "options": options, **{name: new[name] for name in SOURCES if name in new}}

        return allow


def _of_store(plan: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: value for name, value in plan.get("options", {}).items() if name != "part_bytes"}
    options = {**EARLIER, **options}
    return {name: value for name, value in plan.items() if name != "version"} | {"options": options}
