"""What this machine can do: rates of memory and disk, what of a file lies in memory, and limits. Each takes a second or less."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

PAGE = mmap.PAGESIZE
READ_S = 0.5  # that a rate of the disk is measured for
AHEAD = 16  # random reads under way at a time, as a feed has them
MOST_RESIDENT = 1 << 40  # bytes of files whose pages are asked about
BLOCK = 4 << 20


def memory_rate(num_bytes: int = 64 << 20) -> float:
    """Bytes per second that one thread copies within memory; a feed copies each byte of a batch once."""
    import numpy as np

    source = np.ones(num_bytes, np.uint8)
    target = np.ones_like(source)
    return num_bytes / _best(lambda: np.copyto(target, source))


def _best(action: Callable[[], Any], rounds: int = 5) -> float:
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def resident_share(paths: Iterable[str | os.PathLike[str]]) -> float | None:
    """The share of these files that lies in memory; None where the system does not say (mincore)."""
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "mincore"):
        return None
    there = total = 0
    for path in paths:
        size = os.path.getsize(path)
        if size == 0 or total > MOST_RESIDENT:
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as area:
            pages = -(-size // PAGE)
            flags = (ctypes.c_ubyte * pages)()
            start = (ctypes.c_char * size).from_buffer(area)
            failed = library.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), flags)
            del start
            if failed:
                return None
            there, total = there + sum(byte & 1 for byte in bytes(flags)), total + pages
    return there / total if total else None


def disk_rates(paths: Iterable[str | os.PathLike[str]], read_bytes: int, seed: int = 0) -> dict[str, float] | None:
    """Bytes per second in a row, and random reads of ``read_bytes`` per second, past the page cache.

    None where files cannot be read past it, such as in memory or through some file systems.
    """
    files = [(os.fspath(path), os.path.getsize(path)) for path in paths]
    files = [entry for entry in files if entry[1] >= BLOCK] or [entry for entry in files if entry[1] >= 2 * PAGE]
    if not files or not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return None
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        opened = []
        for path, size in files if len(files) <= 64 else rng.sample(files, 64):
            try:
                fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
            except OSError:
                return None
            stack.callback(os.close, fd)
            opened.append((fd, size))
        try:
            whole = _rate(opened, BLOCK, lambda k, fd, size: k * BLOCK % max(PAGE, size // PAGE * PAGE), threads=2)
            length = -(-read_bytes // PAGE) * PAGE
            places: Callable[[int, int, int], int] = lambda k, fd, size: rng.randrange(max(1, size // PAGE)) * PAGE  # noqa: E731
            reads = _rate(opened, length, places, threads=AHEAD)
        except OSError:
            return None
    return {"sequential_bytes_per_s": whole[1], "random_reads_per_s": reads[0], "read_bytes": float(length)}


def _rate(
    opened: list[tuple[int, int]], length: int, place: Callable[[int, int, int], int], *, threads: int
) -> tuple[float, float]:
    """Reads and bytes per second, with so many reads under way at a time."""
    from concurrent.futures import ThreadPoolExecutor

    began = time.perf_counter()

    def read(first: int) -> tuple[int, int]:
        buffer, done, num_bytes, k = mmap.mmap(-1, length), 0, 0, first
        while time.perf_counter() - began < READ_S:
            fd, size = opened[k % len(opened)]
            num_bytes += os.preadv(fd, [buffer], place(k, fd, size))
            done, k = done + 1, k + threads
        return done, num_bytes

    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(read, range(threads)))
    seconds = time.perf_counter() - began
    return sum(done for done, _ in found) / seconds, sum(num_bytes for _, num_bytes in found) / seconds


def device_rate(num_bytes: int = 256 << 20) -> float | None:
    """Bytes per second from pinned memory to the first GPU; None without one."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return num_bytes / _best(copy)


def gpu_names() -> list[str]:
    """The GPUs that torch sees."""
    with contextlib.suppress(Exception):
        import torch

        return [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
    return []


def shared_memory_bytes() -> int | None:
    """Free room in /dev/shm."""
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return None


def data_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The files below a folder that have bytes, the largest first."""
    found = [path for path in Path(folder).rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(found, key=lambda path: -path.stat().st_size)
