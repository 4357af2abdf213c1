"""The cursor: where a feed stands, and of what. JSON under 1 KB; restoring it compares before it moves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millrace.errors import ConfigError, ResumeMismatch
from millrace.identity import canonical, digest
from millrace.order.orders import MAX_POSITION, Order
from millrace.view.view import View

VERSION = 1


def identity(view: View, order: Order, seed: int) -> dict[str, Any]:
    """What a cursor belongs to."""
    stores = [store.fingerprint for store in view.stores]
    return {
        "store": stores[0] if len(stores) == 1 else digest(*stores),
        "view": view.fingerprint,
        "order": digest(canonical(order.spec())),
        "seed": seed,
    }


def write(position: int, view: View, order: Order, seed: int) -> dict[str, Any]:
    return {"version": VERSION, "position": position, **identity(view, order, seed)}


def read(state: Mapping[str, Any], view: View, order: Order, seed: int) -> int:
    """The position of a cursor, after checking that it belongs to this store, view, order and seed."""
    if isinstance(state, Mapping) and isinstance(state.get("version"), int) and state["version"] != VERSION:
        raise ConfigError(f"state of version {state['version']}; this millrace reads version {VERSION}")
    if not _is_state(state):
        raise ConfigError(f"this is not a feed's state: {str(state)[:200]}; give what state_dict() returned")
    described = {"store": repr(view.stores), "view": repr(view), "order": repr(order), "seed": str(seed)}
    for part, expected in identity(view, order, seed).items():
        if state.get(part) != expected:
            raise ResumeMismatch(
                f"the saved state belongs to another {part}: saved {state.get(part)}, here {expected} ({described[part]}); "
                f"use the {part} the run was started with, or start anew",
                part=part, expected=expected, found=state.get(part),
            )  # fmt: skip
    return int(state["position"])


def _is_state(state: Any) -> bool:
    kinds = {"version": int, "position": int, "store": str, "view": str, "order": str, "seed": int}
    return (
        isinstance(state, Mapping)
        and all(type(state.get(name)) is kind for name, kind in kinds.items())
        and 0 <= state["position"] <= MAX_POSITION
    )
