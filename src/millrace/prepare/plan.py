"""What a preparation is doing, written down before it starts, so that a restart knows whether it is the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millrace.errors import ConfigError
from millrace.store import platform

MAX_SHOWN = 6


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed from one plan to another, one phrase each.

    ``sources`` of a plan are {path: [size, time of change in ns, hash of its ends]}, ``order`` is their order.
    """
    found = []
    for key in sorted({*old, *new}):
        before, after = old.get(key), new.get(key)
        if before == after:
            continue
        if (prefix, key) == ("", "sources"):
            found += [
                _source(path, (before or {}).get(path), (after or {}).get(path)) for path in _paths(before, after)
            ]
        elif (prefix, key) == ("", "order"):
            if not _paths(old.get("sources"), new.get("sources"), only_some=True):
                was, now = next(pair for pair in zip(before or (), after or (), strict=True) if pair[0] != pair[1])
                found.append(f"the sources come in another order: {now!r} where {was!r} was")
        elif isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{key}: ")
        else:
            found.append(f"{prefix}{key} was {_short(before)}, now {_short(after)}")
    return found


def _paths(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, *, only_some: bool = False) -> list[str]:
    """Of sources that are not the same; ``only_some``: that only one of the plans has."""
    old, new = before or {}, after or {}
    paths = dict.fromkeys((*old, *new))
    return [path for path in paths if ((path in old) != (path in new) if only_some else old.get(path) != new.get(path))]


def _source(path: str, before: Any, after: Any) -> str:
    if before is None or after is None:
        return f"{path!r} is {'new' if before is None else 'missing'}"
    if before[0] != after[0]:
        return f"{path!r} had {before[0]:,} bytes, now {after[0]:,}"
    if before[2] != after[2]:
        return f"{path!r} holds something else"
    times = [f"{datetime.fromtimestamp(value[1] // 10**9, UTC):%Y-%m-%d %H:%M:%S} UTC" for value in (before, after)]
    return f"{path!r} was last written {times[0]}, now {times[1] if times[0] != times[1] else 'again'}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) < 100 else text[:97] + "..."


def check_plan(
    path: Path,
    plan: Mapping[str, Any],
    folder: Path,
    allow: Callable[[Any, Any], Any] = lambda old, new: old,
    before_change: Callable[[list[str]], None] = lambda changed: None,
) -> None:
    """Writes the plan of a new run; a run that continues must have the same one.

    ``allow(old, new)`` is the old plan with those changes of the new one that leave finished work as it is. Of these
    ``before_change`` is told before the new plan is written.
    """
    plain = json.loads(json.dumps(plan))
    if path.exists():
        old = _read_plan(path)
        if old == plain:
            return
        if old.get("version") != plain.get("version"):
            raise ConfigError(
                f"{folder} was begun by another version of millrace, which keeps what it has read in another form: end it with "
                "that, or begin afresh with --restart"
            )
        try:
            changed = differences(allow(old, plain), plain)
            accepted = differences(old, plain)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # it is JSON, and no plan
            raise damaged(path, repr(error)) from error
        if changed:
            more = f" and {len(changed) - MAX_SHOWN} more" if len(changed) > MAX_SHOWN else ""
            raise ConfigError(
                f"{folder} was begun with other sources or options: {'; '.join(changed[:MAX_SHOWN])}{more}; "
                "run it with those to continue, or begin afresh with --restart"
            )
        before_change(accepted)
    with platform.writing(path):
        platform.write_file(path, json.dumps(plain, indent=1).encode(), mode=0o644)
        platform.sync_dir(path.parent)


def _read_plan(path: Path) -> dict[str, Any]:
    try:
        plan = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(plan, dict):
        raise damaged(path, f"it holds a {type(plan).__name__}")
    return plan


def damaged(path: Path, why: str) -> ConfigError:
    """For a file of an interrupted preparation that is not what was written."""
    return ConfigError(f"{path} is damaged: {why}; begin afresh with --restart")
