"""Preparing text, end to end, against the engine's raw rate and against what others do with the same vocabulary.

    python -m benchmarks.prepare_text [--megabytes 60] [--rounds 3]

The text is the Python standard library and site-packages of this machine, in files of about 8 MB; two processes everywhere.
"""

from __future__ import annotations

import argparse
import multiprocessing
import shutil
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import interleave, medians, save, verdict

PROCESSES = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        size = make_corpus(folder / "text", options.megabytes)
        contestants: dict[str, Callable[[], float]] = {
            "engine alone": lambda: timed(size, lambda: engine_alone(folder)),
            "millrace, no dedup, no normalize": lambda: timed(
                size, lambda: ours(folder, normalize=False, dedup="none")
            ),
            "millrace, defaults": lambda: timed(size, lambda: ours(folder)),
            "obvious script (tokenizers, memmap)": lambda: obvious_rate(folder),
            "millrace, bytes, 1 worker": lambda: timed(
                size, lambda: ours(folder, tokenizer="bytes", normalize=False, dedup="none", workers=1)
            ),
        }
        rounds = interleave(contestants, options.rounds)
        found = medians(rounds)
        for name, value in found.items():
            print(f"  {name}: {value:.1f} MB/s")
        raw = found["engine alone"]
        promises = [
            verdict(
                "share of the engine's raw rate, no dedup, no normalize",
                found["millrace, no dedup, no normalize"] / raw,
                0.9,
            ),
            verdict("share of the engine's raw rate, defaults", found["millrace, defaults"] / raw, 0.75),
            verdict(
                "times the obvious script",
                found["millrace, defaults"] / found["obvious script (tokenizers, memmap)"],
                3,
            ),
            verdict("bytes, MB/s on one core", found["millrace, bytes, 1 worker"], 200),
        ]
        save("prepare_text", {"megabytes": size / 1e6, "mb_per_s": found, "rounds": rounds, "promises": promises})
    finally:
        shutil.rmtree(folder)


def make_corpus(folder: Path, megabytes: int) -> int:
    """Real text: Python sources, in files of about 8 MB."""
    folder.mkdir()
    limit, total, number, chunk = megabytes * 1_000_000, 0, 0, b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        try:
            data = path.read_bytes()
            data.decode()
        except (OSError, UnicodeDecodeError):
            continue
        chunk += data.replace(b"\r\n", b"\n") + b"\n\n"
        if len(chunk) >= 8_000_000 or total + len(chunk) >= limit:
            (folder / f"{number:03d}.txt").write_bytes(chunk)
            total, number, chunk = total + len(chunk), number + 1, b""
        if total >= limit:
            break
    return total


def timed(size: int, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return size / (time.perf_counter() - started) / 1e6


@lru_cache
def _tokenizer() -> Any:
    """Loaded once per process."""
    from millrace.text.load import gpt2

    return gpt2()


def _encode(path: str) -> int:
    """tiktoken's core on documents already split, joined as fast as it goes; nothing is written."""
    tokenizer = _tokenizer()
    documents = Path(path).read_bytes().split(b"\n\n")
    total = 0
    for first in range(0, len(documents), 4000):
        ids, _ = tokenizer.encode_documents(documents[first : first + 4000])
        total += len(ids)
    return total


def engine_alone(folder: Path) -> int:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return sum(pool.imap_unordered(_encode, [str(path) for path in sorted((folder / "text").iterdir())]))


def ours(folder: Path, workers: int = PROCESSES, **options: Any) -> None:
    import millrace as mr

    out = folder / "out"
    mr.prepare_text([str(folder / "text")], out, workers=workers, **options)
    shutil.rmtree(out)


def obvious_rate(folder: Path) -> float:
    """MB/s on the first file alone: it is slow, and its rate does not depend on the size."""
    first = min((folder / "text").iterdir())
    return timed(first.stat().st_size, lambda: obvious(folder, first))


def obvious(folder: Path, path: Path) -> None:
    """What one writes first: lines, ``tokenizer.encode``, append to a file that is then mapped."""
    from tokenizers import Tokenizer

    from millrace.text.load import gpt2

    tokenizer = Tokenizer.from_str(gpt2().to_file().decode())
    with open(folder / "obvious.bin", "wb") as out, open(path) as lines:
        for line in lines:
            out.write(np.array(tokenizer.encode(line).ids, np.uint16).tobytes())


if __name__ == "__main__":
    main()
