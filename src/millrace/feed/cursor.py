"""The cursor: the position of a feed, and what it belongs to. JSON under 1 KB, checked before it is restored."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigError, ResumeMismatch
from millrace.identity import canonical, digest
from millrace.order.orders import MAX_POSITION, Order
from millrace.view.view import View

VERSION = 1
FINGERPRINT = re.compile("[0-9a-f]{32}")


def identity(view: View, order: Order, seed: int) -> dict[str, Any]:
    """What a cursor belongs to."""
    stores = [store.fingerprint for store in view.stores]
    return {
        "store": stores[0] if len(stores) == 1 else digest(*stores),
        "view": view.fingerprint,
        "order": digest(canonical(order.identity())),
        "seed": seed,
    }


def write(place: Mapping[str, int], view: View, order: Order, seed: int) -> dict[str, Any]:
    """``place`` is the position, and with a budget its ``bin`` and ``max_rows``."""
    return {"version": VERSION, **place, **identity(view, order, seed), **order.state()}


def read(state: Mapping[str, Any], view: View, order: Order, seed: int) -> int:
    """The position of a cursor, after checking that it belongs to this store, view, order and seed."""
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != VERSION:
        raise ConfigError(f"state of version {state['version']}; this millrace reads version {VERSION}")
    if not _is_state(state):
        raise ConfigError(f"this is not a feed's state: {str(state)[:200]}; give what state_dict() returned")
    here = identity(view, order, seed)
    for part in ("store", "view", "seed", "order"):  # the order depends on the seed, so the seed comes first
        saved, own = state[part], here[part]
        if saved != own:
            message = _difference(part, saved, own, view, order)
            raise ResumeMismatch(message, part=part, expected=own, found=saved)
    return int(state["position"])


def read_bin(state: Mapping[str, Any], max_rows: int | None) -> int:
    """The bins delivered of the window at the position, after comparing the budget; 0 without one."""
    saved = state.get("max_rows")
    if saved != max_rows:
        raise ResumeMismatch(
            f"the state is of max_rows={saved}, this feed has max_rows={max_rows}; give max_rows={saved}, or start over",
            part="budget", expected=max_rows, found=saved,
        )  # fmt: skip
    if max_rows is not None and (type(state.get("bin")) is not int or state["bin"] < 0):
        raise ConfigError(f"this is not a state of a feed with max_rows: bin is {state.get('bin')!r}")
    return 0 if max_rows is None else int(state["bin"])


def _difference(part: str, saved: Any, here: Any, view: View, order: Order) -> str:
    if part == "seed":
        return f"the state is of seed {saved}, this feed has seed {here}; give seed={saved}, or start over"
    if part == "store" and (path := _with_snapshot(view, saved)) is not None:
        return (
            f"the state belongs to another snapshot of {path}: the store was appended to since; "
            f"open that snapshot with open_store({path!r}, snapshot={saved!r})"
        )
    described = {"store": repr(view.stores), "view": repr(view), "order": repr(order)}[part]
    return (
        f"the saved state belongs to another {part}: saved {saved}, here {here} ({described}); "
        f"use the {part} the run was started with, or start over"
    )


def _with_snapshot(view: View, fingerprint: str) -> str | None:
    """The path of the view's store, if it has a snapshot of this fingerprint."""
    path = getattr(view.stores[0], "path", None)
    if path is None or len(view.stores) > 1 or FINGERPRINT.fullmatch(fingerprint) is None:
        return None
    return str(path) if os.path.isfile(os.path.join(path, "snapshots", f"{fingerprint}.json")) else None


def _is_state(state: Any) -> bool:
    kinds = {"version": int, "position": int, "store": str, "view": str, "order": str, "seed": int}
    return (
        isinstance(state, Mapping)
        and all(type(state.get(name)) is kind for name, kind in kinds.items())
        and 0 <= state["position"] <= MAX_POSITION
    )
