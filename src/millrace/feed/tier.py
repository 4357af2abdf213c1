"""``Feed(tier=)``: where the columns of a view lie while a feed reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.errors import ConfigError
from millrace.view.compose import leaves
from millrace.view.view import View

if TYPE_CHECKING:
    from millrace.feed.feed import Feed

TIERS = (None, "ram", "device")


def check_tier(feed: Feed) -> None:
    if feed.tier not in TIERS:
        raise ConfigError(f"tier={feed.tier!r}; expected 'ram', 'device', or None for the store as it lies")
    if feed.device_bytes is not None and feed.tier != "device":
        raise ConfigError(f"device_bytes={feed.device_bytes} is for tier='device', not tier={feed.tier!r}")
    if feed.tier == "ram" and feed.uses_processes:
        raise ConfigError("tier='ram' with processes=: each worker would need a copy of its own; leave one of them out")
    if feed.tier == "device":
        _check_device(feed)


def _check_device(feed: Feed) -> None:
    if not feed.device.startswith("cuda"):
        raise ConfigError(f"tier='device' with device={feed.device!r}; rows lie on a GPU: give device='cuda'")
    asked = {
        "transform": feed.transform, "decode": feed.decode, "processes": feed.processes or None, "queue": feed.queue,
        "max_rows": feed.budget,
    }  # fmt: skip
    if given := [name for name, value in asked.items() if value is not None]:
        raise ConfigError(
            f"tier='device' with {given[0]}=: batches are made on the GPU, and {given[0]} needs them on the host; change "
            "tensors in your loop, or take tier='ram'"
        )


def load_columns(view: View) -> None:
    """Copies the columns that a view reads into memory, once for each store; its batches stay the same."""
    for leaf in leaves(view):
        for field in leaf.fields:
            column = leaf.store.columns[field.column]
            shards, files = getattr(column, "codes", getattr(column, "raw", column)).files()
            shards.load(files)
