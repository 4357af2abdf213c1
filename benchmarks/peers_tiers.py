"""Epochs of LitData and MosaicML Streaming from S3, by their documented use; run by the Python that has them.

    PEERS/bin/python -m benchmarks.peers_tiers write LIBRARY TOKENS FOLDER
    PEERS/bin/python -m benchmarks.peers_tiers read LIBRARY URL CACHE WORKERS

TOKENS is a file of uint16; ``write`` makes samples of ``LENGTH`` of them in the format of the library, in chunks as long
as the shards of the other contestant. ``read`` prints the samples and the seconds of each of three epochs, as JSON. The
first begins with an empty cache, and its clock when the dataset and the loader are made.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import _without_vision

LENGTH, BATCH, CHUNK = 1024, 256, 8192  # of a sample, samples of a batch and of a chunk
EPOCHS = 3


def write_litdata(tokens: str, out: Path) -> None:
    import litdata
    from litdata.streaming.item_loader import TokensLoader

    whole = np.fromfile(tokens, np.uint16)
    parts = [(tokens, first, LENGTH * CHUNK) for first in range(0, len(whole), LENGTH * CHUNK)]
    litdata.optimize(
        fn=_part, inputs=parts, output_dir=str(out), num_workers=1, chunk_size=LENGTH * CHUNK,
        item_loader=TokensLoader(block_size=LENGTH),
    )  # fmt: skip


def _part(part: tuple[str, int, int]) -> Any:
    import torch

    tokens, first, count = part
    return torch.from_numpy(np.fromfile(tokens, np.uint16, count, offset=2 * first))


def write_mosaic(tokens: str, out: Path) -> None:
    _without_vision()
    import streaming

    columns = {"tokens": f"ndarray:uint16:{LENGTH}"}
    with streaming.MDSWriter(out=str(out), columns=columns, size_limit=2 * LENGTH * CHUNK) as writer:
        for sample in np.fromfile(tokens, np.uint16).reshape(-1, LENGTH):
            writer.write({"tokens": sample})


def litdata_loader(url: str, cache: str, workers: int) -> Any:
    import litdata
    from litdata.streaming import downloader
    from litdata.streaming.item_loader import TokensLoader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # it has no option for a server without TLS
    data = litdata.StreamingDataset(
        url, cache_dir=cache, item_loader=TokensLoader(block_size=LENGTH), shuffle=True, drop_last=True
    )
    return litdata.StreamingDataLoader(data, batch_size=BATCH, num_workers=workers, **_kept(workers))


def mosaic_loader(url: str, cache: str, workers: int) -> Any:
    _without_vision()
    import streaming

    data = streaming.StreamingDataset(remote=url, local=cache, shuffle=True, batch_size=BATCH)
    return streaming.StreamingDataLoader(data, batch_size=BATCH, drop_last=True, num_workers=workers, **_kept(workers))


def _kept(workers: int) -> dict[str, Any]:
    return {"persistent_workers": True, "prefetch_factor": 4} if workers else {}


def read(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"samples": [], "seconds": []}
    for _ in range(EPOCHS):
        began, samples = time.perf_counter(), 0
        for batch in loader:
            samples += len(batch["tokens"] if isinstance(batch, dict) else batch)
        found["seconds"].append(time.perf_counter() - began)
        found["samples"].append(samples)
    return found


WRITE = {"litdata": write_litdata, "streaming": write_mosaic}
LOADER = {"litdata": litdata_loader, "streaming": mosaic_loader}

if __name__ == "__main__":
    what, library, first, second = sys.argv[1:5]
    if what == "write":
        WRITE[library](first, Path(second))
    else:
        print(json.dumps(read(LOADER[library](first, second, int(sys.argv[5])))), flush=True)
