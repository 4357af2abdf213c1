"""The times after the last row of a series."""

from __future__ import annotations

import numpy as np

from millrace.ragged import Array, Int64s

DAY = np.timedelta64(1, "D")
SHORTEST_MONTH = 28 * DAY


def next_times(times: Int64s, unit: str | None, count: int) -> Int64s:
    """The ``count`` times after the last of at least two, by their usual step.

    The step is a number of months if every time lies at the same place of its month. Else it is the most frequent
    difference, or the median difference if none is frequent.

    >>> next_times(np.array([0, 10, 20, 50, 60]), None, 3).tolist()
    [70, 80, 90]
    """
    if unit is not None:
        by_months = _next_by_months(times.astype(f"datetime64[{unit}]"), count)
        if by_months is not None:
            return by_months.astype(f"datetime64[{unit}]").astype(np.int64)
    return np.asarray(times[-1] + _usual_step(np.diff(times)) * np.arange(1, count + 1), np.int64)


def _usual_step(steps: Int64s) -> int:
    steps = steps[steps > 0]
    if not len(steps):
        return 0  # all rows have the same time
    values, counts = np.unique(steps, return_counts=True)
    is_frequent = 2 * counts.max() >= len(steps)
    return int(values[counts.argmax()] if is_frequent else np.median(steps))


def _next_by_months(dates: Array, count: int) -> Array | None:
    """The next dates by months, if all dates are the same day of their month, or its last day."""
    for shift in (0 * DAY, DAY):  # a last day of a month plus one day is a first day
        months = (dates + shift).astype("datetime64[M]")
        rest = dates + shift - months
        is_same = (rest == rest[0]).all() and rest[0] < (SHORTEST_MONTH if shift == 0 * DAY else DAY)
        numbers: Int64s = months.astype(np.int64)
        steps = numbers[1:] - numbers[:-1]
        if is_same and (steps > 0).all():
            step = _usual_step(steps)
            return np.asarray((months[-1] + step * np.arange(1, count + 1)) + rest[0] - shift)
    return None
