"""Ragged records against what people write themselves: events per second on hot data, interleaved, ratios of medians.

    python -m benchmarks.records [--events 400000] [--seconds 0.8] [--rounds 5] [--no-save]

W3: events of 1 to about 1,500 rows (log-normal, median 60) x 6 float32 and a label; batch 256. The store lies in /dev/shm.
``values``: values and offsets. ``padded``: 256 rows for each event, the rest cut, with lengths. ``longest``: as long as the
longest event of the batch. LMDB and SQLite hold 50,000 of the events: in LMDB an event is one value, in SQLite a row of the
table is a row of an event, with an index, as GraphNeT keeps them. Everything ends in torch tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import awkward as ak
import lmdb
import numpy as np
import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, RandomSampler

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict
from benchmarks.feed import endless, settled

BATCH, PAD, FEW = 256, 256, 50_000


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--events", type=int, default=400_000)
    parser.add_argument("--seconds", type=float, default=0.8, help="per contestant and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="Records")  # that events are cut is meant
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        events = Events.make(folder, options.events)
        figures = {way: bench(way, events, options) for way in ("values", "padded", "longest")}
        if not options.no_save:
            save("records", {"events": options.events, "mean_rows": events.mean_rows, **figures})
    finally:
        shutil.rmtree(folder)


class Events:
    """The events as every contestant finds them."""

    def __init__(self, folder: Path) -> None:
        self.store = mr.open_store(folder / "store")
        self.offsets = np.array(self.store.offsets)
        (path,) = (folder / "store").glob("shards/*/hits.f32")
        self.rows = np.memmap(path, np.float32, "r").reshape(-1, 6)
        self.labels = np.array(self.store.columns["label"])
        self.folder, self.count = folder, len(self.labels)
        self.mean_rows = len(self.rows) / self.count

    @classmethod
    def make(cls, folder: Path, count: int) -> Events:
        rng = np.random.default_rng(0)
        lengths = np.maximum(1, rng.lognormal(np.log(60), 0.7, count)).astype(np.int64)
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        columns = {"hits": mr.Column("float32", (6,)), "label": mr.Column("int64", per="record")}
        with mr.StoreWriter(folder / "store", columns=columns, shard_bytes=1 << 40) as writer:
            rows = rng.standard_normal((offsets[-1], 6), np.float32)
            writer.extend({"hits": rows, "label": rng.integers(0, 10, count)}, offsets)
        found = cls(folder)
        found._copy_few()
        return found

    def _copy_few(self) -> None:
        """Some events in LMDB, and row by row in SQLite with an index, as people keep them."""
        with lmdb.open(str(self.folder / "lmdb"), map_size=1 << 32) as database, database.begin(write=True) as write:
            for k in range(min(FEW, self.count)):
                write.put(b"%d" % k, self.labels[k].tobytes() + self.rows[self.span(k)].tobytes())
        with contextlib.closing(sqlite3.connect(self.folder / "events.db")) as database, database:
            names = ", ".join(f"f{k} real" for k in range(6))
            database.execute(f"create table hits (event integer, {names})")
            owners = np.repeat(np.arange(self.count), np.diff(self.offsets))[: self.offsets[min(FEW, self.count)]]
            table = np.column_stack((owners, self.rows[: len(owners)])).tolist()
            database.executemany("insert into hits values (?, ?, ?, ?, ?, ?, ?)", table)
            database.execute("create index by_event on hits (event)")

    def span(self, k: int) -> slice:
        return slice(self.offsets[k], self.offsets[k + 1])


def joined(items: list[Any]) -> Any:
    """Events as values, offsets and labels."""
    lengths = torch.tensor([len(rows) for rows, _ in items])
    offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    return torch.cat([rows for rows, _ in items]), offsets, torch.tensor([label for _, label in items])


def padded(items: list[Any], pad: int | None) -> Any:
    """Events of one length, with their lengths and labels."""
    lengths = torch.tensor([min(len(rows), pad or len(rows)) for rows, _ in items])
    out = pad_sequence([rows[:pad] for rows, _ in items], batch_first=True)
    if pad is not None:
        out = functional.pad(out, (0, 0, 0, pad - out.shape[1]))
    return out, lengths, torch.tensor([label for _, label in items])


class PerEvent(Dataset[Any]):
    """One event at a time, from the memory map, LMDB or SQLite."""

    def __init__(self, events: Events, source: str) -> None:
        self._events, self._source = events, source
        self._count = events.count if source == "memmap" else min(FEW, events.count)
        self._open: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, k: int) -> Any:
        if self._source == "memmap":
            return torch.from_numpy(np.array(self._events.rows[self._events.span(k)])), int(self._events.labels[k])
        if self._source == "lmdb":
            if self._open is None:  # one read transaction for all, and buffers instead of copies
                path = str(self._events.folder / "lmdb")
                self._open = lmdb.open(path, readonly=True, lock=False, readahead=False).begin(buffers=True)
            value = self._open.get(b"%d" % k)
            rows = np.array(np.frombuffer(value, np.float32, offset=8).reshape(-1, 6))
            return torch.from_numpy(rows), int.from_bytes(value[:8], "little")
        self._open = self._open or sqlite3.connect(self._events.folder / "events.db")
        found = self._open.execute("select f0, f1, f2, f3, f4, f5 from hits where event = ?", (k,)).fetchall()
        return torch.tensor(found), int(self._events.labels[k])


def by_hand(events: Events, make: Callable[[Any], Any]) -> Iterator[Any]:
    rng = np.random.default_rng(1)
    while True:
        yield make(rng.integers(0, events.count, BATCH))


def contestants(way: str, events: Events) -> dict[str, Iterator[Any]]:
    pad = PAD if way == "padded" else None
    collate: Any = joined if way == "values" else lambda items: padded(items, pad)
    view = mr.Records(events.store, pad=pad)
    feed = iter(mr.Feed(view, batch=BATCH, seed=7))
    found: dict[str, Iterator[Any]] = {"millrace": feed}
    if way == "longest":
        found["millrace"] = ((batch["hits"].pad(), batch["hits"].lengths, batch["label"]) for batch in feed)
    offsets, rows, labels = events.offsets, np.asarray(events.rows), events.labels  # a plain array is kind to them

    def take(ids: Any) -> Any:
        starts, lengths = offsets[ids], offsets[ids + 1] - offsets[ids]
        if way == "values":
            ends = np.cumsum(lengths)
            index = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
            return (
                torch.from_numpy(rows[index]),
                torch.from_numpy(np.concatenate(([0], ends))),
                torch.from_numpy(labels[ids]),
            )
        inside = np.arange(pad or lengths.max())
        is_real = inside < lengths[:, None]
        out = np.asarray(rows[np.where(is_real, starts[:, None] + inside, 0)])
        out[~is_real] = 0
        return torch.from_numpy(out), torch.from_numpy(lengths), torch.from_numpy(labels[ids])

    def loop(ids: Any) -> Any:
        starts, stops = offsets[ids].tolist(), offsets[ids + 1].tolist()
        lengths = offsets[ids + 1] - offsets[ids]
        if way == "values":
            values = np.concatenate([rows[a:b] for a, b in zip(starts, stops, strict=True)])
            bounds = np.concatenate(([0], np.cumsum(lengths)))
            return torch.from_numpy(values), torch.from_numpy(bounds), torch.from_numpy(labels[ids])
        lengths = np.minimum(lengths, pad or lengths.max())
        out = np.zeros((BATCH, pad or int(lengths.max()), 6), np.float32)
        for k, (a, n) in enumerate(zip(starts, lengths.tolist(), strict=True)):
            out[k, :n] = rows[a : a + n]
        return torch.from_numpy(out), torch.from_numpy(lengths), torch.from_numpy(labels[ids])

    array = ak.Array(ak.contents.ListOffsetArray(ak.index.Index64(offsets), ak.contents.NumpyArray(rows)))

    def awkward(ids: Any) -> Any:
        picked = array[ids]
        values = ak.to_numpy(ak.flatten(picked, axis=1))
        bounds = np.concatenate(([0], np.cumsum(ak.to_numpy(ak.num(picked)))))
        if way == "values":
            return torch.from_numpy(values), torch.from_numpy(bounds), torch.from_numpy(labels[ids])
        return collate([(torch.from_numpy(values[a:b]), 0) for a, b in pairwise(bounds.tolist())])

    found["numpy take"] = by_hand(events, take)
    found["concatenate of slices" if way == "values" else "hand-written fill"] = by_hand(events, loop)
    found["awkward"] = by_hand(events, awkward)
    for source, workers in (("memmap", 0), ("memmap", 2), ("lmdb", 0), ("sqlite", 0)):
        dataset = PerEvent(events, source)
        sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)  # type: ignore[arg-type]
        loader = DataLoader(dataset, batch_size=BATCH, sampler=sampler, num_workers=workers, collate_fn=collate)
        found[f"DataLoader, {source}, {workers} workers"] = endless(loader)
    return found


PROMISES = {
    "values": {"numpy take": 2, "DataLoader": 10},
    "padded": {"hand-written fill": 2},
    "longest": {"hand-written fill": 2},
}


def rate(iterator: Iterator[Any], seconds: float) -> float:
    """Events per second over about this long; what lay ready before is not counted."""
    deadline = time.perf_counter() + seconds / 2
    for _ in range(8):
        next(iterator)
        if time.perf_counter() > deadline:
            break
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds:
        next(iterator)
        count += 1
    return count * BATCH / elapsed


def bench(way: str, events: Events, options: argparse.Namespace) -> dict[str, Any]:
    iterators = contestants(way, events)
    measures: dict[str, Callable[[], float]] = {
        key: lambda iterator=iterator: settled(lambda: rate(iterator, options.seconds), 1.0)
        for key, iterator in iterators.items()
    }
    rounds = interleave(measures, options.rounds)
    found = medians(rounds)
    for key, value in sorted(found.items(), key=lambda item: -item[1]):
        print(f"  {way}, {key}: {value:,.0f} events/s")
    promises = []
    for against, limit in PROMISES[way].items():
        best = max(value for key, value in found.items() if key.startswith(against))
        promises.append(verdict(f"{way}, times {against}", found["millrace"] / best, limit))
    return {"events_per_s": found, "rounds": rounds, "promises": promises}


if __name__ == "__main__":
    main()
