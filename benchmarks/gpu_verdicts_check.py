"""Verdicts of loops on a real GPU: large copies beside no work, and small ones beside much. Under 20 seconds.

python -m benchmarks.gpu_verdicts_check
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import millrace as mr
from benchmarks.verdicts import watch
from millrace.meter.usage import GpuUsage
from millrace.meter.verdict import judge
from millrace.testing.slow import same


def main() -> None:
    values = np.zeros((400_000, 256), np.float32)
    view = mr.Windows(mr.from_arrays({"values": values}, kind="series"), lookback=63, horizon=1)
    weights = torch.randn(8192, 8192, device="cuda")
    ways: dict[str, dict[str, Any]] = {"core": {}, "transform": {"transform": same, "workers": 8}}
    for way, options in ways.items():
        for name, batch, products in (("transfer, if memory keeps up", 4096, 0), ("compute-bound", 64, 20)):

            def step(products: int = products) -> None:
                for _ in range(products):
                    torch.mm(weights, weights)

            with mr.Feed(view, batch=batch, device="cuda", **options) as feed:
                found = watch(feed, step)
                report = feed.report()
            assert report is not None
            print(f"{way}, expected {name}: {judge(found)}")
            rate = found.batches * batch * 64 * 1024 / found.seconds / 2**30
            print(
                f"  get {report.get_s:.3f} s, behind {report.behind_s:.3f} s, transfer {report.transfer_s:.3f} s, {rate:.1f} GiB/s"
            )
    print(GpuUsage.read())


if __name__ == "__main__":
    main()
