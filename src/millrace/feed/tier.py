"""``Feed(tier=)``: where the columns of a view lie while a feed reads them."""

from __future__ import annotations

from millrace.errors import ConfigError
from millrace.view.compose import leaves
from millrace.view.view import View

TIERS = (None, "ram")


def check_tier(tier: str | None, *, uses_processes: bool) -> None:
    if tier not in TIERS:
        raise ConfigError(f"tier={tier!r}; expected 'ram', or None for the store as it lies")
    if tier == "ram" and uses_processes:
        raise ConfigError("tier='ram' with processes=: each worker would need a copy of its own; leave one of them out")


def load_columns(view: View) -> None:
    """Copies the columns that a view reads into memory, once for each store; its batches stay the same."""
    for leaf in leaves(view):
        for field in leaf.fields:
            column = leaf.store.columns[field.column]
            shards, files = getattr(column, "codes", getattr(column, "raw", column)).files()
            shards.load(files)
