"""Preparing text, end to end, against the engines' raw rates and against what others do with the same vocabulary.

    python -m benchmarks.prepare_text [--megabytes 300] [--rounds 3] [--peers .venv-peers/bin/python]

The text is Python sources of this machine (the standard library and site-packages), every file once, in files of
about 8 MB; two processes everywhere, one for ``bytes``. ``--peers`` is a Python that has LitData and datatrove (``make
bench-peers`` makes one); they and the obvious script are so slow that they get the first files alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import interleave, medians, save, verdict

PROCESSES = 2
FILE_BYTES = 8_000_000
PEER_FILES = 6
ENGINES = ("tiktoken", "gigatoken")
AS_IS: dict[str, Any] = {"normalize": False, "dedup": "none"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", help="a Python that has litdata and datatrove")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        size = make_corpus(folder, options.megabytes)
        rounds = interleave(contestants(folder, size, options.peers), options.rounds)
        found = medians(rounds)
        for name, value in found.items():
            print(f"  {name}: {value:.1f} MB/s")
        figures = {
            "versions": versions(options.peers), "megabytes": size / 1e6, "mb_per_s": found, "rounds": rounds,
            "promises": promises(found),
        }  # fmt: skip
        save("prepare_text", figures)
    finally:
        shutil.rmtree(folder)


def contestants(folder: Path, size: int, peers: str | None) -> dict[str, Callable[[], float]]:
    """MB/s of each, by what is to be measured."""
    found: dict[str, Callable[[], float]] = {}
    for engine in ENGINES:
        found[f"{engine} alone"] = partial(on, engine, size, partial(engine_alone, folder))
        found[f"millrace on {engine}, no dedup, no normalize"] = partial(
            on, engine, size, partial(ours, folder, **AS_IS)
        )
        found[f"millrace on {engine}, defaults"] = partial(on, engine, size, partial(ours, folder))
    one = {"tokenizer": "bytes", "workers": 1}
    found["millrace, bytes, 1 worker, no dedup, no normalize"] = partial(
        timed, size, partial(ours, folder, **one, **AS_IS)
    )
    found["millrace, bytes, 1 worker, defaults"] = partial(timed, size, partial(ours, folder, **one))
    found["obvious script (tokenizers, memmap)"] = partial(obvious_rate, folder)
    for peer in ("litdata", "datatrove") if peers else ():
        found[peer] = partial(peer_rate, str(peers), peer, folder)
    return found


def promises(found: dict[str, float]) -> list[dict[str, Any]]:
    raw = {engine: found[f"{engine} alone"] for engine in ENGINES}
    as_is = {engine: found[f"millrace on {engine}, no dedup, no normalize"] for engine in ENGINES}
    default = {engine: found[f"millrace on {engine}, defaults"] for engine in ENGINES}
    made = []
    for engine in ENGINES:
        made += [
            verdict(f"share of {engine}'s raw rate, no dedup, no normalize", as_is[engine] / raw[engine], 0.9),
            verdict(f"share of {engine}'s raw rate, defaults", default[engine] / raw[engine], 0.75),
        ]
    bytes_found = found["millrace, bytes, 1 worker, no dedup, no normalize"]
    made.append(verdict("bytes, MB/s on one core, no dedup, no normalize", bytes_found, 200))
    for peer in ("obvious script (tokenizers, memmap)", "litdata", "datatrove"):
        if peer in found:
            made += [verdict(f"times {peer}, on {e}, defaults", default[e] / found[peer], 3) for e in ENGINES]
    return made


def versions(peers: str | None) -> dict[str, str]:
    found = {name: version(name) for name in ("tiktoken", "gigatoken", "tokenizers", "numpy")}
    if peers:
        command = [peers, str(Path(__file__).with_name("peers_text.py")), "versions", ".", ".", "0"]
        found["peers"] = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found


def sources() -> Iterator[bytes]:
    """Python files of this machine, each content once."""
    seen = set()
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(name)).rglob("*.py")):
            try:
                data = path.read_bytes()
                data.decode()
            except (OSError, UnicodeDecodeError):
                continue
            if (digest := hashlib.sha256(data).digest()) not in seen:
                seen.add(digest)
                yield data.replace(b"\r\n", b"\n")


def make_corpus(folder: Path, megabytes: int) -> int:
    """``text/*.txt`` of about 8 MB each; its first files once more as JSON lines, and GPT-2's tokenizer.json."""
    from millrace.text.load import gpt2

    (folder / "text").mkdir(parents=True)
    limit, total, number, chunk = megabytes * 1_000_000, 0, 0, b""
    for data in sources():
        chunk += data + b"\n\n"
        if len(chunk) >= FILE_BYTES or total + len(chunk) >= limit:
            (folder / "text" / f"{number:03d}.txt").write_bytes(chunk)
            total, number, chunk = total + len(chunk), number + 1, b""
        if total >= limit:
            break
    for made in ("text", "jsonl"):
        (folder / "peers" / made).mkdir(parents=True)
    for path in sorted((folder / "text").iterdir())[:PEER_FILES]:
        shutil.copy(path, folder / "peers" / "text")
        lines = [json.dumps({"text": text}) for text in path.read_text("utf-8").split("\n\n") if text]
        (folder / "peers" / "jsonl" / f"{path.stem}.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "tokenizer.json").write_bytes(gpt2().to_file())
    return total


def timed(size: int, work: Callable[[], Any]) -> float:
    started = time.perf_counter()
    work()
    return size / (time.perf_counter() - started) / 1e6


def on(engine: str, size: int, work: Callable[[], Any]) -> float:
    """MB/s with this engine, in this process and those it starts."""
    os.environ["MILLRACE_BPE"] = engine
    try:
        return timed(size, work)
    finally:
        del os.environ["MILLRACE_BPE"]


@lru_cache
def _tokenizer() -> Any:
    """Loaded once per process."""
    from millrace.text.load import gpt2

    return gpt2()


def _encode(path: str) -> int:
    """The engine on documents already split, joined as fast as it goes; nothing is written, nothing is checked."""
    engine = _tokenizer()._engines[0]
    encode = engine.encode_documents if engine.name == "tiktoken" else engine._encode
    documents = Path(path).read_bytes().split(b"\n\n")
    return sum(len(encode(documents[first : first + 4000])[0]) for first in range(0, len(documents), 4000))


def engine_alone(folder: Path) -> int:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return sum(pool.imap_unordered(_encode, [str(path) for path in sorted((folder / "text").iterdir())]))


def ours(folder: Path, workers: int = PROCESSES, **options: Any) -> None:
    import millrace as mr

    out = folder / "out"
    mr.prepare_text([str(folder / "text")], out, workers=workers, **options)
    shutil.rmtree(out)


def obvious_rate(folder: Path) -> float:
    """MB/s on the first file alone: its rate does not depend on the size."""
    first = min((folder / "text").iterdir())
    return timed(first.stat().st_size, lambda: obvious(folder, first))


def obvious(folder: Path, path: Path) -> None:
    """What one writes first: lines, ``tokenizer.encode``, append to a file that is then mapped."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with open(folder / "obvious.bin", "wb") as out, open(path) as lines:
        for line in lines:
            out.write(np.array(tokenizer.encode(line).ids, np.uint16).tobytes())


def peer_rate(python: str, peer: str, folder: Path) -> float:
    """MB/s of one of the others, by its own clock."""
    data, script = folder / "peers", Path(__file__).with_name("peers_text.py")
    command = [python, str(script), peer, str(data), str(folder / "tokenizer.json"), str(PROCESSES)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{peer} failed:\n{done.stderr[-2000:]}")
    size = sum(path.stat().st_size for path in (data / "text").iterdir())
    return size / float(done.stdout.split()[-1]) / 1e6


if __name__ == "__main__":
    main()
