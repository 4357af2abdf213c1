"""Other libraries on the same data, by their documented use; only those that this Python can import take part.

SPDL gets a hand-made batch function, which is how it is meant to be used; the others load and shuffle samples. Each is
tried with several numbers of workers, and the best takes part.

Libraries with a format of their own get ``COUNT`` samples of the same data in it, cut already, which is kind to them: no
window is looked up. Tokens are kept as uint16 in all formats, since reading less is faster; what comes is int64.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import itertools
import multiprocessing
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.handmade import HORIZON, LENGTH, LOOKBACK, WholeBatch

Make: TypeAlias = Callable[[str, Path, WholeBatch, int], Iterator[Any]]
BUFFERED = 16  # no contestant keeps more batches ready than these
COUNT = {"W1": 16_384, "W2": 32_768}

PACKAGES = (
    *("numpy", "torch", "spdl", "grain", "torchdata", "datasets", "webdataset", "litdata", "mosaicml-streaming"),
    "gluonts",
)


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


class Field:
    """The contestants of one workload, each at its best number of workers, what was tried, and who failed and why."""

    def __init__(self, name: str, folder: Path, whole: WholeBatch, measure: Callable[[Iterator[Any]], float]) -> None:
        self._settings, self._measure = (name, folder, whole), measure
        self.batches: dict[str, Iterator[Any]] = {}
        self.tried: dict[str, dict[str, float]] = {}
        self.failed: dict[str, str] = {}

    def add(self, label: str, make: Make, counts: tuple[int, ...]) -> None:
        tried: dict[str, tuple[float, Iterator[Any]]] = {}
        for workers in counts:
            key = f"{label}, {workers} workers" if len(counts) > 1 else label
            try:
                batches = make(*self._settings, workers)
                tried[key] = (self._measure(batches), batches)
            except Exception as error:  # noqa: BLE001 - one peer must not stop the others
                self.failed[key] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                print(f"  {key} failed: {self.failed[key]}")
        if tried:
            best = max(tried, key=lambda key: tried[key][0])
            self.batches[best] = tried[best][1]
            self.tried[label] = {key: round(speed) for key, (speed, _) in tried.items()}
            print("  tried", self.tried[label], flush=True)

    def add_peers(self) -> None:
        name = self._settings[0]
        for label, (module, make, counts, workloads) in PEERS.items():
            if name in workloads and importlib.util.find_spec(module) is not None:
                self.add(label, make, counts)


def _wide(batches: Iterator[Any]) -> Iterator[Any]:
    """Blocks of tokens as they were stored, to int64 x and y, which are views of one tensor."""
    for batch in batches:
        tokens = torch.as_tensor(batch["tokens"] if isinstance(batch, dict) else batch).to(torch.int64)
        yield tokens[:, :-1], tokens[:, 1:]


def _stored(name: str, whole: WholeBatch) -> Iterator[dict[str, Any]]:
    """Samples as those libraries keep them: windows cut, tokens narrow."""
    picks = np.random.default_rng(1).permutation(len(whole.per_sample))[: COUNT[name]]
    for sample in picks.tolist():
        x, y = (part.numpy() for part in whole.per_sample[sample])
        yield {"x": x, "y": y} if name == "W1" else {"tokens": np.append(x, y[-1]).astype(np.uint16)}


def per_sample(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    dataset = whole.per_sample
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    yield from DataLoader(dataset, batch_size=whole.batch, sampler=sampler, num_workers=workers)


def whole_batch(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    loader = DataLoader(whole, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    while True:
        yield from loader


def _spdl(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    builder = PipelineBuilder().add_source(itertools.count()).pipe(whole.__getitem__, concurrency=workers).add_sink(8)
    pipeline = builder.build(num_threads=workers)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _stateful(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = whole.per_sample
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    yield from StatefulDataLoader(dataset, batch_size=whole.batch, sampler=sampler, num_workers=workers)


def _nodes(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import torchdata.nodes as tn
    from torch.utils.data import default_collate

    dataset = whole.per_sample
    node = tn.Batcher(
        tn.SamplerWrapper(RandomSampler(dataset, replacement=True, num_samples=1 << 40)), batch_size=whole.batch
    )

    def collate(ids: Any) -> Any:
        return default_collate([dataset[i] for i in ids])

    mapped = tn.ParallelMapper(node, collate, workers, method="thread") if workers else tn.Mapper(node, collate)
    yield from tn.Loader(mapped)


def _grain(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import grain.python as grain

    dataset = whole.per_sample

    class Source:
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, sample: int) -> Any:
            return tuple(part.numpy() for part in dataset[sample])

    data = grain.MapDataset.source(Source()).shuffle(seed=7).repeat().batch(whole.batch)
    # Its own default keeps 500 elements ready, here batches: a gigabyte.
    yield from data.to_iter_dataset(grain.ReadOptions(num_threads=workers, prefetch_buffer_size=BUFFERED))


def _nanogpt(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    """get_batch of nanoGPT's train.py: one file, a fresh map for each batch, a slice for each sample."""
    path = folder / "train.bin"
    with open(path, "wb") as file:
        for shard in sorted(folder.glob("W2/shards/*/tokens.u16")):
            shutil.copyfileobj(shard.open("rb"), file)
    while True:
        data = np.memmap(path, dtype=np.uint16, mode="r")
        starts = torch.randint(len(data) - LENGTH, (whole.batch,))
        x = torch.stack([torch.from_numpy(data[i : i + LENGTH].astype(np.int64)) for i in starts])
        y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + LENGTH].astype(np.int64)) for i in starts])
        yield x, y


def _gluonts(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    """What its torch estimators do to train: a random window of each entity in turn, shuffled in a buffer."""
    import pandas as pd
    from gluonts.dataset.loader import as_stacked_batches
    from gluonts.itertools import Cyclic
    from gluonts.transform import ExpectedNumInstanceSampler, InstanceSplitter

    offsets, rows = whole.per_sample._offsets, np.concatenate(whole.per_sample._rows)
    entries = [
        {"item_id": str(k), "start": pd.Period("2020-01-01", freq="h"), "target": np.ascontiguousarray(rows[a:b].T)}
        for k, (a, b) in enumerate(itertools.pairwise(offsets.tolist()))
    ]
    splitter = InstanceSplitter(
        target_field="target",
        is_pad_field="is_pad",
        start_field="start",
        forecast_start_field="forecast_start",
        instance_sampler=ExpectedNumInstanceSampler(num_instances=1.0, min_past=LOOKBACK, min_future=HORIZON),
        past_length=LOOKBACK,
        future_length=HORIZON,
    )
    batches = as_stacked_batches(
        splitter.apply(Cyclic(entries).stream(), is_train=True),
        batch_size=whole.batch,
        shuffle_buffer_length=1024,
        field_names=["past_target", "future_target"],
        output_type=torch.tensor,
    )
    yield from ((batch["past_target"], batch["future_target"]) for batch in batches)


def _datasets(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    """Arrow on disk, mapped; flat lists of a fixed length, which it reads much faster than its Array2D."""
    import datasets

    out = folder / f"{name}-arrow"
    samples = list(_stored(name, whole))
    columns = {key: np.stack([one[key] for one in samples]) for key in samples[0]}
    kinds = {
        key: datasets.Sequence(datasets.Value(str(array.dtype)), length=array[0].size) for key, array in columns.items()
    }
    flat = {key: list(array.reshape(len(array), -1)) for key, array in columns.items()}
    datasets.Dataset.from_dict(flat, features=datasets.Features(kinds)).save_to_disk(str(out))
    table = datasets.load_from_disk(str(out)).with_format("numpy")
    rng = np.random.default_rng(0)

    def taken() -> Iterator[Any]:
        while True:
            order = rng.permutation(COUNT[name])
            for at in range(0, len(order), whole.batch):
                yield table[order[at : at + whole.batch]]

    if name == "W2":
        yield from _wide(taken())
    for batch in taken():
        x, y = (torch.from_numpy(batch[key]) for key in ("x", "y"))
        yield x.reshape(-1, LOOKBACK, 16), y.reshape(-1, HORIZON, 1)


def _webdataset(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import webdataset

    pattern = str(folder / f"{name}-%d.tar")
    if not Path(pattern % 0).exists():
        with webdataset.ShardWriter(pattern, maxcount=COUNT[name] // 8, verbose=0) as writer:
            for i, sample in enumerate(_stored(name, whole)):
                writer.write({"__key__": f"{i:06d}"} | {f"{key}.npy": part for key, part in sample.items()})
    shards = sorted(str(path) for path in folder.glob(f"{name}-*.tar"))
    keys = ("x.npy", "y.npy") if name == "W1" else ("tokens.npy",)
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).decode().to_tuple(*keys)
    batched = data.batched(whole.batch, partial=False)
    loader = webdataset.WebLoader(batched, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    batches = iter(loader.repeat())
    yield from (_wide(batch[0] for batch in batches) if name == "W2" else batches)


def _litdata(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    """Windows as dicts of arrays; all tokens through its TokensLoader, which cuts blocks from chunks of ids."""
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    out = folder / f"{name}-litdata"
    blocks = TokensLoader(block_size=LENGTH + 1) if name == "W2" else None
    if not out.exists():
        method = multiprocessing.get_start_method()
        if name == "W1":
            run, inputs, sized = list(_stored(name, whole)).__getitem__, range(COUNT[name]), {"chunk_bytes": "64MB"}
        else:
            shards = sorted(map(str, folder.glob("W2/shards/*/tokens.u16")))
            run, inputs, sized = _tokens, shards, {"chunk_size": (LENGTH + 1) * 8192, "item_loader": blocks}
        litdata.optimize(fn=run, inputs=list(inputs), output_dir=str(out), num_workers=1, **sized)
        multiprocessing.set_start_method(method, force=True)  # it sets another, for all contestants
    data = litdata.StreamingDataset(str(out), item_loader=blocks, shuffle=True, drop_last=True)
    keeps = {"persistent_workers": True, "prefetch_factor": 4} if workers else {}
    loader = litdata.StreamingDataLoader(data, batch_size=whole.batch, num_workers=workers, **keeps)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    yield from (_wide(batches) if name == "W2" else batches)


def _tokens(shard: str) -> Any:
    return torch.from_numpy(np.fromfile(shard, np.uint16))


def _mosaic(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    _without_vision()
    import streaming

    out = folder / f"{name}-mds"
    if not out.exists():
        # With type and shape in the schema they are not stored with each sample.
        columns = (
            {"x": f"ndarray:float32:{LOOKBACK},16", "y": f"ndarray:float32:{HORIZON},1"}
            if name == "W1"
            else {"tokens": f"ndarray:uint16:{LENGTH + 1}"}
        )
        with streaming.MDSWriter(out=str(out), columns=columns) as writer:
            for sample in _stored(name, whole):
                writer.write(sample)
    data = streaming.StreamingDataset(local=str(out), shuffle=True, batch_size=whole.batch)
    loader = streaming.StreamingDataLoader(
        data, batch_size=whole.batch, drop_last=True, num_workers=workers, persistent_workers=workers > 0
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    yield from (_wide(batches) if name == "W2" else batches)


def _without_vision() -> None:
    """MosaicML Streaming imports torchvision for its image datasets, and torchvision's wheel wants a GPU's torch."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[names[1]].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules[names[3]].to_tensor = None  # type: ignore[attr-defined]


# By label: the module, how to make its batches, the numbers of workers to try, and for which workloads.
BOTH = ("W1", "W2")
PEERS: dict[str, tuple[str, Make, tuple[int, ...], tuple[str, ...]]] = {
    "SPDL": ("spdl", _spdl, (1, 2), BOTH),
    "Grain": ("grain", _grain, (0, 1, 2, 16), BOTH),
    "StatefulDataLoader": ("torchdata", _stateful, (0, 1, 2), BOTH),
    "torchdata nodes": ("torchdata", _nodes, (0, 1, 2), BOTH),
    "Hugging Face datasets": ("datasets", _datasets, (0,), BOTH),
    "WebDataset": ("webdataset", _webdataset, (0, 1, 2), BOTH),
    "LitData": ("litdata", _litdata, (0, 1, 2), BOTH),
    "MosaicML Streaming": ("streaming", _mosaic, (0, 1, 2), BOTH),
    "GluonTS": ("gluonts", _gluonts, (0,), ("W1",)),
    "nanoGPT get_batch": ("torch", _nanogpt, (0,), ("W2",)),
}
