"""What preparations wrote down of themselves, checked when it is read: ``plan.json`` and ``provenance.json``.

The first is of one that was interrupted; the second lies in a store, a line for its preparation and one for each append.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from millrace.errors import ConfigError, StoreError
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.report import TableReport
from millrace.store.plain_file import read_plain

_Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Made(NamedTuple):
    """One line, checked."""

    plan: dict[str, Any]
    options: TableOptions
    report: TableReport  # of the store as it was then


class _Plan(msgspec.Struct):
    options: TableOptions
    sources: dict[str, tuple[int, _Time, str]]
    order: list[str]


def read_made(out: Path, line: int, remedy: str) -> Made:
    """Line number ``line``, -1 for the last; one that is not what ``prepare table`` writes is refused."""
    path = out / "provenance.json"
    try:
        lines = read_plain(str(path)).splitlines()
    except StoreError as error:
        raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from error
    try:
        made = json.loads(lines[line] if lines else "")
        if isinstance(made, dict) and "plan" not in made:
            raise ConfigError(f"{out} was not made by prepare table; {remedy}")
        plan = msgspec.convert(made["plan"], _Plan)
        given = {"path": str(out), "fingerprint": made["fingerprint"], "is_new": False, "seconds": 0.0}
        report = msgspec.convert({**made["report"], **given}, TableReport)
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
    return Made(made["plan"], plan.options, report)
