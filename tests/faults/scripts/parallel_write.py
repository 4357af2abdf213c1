"""One store, its shards written by processes that were spawned: ``parallel_write.py PATH SHARDS WORKERS``."""

from __future__ import annotations

import multiprocessing
import sys

import numpy as np

import millrace as mr
from millrace.store.shard import ShardEntry, ShardWriter

COLUMNS = {"values": mr.Column("float32", (3,)), "class": mr.Column("dictionary", per="record", values=("a", "b"))}


def fill(shard: ShardWriter, seed: int) -> ShardEntry:
    """Some records that depend on the shard alone, in two writes."""
    for part in range(2):
        lengths = np.arange(4) + seed % 3
        values = np.arange(3 * lengths.sum(), dtype=np.float32).reshape(-1, 3) * (1 + seed) + part
        codes = (np.arange(4, dtype=np.int32) + seed) % 2
        shard.write({"values": values, "class": codes}, {"rows": np.concatenate(([0], np.cumsum(lengths)))})
    return shard.finish()


def task(given: tuple[ShardWriter, int]) -> ShardEntry:
    return fill(*given)


def main() -> None:
    path, shards, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with mr.StoreWriter(path, columns=COLUMNS) as writer:
        tasks = [(writer.shard(number), number) for number in reversed(range(shards))]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for entry in pool.imap_unordered(task, tasks):
                writer.add(entry)


if __name__ == "__main__":
    main()
