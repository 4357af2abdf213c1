"""Preparing text end to end, against the raw rates of encoders and against other libraries.

    python -m benchmarks.prepare_text [--megabytes 300] [--copies 3] [--rounds 3] [--peers .venv-peers/bin/python]

The text is the Python sources of this machine, each file once, in files of about 8 MB. All use two
processes, ``bytes`` one. gigatoken, the core's encoder and ``bytes`` are so fast that they get it
``--copies`` times; each document of a copy gets a line of its own, so that none is a repeat.
``--peers`` is a Python with LitData and datatrove (``make bench-peers`` makes one). They and the obvious
script are so slow that they get the first files alone.

An encoder alone also starts its processes and loads its vocabulary. It gets documents that are split
already, 4,000 joined by a special token, which is its fastest way. Its ids are counted and thrown away.
``undivided``, it gets whole files. gigatoken runs alone only: millrace does not use it.

The same text is also prepared, with defaults, as JSON lines, with CRLF, and with files of 8 MB as
documents.
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
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import interleave, medians, save, share, verdict

PROCESSES = 2
FILE_BYTES = 8_000_000
PEER_FILES = 6
QUICK_ROUNDS = 3  # times as many
ENCODERS = ("tiktoken", "gigatoken", "millrace")  # the last is the core's
CORPORA = {"tiktoken": ("text",)} | dict.fromkeys(("gigatoken", "millrace", "bytes"), ("text", "copies"))
# End to end on an encoder, against its own raw rate and that of the fastest other one.
SHARES = (
    *(("tiktoken", "tiktoken alone"), ("millrace", "gigatoken alone"), ("millrace", "millrace alone")),
    ("millrace", "gigatoken alone, undivided"),
)
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "JSON lines": ("records", {}),
    "CRLF": ("crlf", {}),
    "documents of 8 MB": ("text", {"document": "file", "val": 0}),
}
AS_IS: dict[str, Any] = {"normalize": False, "dedup": "none"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--copies", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", help="a Python that has litdata and datatrove")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="bench-"))
    try:
        make_corpus(folder, options.megabytes, options.copies)
        all_of_them = contestants(folder, options.peers)
        quick = {name: measure for name, measure in all_of_them.items() if is_quick(name)}
        slow = {name: measure for name, measure in all_of_them.items() if not is_quick(name)}
        rounds = interleave(slow, options.rounds) | interleave(quick, QUICK_ROUNDS * options.rounds)
        found = medians(rounds)
        for name, value in found.items():
            print(f"  {name}: {value:.1f} MB/s")
        figures = {
            "versions": versions(options.peers),
            "megabytes": {name: size_of(folder, some) / 1e6 for name, some in CORPORA.items()},
            "mb_per_s": found, "rounds": rounds, "promises": promises(found, rounds),
        }  # fmt: skip
        save("prepare_text", figures)
    finally:
        shutil.rmtree(folder)


def contestants(folder: Path, peers: str | None) -> dict[str, Callable[[], float]]:
    """Functions that give the MB/s of each contestant."""
    found: dict[str, Callable[[], float]] = {}
    for encoder in ENCODERS:
        found[f"{encoder} alone"] = partial(on, encoder, folder, partial(encoder_alone, folder, encoder))
        if encoder != "tiktoken":
            found[f"{encoder} alone, undivided"] = partial(
                on, encoder, folder, partial(encoder_alone, folder, encoder, is_whole=True)
            )
        if encoder == "gigatoken":
            continue
        found[f"millrace on {encoder}, no dedup, no normalize"] = partial(
            on, encoder, folder, partial(ours, folder, CORPORA[encoder], **AS_IS)
        )
        found[f"millrace on {encoder}, defaults"] = partial(
            on, encoder, folder, partial(ours, folder, CORPORA[encoder])
        )
    for form, (corpus, options) in FORMS.items():
        found[f"millrace, {form}, defaults"] = partial(
            on, "millrace", folder, partial(ours, folder, (corpus,), **options), (corpus,)
        )
    one = {"tokenizer": "bytes", "workers": 1}
    found["millrace, bytes, 1 worker, no dedup, no normalize"] = partial(
        on, "bytes", folder, partial(ours, folder, CORPORA["bytes"], **one, **AS_IS)
    )
    found["millrace, bytes, 1 worker, defaults"] = partial(
        on, "bytes", folder, partial(ours, folder, CORPORA["bytes"], **one)
    )
    found["obvious script (tokenizers, memmap)"] = partial(obvious_rate, folder)
    for peer in ("litdata", "datatrove") if peers else ():
        found[peer] = partial(peer_rate, str(peers), peer, folder)
    return found


def is_quick(name: str) -> bool:
    """Whether it takes seconds: then it runs more often, since the speed of a machine changes."""
    return any(part in name for part in ("gigatoken", "millrace alone", "on millrace", "bytes"))


def promises(found: dict[str, float], rounds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Shares are medians over rounds; the measurements of a round are close in time."""
    made = []
    for encoder, other in SHARES:
        for how, limit in (("no dedup, no normalize", 0.9), ("defaults", 0.75)):
            pairs = zip(rounds[f"millrace on {encoder}, {how}"], rounds[other], strict=True)
            ratios = share([ours / raw for ours, raw in pairs])
            what = f"on {encoder}, share of {other}, {how}"
            made.append(verdict(what, ratios["median"], limit) | {"between": ratios["between"]})
    bytes_found = found["millrace, bytes, 1 worker, no dedup, no normalize"]
    made.append(verdict("bytes, MB/s on one core, no dedup, no normalize", bytes_found, 200))
    for peer in ("obvious script (tokenizers, memmap)", "litdata", "datatrove"):
        if peer in found:
            made += [
                verdict(f"times {peer}, on {e}, defaults", found[f"millrace on {e}, defaults"] / found[peer], 3)
                for e in ENCODERS
                if e != "gigatoken"
            ]
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


def make_corpus(folder: Path, megabytes: int, copies: int) -> None:
    """Writes ``text/*.txt`` of about 8 MB each, other forms of it, files for peers, and GPT-2's tokenizer.json."""
    from millrace.text.load import gpt2

    for made in ("text", "copies", "records", "crlf", "peers/text", "peers/jsonl"):
        (folder / made).mkdir(parents=True)
    limit, total, number, chunk, records = megabytes * 1_000_000, 0, 0, b"", b""
    for data in sources():
        chunk += data + b"\n\n"
        records += json.dumps({"text": data.decode()}, ensure_ascii=False).encode() + b"\n"
        if len(chunk) >= FILE_BYTES or total + len(chunk) >= limit:
            (folder / "text" / f"{number:03d}.txt").write_bytes(chunk)
            (folder / "crlf" / f"{number:03d}.txt").write_bytes(chunk.replace(b"\n", b"\r\n"))
            (folder / "records" / f"{number:03d}.jsonl").write_bytes(records)
            total, number, chunk, records = total + len(chunk), number + 1, b"", b""
        if total >= limit:
            break
    for path in files(folder, ("text",)):
        for copy in range(1, copies):
            again = path.read_bytes().replace(b"\n\n", f"\n\n# {copy}\n".encode())
            (folder / "copies" / f"{copy}-{path.name}").write_bytes(again)
    for path in files(folder, ("text",))[:PEER_FILES]:
        shutil.copy(path, folder / "peers" / "text")
        lines = [json.dumps({"text": text}) for text in path.read_text("utf-8").split("\n\n") if text]
        (folder / "peers" / "jsonl" / f"{path.stem}.jsonl").write_text("\n".join(lines), "utf-8")
    (folder / "tokenizer.json").write_bytes(gpt2().to_file())


def files(folder: Path, corpora: Sequence[str]) -> list[Path]:
    return [path for corpus in corpora for path in sorted((folder / corpus).iterdir())]


def size_of(folder: Path, corpora: Sequence[str]) -> int:
    return sum(path.stat().st_size for path in files(folder, corpora))


def timed(size: int, work: Callable[[], Any], folder: Path | None = None) -> float:
    """MB/s; the output in the folder is removed afterwards."""
    started = time.perf_counter()
    work()
    found = size / (time.perf_counter() - started) / 1e6
    if folder is not None:
        shutil.rmtree(folder / "out", ignore_errors=True)
    return found


def on(encoder: str, folder: Path, work: Callable[[], Any], corpora: Sequence[str] | None = None) -> float:
    """MB/s with this encoder, in this process and those it starts."""
    os.environ["MILLRACE_BPE"] = encoder
    try:
        return timed(size_of(folder, corpora or CORPORA[encoder]), work, folder)
    finally:
        del os.environ["MILLRACE_BPE"]


@lru_cache
def _encoder(vocabulary: str, encoder: str) -> Callable[[list[bytes]], int]:
    """A function that counts the ids of documents; loaded once per process."""
    from millrace.text.ranks import SEPARATOR

    body = json.loads(Path(vocabulary).read_bytes())
    if encoder == "tiktoken":
        from millrace.text.ranks import rank_encoder

        core: Any = rank_encoder(body)._core  # type: ignore[union-attr]
        return lambda documents: len(
            np.frombuffer(
                core.encode_to_tiktoken_buffer(SEPARATOR.join(map(bytes.decode, documents)), {SEPARATOR}), np.uint32
            )
        )
    if encoder == "millrace":
        from millrace.text.ranks import core_merges, fast_encoder

        own: Any = fast_encoder(core_merges(body), 50257, 50256, lambda: body)
        return lambda documents: len(own.encode_spaced(documents)[0])
    from gigatoken.gigatoken_rs import load_hf_json

    body["added_tokens"][0] |= {"id": 50257, "content": SEPARATOR}
    encode, separator = load_hf_json(json.dumps(body)).encode, SEPARATOR.encode()
    return lambda documents: len(encode(separator.join(documents)))


def _encode(vocabulary: str, encoder: str, path: Path, is_whole: bool = False) -> int:
    """The number of ids of a file, its documents split already."""
    encode, text = _encoder(vocabulary, encoder), path.read_bytes()
    documents = [text] if is_whole else text.split(b"\n\n")
    return sum(encode(documents[first : first + 4000]) for first in range(0, len(documents), 4000))


def encoder_alone(folder: Path, encoder: str, is_whole: bool = False) -> int:
    work = partial(_encode, str(folder / "tokenizer.json"), encoder, is_whole=is_whole)
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        return sum(pool.imap_unordered(work, files(folder, CORPORA[encoder])))


def ours(folder: Path, corpora: Sequence[str], workers: int = PROCESSES, **options: Any) -> None:
    import millrace as mr

    mr.prepare_text([str(folder / corpus) for corpus in corpora], folder / "out", workers=workers, **options)


def obvious_rate(folder: Path) -> float:
    """MB/s on the first file alone: its rate does not depend on the size."""
    first = min((folder / "text").iterdir())
    return timed(first.stat().st_size, lambda: obvious(folder, first))


def obvious(folder: Path, path: Path) -> None:
    """What one writes first: lines, ``tokenizer.encode``, append to a file."""
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
