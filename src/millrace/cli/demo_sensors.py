"""The table of the second half of ``millrace demo``: made-up sensors as Parquet, and their store."""

from __future__ import annotations

from typing import Any

import numpy as np

FEATURES = ["temperature", "pressure", "flow", "load"]
TARGET = ["temperature"]
VAL = 0.1  # share of each sensor's last rows for val


def write_table(path: str, sensors: int = 60, rows: int = 1200) -> int:
    """Writes sensors with daily and weekly waves, drift and noise, one row per hour, shuffled; returns the rows."""
    import pyarrow
    from pyarrow import parquet

    rng = np.random.default_rng(7)
    hours = np.arange(rows)
    columns: dict[str, list[Any]] = {name: [] for name in ("sensor", "time", *FEATURES)}
    for sensor in range(sensors):
        phase, level = rng.uniform(0, 24), rng.uniform(10, 30)
        day = np.sin((hours + phase) * 2 * np.pi / 24)
        week = np.sin((hours + phase) * 2 * np.pi / 168)
        drift = np.cumsum(rng.normal(size=rows)) * 0.05
        load = 50 + 20 * day + rng.normal(size=rows) * 2
        columns["sensor"] += [f"sensor-{sensor:03d}"] * rows
        columns["time"].append(np.datetime64("2026-01-01T00", "h") + hours)
        columns["temperature"].append(level + 4 * day + 2 * week + drift + rng.normal(size=rows) * 0.3)
        columns["pressure"].append(1000 + 3 * week + rng.normal(size=rows) * 0.5)
        columns["flow"].append(load * 0.2 + rng.normal(size=rows))
        columns["load"].append(load)
    order = rng.permutation(sensors * rows)
    join = {"sensor": np.asarray}
    arrays = {name: join.get(name, np.concatenate)(values) for name, values in columns.items()}
    arrays["time"] = arrays["time"].astype("datetime64[s]")
    parquet.write_table(pyarrow.table({name: pyarrow.array(values[order]) for name, values in arrays.items()}), path)
    return sensors * rows


def prepare_sensors(table: str, out: str) -> Any:
    """Prepares the table: sorted, scaled, with the last rows of each sensor for val."""
    from millrace.prepare.table.table import prepare_table

    options: dict[str, Any] = {"entity": ("sensor",), "time": "time", "features": FEATURES, "target": TARGET}
    return prepare_table([table], out, **options, val_last=VAL, scale="standard").open()
