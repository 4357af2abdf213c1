"""The report of a preparation of a table, and those in ``provenance.json``: a line for the first run and each append."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, StoreError
from millrace.prepare.kind import Earlier
from millrace.prepare.plan import PlanForm
from millrace.prepare.table.options import TableOptions
from millrace.store.plain_file import read_plain

COUNTS = ("nulls", "infinite", "filled", "leading")  # in the report of a column, these add up over appends


class TableReport(msgspec.Struct, frozen=True):
    """Counts for people and machines, with everything that was dropped or filled.

    After an append, entities, rows, columns, shards and bytes count the whole store; all else counts the append.
    """

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
    missing: dict[str, int] = {}  # by category or static column: rows, or entities, without a value
    added: dict[str, int] = {}  # by an append: rows, entities of the store that got some, new entities
    rows_kept: int = 0  # how many of the rows an earlier attempt read
    rewritten: dict[str, int] = {}  # by an append: bytes that were copied, bytes that are new

    def open(self) -> Any:
        """Opens the store."""
        from millrace.store.open import open_store

        return open_store(self.path)


def merge_reports(before: Mapping[str, Any], report: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The report of an append, with the columns of the whole store; and the report of the whole store."""
    columns = {
        name: {key: value + before["columns"][name][key] if key in COUNTS else value for key, value in column.items()}
        for name, column in report["columns"].items()
    }
    appended = {**report, "columns": columns}
    whole = {
        **appended,
        **{key: before[key] + report[key] for key in ("rows_read", "rows_sorted")},
        "dropped": dict(sorted((Counter(before["dropped"]) + Counter(report["dropped"])).items())),
        "notes": list(dict.fromkeys((*before["notes"], *report["notes"]))),
        "append": {key: report[key] for key in ("added", "rewritten", "rows_read", "dropped")},
    }
    del whole["added"], whole["rewritten"]
    return appended, whole


class _TablePlan(PlanForm):
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
        msgspec.convert(run["plan"], _TablePlan)
        given = {"path": str(out), "fingerprint": run["fingerprint"], "is_new": False, "seconds": 0.0}
        return Earlier(run["fingerprint"], run["plan"], msgspec.convert({**run["report"], **given}, TableReport))
    except ConfigError:
        raise
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
