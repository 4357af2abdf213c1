"""The most memory that preparing a table takes, over all processes, at growing sizes.

    python -m benchmarks.table_memory [--rows 1000000 4000000 16000000] [--workers 2]

It samples the anonymous and shared pages of the command and its workers. It does not count pages of files, which the
kernel can take back. Rows have 16 float32 features and a category, in row groups of about 8 MB and, once, of 128 MB.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
from pyarrow import parquet

from benchmarks.common import anonymous_bytes, save, verdict

FEATURES = 16
GROUP_ROWS = 125_000  # 8 MB of features
LARGE_GROUP_ROWS = 2_000_000  # 128 MB
LIMIT = 1e9
SHAPES = {  # what differs from rows in order of entity and time
    "sorted": {},
    "shuffled": {"is_sorted": False},
    "one entity": {"entities": 1},
    "robust, per entity, grid": {"arguments": ("--scale", "robust", "--per-entity", "--freq", "1s", "--nulls", "interpolate")},
    "row groups of 128 MB": {"group_rows": LARGE_GROUP_ROWS},
}  # fmt: skip


def write_table(
    folder: Path, rows: int, *, entities: int = 200, is_sorted: bool = True, group_rows: int = GROUP_ROWS, seed: int = 0
) -> None:
    """Files of one row group each; unsorted, every entity is in every file and no row in its place."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    each = rows // entities
    for number, first in enumerate(range(0, rows, group_rows)):
        places = np.arange(first, min(first + group_rows, rows))
        if not is_sorted:  # an invertible step through all rows, so that each comes once
            places = (places * 7_368_787 + 13) % rows
        who, when = np.minimum(places // each, entities - 1), places % each
        columns: dict[str, Any] = {
            "entity": pa.array(who.astype(np.int32)),
            "time": pa.array(1_600_000_000_000 + 1000 * (when + (places // each - who) * each)).cast(
                pa.timestamp("ms")
            ),
            "kind": pa.array((who % 7).astype("U1")).dictionary_encode(),
        }
        for k in range(FEATURES):
            column = rng.standard_normal(len(places), np.float32)
            columns[f"f{k}"] = pa.array(column, mask=rng.random(len(places)) < 0.01 if k == 0 else None)
        parquet.write_table(
            pa.table(columns), folder / f"{number:05d}.parquet", row_group_size=group_rows, compression="none"
        )


def peak(source: Path, out: Path, *arguments: str, workers: int = 2) -> int:
    """The most anonymous and shared bytes the command and its workers had together."""
    command = [
        sys.executable, "-m", "millrace", "prepare", "table", str(source), "--out", str(out), "--entity", "entity",
        "--time", "time", "--categorical", "kind", "--split", "tail:0.1", "--workers", str(workers), *arguments,
    ]  # fmt: skip
    most = 0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as running:
        said: list[str] = []
        listener = threading.Thread(target=lambda: said.extend(running.stderr or ()))
        listener.start()
        while running.poll() is None:
            most = max(most, _together(running.pid))
            try:
                running.wait(0.05)
            except subprocess.TimeoutExpired:
                continue
        listener.join()
    if running.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}: {''.join(said)}")
    return most


def _together(pid: int) -> int:
    total = 0
    try:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            total += anonymous_bytes(process.pid)
    except (psutil.Error, OSError):
        return 0  # one of them has just ended: the next look counts
    return total


def memory_curve(sizes: list[int], folder: Path, shape: str = "sorted", *, workers: int = 2) -> dict[int, int]:
    """Peak bytes by the number of rows."""
    options = dict(SHAPES[shape])
    arguments: Any = options.pop("arguments", ())
    found = {}
    for rows in sizes:
        here = folder / f"{rows}"
        try:
            write_table(here / "in", rows, **options)  # type: ignore[arg-type]
            found[rows] = peak(here / "in", here / "out", *arguments, workers=workers)
        finally:
            shutil.rmtree(here, ignore_errors=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000, 16_000_000])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-"))  # on disk: in tmpfs the table would be memory itself
    curves, promises = {}, []
    try:
        for shape in options.shapes:
            curve = memory_curve(options.rows, folder, shape, workers=options.workers)
            curves[shape] = curve
            told = ", ".join(f"{rows / 1e6:g} M rows: {size / 1e6:.0f} MB" for rows, size in curve.items())
            print(f"  {shape}: {told}")
            promises.append(verdict(f"GB at most, {shape}", max(curve.values()) / LIMIT, 1, at_least=False))
    finally:
        shutil.rmtree(folder)
    save("table_memory", {"workers": options.workers, "bytes_by_rows": curves, "promises": promises})


if __name__ == "__main__":
    main()
