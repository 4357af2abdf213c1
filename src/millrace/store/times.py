"""What the ``time`` column of a series store counts, and how it reads as dates.

A store has one unit of time, ``store.meta["time"]["unit"]``:

* ``D``, ``s``, ``ms``, ``us`` or ``ns``: the column is int64, counted from 1970-01-01. Where ``meta["time"]["zone"]``
  names a time zone, the times are in UTC; otherwise they are the clock times of the source.
* ``None``: the source had plain numbers, and the column holds those numbers (int64 or float64).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.ragged import Array

TEXT = ("string", "dictionary")
UNITS = {"D": "days", "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds"}


def time_unit(store: Any) -> str | None:
    """The unit of the store's times; None where they are plain numbers."""
    described = store.meta.get("time")
    unit = described.get("unit") if isinstance(described, Mapping) else None
    return unit if isinstance(unit, str) and unit in UNITS else None


def time_zone(store: Any) -> str | None:
    """The zone the source's times were in, which are stored in UTC; None where they had none."""
    described = store.meta.get("time")
    zone = described.get("zone") if isinstance(described, Mapping) else None
    return None if zone is None else str(zone)


def has_times(store: Any) -> bool:
    """Whether every row of the store has a time."""
    column = store.layout.columns.get("time")
    return column is not None and column.axis == store.layout.primary and not column.shape and column.dtype not in TEXT


def read_times(store: Any, rows: Any = None) -> Array:
    """The times of some rows (default: all): datetime64 where the store knows its unit, else the numbers."""
    if not has_times(store):
        raise ConfigError(
            f"this {store.kind} store has no time for each row (columns: {', '.join(store.columns)}); stores made by "
            "millrace prepare table or from_pandas have one"
        )
    numbers = np.asarray(store.columns["time"][slice(None) if rows is None else rows])
    unit = time_unit(store)
    return numbers if unit is None else numbers.astype(np.int64).view(f"datetime64[{unit}]")


def show_times(store: Any, times: Array) -> list[Any]:
    """Times as people and JSON read them: ISO dates, with Z where they are UTC; plain numbers stay."""
    if times.dtype.kind != "M":
        return times.tolist()  # type: ignore[no-any-return]
    texts: list[str] = np.datetime_as_string(times).tolist()
    texts = [text.rstrip("0").rstrip(".") if "." in text else text for text in texts]  # 09:30:00.000 is 09:30:00
    return [text + "Z" * (time_zone(store) is not None) for text in texts]
