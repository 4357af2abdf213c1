"""Other libraries on the same data, by their documented use; only those that this Python can import take part.

SPDL gets a hand-made batch function, which is how it is meant to be used; the others load and shuffle samples.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import RandomSampler

from benchmarks.handmade import WholeBatch


def contestants(name: str, folder: Path, whole: WholeBatch) -> dict[str, Iterator[Any]]:
    """Endless batches of each library that is there; those that fail say so and are left out."""
    found: dict[str, Iterator[Any]] = {}
    for label, (module, make) in PEERS.items():
        if importlib.util.find_spec(module) is None:
            print(f"  {label} is not installed")
            continue
        try:
            batches = make(name, folder, whole)
            next(batches)
        except Exception as error:  # noqa: BLE001 - one peer must not stop the others
            print(f"  {label} failed: {type(error).__name__}: {error}")
            continue
        found[label] = batches
    return found


def _spdl(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    from spdl.pipeline import PipelineBuilder

    def numbers() -> Iterator[int]:
        number = 0
        while True:
            yield number
            number += 1

    builder = PipelineBuilder().add_source(numbers()).pipe(whole.__getitem__, concurrency=2).add_sink(8)
    pipeline = builder.build(num_threads=2)
    with pipeline.auto_stop():
        yield from pipeline.get_iterator(timeout=60)


def _stateful(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = whole.per_sample
    loader = StatefulDataLoader(
        dataset, batch_size=whole.batch, sampler=RandomSampler(dataset, replacement=True, num_samples=1 << 40)
    )
    while True:
        yield from loader


def _nodes(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import torchdata.nodes as tn
    from torch.utils.data import default_collate

    dataset = whole.per_sample
    node = tn.SamplerWrapper(RandomSampler(dataset, replacement=True, num_samples=1 << 40))
    mapped = tn.Mapper(tn.Batcher(node, batch_size=whole.batch), lambda ids: default_collate([dataset[i] for i in ids]))
    loader = tn.Loader(mapped)
    while True:
        yield from loader


def _grain(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import grain.python as grain

    dataset = whole.per_sample

    class Source:
        def __len__(self) -> int:
            return len(dataset)

        def __getitem__(self, sample: int) -> Any:
            return tuple(part.numpy() for part in dataset[sample])

    data = grain.MapDataset.source(Source()).shuffle(seed=7).repeat().batch(whole.batch)
    yield from data.to_iter_dataset()


# Those that have a format of their own get some samples of the same data, already cut, which is kind to them.
COUNT = 4096


def _datasets(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import datasets
    import numpy as np

    samples = [whole.per_sample[i] for i in range(COUNT)]
    columns = {"x": np.stack([x.numpy() for x, _ in samples]), "y": np.stack([y.numpy() for _, y in samples])}
    table = datasets.Dataset.from_dict(columns).with_format("numpy")
    order, at = np.random.default_rng(0).permutation(COUNT), 0
    while True:
        ids = order[at : at + whole.batch]
        at = (at + whole.batch) % (COUNT - whole.batch)
        yield table[ids]


def _webdataset(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import webdataset

    path = str(folder / f"{name}.tar")
    with webdataset.TarWriter(path) as writer:
        for i in range(COUNT):
            x, y = whole.per_sample[i]
            writer.write({"__key__": f"{i:06d}", "x.npy": x.numpy(), "y.npy": y.numpy()})
    data = webdataset.WebDataset(path, shardshuffle=False).shuffle(1000).decode().to_tuple("x.npy", "y.npy")
    while True:
        yield from data.batched(whole.batch, partial=False)


def _litdata(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import litdata

    out = str(folder / f"{name}-litdata")
    litdata.optimize(
        fn=whole.per_sample.__getitem__, inputs=list(range(COUNT)), output_dir=out, chunk_bytes="64MB", num_workers=1
    )
    data = litdata.StreamingDataset(out, shuffle=True, drop_last=True)
    while True:
        yield from litdata.StreamingDataLoader(data, batch_size=whole.batch, num_workers=0)


def _mosaic(name: str, folder: Path, whole: WholeBatch) -> Iterator[Any]:
    import streaming
    from torch.utils.data import DataLoader

    out = str(folder / f"{name}-mds")
    with streaming.MDSWriter(out=out, columns={"x": "ndarray", "y": "ndarray"}) as writer:
        for i in range(COUNT):
            x, y = whole.per_sample[i]
            writer.write({"x": x.numpy(), "y": y.numpy()})
    data = streaming.StreamingDataset(local=out, shuffle=True, batch_size=whole.batch)
    while True:
        yield from DataLoader(data, batch_size=whole.batch, drop_last=True)


PEERS: dict[str, tuple[str, Callable[[str, Path, WholeBatch], Iterator[Any]]]] = {
    "SPDL": ("spdl", _spdl),
    "peer Grain": ("grain", _grain),
    "peer StatefulDataLoader": ("torchdata", _stateful),
    "peer torchdata nodes": ("torchdata", _nodes),
    "peer HF datasets": ("datasets", _datasets),
    "peer WebDataset": ("webdataset", _webdataset),
    "peer LitData": ("litdata", _litdata),
    "peer MosaicML Streaming": ("streaming", _mosaic),
}
