"""What people write themselves over the same files: per-sample datasets, and whole batches by one numpy index."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

import millrace as mr

LOOKBACK, HORIZON, TARGET = 64, 8, 3
LENGTH = 1024


class WindowPerSample(Dataset[Any]):
    """What one writes first: find the entity by searchsorted, slice the memmap."""

    def __init__(self, folder: Path) -> None:
        store = mr.open_store(folder / "W1")
        self._rows = [
            np.memmap(path, np.float32, "r").reshape(-1, 16) for path in sorted(folder.glob("W1/shards/*/values.f32"))
        ]
        self._firsts = np.cumsum([0, *(len(rows) for rows in self._rows)])
        self._offsets = np.array(store.offsets)
        self._ends = np.cumsum(np.maximum(0, np.diff(self._offsets) - LOOKBACK - HORIZON + 1))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, sample: int) -> Any:
        entity = np.searchsorted(self._ends, sample, side="right")
        inside = sample - (self._ends[entity - 1] if entity else 0)
        start = self._offsets[entity] + inside
        shard = np.searchsorted(self._firsts, start, side="right") - 1
        rows, first = self._rows[shard], start - self._firsts[shard]
        y = rows[first + LOOKBACK : first + LOOKBACK + HORIZON, TARGET : TARGET + 1]
        return torch.from_numpy(np.array(rows[first : first + LOOKBACK])), torch.from_numpy(np.array(y))


class BlockPerSample(Dataset[Any]):
    """The same for tokens; samples stay inside one shard, which is kind to it."""

    def __init__(self, folder: Path) -> None:
        self._shards = [np.memmap(path, np.uint16, "r") for path in sorted(folder.glob("W2/shards/*/tokens.u16"))]
        self._per_shard = (len(self._shards[0]) - 1) // LENGTH

    def __len__(self) -> int:
        return self._per_shard * len(self._shards)

    def __getitem__(self, sample: int) -> Any:
        shard, inside = divmod(sample, self._per_shard)
        tokens = self._shards[shard][inside * LENGTH : inside * LENGTH + LENGTH + 1].astype(np.int64)
        return torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:])


class WholeBatch(Dataset[Any]):
    """Hand-made for speed: an item is a whole batch, gathered by one fancy index into a strided view.

    All rows lie in one array in memory, which is kind to it. ``own``: x and y are arrays of their own, as the feed's
    are; else views of what was gathered, which is less to copy.
    """

    def __init__(self, name: str, folder: Path, batch: int, *, own: bool) -> None:
        self.batch, self._own = batch, own
        self._rng = np.random.default_rng(0)
        strided = np.lib.stride_tricks.as_strided
        self.per_sample: Any
        if name == "W1":
            self.per_sample = WindowPerSample(folder)
            self._firsts = np.concatenate(([0], self.per_sample._ends))
            rows = np.concatenate(self.per_sample._rows)
            shape, (row, item) = (len(rows) - LOOKBACK - HORIZON + 1, LOOKBACK + HORIZON, 16), rows.strides
            self._runs = strided(rows, shape, (row, row, item), writeable=False)
        else:
            self.per_sample = BlockPerSample(folder)
            tokens = np.concatenate(self.per_sample._shards)
            self._runs = strided(tokens, (len(tokens) - LENGTH, LENGTH + 1), (2, 2), writeable=False)
        self._name = name

    def __len__(self) -> int:
        return len(self.per_sample) // self.batch

    def starts(self, samples: Any) -> Any:
        if self._name == "W2":
            shards, inside = np.divmod(samples, self.per_sample._per_shard)
            return shards * len(self.per_sample._shards[0]) + inside * LENGTH
        entities = np.searchsorted(self.per_sample._ends, samples, side="right")
        inside = samples - self._firsts[entities]
        return self.per_sample._offsets[entities] + inside

    def __getitem__(self, number: int) -> Any:
        samples = self._rng.integers(0, len(self.per_sample), self.batch)
        runs = self._runs[self.starts(samples)]
        if self._name == "W1":
            x, y = runs[:, :LOOKBACK], runs[:, LOOKBACK:, TARGET : TARGET + 1]
        else:
            wide = runs.astype(np.int64)
            x, y = wide[:, :-1], wide[:, 1:]  # views of one buffer: half of what we write
        if self._own:
            x, y = np.ascontiguousarray(x), np.ascontiguousarray(y)
        return torch.from_numpy(x), torch.from_numpy(y)


def in_line(dataset: WholeBatch) -> Iterator[Any]:
    number = 0
    while True:
        yield dataset[number]
        number += 1
