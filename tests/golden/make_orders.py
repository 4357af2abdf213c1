"""Makes orders.json: what seeds have meant since version 1. Run it only to add cases; existing ones never change.

python tests/golden/make_orders.py
"""

import json
from pathlib import Path

import numpy as np

from millrace import BlockShuffled, Shuffled
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
    made = {"shuffled": shuffled(), "block_shuffled": block_shuffled(), "round_keys": keys(), "rng": rng()}
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
