"""Tokenising with LitData and datatrove as their documentation shows it; run by the Python that has them.

    PEERS/bin/python benchmarks/peers_text.py litdata|datatrove FOLDER TOKENIZER_JSON PROCESSES

FOLDER holds ``text/*.txt`` (documents between empty lines) and ``jsonl/*.jsonl`` (the same, one per line). Prints the
seconds the tokenisation took, without imports; ``make bench-peers`` makes the environment.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any


def tokenize(path: str, tokenizer: Any = None) -> Iterator[Any]:
    """LitData's example: one tensor of ids per document, the end behind it."""
    import torch

    for text in Path(path).read_text("utf-8").split("\n\n"):
        yield torch.tensor([*tokenizer.encode(text).ids, 50256], dtype=torch.int)


def litdata(folder: Path, vocabulary: str, processes: int) -> float:
    from litdata import optimize
    from litdata.streaming.item_loader import TokensLoader
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(vocabulary)
    started = time.perf_counter()
    optimize(
        fn=partial(tokenize, tokenizer=tokenizer),
        inputs=[str(path) for path in sorted((folder / "text").iterdir())],
        output_dir=str(folder / "litdata"),
        chunk_size=2049 * 8012,
        item_loader=TokensLoader(),
        num_workers=processes,
    )
    return time.perf_counter() - started


def datatrove(folder: Path, vocabulary: str, processes: int) -> float:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    pipeline = [
        JsonlReader(str(folder / "jsonl")),
        DocumentTokenizer(str(folder / "datatrove"), vocabulary, eos_token="<|endoftext|>"),
    ]
    executor = LocalPipelineExecutor(
        pipeline, tasks=processes, workers=processes, logging_dir=str(folder / "datatrove-logs")
    )
    started = time.perf_counter()
    executor.run()
    return time.perf_counter() - started


if __name__ == "__main__":
    which, folder, vocabulary, processes = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    if which == "versions":
        from importlib.metadata import version

        print(*(f"{name} {version(name)}" for name in ("litdata", "datatrove", "tokenizers")), sep=", ")
    else:
        seconds = {"litdata": litdata, "datatrove": datatrove}[which](folder, vocabulary, processes)
        for made in (which, f"{which}-logs"):
            shutil.rmtree(folder / made, ignore_errors=True)
        print(seconds)
