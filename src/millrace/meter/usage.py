"""Usage: what this process and its GPU used, read from the system when somebody asks. No thread samples it."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from millrace.native import core

FEED_THREADS = "millrace-"  # names of the threads that make batches
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Usage:
    """Counters since the process began; None where the system does not count. ``rates`` compares two readings."""

    at_s: float
    cpu_s: float
    """CPU time of all threads. In ``rates``, ``cpu_cores``: near the number of cores, the machine has no core to spare."""
    feed_cpu_s: float | None
    """CPU time of the threads that make batches. ``feed_cores`` near ``workers`` while the loop waits: they compute all the
    time, so add workers or make them do less. Near zero while the loop waits: they wait for the disk or the GIL."""
    disk_faults: int
    """Page faults that waited for a disk. ``disk_faults_per_s`` above zero: rows are read where they were not asked for
    ahead."""
    faults: int
    """Page faults answered from memory. ``faults_per_s`` in the ten thousands: memory is mapped again and again, as by a
    transform that allocates large arrays for each batch."""
    disk_read_bytes: int | None
    """Bytes that a disk had to deliver. ``disk_read_per_s`` near what `millrace doctor` measures: the disk is the limit.
    Zero: all data comes from memory."""
    refaults: int | None
    """Of the whole machine: pages read again soon after they were dropped. ``refaults_per_s`` above zero for long: the data
    does not fit into memory, so each pass reads the disk again."""

    @classmethod
    def read(cls) -> Usage:
        usage, io = _resources(), _numbers("/proc/self/io")
        return cls(
            time.perf_counter(), time.process_time(), _cpu_of_threads(FEED_THREADS), usage[0], usage[1],
            io.get("read_bytes:"), _numbers("/proc/vmstat").get("workingset_refault_file"),
        )  # fmt: skip

    def rates(self, earlier: Usage) -> dict[str, float]:
        """What was used per second between two readings."""
        seconds = max(self.at_s - earlier.at_s, 1e-9)
        pairs = {
            "cpu_cores": (self.cpu_s, earlier.cpu_s), "feed_cores": (self.feed_cpu_s, earlier.feed_cpu_s),
            "disk_faults_per_s": (self.disk_faults, earlier.disk_faults), "faults_per_s": (self.faults, earlier.faults),
            "disk_read_per_s": (self.disk_read_bytes, earlier.disk_read_bytes),
            "refaults_per_s": (self.refaults, earlier.refaults),
        }  # fmt: skip
        # Threads that ended take their time with them, so a difference may be below zero.
        return {
            n: max(now - was, 0) / seconds for n, (now, was) in pairs.items() if now is not None and was is not None
        }


@dataclass(frozen=True)
class GpuUsage:
    """One GPU at this moment, by NVML."""

    gpu_utilization: float
    """Share of the last moments in which some kernel ran. Low while the loop does not wait: the loop's own Python is the
    limit. It says nothing about how well the kernels use the GPU: see ``mfu``."""
    gpu_memory_used: float
    """Bytes in use, of all processes. Much room left: a larger batch uses the GPU better."""
    gpu_power_w: float | None
    """Watts. Far below the limit of the card although the utilisation is high: kernels are small, or wait for memory."""

    @classmethod
    def read(cls, index: int = 0) -> GpuUsage | None:
        """None without NVML, a driver or this GPU. ``index`` is that of torch: CUDA_VISIBLE_DEVICES counts."""
        try:
            import pynvml

            handle = _handle(pynvml, index)
            power = None
            with contextlib.suppress(pynvml.NVMLError):
                power = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
            used, busy = pynvml.nvmlDeviceGetMemoryInfo(handle).used, pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        except Exception:  # noqa: BLE001 - NVML is an extra package, and some GPUs (MIG) do not answer
            return None
        return cls(busy / 100, float(used), power)


def _handle(pynvml: Any, index: int) -> Any:
    """The GPU that CUDA numbers so."""
    pynvml.nvmlInit()
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = visible[index] if index < len(visible) else str(index)
    return pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(name)


def _resources() -> tuple[int, int]:
    """Page faults of this process: those that waited for a disk, and the others."""
    try:
        import resource
    except ImportError:  # Windows
        return 0, 0
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_majflt, usage.ru_minflt


def _numbers(path: str) -> dict[str, int]:
    """The lines ``name number`` of a file of the kernel."""
    try:
        with open(path) as file:
            return {words[0]: int(words[1]) for words in map(str.split, file) if len(words) == 2}
    except (OSError, ValueError):
        return {}


def lock_wait_s() -> float:
    """Seconds in which this thread, with its work in the core done, waited for Python's lock (the GIL); 0 without the core."""
    return 0.0 if core is None else core.lock_wait() * 1e-9


def worked_s() -> float:
    """A clock of this thread that stands still while it waits for Python's lock: that time is no work of any stage."""
    return time.perf_counter() - lock_wait_s()


def without_core_s() -> float:
    """Seconds since its start in which this thread could have run, but had no core; 0 where the system does not say."""
    try:
        with open("/proc/thread-self/schedstat") as file:
            return int(file.read().split()[1]) * 1e-9
    except (OSError, ValueError, IndexError):
        return 0.0


def _cpu_of_threads(prefix: str) -> float | None:
    """CPU seconds of this process's threads with such names."""
    total, is_known = 0.0, False
    for thread in threading.enumerate():
        if not thread.name.startswith(prefix):
            continue
        try:
            with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
                total += int(file.read().split()[0]) * 1e-9
                is_known = True
        except (OSError, ValueError, IndexError):
            continue
    return total if is_known else None
