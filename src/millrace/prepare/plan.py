"""The plan of a preparation: what it was asked for, written down before it starts.

A restart compares its own plan with it, and so knows whether it can continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec

from millrace.errors import ConfigError
from millrace.prepare.files import InputFile
from millrace.prepare.functions import source_digest
from millrace.store import platform

MAX_SHOWN = 6
_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class PlanForm(msgspec.Struct):
    """What every plan holds; a file that lacks it is damaged."""

    options: dict[str, Any]
    sources: dict[str, tuple[int, _Time, str]]  # by path: size, time of change in ns, hash of both ends
    order: list[str]  # of the paths


def make_plan(
    version: int, options: msgspec.Struct, files: Iterable[InputFile], functions: Mapping[str, str | None], **more: Any
) -> dict[str, Any]:
    """The plan for these files. ``functions`` are the user's, by option: another source file makes another plan."""
    described = {file.path: [file.size, file.mtime_ns, file.ends] for file in files}
    plan = {
        "version": version, "options": msgspec.to_builtins(options), "sources": described, "order": list(described), **more,
        **{option: source_digest(name, f"--{option}") for option, name in functions.items() if name is not None},
    }  # fmt: skip
    return json.loads(json.dumps(plan))  # type: ignore[no-any-return]


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What changed from one plan to another, one phrase each."""
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
    """Sources that differ; ``only_some``: those that only one of the plans has."""
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


def show_changes(changes: Sequence[str]) -> str:
    """The first few changes in one line, and how many more there are."""
    more = f" and {len(changes) - MAX_SHOWN:,} more" if len(changes) > MAX_SHOWN else ""
    return "; ".join(changes[:MAX_SHOWN]) + more


def check_plan(
    path: Path,
    plan: Mapping[str, Any],
    allow: Callable[[Any, Any], Any] = lambda old, new: old,
    before_change: Callable[[Any, Any], None] = lambda old, new: None,
    form: type = dict,
) -> None:
    """Writes the plan of a new run; a run that continues must have the same one.

    ``allow(old, new)`` is the old plan with those changes of the new one that leave finished work as it is. If there
    are any, ``before_change`` is called with both plans before the new one is written. ``form`` is the type of a plan.
    """
    plain = json.loads(json.dumps(plan))
    if path.exists():
        try:
            old = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except (OSError, ValueError, RecursionError) as error:
            raise damage_error(path, str(error)) from error
        if old == plain:
            return
        if old.get("version") != plain.get("version"):
            raise ConfigError(
                f"{path.parent} was begun by another version of millrace, whose parts have another form: finish it with "
                "that version, or begin afresh with --restart"
            )
        try:
            msgspec.convert(old, form)
            refused = differences(allow(old, plain), plain)
        except (LookupError, TypeError, ValueError, AttributeError) as error:  # it is JSON, and no plan
            raise damage_error(path, repr(error)) from error
        if refused:
            raise ConfigError(
                f"{path.parent} was begun with other sources or options: {show_changes(refused)}; "
                "run it with those to continue, or begin afresh with --restart"
            )
        before_change(old, plain)
    with platform.writing(path):
        platform.write_file(path, json.dumps(plain, indent=1).encode(), mode=0o644)
        platform.sync_dir(path.parent)


def damage_error(path: Path, why: str) -> ConfigError:
    """For a file of an interrupted preparation that is not what was written."""
    return ConfigError(f"{path} is damaged: {why}; begin afresh with --restart")
