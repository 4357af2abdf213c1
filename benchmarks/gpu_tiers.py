"""Rows in the memory of a GPU: steps/s of a forecaster with tier="device", against a batch that already lies there.

    python -m benchmarks.gpu_tiers [--out gpu_tiers.json] [--pairs 15] [--seconds 0.4]

W1 windows and the LSTM of benchmarks/gpu.py, whose docstring says how to build the core in place and how pairs are measured.
First batches are compared with those of the host, byte for byte: windows, tokens, records, a mixture, whole and partly on the
GPU, and states are carried from tier to tier. Then come the pairs at batch 512 and 4,096, the same with 25, 50 and 100 % of
the rows on the GPU, a loop without a model, and the kernels of a gather alone. It takes about two minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import millrace as mr
from benchmarks.common import machine
from benchmarks.gpu import bench, make_store
from millrace.native import core

SHARES = (0.25, 0.5, 1.0)


def views() -> dict[str, mr.View]:
    """Small ones, of every kind."""
    rng = np.random.default_rng(0)
    offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 90, 3_000))))
    rows = rng.standard_normal((int(offsets[-1]), 6)).astype(np.float32)
    tokens = [mr.from_arrays({"tokens": rng.integers(0, 65_536, n).astype(np.uint16)}) for n in (400_000, 90_000)]
    series = mr.from_arrays({"values": rows}, offsets)
    events = mr.from_arrays({"hits": rows, "label": np.arange(3_000)}, offsets)
    blocks = [mr.Blocks(store, length=256) for store in tokens]
    return {
        "windows": mr.Windows(series, lookback=48, horizon=8, lead=3, target=[2]), "blocks": blocks[0],
        "records": mr.Records(events), "padded": mr.Records(events, pad=100, mask=True),
        "mixture": mr.Mixture([(blocks[0], 0.7), (blocks[1], 0.3)]),
    }  # fmt: skip


def num_bytes(view: mr.View) -> int:
    """Of the row columns of a view over one store."""
    names = {field.column for field in view.fields if field.axis is not None}
    columns = [view.store.columns[name] for name in names]
    return sum(int(np.prod(column.shape)) * column.dtype.itemsize for column in columns)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, mr.Ragged):
        return same(one.values, other.values) and same(one.offsets, other.offsets)
    found = other.cpu().numpy()
    return found.dtype == one.dtype and found.shape == one.shape and one.tobytes() == found.tobytes()


def check_batches(view: mr.View, **options: Any) -> None:
    """30 batches that are all held, a state of the host's feed, and one of the GPU's."""
    made: dict[str, Any] = {"batch": 128, "seed": 5}
    host, gpu = mr.Feed(view, device="numpy", **made), mr.Feed(view, device="cuda", tier="device", **made, **options)
    for turn in range(2):
        pairs = list(zip(itertools.islice(host, 30), list(itertools.islice(gpu, 30)), strict=True))
        assert all(np.array_equal(one.samples, other.samples) for one, other in pairs)
        assert all(same(one[name], other[name]) for one, other in pairs for name in one), f"turn {turn}"
        host.close(), gpu.close()
        assert host.state_dict() == gpu.state_dict()
        state = (host if turn else gpu).state_dict()
        host, gpu = (
            mr.Feed(view, device="numpy", **made),
            mr.Feed(view, device="cuda", tier="device", **made, **options),
        )
        host.load_state_dict(state), gpu.load_state_dict(state)


def bare_loop(view: mr.View, size: int, seconds: float, **options: Any) -> float:
    """Samples per second of a loop that only adds up one column."""
    total = torch.zeros((), device="cuda")
    with mr.Feed(view, batch=size, seed=7, device="cuda", **options) as feed:
        batches = iter(feed)
        for _ in range(50):
            total += next(batches)["y"].sum()
        torch.cuda.synchronize()
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(20):
                total += next(batches)["y"].sum()
            count += 20
        torch.cuda.synchronize()
        return count * size / (time.perf_counter() - began)


def kernels(view: mr.View, size: int, group: int) -> dict[str, float]:
    """Microseconds a batch for the gather of x alone, by two calls of torch, over a group of batches."""
    table = torch.from_numpy(np.array(view.store.columns["values"][:])).cuda().view(torch.int32)
    count, width = len(table) - 64 + 1, table.shape[1]
    starts = torch.randint(0, count, (size * group,), device="cuda")
    runs = table.as_strided((count, 64, width), (width, width, 1))
    ways = {"index_select": lambda: runs.index_select(0, starts), "runs[starts]": lambda: runs[starts]}
    found = {}
    for name, way in ways.items():
        times = []
        for _ in range(12):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            way()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / group)
        found[name] = statistics.median(times)
    moved = 2 * size * 64 * width * 4
    told = ", ".join(f"{name} {us:.1f} us ({moved / us / 1e3:,.0f} GB/s)" for name, us in found.items())
    print(f"  kernels, batch {size}, {group} together: {told}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_tiers.json"))
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--part-pairs", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.4, help="per measurement")
    parser.add_argument("--baseline", action="store_true", help="adds a DataLoader, as in benchmarks.gpu")
    options = parser.parse_args()
    assert core is not None, "the C core is not built: see the first lines of benchmarks/gpu.py"
    for name, view in views().items():
        check_batches(view)
        if name != "mixture":
            check_batches(view, device_bytes=num_bytes(view) // 3)
    check_batches(views()["mixture"], device_bytes=600_000)
    print("windows, blocks, records, padded, mixture: batches and states are those of the host, whole and in part")
    base = "/dev/shm" if Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free > 2 << 30 else None
    folder = Path(tempfile.mkdtemp(dir=base, prefix="bench-"))
    try:
        view = make_store(folder)
        check_batches(view)
        print("W1: the same")
        found = [
            bench(view, "LSTM", size, options, wanted, tier="device") for size, wanted in ((512, 0.97), (4096, 0.99))
        ]
        for size in (512, 4096):
            kernels(view, size, 28 if size == 512 else 3)
        parts, options.pairs = [], options.part_pairs
        for size, share in itertools.product((512, 4096), SHARES):
            tier = {"tier": "device", "device_bytes": int(share * num_bytes(view))}
            print(f"{share:.0%} on the GPU, at most {tier['device_bytes']:,} bytes:")
            part = bench(view, "LSTM", size, options, 0.95, **tier)
            part["share"], part["bare"] = share, bare_loop(view, size, options.seconds, **tier)
            report = part["report"]
            fed = statistics.median(pair["feed"] for pair in part["steps_per_s"])
            print(
                f"  hit rate {report['hit_rate']:.3f}, {fed:.1f} steps/s; without a model {part['bare']:,.0f} samples/s"
            )
            parts.append(part)
        streamed = {size: bare_loop(view, size, options.seconds) for size in (512, 4096)}
        print(f"streamed from memory, without a model: {streamed[512]:,.0f} and {streamed[4096]:,.0f} samples/s")
    finally:
        shutil.rmtree(folder)
    where = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, **machine()}
    figures = {"machine": where, "whole": found, "parts": parts, "streamed": streamed}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(f"saved {options.out}")


if __name__ == "__main__":
    main()
