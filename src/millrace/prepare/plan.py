"""What a preparation is doing, written down before it starts, so that a restart knows whether it is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.store import platform

MAX_SHOWN = 6


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed from one plan to another, one phrase each."""
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}: ")
        else:
            found.append(f"{prefix}{key} was {_short(before)}, now {_short(after)}")
    return found


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def check_plan(
    path: Path, plan: Mapping[str, Any], folder: Path, allow: Callable[[Any, Any], Any] = lambda old, new: old
) -> None:
    """Writes the plan of a new run; a run that continues must have the same one.

    ``allow(old, new)`` is the old plan with those changes of the new one that leave finished work as it is.
    """
    plain = json.loads(json.dumps(plan))
    if path.exists():
        old = json.loads(path.read_bytes())
        if old == plain:
            return
        changed = differences(allow(old, plain), plain)
        if changed:
            more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            raise ConfigError(
                f"{folder} was begun with other sources or options: {'; '.join(changed[:MAX_SHOWN])}{more}; "
                "run it with those to continue, or remove that folder to start anew"
            )
    with platform.writing(path):
        platform.write_file(path, json.dumps(plain, indent=1).encode(), mode=0o644)
        platform.sync_dir(path.parent)
