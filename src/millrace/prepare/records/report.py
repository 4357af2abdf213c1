"""The report of a preparation of records, its progress, and earlier reports in ``provenance.json``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, StoreError
from millrace.prepare.kind import Earlier
from millrace.prepare.plan import PlanForm
from millrace.prepare.records.read.part import PartDone
from millrace.store.plain_file import read_plain
from millrace.store.shard import ShardEntry


class RecordReport(msgspec.Struct, frozen=True):
    """What a preparation did. After an append it counts what was added."""

    path: str
    fingerprint: str
    is_new: bool
    format: str
    records: dict[str, int]  # by split
    rows: dict[str, int]  # by axis
    shards: dict[str, int]
    bytes: int
    dropped: dict[str, int]
    notes: list[str]
    seconds: float

    def open(self) -> Any:
        """Opens the store."""
        from millrace.store.open import open_store

        return open_store(self.path)


class Tally:
    """How much is read: ``done`` of ``total`` bytes of the sources."""

    def __init__(self, weights: Sequence[int]) -> None:
        self._weights, self._done, self._records = weights, 0, 0
        self._moving: dict[int, Mapping[str, int]] = {}
        self.total = sum(weights)

    @property
    def done(self) -> int:
        moving = (min(counts.get("bytes", 0), self._weights[number]) for number, counts in self._moving.items())
        return self._done + sum(moving)

    @property
    def facts(self) -> dict[str, int]:
        return {"records": self._records + sum(counts.get("records", 0) for counts in self._moving.values())}

    def move(self, number: int, counts: Mapping[str, int]) -> None:
        self._moving[number] = counts

    def add(self, number: int, part: PartDone) -> None:
        self._moving.pop(number, None)
        self._done += self._weights[number]
        self._records += part.records


def summary(
    format_: str,
    parts: Sequence[PartDone],
    records: Mapping[str, int],
    entries: Mapping[str, ShardEntry],
    axes: Sequence[str],
) -> dict[str, Any]:
    """The counts of a run, for its report and provenance."""
    dropped: Counter[str] = Counter()
    for part in parts:
        dropped.update(part.dropped)
    rows = {axis: sum(part.rows[axis] for part in parts) for axis in axes}
    return {
        "format": format_,
        "records": dict(records),
        "rows": rows,
        "shards": {split: sum(entry.split == split for entry in entries.values()) for split in records},
        "bytes": sum(part.bytes for part in parts),
        "dropped": dict(sorted(dropped.items())),
    }


def read_run(out: Path, line: int) -> Earlier:
    """The run of line number ``line`` of provenance.json, -1 for the last."""
    path, remedy = out / "provenance.json", "choose another --out, or remove it yourself"
    try:
        lines = read_plain(str(path)).splitlines()
        run = json.loads(lines[line] if lines else "")
        if isinstance(run, dict) and "format" not in run.get("report", {}):
            raise ConfigError(f"{out} was not made by prepare records; {remedy}")
        msgspec.convert(run["plan"], PlanForm)
        given = {"path": str(out), "fingerprint": run["fingerprint"], "is_new": False, "seconds": 0.0}
        report = msgspec.convert({"notes": [], **run["report"], **given}, RecordReport)
        return Earlier(run["fingerprint"], run["plan"], report)
    except ConfigError:
        raise
    except (StoreError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged ({type(error).__name__}: {error}); {remedy}") from error
