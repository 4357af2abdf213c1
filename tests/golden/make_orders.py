"""Makes orders.json: what seeds have meant since version 1. Run it only to add cases; existing ones never change.

python tests/golden/make_orders.py
"""

import json
from pathlib import Path

import numpy as np

from millrace import BlockShuffled, MixtureOrder, Packed, Records, Shuffled, from_arrays
from millrace.feed.budget import Budget
from millrace.feed.rng import Rng
from millrace.order.hashing import round_keys

SEEDS = (0, 7, (1 << 64) - 1)
EPOCHS = (0, 1, 12_345)
SIZES = (1, 2, 3, 5, 8, 24, 100, 1023, 1024, 1025, 10**6, 10**12, 1 << 62, (1 << 63) - 1)
BLOCKS = (
    (5, 256, 64), (1000, 10, 4), (1003, 10, 4), (1040, 10, 4), (10**6 + 7, 256, 64), (10**12 + 1, 4096, 1024),
    (1 << 62, 1, 1 << 20), ((1 << 63) - 1, 1 << 31, 1 << 31),
)  # fmt: skip
POSITIONS = (-1, 0, 1, 2, 10**12, (1 << 63) - 1)


def shuffled():
    for n in SIZES:
        for seed in SEEDS:
            for epoch in EPOCHS:
                if (epoch + 1) * n < 1 << 63:
                    positions = epoch * n + np.arange(min(n, 16))
                    samples = Shuffled(n, seed=seed).samples(positions).tolist()
                    yield {"n": n, "seed": seed, "epoch": epoch, "samples": samples}


def block_shuffled():
    for n, block, window in BLOCKS:
        for seed, epoch in ((0, 0), (7, 1), ((1 << 64) - 1, 3)):
            if (epoch + 1) * n < 1 << 63:
                order = BlockShuffled(n, block=block, window=window, seed=seed)
                places = epoch * n + np.arange(min(n, 16))
                ends = (epoch + 1) * n - 1 - np.arange(min(n, 16))
                options = {"n": n, "block": block, "window": window, "seed": seed, "epoch": epoch}
                yield {**options, "first": order.samples(places).tolist(), "last": order.samples(ends).tolist()}


def mixture():
    schedules = {
        "two": ([1000, 30], [0.7, 0.3]),
        "five": ([7, 10**6, 10**12, 1, 50_000], [5, 4, 3, 2, 1]),
        "later": ([100, 10**9, 3], [(0, [1, 1, 1]), (70_000, [0, 3, 1]), (200_003, [6, 0, 1])]),
    }
    for name, (sizes, schedule) in schedules.items():
        for seed in SEEDS:
            order = MixtureOrder(sizes, schedule, seed=seed)
            positions = [*range(12), 69_999, 70_000, 70_001, 200_002, 200_003, 10**9, 10**15]
            found = {"positions": positions, "samples": order.samples(positions).tolist()}
            yield {"name": name, "segments": order.state()["segments"], "seed": seed, **found}


def documents(count, longest):
    """A store of documents whose lengths are plain arithmetic."""
    offsets = np.concatenate(([0], np.cumsum(np.arange(count) * 7919 % longest + 1)))
    return from_arrays({"tokens": np.zeros(offsets[-1], np.uint16)}, offsets)


def packed():
    for count, longest, length in ((5, 40, 16), (60, 100, 64), (3000, 700, 512)):
        view = Packed(documents(count, longest), length=length)
        few = view.spans(np.arange(min(len(view), 6)))
        every = view.spans(np.arange(len(view)))
        found = {"blocks": len(view), "starts": few.starts.tolist(), "stops": few.stops.tolist()}
        yield {
            "documents": count,
            "longest": longest,
            "length": length,
            **found,
            "sum": sums(every.starts, every.stops),
        }


def budget():
    for count, longest, max_rows in ((40, 100, 200), (70_000, 50, 4096)):
        for seed in SEEDS:
            view = Records(documents(count, longest))
            bins = [Budget(view, Shuffled(count, seed=seed), max_rows).bins(window) for window in (0, 1, 5)]
            found = [
                {"first": own.positions[:12].tolist(), "bins": len(own.offsets) - 1, "sum": sums(*own)} for own in bins
            ]
            yield {"documents": count, "longest": longest, "max_rows": max_rows, "seed": seed, "windows": found}


def sums(*arrays):
    """Of all numbers, each with its place, so that no other order has the same."""
    return [int((array.astype(np.uint64) * (np.arange(len(array), dtype=np.uint64) * 2 + 1)).sum()) for array in arrays]


def keys():
    streams = [0, 1, 1 << 40, (1 << 63) - 1]
    for seed in SEEDS:
        for lane in (0, 1, 2):
            found = [[f"{key:08x}" for key in row] for row in round_keys(seed, lane, streams, 8).tolist()]
            yield {"seed": seed, "lane": lane, "streams": streams, "keys": found}


def rng():
    for seed in SEEDS:
        draws = Rng(seed, np.array(POSITIONS, np.int64))
        yield {
            "seed": seed,
            "positions": list(POSITIONS),
            "uniform": bits(draws.uniform(2)),
            "integers": draws.integers(-3, 100, 2).tolist(),
            "wide": draws.integers(-(1 << 61), 1 << 61).tolist(),
            "normal": bits(draws.normal(2, 2)),
            "again": bits(draws.uniform()),
            "philox": [draws.generator(row).bit_generator.random_raw(2).tolist() for row in range(len(POSITIONS))],
        }


def bits(values):
    """float64 by their bits, so that a last digit cannot hide in how it is printed."""
    return [f"{word:016x}" for word in values.reshape(-1).view(np.uint64).tolist()]


def vectors():
    made = {
        "shuffled": shuffled(), "block_shuffled": block_shuffled(), "round_keys": keys(), "rng": rng(), "mixture": mixture(),
        "packed": packed(), "budget": budget(),
    }  # fmt: skip
    return {name: list(cases) for name, cases in made.items()}


def text():
    """One case to a line."""
    parts = []
    for name, cases in vectors().items():
        lines = ",\n".join(f"  {json.dumps(case)}" for case in cases)
        parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    Path(__file__).with_name("orders.json").write_text(text())
