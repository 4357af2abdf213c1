"""What ``prepare table`` wrote into ``provenance.json`` of a store: a line for the first run and one for each append."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from millrace.errors import ConfigError, StoreError
from millrace.prepare.kind import Earlier
from millrace.prepare.plan import PlanForm
from millrace.prepare.table.options import TableOptions
from millrace.prepare.table.report import TableReport
from millrace.store.plain_file import read_plain


class _Plan(PlanForm):
    options: TableOptions  # type: ignore[assignment]


def read_run(out: Path, line: int, remedy: str) -> Earlier:
    """The run of line number ``line``, -1 for the last. A line that ``prepare table`` did not write is refused."""
    path = out / "provenance.json"
    try:
        lines = read_plain(str(path)).splitlines()
    except StoreError as error:
        raise ConfigError(f"{path} cannot be read ({error}); {remedy}") from error
    try:
        run = json.loads(lines[line] if lines else "")
        if isinstance(run, dict) and "plan" not in run:
            raise ConfigError(f"{out} was not made by prepare table; {remedy}")
        msgspec.convert(run["plan"], _Plan)
        given = {"path": str(out), "fingerprint": run["fingerprint"], "is_new": False, "seconds": 0.0}
        return Earlier(run["fingerprint"], run["plan"], msgspec.convert({**run["report"], **given}, TableReport))
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
