"""The three designs people go through with thousands of entities in Parquet files, side by side.

    python -m benchmarks.problem [--entities 1000] [--rows 8000] [--seconds 10]

1. Everything in RAM: all files loaded and scaled at the start, windows indexed in Python.
2. A Parquet file opened for every sample, in ``__getitem__`` of a torch dataset, by two DataLoader workers.
3. Prepared once by millrace, fed from the store.

Each runs in a process of its own: seconds from its first line to the first batch, peak anonymous memory of it and its
workers, and batches per second of 512 windows (64 + 8 rows of 16 features) after that.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import anonymous_bytes, save, verdict

LOOKBACK, HORIZON, BATCH = 64, 8, 512
FEATURES = [f"f{k}" for k in range(16)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--entities", type=int, default=1000)
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--design", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.design:
        print(json.dumps(measure(DESIGNS[options.design], Path(options.folder), options.seconds)))
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_files(folder / "files", options.entities, options.rows)
        started = time.perf_counter()
        prepare(folder)
        preparing = time.perf_counter() - started
        found = {name: run_apart(name, folder, options) for name in DESIGNS}
    finally:
        shutil.rmtree(folder)
    print(f"  prepared once in {preparing:.1f} s")
    for name, facts in found.items():
        print(
            f"  {name}: first batch after {facts['start_s']:.2f} s, {facts['memory_mb']:.0f} MB, "
            f"{facts['batches_per_s']:.1f} batches/s"
        )
    mine, opening = found["store"], found["open"]
    promises = [
        verdict("seconds to the first batch", mine["start_s"], 1, at_least=False),
        verdict("anonymous memory, GB", mine["memory_mb"] / 1e3, 2, at_least=False),
        verdict(
            "times the batches of opening Parquet per sample", mine["batches_per_s"] / opening["batches_per_s"], 100
        ),
    ]
    table = {"entities": options.entities, "rows_each": options.rows, "prepare_s": preparing}
    save("problem", {**table, "designs": found, "promises": promises})


def make_files(folder: Path, entities: int, rows: int) -> None:
    """One Parquet file per entity."""
    import pyarrow
    from pyarrow import parquet

    folder.mkdir()
    rng = np.random.default_rng(0)
    times = np.datetime64("2015-01-01", "us") + np.arange(rows) * np.timedelta64(60, "s")
    for number in range(entities):
        columns: dict[str, Any] = {"time": times}
        for k, name in enumerate(FEATURES):
            columns[name] = (rng.standard_normal(rows).cumsum() + k).astype(np.float32)
        parquet.write_table(pyarrow.table(columns), folder / f"E{number:06d}.parquet")


def prepare(folder: Path) -> None:
    import millrace

    millrace.prepare_table(str(folder / "files"), folder / "store", time="time", target=["f0"])


def run_apart(name: str, folder: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.problem", "--design", name, "--folder", str(folder)]
    done = subprocess.run([*command, "--seconds", str(options.seconds)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def measure(design: Any, folder: Path, seconds: float) -> dict[str, float]:
    import torch  # noqa: F401 - every one of them trains with it: its import is nobody's start

    watch = Watch()
    started = time.perf_counter()
    batches = design(folder)
    next(batches)
    start = time.perf_counter() - started
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(batches)
        count += 1
    rate = count / (time.perf_counter() - began)
    return {"start_s": start, "memory_mb": watch.stop() / 1e6, "batches_per_s": rate}


class Watch:
    """The most anonymous memory this process and its children had."""

    def __init__(self) -> None:
        self._peak, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        import psutil

        me = psutil.Process(os.getpid())
        while not self._done.wait(0.1):
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    total += anonymous_bytes(process.pid)
                except (OSError, psutil.Error):
                    continue
            self._peak = max(self._peak, total)

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak


def in_memory(folder: Path) -> Iterator[Any]:
    """All files in one frame, scaled by scikit-learn, every window listed, a DataLoader that takes them one by one."""
    import pandas
    import torch
    from sklearn.preprocessing import StandardScaler

    frames = [pandas.read_parquet(file) for file in sorted((folder / "files").glob("*.parquet"))]
    scaler = StandardScaler().fit(pandas.concat(frames)[FEATURES])
    arrays = [scaler.transform(frame[FEATURES]).astype(np.float32) for frame in frames]
    windows = [(k, start) for k, array in enumerate(arrays) for start in range(len(array) - LOOKBACK - HORIZON + 1)]

    class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(windows)

        def __getitem__(self, i: int) -> Any:
            k, start = windows[i]
            return arrays[k][start : start + LOOKBACK], arrays[k][start + LOOKBACK : start + LOOKBACK + HORIZON, :1]

    return _endless(torch.utils.data.DataLoader(Windows(), batch_size=BATCH, shuffle=True))


def opening(folder: Path) -> Iterator[Any]:
    """The file of the entity opened for every sample."""
    import torch
    from pyarrow import parquet

    files = [str(file) for file in sorted((folder / "files").glob("*.parquet"))]
    each = parquet.read_metadata(files[0]).num_rows - LOOKBACK - HORIZON + 1

    class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return len(files) * each

        def __getitem__(self, i: int) -> Any:
            k, start = divmod(i, each)
            table = parquet.read_table(files[k], columns=FEATURES).slice(start, LOOKBACK + HORIZON)
            rows = np.stack([column.to_numpy() for column in table.columns], axis=1)
            return rows[:LOOKBACK], rows[LOOKBACK:, :1]

    loader = torch.utils.data.DataLoader(
        Windows(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        multiprocessing_context="spawn" if os.name == "nt" else "fork",
    )
    return _endless(loader)


def store(folder: Path) -> Iterator[Any]:
    import millrace

    view = millrace.Windows(millrace.open_store(folder / "store"), lookback=LOOKBACK, horizon=HORIZON)
    return iter(millrace.Feed(view, batch=BATCH, seed=7))


def _endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


DESIGNS = {"ram": in_memory, "open": opening, "store": store}

if __name__ == "__main__":
    main()
