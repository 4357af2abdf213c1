"""The second half of ``millrace demo``: a table of sensors that do not exist, as Parquet, and the store made of it."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

FEATURES = ["temperature", "pressure", "flow", "load"]
TARGET = ["temperature"]
VAL = 0.1  # of the rows of each sensor, the last ones


def write_table(path: str, sensors: int = 60, rows: int = 1200) -> int:
    """Sensors with daily and weekly waves, drift and noise, one row per hour, not in order; returns the rows."""
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
    arrays = {
        name: np.asarray(values) if name == "sensor" else np.concatenate(values) for name, values in columns.items()
    }
    arrays["time"] = arrays["time"].astype("datetime64[s]")
    parquet.write_table(pyarrow.table({name: pyarrow.array(values[order]) for name, values in arrays.items()}), path)
    return sensors * rows


def prepare_sensors(table: str, out: str) -> Any:
    """The series store of the table: sorted, scaled, its last rows held back for val."""
    import millrace

    if "prepare_table" in dir(millrace):
        prepare = millrace.prepare_table
        return prepare(
            [table], out, entity="sensor", time="time", features=FEATURES, target=TARGET, val_last=VAL, scale="standard"
        )
    return _prepare_here(table, out)


def _prepare_here(table: str, out: str) -> Any:
    """What ``prepare table`` will do, for this table alone and in memory."""
    from pyarrow import parquet

    from millrace.store.layout import Column
    from millrace.store.manifest import Cuts
    from millrace.store.open import open_store
    from millrace.store.writer import StoreWriter

    if os.path.exists(os.path.join(out, "store.json")):
        return open_store(out)
    read = parquet.read_table(table).sort_by([("sensor", "ascending"), ("time", "ascending")])
    names, firsts = np.unique(read["sensor"].to_numpy(zero_copy_only=False).astype(str), return_index=True)
    values = np.stack([read[name].to_numpy() for name in FEATURES], 1)
    times = read["time"].to_numpy().astype("datetime64[s]").astype(np.int64)
    ends = np.append(firsts[1:], len(values))
    cuts = firsts + ((ends - firsts) * (1 - VAL)).astype(int)
    seen = np.concatenate([values[first:cut] for first, cut in zip(firsts, cuts, strict=True)])
    scaled = (values - seen.mean(0)) / seen.std(0)
    columns = {
        "values": Column("float32", (len(FEATURES),)),
        "time": Column("int64"),
        "name": Column("string", per="record"),
        "cuts": Column("int64", (1,), per="record"),
    }
    meta = {"features": FEATURES, "target": TARGET}
    with StoreWriter(out, kind="series", columns=columns, meta=meta, cuts=Cuts(("train", "val"))) as writer:
        for name, first, cut, end in zip(names.tolist(), firsts, cuts, ends, strict=True):
            rows = slice(first, end)
            writer.append({"values": scaled[rows], "time": times[rows], "name": name, "cuts": [cut - first]})
    return open_store(out)
