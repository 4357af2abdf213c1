"""``millrace demo``: writes, verifies and reads a small store, so that a newcomer sees one."""

from __future__ import annotations

from typing import Annotated

import typer

EXAMPLE = "millrace demo --out demo-output"


def run(
    out: Annotated[
        str | None, typer.Option(help="Folder for what the demo writes.", show_default="demo-output")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Write, verify and read a small store.

    Takes a few seconds and downloads nothing. Without --out it writes to demo-output, or the next free name.
    """
    import time

    from millrace.cli.console import print_fields, print_json, print_line, size
    from millrace.store.open import open_store
    from millrace.store.verify import verify_store

    started = time.perf_counter()
    path = f"{out or free_name('demo-output')}/sensors"
    fingerprint = write_sensors(path)
    written = time.perf_counter()
    report = verify_store(path)
    checked = time.perf_counter()
    store = open_store(path)
    series = store.columns["name"][0]
    start, stop = store.offsets[:2].tolist()
    mean = float(store.columns["values"][start:stop].mean())
    facts = {
        "store": path,
        "records": store.num_records,
        "rows": store.num_rows,
        "bytes": report.bytes,
        "fingerprint": fingerprint,
        "damage": len(report.damage),
        "first": {"name": series, "rows": stop - start, "mean": mean},
    }
    if as_json:
        print_json(facts)
        return
    print_fields([
        ("wrote", f"{store.num_records:,} sensors, {store.num_rows:,} rows, {size(report.bytes)} in {written - started:.2f} s"),
        ("verified", f"{report.files} files, {len(report.damage)} damaged, in {checked - written:.2f} s"),
        ("read", f"{series}: {stop - start:,} rows, mean {mean:.4f}"),
        ("fingerprint", fingerprint),
    ])  # fmt: skip
    print_line()
    print_line("Try next:")
    for command in (f"millrace info {path}", f"millrace head {path} -n 1", f"millrace verify {path}"):
        print_line(f"  {command}")


def free_name(name: str) -> str:
    """The name, or name-2, name-3, ... if it is taken."""
    import os

    taken = 1
    while os.path.exists(name if taken == 1 else f"{name}-{taken}"):
        taken += 1
    return name if taken == 1 else f"{name}-{taken}"


def write_sensors(path: str, sensors: int = 200) -> str:
    """Random walks of different lengths with their times; the same bytes every time."""
    import numpy as np

    from millrace.store.layout import Column
    from millrace.store.writer import StoreWriter

    rng = np.random.default_rng(7)
    columns = {"values": Column("float32", (4,)), "time": Column("int64"), "name": Column("string", per="record")}
    meta = {"features": ["temperature", "pressure", "flow", "load"]}
    with StoreWriter(path, kind="series", columns=columns, meta=meta) as writer:
        for sensor in range(sensors):
            rows = int(rng.integers(500, 5000))
            values = np.cumsum(rng.normal(size=(rows, 4)), axis=0)
            writer.append({"values": values, "time": np.arange(rows) * 60, "name": f"sensor-{sensor:03d}"})
    assert writer.fingerprint is not None
    return writer.fingerprint
