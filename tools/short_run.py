"""A short run of the C core over every kind of view and order, for `make valgrind`."""

import gc
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np

import millrace as mr
from millrace.feed import compose as native
from millrace.feed.make import program
from millrace.gather import core_gather as gather
from millrace.native import core

assert core is not None
native.IN_LINE_BYTES = 0  # threads also for these tiny batches
gather.THREAD_BYTES, gather.num_cores = 1, lambda: 4

rng = np.random.default_rng(0)
offsets = np.concatenate(([0], np.cumsum(rng.integers(0, 20, 60))))
rows = int(offsets[-1])
store = mr.from_arrays(
    {
        "dense": rng.normal(size=(rows, 3)).astype(np.float32),
        "half": rng.normal(size=(rows, 2)).astype(np.float16),
        "token": rng.integers(0, 9, rows).astype(np.uint16),
        "label": np.arange(60),
    },
    offsets,
)
windows = mr.Windows(store, lookback=4, horizon=2, column="dense", target=[2, 0])
views = [
    windows,
    mr.Windows(store, lookback=2, horizon=1, column="half"),
    mr.Blocks(store, length=7, column="token"),
    mr.Records(store),
    mr.Records(store, pad=5),
    mr.Subset(mr.Concat([windows, mr.Subset(windows, np.arange(20))]), np.arange(0, 60, 3)),
]
for view in views:
    for order in (mr.Shuffled(len(view), 3), mr.BlockShuffled(len(view), block=3, window=2), mr.Sequential(len(view))):
        with mr.Feed(view, batch=8, order=order, device="numpy", workers=2) as feed:
            held = list(itertools.islice(feed, 12))
        assert len(held) == 12
    view[np.arange(min(len(view), 30))]
del held, feed, view, views, windows, store
gc.collect()

# On disk: maps, many shards, and rows that are asked for ahead, also of views that Python alone knows.


class Own(mr.Windows):
    def spans(self, samples, axis=None):
        return super().spans(samples, axis)


with tempfile.TemporaryDirectory(dir=".") as folder:  # the usual place may lie in memory
    path = Path(folder) / "store"
    with mr.StoreWriter(path, kind="series", columns={"x": mr.Column("float32", (16,))}, shard_bytes=1 << 17) as writer:
        for _ in range(8):
            writer.append({"x": rng.normal(size=(4000, 16)).astype(np.float32)})
    large = {"batch": 64}  # read past the page cache
    for kind, options in (
        (mr.Windows, {}),
        (Own, {}),
        (mr.Windows, {"transform": lambda batch, rng: batch}),
        (mr.Windows, large),
    ):
        program.DIRECT_TIMES = 0 if options is large else 2
        for file in path.rglob("*.f32"):
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        cold = kind(mr.open_store(path), lookback=64, horizon=8)
        with mr.Feed(cold, device="numpy", workers=2, **{"batch": 32, **options}) as feed:
            assert len(list(itertools.islice(feed, 12))) == 12
        del cold, feed
        gc.collect()
print("done")
