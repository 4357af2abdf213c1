"""``store.times()``: one unit for a store, as dates where it knows the unit."""

import numpy as np
import pytest

import millrace as mr
from millrace.store.times import show_times


def series(times, **meta) -> mr.Store:
    arrays = {"values": np.zeros(len(times)), "time": times}
    return mr.from_arrays(arrays, [0, len(times)], kind="series", meta=meta)


@pytest.mark.parametrize("unit", ["D", "s", "ms", "us", "ns"])
def test_times_are_dates_in_the_unit_of_the_store(unit: str) -> None:
    dates = np.array(["2024-01-01", "2024-03-01"], f"datetime64[{unit}]")
    store = series(dates.view(np.int64), time={"unit": unit})
    assert store.times().dtype == f"datetime64[{unit}]"
    assert np.array_equal(store.times(), dates)
    assert np.array_equal(store.times([1, 0]), dates[::-1])
    assert np.array_equal(store.times(slice(1, 2)), dates[1:])
    assert store.times(0) == dates[0]


@pytest.mark.parametrize("times", [[3, 7], [0.5, 2.25]])
@pytest.mark.parametrize("meta", [{}, {"time": {"unit": None}}, {"time": {"unit": "years"}}, {"time": "day"}])
def test_plain_numbers_stay_numbers(times: list, meta: dict) -> None:
    assert series(times, **meta).times().tolist() == times


def test_they_are_shown_as_iso_dates_with_z_for_utc() -> None:
    ns = np.array(["2024-01-01T09:30", "2024-01-01T09:30:00.25"], "datetime64[ns]")
    local, utc = (series(ns.view(np.int64), time={"unit": "ns", "zone": zone}) for zone in (None, "America/New_York"))
    assert show_times(local, local.times()) == ["2024-01-01T09:30:00", "2024-01-01T09:30:00.25"]
    assert show_times(utc, utc.times()) == ["2024-01-01T09:30:00Z", "2024-01-01T09:30:00.25Z"]


def test_a_store_without_times_says_which_stores_have_them() -> None:
    with pytest.raises(mr.ConfigError, match=r"records store has no time for each row \(columns: x\).*prepare table"):
        mr.from_arrays({"x": [1, 2]}).times()
