"""What a preparation of a table says of itself when it is done."""

from __future__ import annotations

from typing import Any

import msgspec


class TableReport(msgspec.Struct, frozen=True):
    """Counts for people and machines; everything that was dropped or filled is in it."""

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
    rewritten: dict[str, int] = {}  # of an append: bytes that were copied, bytes that are new

    def open(self) -> Any:
        """The store that was made."""
        from millrace.store.open import open_store

        return open_store(self.path)
