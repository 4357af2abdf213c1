"""What a preparation of a table says of itself when it is done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

COUNTS = ("nulls", "infinite", "filled", "leading")  # of a column's report: they add up over appends


class TableReport(msgspec.Struct, frozen=True):
    """Counts for people and machines; everything that was dropped or filled is in it.

    Of an append: entities, rows, columns, shards and bytes are those of the store as it is now, all else is of the append.
    """

    path: str
    fingerprint: str
    is_new: bool
    entities: int
    rows: dict[str, int]  # by split; "all" where there are none
    rows_read: int
    rows_sorted: int
    dropped: dict[str, int]
    columns: dict[str, dict[str, Any]]  # by feature: mean, std, min, max, nulls, infinite, filled, leading
    shards: int
    bytes: int
    notes: list[str]
    seconds: float
    missing: dict[str, int] = {}  # of categories and static columns: rows, or entities, without a value
    added: dict[str, int] = {}  # of an append: rows, entities of the store that got some, new entities
    rows_kept: int = 0  # of those read, how many by an earlier attempt
    rewritten: dict[str, int] = {}  # of an append: bytes that were copied, bytes that are new

    def open(self) -> Any:
        """The store that was made."""
        from millrace.store.open import open_store

        return open_store(self.path)


def merge_reports(before: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of an append, with the columns of the whole store; and what the store says of all that was put into it."""
    columns = {
        name: {key: value + before["columns"][name][key] if key in COUNTS else value for key, value in column.items()}
        for name, column in report["columns"].items()
    }
    appended = {**report, "columns": columns}
    whole = {
        **appended,
        **{key: before[key] + report[key] for key in ("rows_read", "rows_sorted")},
        "dropped": dict(sorted((Counter(before["dropped"]) + Counter(report["dropped"])).items())),
        "notes": list(dict.fromkeys((*before["notes"], *report["notes"]))),
        "append": {key: report[key] for key in ("added", "rewritten", "rows_read", "dropped")},
    }
    del whole["added"], whole["rewritten"]
    return appended, whole
