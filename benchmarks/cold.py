"""The feed on cold data, in global random order, against the disk itself and against plain maps.

    python -m benchmarks.cold [--folder /tmp] [--gigabytes 12] [--rounds 5] [--seconds 2]

W1 windows (see benchmarks/feed.py) on a disk, about 4.6 kB a sample. Before each measurement the page cache is dropped (by
drop_caches as root, else the files from it; no map of them is open then), and it is checked that no page of them is left; fio
reads 8 kB at queue depth 32 past the cache, before and after each round. The files are four times as large as the memory of the
cgroup it runs in, which takes root; once more the feed reads them without that limit, as on a first pass over data that memory
will hold. Needs fio, and a disk with room.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import mmap
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, RandomSampler

import millrace as mr
from benchmarks.common import save, verdict
from benchmarks.handmade import HORIZON, LOOKBACK, TARGET, WindowPerSample
from millrace.native import memory_bytes

BATCH = 512


def make_store(folder: Path, gigabytes: float) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((4_000_000, 16), np.float32)
    columns = {"values": mr.Column("float32", (16,))}
    with mr.StoreWriter(folder / "W1", kind="series", columns=columns, shard_bytes=1 << 30) as writer:
        for _ in range(max(1, round(gigabytes * 1e9 / rows.nbytes))):
            cuts = np.sort(rng.choice(len(rows) - 1, 124, replace=False)) + 1
            writer.extend({"values": rows}, np.concatenate(([0], cuts, [len(rows)])))


def drop(folder: Path) -> None:
    """No page of the files is in memory: as root the kernel drops all it can, else what nobody has mapped."""
    gc.collect()
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    if os.geteuid() == 0:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    left, total = resident(folder)
    assert left <= total // 1000, f"{left:,} of {total:,} pages are still in memory; nothing cold can be measured"


def resident(folder: Path) -> tuple[int, int]:
    """Pages of the files that lie in memory, and all of them."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    left = total = 0
    for path in files(folder):
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as area,
        ):
            pages = -(-len(area) // mmap.PAGESIZE)
            found, start = (ctypes.c_ubyte * pages)(), ctypes.c_char.from_buffer(area)
            failed = mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(area)), found)
            del start
            assert failed == 0, os.strerror(ctypes.get_errno())
            left += int((np.frombuffer(found, np.uint8) & 1).sum())
            total += pages
    return left, total


@contextlib.contextmanager
def limited(num_bytes: int) -> Iterator[None]:
    """This process may use so much memory, page cache included."""
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    old = next((group for _, controllers, group in lines if controllers == "memory"), None)
    root = Path("/sys/fs/cgroup") if old is None else Path("/sys/fs/cgroup/memory")
    before = root / (old if old is not None else lines[0][2]).lstrip("/")
    group = before / f"bench-{os.getpid()}" if old is not None else root / f"bench-{os.getpid()}"
    group.mkdir()
    (group / ("memory.max" if old is None else "memory.limit_in_bytes")).write_text(str(num_bytes))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    memory_bytes.cache_clear()
    try:
        yield
    finally:
        (before / "cgroup.procs").write_text(str(os.getpid()))
        memory_bytes.cache_clear()
        group.rmdir()


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("W1/shards/*/values.f32"))


def fio(folder: Path, seconds: float) -> float:
    drop(folder)
    names = ":".join(map(str, files(folder)))
    options = [
        "--rw=randread",
        "--bs=8k",
        "--iodepth=32",
        "--ioengine=libaio",
        "--direct=1",
        "--time_based",
        "--readonly",
    ]
    size = min(path.stat().st_size for path in files(folder)) // 8192 * 8192 * len(files(folder))
    done = subprocess.run(
        ["fio", "--name=read", f"--filename={names}", f"--runtime={seconds}", f"--size={size}", *options, "--output-format=json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(json.loads(done.stdout)["jobs"][0]["read"]["iops"])


def rate(batches: Iterator[Any], seconds: float, batch: int = BATCH) -> float:
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        next(batches)
        count += batch
    return count / elapsed


def fed(folder: Path, seconds: float, seed: int) -> float:
    drop(folder)
    view = mr.Windows(mr.open_store(folder / "W1"), lookback=LOOKBACK, horizon=HORIZON, target=[TARGET])
    with mr.Feed(view, batch=BATCH, seed=seed) as feed:
        return rate(iter(feed), seconds)


def mapped(folder: Path, seconds: float, seed: int) -> float:
    drop(folder)
    dataset, rng = WindowPerSample(folder), np.random.default_rng(seed)
    return rate((dataset[int(rng.integers(len(dataset)))] for _ in itertools.count()), seconds, 1)


def loaded(folder: Path, seconds: float, seed: int) -> float:
    drop(folder)
    dataset = WindowPerSample(folder)
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    loader = iter(DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=2))
    found = rate(loader, seconds, 32)
    del loader
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--gigabytes", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder, prefix="bench-"))
    try:
        make_store(folder, options.gigabytes)
        limit = sum(path.stat().st_size for path in files(folder)) // 4
        rounds = []
        for seed in range(options.rounds):
            with limited(limit):
                before = fio(folder, options.seconds)
                found = {"millrace": fed(folder, options.seconds, seed)}
                found["fio"] = (before + fio(folder, options.seconds)) / 2
                # Briefly: their read-ahead has the whole file in memory after some seconds.
                found["plain map"] = mapped(folder, options.seconds / 4, seed)
                found["DataLoader, 2 workers"] = loaded(folder, options.seconds / 2, seed)
            found["millrace, a first pass through the page cache"] = fed(folder, options.seconds, seed)
            print("  " + ", ".join(f"{name} {value:,.0f}" for name, value in found.items()))
            rounds.append(found)
    finally:
        shutil.rmtree(folder)

    def times(name: str) -> float:
        return statistics.median(found["millrace"] / found[name] for found in rounds)

    plain = min(times("plain map"), times("DataLoader, 2 workers"))
    promises = [
        verdict("cold, samples/s of fio's reads/s", times("fio"), 0.85),
        verdict("cold, times a plain map or DataLoader", plain, 100),
    ]
    save("cold", {"rounds": rounds, "promises": promises})


if __name__ == "__main__":
    main()
