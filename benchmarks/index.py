"""What an index costs: anonymous memory of a process, and the time to the first batch, over very many records.

    python -m benchmarks.index [--records 1e8 1e9] [--no-save]

Stores have 16 shards. Half of ``records`` are real offsets on disk, 8 rows each; with ``sparse`` all rows are the last
record's, so that 1e9 records take no disk. A process opens the store, makes a view and a feed, and takes a batch; the
second one has the cache of the first. Its memory is RssAnon + RssShmem beyond that of the same feed over a tiny store.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from benchmarks.common import save
from millrace.store import manifest as manifests
from millrace.store.layout import Layout, num_blocks
from millrace.store.shard import ShardEntry, shard_name
from millrace.store.snapshot import build

SHARDS, ROWS, CHUNK = 16, 8, 1 << 22
MEASURE = """
import sys, time
import millrace as mr
def memory():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return sum(int(lines[name].split()[0]) << 10 for name in ("RssAnon", "RssShmem"))
def first_batch(path):
    store = mr.open_store(path)
    view = mr.Windows(store, lookback=2, horizon=1) if kind == "windows" else mr.Records(store)
    batches = iter(mr.Feed(view, batch=256, seed=7, device="numpy"))
    next(batches)
    return len(view), batches
kind, tiny, large = sys.argv[1:]
first_batch(tiny)
before, began = memory(), time.perf_counter()
samples, batches = first_batch(large)
print(f'{{"samples": {samples}, "first_s": {time.perf_counter() - began:.3f}, "anonymous_mb": {(memory() - before) / 1e6:.0f}}}')
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=float, nargs="+", default=[1e8, 1e9])
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-index-", dir=os.environ.get("TMPDIR")))
    figures: dict[str, Any] = {}
    try:
        make(folder / "tiny", 1000, is_sparse=False)
        for count in map(int, options.records):
            is_sparse = count > 1e8
            make(folder / "large", count, is_sparse=is_sparse)
            for kind in ("records", "windows"):
                for turn in ("first", "second"):
                    found = measure(kind, folder)
                    figures[f"{count:.0e} {kind}, {turn} open"] = found
                    print(f"{count:.0e} {kind}, {turn} open: {found}", flush=True)
            shutil.rmtree(folder / "large")
            shutil.rmtree(folder / "cache", ignore_errors=True)
        if not options.no_save:
            save("index", figures)
    finally:
        shutil.rmtree(folder)


def measure(kind: str, folder: Path) -> dict[str, float]:
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, kind, str(folder / "tiny"), str(folder / "large")],
        env={**os.environ, "MILLRACE_CACHE": str(folder / "cache")}, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def make(path: Path, records: int, *, is_sparse: bool) -> None:
    """A store without the hashes of its blocks, whose values are a hole in a file."""
    columns = {"values": mr.Column("float32")}
    layout, entries = Layout(columns), []
    for number in range(SHARDS):
        count = (number + 1) * records // SHARDS - number * records // SHARDS
        rows = ROWS * count
        folder = path / "shards" / shard_name("train", number)
        folder.mkdir(parents=True)
        sizes = layout.file_bytes(np.array([[count, rows]], np.int64))[0]
        for file, size in zip(layout.files, sizes.tolist(), strict=True):
            (folder / file.name).touch()
            os.truncate(folder / file.name, size)
        with open(folder / layout.files[0].name, "r+b") as offsets:
            for first in range(0, 0 if is_sparse else count + 1, CHUNK):
                offsets.write((np.arange(first, min(first + CHUNK, count + 1)) * ROWS).astype("<i8").tobytes())
            offsets.seek(8 * count)
            offsets.write(np.array([rows], "<i8").tobytes())
        blocks = ("0" * 16,) * int(num_blocks(sizes).sum())
        entries.append(ShardEntry("train", number, count, (rows,), blocks))
    manifest, table, hashes = build({"kind": "records", "columns": columns}, ("train",), entries, None)
    (path / "shards.bin").write_bytes(table)
    (path / "hashes.bin").write_bytes(hashes)
    (path / "store.json").write_bytes(manifests.encode(manifest))


if __name__ == "__main__":
    main()
