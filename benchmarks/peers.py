"""Other libraries on the same data, by their documented use; only those that this Python can import take part.

SPDL gets a hand-made batch function, which is how it is meant to be used; the others load and shuffle samples.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import multiprocessing
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from torch.utils.data import RandomSampler

from benchmarks.handmade import WholeBatch

Make: TypeAlias = Callable[[str, Path, WholeBatch, int], Iterator[Any]]
BUFFERED = 16  # no contestant keeps more batches ready than these


def contestants(
    name: str, folder: Path, whole: WholeBatch, measure: Callable[[Iterator[Any]], float]
) -> dict[str, Iterator[Any]]:
    """Endless batches of each library that is there, at its best number of workers; those that fail say so."""
    found: dict[str, Iterator[Any]] = {}
    for label, (module, make, counts) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"  {label} is not installed")
            continue
        tried: dict[str, tuple[float, Iterator[Any]]] = {}
        for workers in counts:
            try:
                batches = make(name, folder, whole, workers)
                tried[f"{label}, {workers} workers"] = (measure(batches), batches)
            except Exception as error:  # noqa: BLE001 - one peer must not stop the others
                print(f"  {label} with {workers} workers failed: {type(error).__name__}: {error}")
        if tried:
            best = max(tried, key=lambda key: tried[key][0])
            found[best] = tried[best][1]
            print("  tried", {key: round(speed) for key, (speed, _) in tried.items()})
    return found


def versions() -> dict[str, str]:
    found = {}
    for package in (
        "numpy",
        "torch",
        "spdl",
        "grain",
        "torchdata",
        "datasets",
        "webdataset",
        "litdata",
        "mosaicml-streaming",
    ):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _spdl(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    builder = PipelineBuilder().add_source(numbers()).pipe(whole.__getitem__, concurrency=workers).add_sink(8)
    pipeline = builder.build(num_threads=workers)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _stateful(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = whole.per_sample
    sampler = RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    while True:
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
    loader = tn.Loader(mapped)
    while True:
        yield from loader


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


# Those that have a format of their own get some samples of the same data, already cut, which is kind to them.
COUNT = 4096


def _datasets(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import datasets
    import numpy as np

    samples = [whole.per_sample[i] for i in range(COUNT)]
    columns = {"x": np.stack([x.numpy() for x, _ in samples]), "y": np.stack([y.numpy() for _, y in samples])}
    kinds = {
        key: datasets.Array2D(v.shape[1:], str(v.dtype))
        if v.ndim == 3
        else datasets.Sequence(datasets.Value(str(v.dtype)), length=v.shape[1])
        for key, v in columns.items()
    }
    table = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).with_format("numpy")
    order, at = np.random.default_rng(0).permutation(COUNT), 0
    while True:
        ids = order[at : at + whole.batch]
        at = (at + whole.batch) % (COUNT - whole.batch)
        yield table[ids]


def _webdataset(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import webdataset

    pattern = str(folder / f"{name}-%d.tar")
    if not Path(pattern % 0).exists():
        with webdataset.ShardWriter(pattern, maxcount=COUNT // 2) as writer:
            for i in range(COUNT):
                x, y = whole.per_sample[i]
                writer.write({"__key__": f"{i:06d}", "x.npy": x.numpy(), "y.npy": y.numpy()})
    shards = sorted(str(path) for path in folder.glob(f"{name}-*.tar"))
    data = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000).decode().to_tuple("x.npy", "y.npy")
    while True:
        yield from webdataset.WebLoader(data.batched(whole.batch, partial=False), batch_size=None, num_workers=workers)


def _litdata(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    import litdata

    out = folder / f"{name}-litdata"
    if not out.exists():
        make, method = whole.per_sample.__getitem__, multiprocessing.get_start_method()
        litdata.optimize(fn=make, inputs=list(range(COUNT)), output_dir=str(out), chunk_bytes="64MB", num_workers=1)
        multiprocessing.set_start_method(method, force=True)  # it sets another, for all contestants
    data = litdata.StreamingDataset(str(out), shuffle=True, drop_last=True)
    while True:
        yield from litdata.StreamingDataLoader(data, batch_size=whole.batch, num_workers=workers)


def _mosaic(name: str, folder: Path, whole: WholeBatch, workers: int) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    _without_vision()
    import streaming

    out = folder / f"{name}-mds"
    if not out.exists():
        with streaming.MDSWriter(out=str(out), columns={"x": "ndarray", "y": "ndarray"}) as writer:
            for i in range(COUNT):
                x, y = whole.per_sample[i]
                writer.write({"x": x.numpy(), "y": y.numpy()})
    data = streaming.StreamingDataset(local=str(out), shuffle=True, batch_size=whole.batch)
    while True:
        yield from DataLoader(data, batch_size=whole.batch, drop_last=True, num_workers=workers)


def _without_vision() -> None:
    """MosaicML Streaming imports torchvision for its image datasets, and torchvision's wheel wants a GPU's torch."""
    names = ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional")
    for name in names:
        module = sys.modules.setdefault(name, types.ModuleType(name))
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[names[1]].VisionDataset = object  # type: ignore[attr-defined]
    sys.modules[names[3]].to_tensor = None  # type: ignore[attr-defined]


# By label: the module, how to make its batches, and the numbers of workers to try.
PEERS: dict[str, tuple[str, Make, tuple[int, ...]]] = {
    "SPDL": ("spdl", _spdl, (1, 2)),
    "peer Grain": ("grain", _grain, (0, 1, 2, 16)),
    "peer StatefulDataLoader": ("torchdata", _stateful, (0, 1, 2)),
    "peer torchdata nodes": ("torchdata", _nodes, (0, 1, 2)),
    "peer HF datasets": ("datasets", _datasets, (0,)),
    "peer WebDataset": ("webdataset", _webdataset, (0, 1, 2)),
    "peer LitData": ("litdata", _litdata, (0, 1, 2)),
    "peer MosaicML Streaming": ("streaming", _mosaic, (0, 1, 2)),
}
