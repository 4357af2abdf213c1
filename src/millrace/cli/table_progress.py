"""Progress of ``prepare table``: a bar on a terminal, a plain line every few seconds otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from millrace.cli.printing import size
from millrace.cli.text_progress import TextProgress, memory

NOUNS = {"read": "part", "measure": "entity group", "write": "shard"}


class TableProgress(TextProgress):
    """Called as (stage, done, total, facts): parts read, groups of entities measured, shards written."""

    _rows = 0

    def __call__(self, stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
        if stage == "note":
            sys.stderr.write(f"note: {facts['note']}\n")
        else:
            super().__call__(stage, done, total, facts)

    def _facts(self, stage: str, done: int, facts: Mapping[str, Any]) -> list[str]:
        seconds = max(time.monotonic() - self._started, 1e-9)
        if stage == "write":
            self._rows += facts["rows"]
        rows = facts.get("rows", 0) if stage == "read" else self._rows
        rate = [f"{rows:,} rows", f"{rows / seconds:,.0f} rows/s"] if rows else []
        search = [f"pass {facts['quartiles']} for quartiles"] if "quartiles" in facts else []
        return [f"{done:,} {NOUNS[stage]}{'s' * (done != 1)}", *rate, *search, f"{size(memory())} memory"]
