"""The rows, or the entities, that are train, val and test."""

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
    "time": "move the time (--split time:TIME), or split off the end of each entity (--split tail:0.1)",
    "entity": "take a larger share (--split entity:0.2), or name entities (--split entities:A,B)",
}


def cut_times(options: TableOptions, schema: Schema, first: Any, last: Any) -> list[Any] | None:
    """The times at which the later splits begin, in units of the stored times; None where each entity is cut by rows."""
    if not options.has_time_split or options.val_last or options.test_last:
        return None
    given = {"val": options.val_from, "test": options.test_from}
    if starts := {split: parse_time(text, schema, split) for split, text in given.items() if text is not None}:
        times = list(starts.values())
        if times != sorted(set(times)):
            raise ConfigError(f"val begins at {options.val_from}, test at {options.test_from}; val must begin first")
        for split, time in starts.items():
            if not first < time <= last:
                raise _outside(options, schema, split, time, (first, last))
        return times
    # As fractions: nanoseconds are beyond what floats count.
    ends = [Fraction(last) - (Fraction(last) - Fraction(first)) * share for share in _shares(options.val, options.test)]
    return [float(end) for end in ends] if schema.time_dtype == "float64" else [ceil(end) for end in ends]


def _outside(options: TableOptions, schema: Schema, split: str, time: Any, ends: tuple[Any, Any]) -> ConfigError:
    """The error for a time outside the data: the split on one side of it would have no rows."""
    is_late = time > ends[1]
    empty = split if is_late else options.time_splits[options.time_splits.index(split) - 1]
    at, low, high = (show_time(end, schema.time_unit) for end in (time, *ends))
    return ConfigError(
        f"split {empty!r} would be empty: {split} begins at {at}, {'after the last' if is_late else 'at or before the first'} row, "
        f"as times run from {low} to {high}; {REMEDIES['time']}; what was read is kept"
    )


def _shares(val: float, test: float) -> list[Fraction]:
    """The share behind each cut, exactly as written: 0.1 + 0.7 is 0.8, and 0.29 of 100 rows are 29."""
    parts = Fraction(repr(val)), Fraction(repr(test))
    return [sum(parts, Fraction(0))] * (val > 0) + [parts[1]] * (test > 0)


def parse_time(text: str, schema: Schema, split: str) -> Any:
    """The time at which a split begins, as the store keeps it; without a zone it is UTC where the times have a zone."""
    if schema.time_unit is None:
        try:
            return int(text) if schema.time_dtype == "int64" else float(text)
        except ValueError as error:
            raise ConfigError(f"{split} begins at {text!r}, but the times are plain numbers; give a number") from error
    try:
        parsed = datetime.fromisoformat(text)
        if parsed.tzinfo is not None:
            if schema.time_zone is None:
                raise ConfigError(
                    f"{split} begins at {text!r}, which has a zone, but the times have none; give it without"
                )
            parsed = parsed.astimezone(UTC).replace(tzinfo=None)
        instant: Any = np.datetime64(parsed, "us")
        if len(text) > 26 and "." in text:  # datetime stops at microseconds
            instant = np.datetime64(text.removesuffix("Z"), "ns")
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(
            f"{split} begins at {text!r}, which is no time; give 2023-01-01 or 2023-01-01T12:00:00"
        ) from error
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
            raise ConfigError(f"the split names entity {unknown[0]!r}, which is not in the table ({len(unknown)} such)")
        listed = dict.fromkeys(options.val_entities, 1) | dict.fromkeys(options.test_entities, 2)
        return np.array([listed.get(name, 0) for name in names], np.int64)
    hashes = np.array([xxhash.xxh3_64_intdigest(name.encode()) for name in names], np.uint64)
    share = (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return np.where(share < options.val, 1, np.where(share < options.val + options.test, 2, 0)).astype(np.int64)


def rows_by_split(cuts: Int64s, rows: Int64s, splits: Sequence[str]) -> dict[str, int]:
    """Rows of each split by time over all entities."""
    edges = np.column_stack((np.zeros(len(rows), np.int64), cuts, rows))
    return {split: int((edges[:, k + 1] - edges[:, k]).sum()) for k, split in enumerate(splits)}
