"""Which rows, or which entities, are train, val and test."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from fractions import Fraction
from math import ceil
from typing import Any

import numpy as np
import xxhash

from millrace.errors import ConfigError
from millrace.prepare.table.options import STEPS_NS, TableOptions
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.clean import show_time
from millrace.ragged import Array, Int64s

SPLITS = ("train", "val", "test")
REMEDIES = {
    "time": "move the time (--val-from), or take shares of each entity's rows (--val-last 0.1)",
    "entity": "take a larger share (--val), or name entities (--val-entities)",
}


def cut_times(options: TableOptions, schema: Schema, first: Any, last: Any) -> list[Any] | None:
    """The times at which the later splits begin, in units of the stored times; None where each entity is cut by rows."""
    if not options.has_time_split or options.val_last or options.test_last:
        return None
    if options.val_from is not None or options.test_from is not None:
        given = (("--val-from", options.val_from), ("--test-from", options.test_from))
        times = [parse_time(text, schema, option) for option, text in given if text is not None]
        if times != sorted(set(times)):
            raise ConfigError(f"--val-from {options.val_from} must lie before --test-from {options.test_from}")
        for (option, text), time in zip([pair for pair in given if pair[1] is not None], times, strict=True):
            if not first < time <= last:
                _refuse_outside(options, schema, f"{option} {text}", time, (first, last))
        return times
    # As fractions: nanoseconds are beyond what floats count.
    ends = [Fraction(last) - (Fraction(last) - Fraction(first)) * share for share in _shares(options.val, options.test)]
    return [float(end) for end in ends] if schema.time_dtype == "float64" else [ceil(end) for end in ends]


def _refuse_outside(options: TableOptions, schema: Schema, given: str, time: Any, ends: tuple[Any, Any]) -> None:
    """A time outside the data leaves the split on one side of it without rows."""
    split, is_late = given[2:].partition("-")[0], time > ends[1]
    before = options.time_splits[options.time_splits.index(split) - 1]
    low, high = (show_time(end, schema.time_unit) for end in ends)
    raise ConfigError(
        f"split {(split if is_late else before)!r} would be empty: {given} lies {'after' if is_late else 'before'} "
        f"all rows, whose times run from {low} to {high}; {REMEDIES['time']}; what was read is kept"
    )


def _shares(val: float, test: float) -> list[Fraction]:
    """What lies behind each cut, as it was written: 0.1 + 0.7 is 0.8, and 0.29 of 100 rows are 29."""
    parts = Fraction(repr(val)), Fraction(repr(test))
    return [sum(parts, Fraction(0))] * (val > 0) + [parts[1]] * (test > 0)


def parse_time(text: str, schema: Schema, option: str) -> Any:
    """A time as the store keeps it; one without a zone is UTC where the times have a zone."""
    if schema.time_unit is None:
        try:
            return int(text) if schema.time_dtype == "int64" else float(text)
        except ValueError as error:
            raise ConfigError(f"{option} {text!r}: the times are plain numbers; give a number") from error
    try:
        parsed = datetime.fromisoformat(text)
        if parsed.tzinfo is not None:
            if schema.time_zone is None:
                raise ConfigError(f"{option} {text!r} has a zone, but the times have none; give it without")
            parsed = parsed.astimezone(UTC).replace(tzinfo=None)
        instant: Any = np.datetime64(parsed, "us")
        if len(text) > 26 and "." in text:  # datetime stops at microseconds
            instant = np.datetime64(text.removesuffix("Z"), "ns")
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{option} {text!r} is no time; give 2023-01-01 or 2023-01-01T12:00:00") from error
    unit = np.datetime_data(instant.dtype)[0]
    num, per = int(instant.astype(np.int64)) * STEPS_NS[unit], STEPS_NS[schema.time_unit]
    return -(-num // per)  # rounded up: rows at or after the time


def last_rows(rows: int, options: TableOptions) -> list[int]:
    """Where an entity of so many rows is cut by shares of its rows."""
    return [rows - int(rows * share) for share in _shares(options.val_last, options.test_last)]


def entity_splits(names: Sequence[str], options: TableOptions) -> Array:
    """The split of each entity (0 train, 1 val, 2 test): by a stable hash of its name, or as listed."""
    if options.split_by != "entity":
        return np.zeros(len(names), np.int64)
    if options.val_entities or options.test_entities:
        unknown = sorted({*options.val_entities, *options.test_entities} - set(names))
        if unknown:
            raise ConfigError(f"--val-entities names {unknown[0]!r}, which is not in the table ({len(unknown)} such)")
        listed = dict.fromkeys(options.val_entities, 1) | dict.fromkeys(options.test_entities, 2)
        return np.array([listed.get(name, 0) for name in names], np.int64)
    hashes = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
    share = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where(share < options.val, 1, np.where(share < options.val + options.test, 2, 0)).astype(np.int64)


def check_splits(options: TableOptions, rows: dict[str, int]) -> None:
    """A split that was asked for must hold rows."""
    for split, found in rows.items():
        if found == 0:
            raise ConfigError(f"split {split!r} would be empty; {REMEDIES[options.split_by]}; what was read is kept")


def rows_by_split(cuts: Int64s, rows: Int64s, splits: Sequence[str]) -> dict[str, int]:
    """Rows of each split by time over all entities."""
    edges = np.column_stack((np.zeros(len(rows), np.int64), cuts, rows))
    return {split: int((edges[:, k + 1] - edges[:, k]).sum()) for k, split in enumerate(splits)}
