"""Cleans an entity's rows once they are in order of time: repeated times, rows to drop, a regular grid, the calendar.

Missing values stay NaN here, so that statistics see only observed ones; fill.py fills them when rows are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from millrace.errors import ConfigError, SourceError
from millrace.prepare.table.options import STEPS_NS, TableOptions, step_ns
from millrace.prepare.table.read.schema import Schema
from millrace.prepare.table.settle.index import Block, Slice, slice_rows
from millrace.ragged import Array, Int64s

MAX_GRID = 1000  # rows of a grid for each row that was read; more is a wrong step, or a wrong time
# The length of each cycle, its unit, and the unit in which it begins.
CYCLES = {
    "minute": (60, "m", "h"), "hour": (24, "h", "D"), "dayofweek": (7, "D", "W"), "dayofmonth": (31, "D", "M"),
    "dayofyear": (366, "D", "Y"), "month": (12, "M", "Y"),
}  # fmt: skip


class Cleaner:
    """Cleans entities by the options; counts the rows it drops and adds."""

    def __init__(self, options: TableOptions, schema: Schema) -> None:
        self._options, self._schema = options, schema
        self._drop = np.array([options.policy(name)[0] == "drop" for name in schema.role.features])
        self._step = grid_step(options.freq, schema)
        self.dropped: Counter[str] = Counter()

    def rows(self, name: str, slices: Iterable[Slice], after: Any = None) -> Iterator[Slice]:
        """The rows that stay, in order of time, each time once; ``after`` is the last time of the entity in the store."""
        clean = (self._without_nulls(self._unique(name, part)) for part in slices)
        rows = (part for part in clean if len(part.time))
        return rows if self._step is None else self._grid(name, rows, self._step, after)

    def plain(self, block: Block) -> Array:
        """For each entity of a block, whether its rows stay as they are; without a grid."""
        repeats = block.time[1:] == block.time[:-1]
        repeats[block.offsets[1:-1] - 1] = False
        is_plain = ~block.gaps if self._drop.any() else np.ones(len(block.gaps), bool)
        is_plain[np.searchsorted(block.offsets, np.flatnonzero(repeats), side="right") - 1] = False
        return is_plain

    def _unique(self, name: str, rows: Slice) -> Slice:
        repeats = rows.time[1:] == rows.time[:-1]
        if not repeats.any():
            return rows
        how = self._options.duplicates
        if how == "error":
            when = show_time(rows.time[1:][repeats][0], self._schema.time_unit)
            raise SourceError(
                f"entity {name!r} has {when} twice; keep one of such rows with --duplicates first, last or mean",
                entity=name, at=rows.time[1:][repeats][0].item(),
            )  # fmt: skip
        self.dropped["duplicate time"] += int(repeats.sum())
        starts = np.flatnonzero(np.concatenate(([True], ~repeats)))
        if how == "mean":
            return self._averaged(rows, starts)
        return rows.take(starts if how == "first" else np.append(starts[1:], len(rows.time)) - 1)

    def _averaged(self, rows: Slice, starts: Int64s) -> Slice:
        """The mean of the observed values at each time; categories of the first row."""
        observed = ~np.isnan(rows.values)
        counts = np.add.reduceat(observed, starts, axis=0, dtype=np.int64)
        known = np.where(observed, rows.values, 0).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            means = np.add.reduceat(known, starts, axis=0) / counts
            if np.isinf(means).any():  # the sum is too large for a float, the mean is not
                shares = known / np.repeat(np.maximum(counts, 1), np.diff([*starts, len(known)]), axis=0)
                low, high = (reduce.reduceat(known, starts, axis=0) for reduce in (np.minimum, np.maximum))
                means = np.where(np.isinf(means), np.clip(np.add.reduceat(shares, starts, axis=0), low, high), means)
        return rows.take(starts)._replace(values=means.astype(rows.values.dtype))

    def _without_nulls(self, rows: Slice) -> Slice:
        if not rows.has_gaps or not self._drop.any():
            return rows
        is_null = np.asarray(np.isnan(rows.values[:, self._drop]).any(axis=1))
        self.dropped["null"] += int(is_null.sum())
        return rows.take(~is_null)

    def _grid(self, name: str, slices: Iterable[Slice], step: int, after: Any) -> Iterator[Slice]:
        """Every step from the first time (or the one after the store's last) to the last; new rows are all missing."""
        origin, done, num_read = (None, 0, 0) if after is None else (int(after), 1, 0)
        for rows in slices:
            if origin is None:
                origin = int(rows.time[0])
            places, rest = np.divmod(rows.time.astype(np.int64) - origin, step)
            if rest.any():
                unit = self._schema.time_unit
                when, start = show_time(rows.time[np.flatnonzero(rest)[0]], unit), show_time(origin, unit)
                raise SourceError(
                    f"entity {name!r} has {when}, which is not on the grid of {self._options.freq} from {start}; "
                    "round the times with --transform, or choose another --freq"
                )
            num_read += len(places)
            total = int(places[-1]) + 1
            if total > MAX_GRID * num_read + MAX_GRID:
                raise SourceError(
                    f"entity {name!r} would have {total:,} rows on the grid of {self._options.freq} for {num_read:,} that were read"
                    "; choose a coarser --freq, or look at its times"
                )
            yield from self._filled_grid(rows, places, range(done, total), origin, step)
            done = total

    def _filled_grid(self, rows: Slice, places: Int64s, wanted: range, origin: int, step: int) -> Iterator[Slice]:
        room = slice_rows(rows.values.shape[1])
        if len(wanted) == len(places):
            yield rows
            return
        self.dropped["grid rows added"] += len(wanted) - len(places)
        for first in range(wanted.start, wanted.stop, room):
            last = min(first + room, wanted.stop)
            low, high = np.searchsorted(places, [first, last])
            there = places[low:high] - first
            values = np.full((last - first, rows.values.shape[1]), np.nan, rows.values.dtype)
            categorical = np.zeros((last - first, rows.categorical.shape[1]), np.int32)
            values[there], categorical[there] = rows.values[low:high], rows.categorical[low:high]
            time = origin + step * np.arange(first, last, dtype=np.int64)
            yield Slice(time, values, categorical, rows.has_gaps or len(there) < last - first)


def grid_step(freq: str | None, schema: Schema) -> int | None:
    """The step of the grid in units of the stored times."""
    if freq is None:
        return None
    if schema.time_unit is None:
        raise ConfigError(f"--freq {freq}: the times are plain numbers, which have no length; leave it out")
    step, rest = divmod(step_ns(freq), STEPS_NS[schema.time_unit])
    if rest or step == 0:
        raise ConfigError(f"--freq {freq} is not a whole number of {schema.time_unit}, the unit of the times")
    return step


def calendar_names(parts: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{part}_{wave}" for part in parts for wave in ("sin", "cos"))


def local_times(time: Array, unit: str, zone: str | None) -> Array:
    """The local time in the zone of times that are stored in UTC; times without a zone stay as they are."""
    if zone is None:
        return time
    import pyarrow
    from pyarrow import compute

    try:
        local: Array = compute.local_timestamp(pyarrow.array(time, pyarrow.timestamp(unit, zone))).to_numpy()
        return local.view(np.int64)
    except pyarrow.ArrowException as error:
        raise ConfigError(
            f"--calendar: zone {zone!r} of the times is unknown here ({error}); install tzdata"
        ) from error


def calendar(time: Array, unit: str, parts: Iterable[str], zone: str | None = None) -> Array:
    """The place of each time in its cycles, as sine and cosine, so that the end of a cycle meets its beginning.

    Hours and days are those of the zone of the times. A week begins on Monday.
    """
    when = local_times(time, unit, zone).view(f"datetime64[{unit}]")
    waves: list[Array] = []
    for part in parts:
        length, step, cycle = CYCLES[part]
        if cycle == "W":  # 1 January 1970 was a Thursday; Monday is 0
            phase = (when.astype("datetime64[D]").astype(np.int64) + 3) % 7
        else:
            counted = when.astype(f"datetime64[{step}]")
            phase = (counted - counted.astype(f"datetime64[{cycle}]")).astype(np.int64)
        angle = phase * (2 * np.pi / length)
        waves += [np.sin(angle), np.cos(angle)]
    return np.stack(waves, axis=1)


def show_time(value: Any, unit: Any) -> str:
    """A stored time for people."""
    plain = value.item() if hasattr(value, "item") else value
    if unit is None:
        return str(plain)
    text = str(np.datetime64(int(plain), unit))
    return (text.rstrip("0").rstrip(".") if "." in text else text).removesuffix("T00:00:00")
