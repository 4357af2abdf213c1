"""How fast a feed of a view is by itself, what each stage of it could give, and which settings are fastest."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.errors import ConfigError
from millrace.feed.feed import Feed
from millrace.feed.iteration import Iteration
from millrace.meter import machine
from millrace.meter.verdict import REMEDIES
from millrace.native import memory_bytes, num_cores
from millrace.view.compose import Subset
from millrace.view.view import View

ALONE: dict[str, Any] = {
    "device": "numpy",
    "rank": 0,
    "world": 1,
}  # a measurement is whole, also in one task of several
SLOTS = 6  # batches that a feed has at a time, with the usual depth
PROBED = 256  # samples whose sizes are looked at
WARM_BYTES = 256 << 20  # of the samples that are read twice to measure gather apart from the disk
RESIDENT = 0.99  # of a store in memory: from here on the disk is not asked
ASK_BYTES = 128 << 10  # the disk is asked for at most so much at a time
WARM_BATCHES = 8
MEMORY_SHARE = 0.7  # of memory that a store may take and still stay there
TUNE_S = 30.0
LEAST_EACH = 3  # batches of each worker that a setting with functions is measured by in a round
SLICE_S = 0.25  # the least that a setting is measured for in a round


@dataclass(frozen=True)
class SampleBytes:
    """What one sample takes: of the store, and as it is delivered."""

    read: float
    made: float

    @classmethod
    def of(cls, view: View) -> SampleBytes:
        count = min(len(view), PROBED)
        with Feed(view, batch=max(count, 1), epochs=1, **ALONE) as feed:  # an empty view is refused here
            made = sum(value.nbytes for value in _arrays(next(iter(feed)))) / count
        first = view.stores[0]
        rows = sum(_row_bytes(column, first.num_rows) for column in first.columns.values())
        samples = np.linspace(0, len(view) - 1, count).astype(np.int64)
        return cls(float(np.mean(view.spans(samples).lengths)) * rows, made)

    def check(self, batch: int) -> None:
        """Refuses batches of which memory does not hold the few that a feed has at a time."""
        needed = self.made * batch * SLOTS
        if needed > memory_bytes():
            raise ConfigError(
                f"--batch {batch:,} needs {needed / 2**30:,.0f} GiB for the {SLOTS} batches that a feed has at a time, and this "
                f"machine has {memory_bytes() / 2**30:,.0f}; lower it"
            )


def _row_bytes(column: Any, num_rows: int) -> int:
    """Bytes of a row; none of text and of what belongs to records."""
    dtype, shape = getattr(column, "dtype", None), getattr(column, "shape", ())
    if not isinstance(dtype, np.dtype) or dtype.hasobject or shape[:1] != (num_rows,):
        return 0
    return int(math.prod(shape[1:])) * dtype.itemsize


def _arrays(batch: Mapping[str, Any]) -> Iterator[Any]:
    for value in batch.values():
        array = getattr(value, "values", value)
        if isinstance(array, np.ndarray):
            yield array


def rate(
    batches: Iteration,
    seconds: float,
    *,
    ready: int = 0,
    least: int = 1,
    until: float = math.inf,
    warm: int = WARM_BATCHES,
) -> float:
    """Samples per second of a loop that does nothing else, without its first batches: the start, and those that lay ``ready``.

    At least so many batches are counted, however long they take; not beyond the moment ``until``.
    """
    count = 0
    start = began = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        now = time.perf_counter()
        if number <= ready + 1 or (number <= warm + 2 * ready and now - start < seconds):
            began = now
        else:
            count += batch.num_samples
        if now >= until or (now - began >= seconds and number > ready + least):
            break
    return count / max(time.perf_counter() - began, 1e-9)


def speed(view: View, *, seconds: float = 1.0, **options: Any) -> float:
    """Samples per second of a feed by itself."""
    with Feed(view, **{**ALONE, **options}) as feed:
        return rate(iter(feed), seconds)


def files_of(view: View) -> list[Path]:
    """The files of the stores of a view that lie in folders of this machine."""
    paths = [store.path for store in view.stores if store.path is not None and os.path.isdir(store.path)]
    return [file for path in paths for file in machine.data_files(path)]


def disk_rate(sample: SampleBytes, disk: Mapping[str, float], resident: float) -> float:
    """Samples per second from anywhere on a disk, of which the share ``resident`` needs no read."""
    reads = max(1.0, sample.read / disk["read_bytes"])
    cold = min(disk["random_reads_per_s"] / reads, disk["sequential_bytes_per_s"] / max(sample.read, 1))
    return cold / max(1 - resident, 1 - RESIDENT)


@dataclass(frozen=True)
class Stages:
    """Samples per second that each stage could give by itself on this machine; the least of them limits a feed."""

    batch: int
    rates: dict[str, float]
    sample: SampleBytes
    store_bytes: int
    resident: float | None
    disk: dict[str, float] | None
    memory_bytes_per_s: float
    device_bytes_per_s: float | None

    @classmethod
    def measure(cls, view: View, batch: int, *, seconds: float = 1.0) -> Stages:
        sample = SampleBytes.of(view)
        sample.check(batch)
        files = files_of(view)
        resident = machine.resident_share(files) if files else None
        disk = machine.disk_rates(files, min(int(sample.read) or 1, ASK_BYTES)) if files else None
        memory, device = machine.memory_rate(), machine.device_rate()
        rates = {"gather": _hot_rate(view, batch, sample, seconds), "memory": memory / max(sample.made, 1)}
        if disk is not None and resident is not None and resident < RESIDENT:
            rates["disk"] = disk_rate(sample, disk, resident)
        if device is not None:
            rates["transfer"] = device / max(sample.made, 1)
        store_bytes = sum(file.stat().st_size for file in files)
        return cls(batch, rates, sample, store_bytes, resident, disk, memory, device)

    @property
    def fits(self) -> bool:
        """Whether the whole store stays in memory once it was read: then the disk limits the first pass alone."""
        return self.store_bytes < MEMORY_SHARE * memory_bytes()

    @property
    def limit(self) -> str:
        """The stage that limits; memory alone never does, since gather copies too."""
        left_out = {"memory", "disk"} if self.fits else {"memory"}
        return min((name for name in self.rates if name not in left_out), key=self.rates.__getitem__)

    @property
    def verdict(self) -> str:
        """What limits a feed of this store, from which step time on it does not, and what to change."""
        slowest = self.rates[self.limit]
        first = ""
        if self.fits and self.rates.get("disk", math.inf) < slowest:
            first = f"; the first pass reads the disk, at {self.rates['disk']:,.0f} samples/s"
        return (
            f"{self.limit} limits this store: up to {slowest:,.0f} samples/s. A training step of more than "
            f"{1000 * self.batch / slowest:.3g} ms for {self.batch:,} samples does not wait; for faster steps "
            f"{REMEDIES[self.limit]}{first}"
        )


def _hot_rate(view: View, batch: int, sample: SampleBytes, seconds: float) -> float:
    """Samples per second from memory: so many samples from anywhere, read once before."""
    count = min(len(view), max(batch * WARM_BATCHES, int(WARM_BYTES / max(sample.read, 1))), 1 << 20)
    some = np.sort(np.random.default_rng(0).choice(len(view), count, replace=False)) if count < len(view) else None
    few = view if some is None else Subset(view, some)
    with Feed(few, batch=batch, epochs=1, **ALONE) as warm:
        began = time.perf_counter()
        for _ in warm:
            if time.perf_counter() - began > 2 * seconds:
                break
    return speed(few, batch=batch, seconds=seconds)


# Tuning.


def choices(batch_bytes: float, *, has_functions: bool) -> list[dict[str, Any]]:
    """The settings that are tried: threads, depth and, with functions, processes."""
    cores = num_cores()
    threads = sorted({1, 2, cores, *(2**k for k in range(1, 7) if 2**k <= cores), cores + 2})
    depths = [depth for depth in (2, 4, 8, 16) if depth == 2 or 30 * depth * batch_bytes < memory_bytes() / 4]
    ways = (False, True) if has_functions else (False,)
    # With functions a depth below the workers is the same as theirs. Each process takes a second to start, so they are tried
    # with one depth. Many workers come first: where batches take seconds, time may end before all are measured.
    return [
        {"workers": workers, "depth": depth, **({"processes": way} if has_functions else {})}
        for workers, depth, way in itertools.product(reversed(threads) if has_functions else threads, depths, ways)
        if not has_functions or depth == depths[-1] or (depth >= workers and not way)
    ]


def autotune(view: View, *, batch: int, within_s: float = TUNE_S, **options: Any) -> tuple[dict[str, Any], float]:
    """The fastest settings of a feed, and their samples per second.

    All are measured in turn, so drift of the machine hits all alike; after each round the slower half is dropped.
    """
    end = time.perf_counter() + within_s
    has_functions = options.get("transform") is not None or options.get("decode") is not None
    left = choices(SampleBytes.of(view).made * batch, has_functions=has_functions)
    if options.get("processes"):
        left = [setting for setting in left if setting.get("processes", True)]
    with contextlib.ExitStack() as stack:
        live = []
        for setting in left:
            feed = stack.enter_context(Feed(view, batch=batch, **{**ALONE, **options, **setting}))
            live.append((setting, iter(feed), list[float]()))
        while True:
            left_s = end - time.perf_counter()
            rounds = math.ceil(math.log2(len(live))) + 1 if len(live) > 1 else 1
            slice_s = max(SLICE_S / 5, min(1.5, 0.8 * left_s / rounds / len(live)))
            for setting, batches, found in live:
                if live[0][2] and time.perf_counter() >= end:
                    break
                # Workers often end together: of fewer than several batches of each, chance decides.
                least = LEAST_EACH * setting["workers"] if has_functions else 1
                measured = rate(
                    batches, slice_s, ready=max(setting["depth"], setting["workers"]), least=least, until=end
                )
                if not live[0][2] or time.perf_counter() < end:  # what the end of time cuts short says nothing
                    found.append(measured)
            live.sort(key=lambda entry: -statistics.median(entry[2] or [0.0]))
            if len(live) == 1 or time.perf_counter() >= end:
                return live[0][0], statistics.median(live[0][2])
            live = live[: -(-len(live) // 2)]
