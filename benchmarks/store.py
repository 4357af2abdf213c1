"""The store: writing against dd on the same disk, memory while writing, verifying, opening many shards.

python -m benchmarks.store [--disk FOLDER] [--gigabytes 2]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import anonymous_bytes, interleave, medians, save, verdict

HOT = "/dev/shm"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--disk", default=".")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    options = parser.parse_args()
    disk = Path(tempfile.mkdtemp(dir=options.disk, prefix="bench-"))
    hot = Path(tempfile.mkdtemp(dir=HOT, prefix="bench-"))
    try:
        figures = {
            "write": bench_write(disk, hot, int(options.gigabytes * 1e9)),
            "memory": bench_memory(disk),
            "verify": bench_verify(hot),
            "open": bench_open(hot),
        }
        save("store", figures)
    finally:
        shutil.rmtree(disk)
        shutil.rmtree(hot)


def bench_write(disk: Path, hot: Path, num_bytes: int) -> dict[str, Any]:
    """The same random bytes from memory to disk, fsync included: dd against StoreWriter."""
    import millrace as mr

    rows = np.random.default_rng(0).integers(0, 2**16, (num_bytes // 64, 32), np.uint16)
    source = hot / "source"
    rows.tofile(source)
    offsets = np.arange(0, len(rows) + 1, 1000)
    offsets = np.append(offsets, len(rows)) if offsets[-1] != len(rows) else offsets

    def dd() -> float:
        target = disk / "dd"
        started = time.perf_counter()
        subprocess.run(["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"], check=True)
        rate = rows.nbytes / (time.perf_counter() - started) / 1e9
        target.unlink()
        return rate

    def ours() -> float:
        target = disk / "store"
        started = time.perf_counter()
        with mr.StoreWriter(target, columns={"rows": mr.Column("uint16", (32,))}) as writer:
            writer.extend({"rows": rows}, offsets)
        rate = rows.nbytes / (time.perf_counter() - started) / 1e9
        shutil.rmtree(target)
        return rate

    rounds = interleave({"dd": dd, "millrace": ours})
    found = medians(rounds)
    source.unlink()
    ratio = verdict("write, share of dd with fsync", found["millrace"] / found["dd"], 0.6)
    return {"gigabytes": rows.nbytes / 1e9, "gb_per_s": found, "rounds": rounds, "promise": ratio}


WRITE_IN_PIECES = """
import sys, numpy as np, millrace as mr
path, pieces = sys.argv[1], int(sys.argv[2])
rows = np.random.default_rng(0).integers(0, 2**16, (1_000_000, 16), np.uint16)
print("ready", flush=True); sys.stdin.readline()
with mr.StoreWriter(path, columns={"rows": mr.Column("uint16", (16,)), "name": mr.Column("string", per="record")}) as writer:
    for piece in range(pieces):
        writer.extend({"rows": rows, "name": [f"{piece}-{k}" for k in range(1000)]}, np.arange(0, len(rows) + 1, 1000))
    for record in range(20_000):
        writer.append({"rows": rows[:200], "name": str(record)})
"""


def bench_memory(disk: Path) -> dict[str, Any]:
    """Anonymous memory of a writer beyond what it has before it writes, for 10 and 100 pieces of 32 MB."""
    peaks = {}
    for pieces in (10, 100):
        target = disk / f"memory-{pieces}"
        command = [sys.executable, "-c", WRITE_IN_PIECES, str(target), str(pieces)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        peak = [0]
        watcher = threading.Thread(target=_watch, args=(process, peak))
        watcher.start()
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
        watcher.join()
        shutil.rmtree(target)
        peaks[f"{pieces * 32} MB"] = peak[0] / 1e6
    largest = max(peaks.values())
    return {
        "peak_mb": peaks,
        "promise": verdict("write, peak anonymous MB of the process", largest, 200, at_least=False),
    }


def _watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    while process.poll() is None:
        try:
            peak[0] = max(peak[0], anonymous_bytes(process.pid))
        except (OSError, ValueError):
            return
        time.sleep(0.02)


def bench_verify(hot: Path) -> dict[str, Any]:
    import millrace as mr
    from millrace.store.verify import verify_store

    rows = np.random.default_rng(0).integers(0, 2**16, 500_000_000, np.uint16)
    with mr.StoreWriter(hot / "verify", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.extend({"tokens": rows}, np.arange(0, len(rows) + 1, 1000))

    def rate(workers: int) -> float:
        started = time.perf_counter()
        report = verify_store(hot / "verify", workers=workers)
        return report.bytes / (time.perf_counter() - started) / 1e9

    rounds = interleave({"1 thread": lambda: rate(1), "2 threads": lambda: rate(2)})
    shutil.rmtree(hot / "verify")
    found = medians(rounds)
    return {"gb_per_s": found, "rounds": rounds, "promise": verdict("verify, GB/s on one core", found["1 thread"], 1.0)}


OPEN_ONE = """
import sys, time, millrace as mr
mr.open_store
started = time.perf_counter()
store = mr.open_store(sys.argv[1])
opened = time.perf_counter()
row = store.columns["tokens"][store.num_rows - 1]
print(opened - started, time.perf_counter() - opened, store.num_rows, store.num_shards)
"""


def bench_open(hot: Path) -> dict[str, Any]:
    """Opening in a fresh process, after imports."""
    promises, figures = [], {}
    for shards, rows, limit in ((1_000, 1_000_000, 0.05), (100_000, 10, 0.5)):
        path = hot / f"open-{shards}"
        linked_store(path, shards, rows)

        def measure(path: Path = path) -> float:
            out = subprocess.run(
                [sys.executable, "-c", OPEN_ONE, str(path)], capture_output=True, text=True, check=True
            )
            return float(out.stdout.split()[0])

        rounds = [measure() for _ in range(5)]
        figures[f"{shards} shards, {shards * rows} rows"] = rounds
        promises.append(
            verdict(f"open {shards:,} shards of {rows:,} rows, s", sorted(rounds)[2], limit, at_least=False)
        )
        shutil.rmtree(path)
    return {"seconds": figures, "promises": promises}


def linked_store(path: Path, shards: int, rows: int) -> None:
    """A store of many equal shards, their files hard links to those of one: quick to make, real to open."""
    import millrace as mr
    from millrace.store import manifest as manifests
    from millrace.store.publish import build
    from millrace.store.shard import shard_name

    columns = {"tokens": mr.Column("uint16")}
    with mr.StoreWriter(path, columns=columns) as writer:
        writer.extend({"tokens": np.arange(rows) % 65536}, [0, rows])
    entry = _entry(path)
    first = path / "shards" / "train-00000"
    for number in range(1, shards):
        folder = path / "shards" / shard_name("train", number)
        folder.mkdir()
        for file in first.iterdir():
            os.link(file, folder / file.name)
    entries = [entry.__class__("train", number, entry.records, entry.rows, entry.hashes) for number in range(shards)]
    manifest, table, hashes = build(
        {"kind": "records", "columns": columns, "splits": ("train",)}, ("train",), entries, None
    )
    for name, data in (("shards.bin", table), ("hashes.bin", hashes), ("store.json", manifests.encode(manifest))):
        (path / name).unlink()
        (path / name).write_bytes(data)


def _entry(path: Path) -> Any:
    from millrace.store.reader import read_base
    from millrace.store.shard import ShardEntry

    base = read_base(path)
    table = np.frombuffer(base.table, "<u8")
    hashes = tuple(f"{value:016x}" for value in np.frombuffer(base.hashes, "<u8").tolist())
    return ShardEntry("train", 0, int(table[2]), tuple(table[3:].tolist()), hashes)


if __name__ == "__main__":
    main()
