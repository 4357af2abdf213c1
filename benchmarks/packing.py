"""Packing and mixtures: plans for millions of documents, how full blocks are, a mixture against one source, and
bins of a budget against padded batches.

python -m benchmarks.packing [--documents 100000000] [--only budgets]
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from typing import Any

import numpy as np

from benchmarks.common import interleave, medians, save, verdict

LONGEST = 512  # tokens of a document for the small GPT


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--only", choices=("mixture", "plans", "budgets"), help="this part alone; nothing is saved")
    options = parser.parse_args()
    parts = {"mixture": bench_mixture, "plans": lambda: bench_plans(options.documents), "budgets": bench_budgets}
    if options.only is not None:
        print(json.dumps({options.only: parts[options.only]()}, indent=1))
    else:
        save("packing", {name: measure() for name, measure in parts.items()})


def offsets_of(count: int) -> Any:
    """Log-normal documents with a median of 600 tokens."""
    rng, parts = np.random.default_rng(0), []
    for first in range(0, count, 1 << 22):
        normal = rng.standard_normal(min(1 << 22, count - first), np.float32)
        parts.append(np.exp(normal + np.float32(np.log(600))).astype(np.int32) + 1)
    offsets = np.zeros(count + 1, np.int64)
    at = 0
    for part in parts:
        np.cumsum(part, out=offsets[at + 1 : at + 1 + len(part)])
        offsets[at + 1 : at + 1 + len(part)] += offsets[at]
        at += len(part)
    return offsets


def bench_plans(most: int) -> list[Any]:
    from millrace.store.offsets import Offsets
    from millrace.view.packing import pack, whole_blocks

    rows = []
    for count in (10**6, 10**7, most):
        offsets = offsets_of(count)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.perf_counter()
        packing, (_, ends) = pack(offsets, 8192), whole_blocks(Offsets.of(offsets), 8192)
        seconds = time.perf_counter() - started
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e6
        fill = float(offsets[-1] / ((len(packing) + (ends[-1] if len(ends) else 0)) * 8192))
        print(f"{count:>11,} documents: {seconds:.2f} s, fill {fill:.6f}, {peak:.2f} GB more than their offsets")
        rows.append({"documents": count, "seconds": seconds, "fill": fill, "gigabytes": peak})
    last = rows[-1]
    rows.append(verdict(f"fill of {last['documents']:,} documents", last["fill"], 0.999))
    rows.append(verdict("seconds of that plan", last["seconds"], 40, at_least=False))
    rows.append(verdict("gigabytes beside the offsets", last["gigabytes"], 2, at_least=False))
    return rows


def bench_mixture() -> list[Any]:
    """Samples per second of W2 from one source, and from the same tokens as ten sources of equal weight."""
    import millrace as mr

    tokens = np.random.default_rng(0).integers(0, 50_000, 100_000_000).astype(np.uint16)
    one = mr.Blocks(mr.from_arrays({"tokens": tokens}), length=1024)
    parts = [mr.Blocks(mr.from_arrays({"tokens": part}), length=1024) for part in np.array_split(tokens, 10)]
    ten = mr.Mixture([(part, 1.0) for part in parts])

    def rate(view: Any) -> float:
        feed = mr.Feed(view, batch=32, seed=1, device="numpy")
        with feed:
            iterator = iter(feed)
            for _ in range(200):
                next(iterator)
            started = time.perf_counter()
            for _ in range(6000):
                next(iterator)["x"][0, 0]
            return 6000 * 32 / (time.perf_counter() - started)

    rates = interleave({"one source": lambda: rate(one), "ten sources": lambda: rate(ten)}, rounds=7)
    middle = medians(rates)
    return [middle, verdict("ten sources against one", middle["ten sources"] / middle["one source"], 0.95)]


def bench_budgets() -> list[Any]:
    """Tokens per second of a small GPT on log-normal documents: bins of one budget against batches padded to their longest."""
    import torch

    import millrace as mr
    from millrace.train.models.gpt import GPT

    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(np.log(60), 1.0, 20_000)).astype(np.int64) + 2, LONGEST)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    tokens = np.random.default_rng(1).integers(0, 1000, offsets[-1]).astype(np.uint16)
    view = mr.Records(mr.from_arrays({"tokens": tokens}, offsets))
    torch.manual_seed(0)
    model = GPT(vocabulary=1000, length=LONGEST, layers=2, heads=4, width=128)
    rows = 4096
    documents = round(rows / float(lengths.mean()))  # a padded batch has as many tokens on average

    def step(ragged: Any) -> int:
        """One forward and backward pass over documents padded to the longest of them."""
        padded = torch.from_numpy(ragged.pad().astype(np.int64))
        places = torch.arange(padded.shape[1] - 1)
        batch = {
            "x": padded[:, :-1],
            "y": padded[:, 1:],
            "mask": places < torch.from_numpy(ragged.lengths)[:, None] - 1,
        }
        model(batch).backward()
        model.zero_grad()
        return int(ragged.lengths.sum())

    def rate(**options: Any) -> float:
        with mr.Feed(view, seed=1, device="numpy", **options) as feed:
            iterator = iter(feed)
            step(next(iterator)["tokens"])
            started, seen = time.perf_counter(), 0
            for _ in range(20):
                seen += step(next(iterator)["tokens"])
            return seen / (time.perf_counter() - started)

    contestants = {"padded": lambda: rate(batch=documents), "bins": lambda: rate(batch=1, max_rows=rows)}
    middle = medians(interleave(contestants, rounds=5))
    return [middle, verdict("bins against padded batches", middle["bins"] / middle["padded"], 1.5)]


if __name__ == "__main__":
    main()
