"""Seconds and memory of every command with N and with 8 N files, shards, columns, entities or records.

    python -m benchmarks.growth [--only "text files" "info of shards"] [--files 100000] [--shards 100000]
        [--entities 100000] [--columns 1000] [--records 1000000000]

The sizes are the larger ones; the smaller are an eighth. Each measurement is a process of its own, and what it reads is
made before. ``tests/property/test_growth.py`` holds the same by counts. Records lie in sparse files: zeros, which take
no disk.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import millrace as mr
from benchmarks.common import anonymous_bytes, save
from millrace.store.layout import BLOCK_BYTES, Layout
from millrace.store.shard import ShardEntry, shard_name

SIZES = {"files": 100_000, "shards": 100_000, "entities": 100_000, "columns": 1_000, "records": 1_000_000_000}
TIMES = 8
LIMIT = 10.0
SHARD_RECORDS = 1 << 27  # of the sparse store
LEAST_S = 0.2  # below this a command is its start
Job = Callable[[], object]


def in_folders(folder: Path, size: int, ending: str, content: Callable[[int], bytes]) -> str:
    """Files, a thousand to a folder."""
    if not folder.exists():
        for k in range(size):
            place = folder / f"{k // 1000:04d}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{k:07d}{ending}").write_bytes(content(k))
    return str(folder)


def text(folder: Path, size: int) -> Job:
    source = in_folders(folder / "in-txt", size, ".txt", lambda k: b"document %d" % k)
    return lambda: mr.prepare_text(source, folder / "text", tokenizer="bytes", val=0, workers=1)


def table(folder: Path, size: int) -> Job:
    source = in_folders(folder / "in-csv", size, ".csv", lambda k: b"t,x\n1,%d\n2,3\n" % k)
    return lambda: mr.prepare_table(source, folder / "table", time="t", workers=1)


def records(folder: Path, size: int) -> Job:
    source = in_folders(folder / "in-jsonl", size, ".jsonl", lambda k: b'{"x":[%d],"y":2}\n' % k)
    return lambda: mr.prepare_records(source, folder / "records", workers=1)


def images(folder: Path, size: int) -> Job:
    source = in_folders(folder / "in-png", size, ".png", lambda k: b"\x89PNG\r\n\x1a\n%d" % k)
    return lambda: mr.prepare_records(source, folder / "images", workers=1)


def entities(folder: Path, size: int) -> Job:
    path = folder / "entities.csv"
    with open(path, "w") as file:
        file.write("e,t,x\n")
        file.writelines(f"e{k},{t},{k}.5\n" for k in range(size) for t in range(3))
    return lambda: mr.prepare_table(str(path), folder / "store", time="t", entity="e", workers=1)


def columns(folder: Path, size: int) -> Job:
    path, values = folder / "columns.csv", ",".join(["1.5"] * size)
    names = ",".join(f"x{k}" for k in range(size))
    path.write_text(f"t,{names}\n" + "".join(f"{t},{values}\n" for t in range(100)))
    return lambda: mr.prepare_table(str(path), folder / "store", time="t", workers=1)


def shards(folder: Path, size: int) -> Job:
    def write() -> None:
        with mr.StoreWriter(folder / "store", columns={"tokens": mr.Column("uint16")}, shard_bytes=2) as writer:
            for k in range(size):
                writer.append({"tokens": np.array([k & 0xFFFF], np.uint16)})

    return write


def sparse(folder: Path, size: int) -> Job:
    """A store of records with a number each, in files without a block on disk."""
    columns = {"label": mr.Column("int64", per="record")}
    layout, zeros = Layout(columns), bytes(BLOCK_BYTES)
    whole = xxhash.xxh3_64_hexdigest(zeros)

    def hashes(num_bytes: int) -> list[str]:
        full, more = divmod(num_bytes, BLOCK_BYTES)
        return [whole] * full + [xxhash.xxh3_64_hexdigest(zeros[:more])] * bool(more)

    def write() -> None:
        with mr.StoreWriter(folder / "store", columns=columns) as writer:
            for number, first in enumerate(range(0, size, SHARD_RECORDS)):
                count = min(SHARD_RECORDS, size - first)
                place = writer._partial.shards / shard_name("train", number)
                place.mkdir()
                found: list[str] = []
                for file in layout.files:
                    num_bytes = file.item_bytes * (count + file.extra)
                    with open(place / file.name, "wb") as made:
                        made.truncate(num_bytes)
                    found += hashes(num_bytes)
                writer.add(ShardEntry("train", number, count, (0,), tuple(found)))

    return write


def command(*arguments: str) -> Callable[[Path], Job]:
    from millrace.cli import run

    def make(folder: Path) -> Job:
        given = [str(folder / "store") if argument == "STORE" else argument for argument in arguments]
        return lambda: run(given)

    return make


def opened(folder: Path) -> Job:
    def look() -> None:
        store = mr.open_store(folder / "store")
        view = mr.Records(store.split(store.splits[0]) if store.splits else store)
        view[len(view) // 2]

    return look


COMMANDS: dict[str, Callable[[Path], Job]] = {
    "open": opened,
    "info": command("info", "STORE"),
    "head": command("head", "STORE"),
    "inspect": command("inspect", "STORE"),
    "verify": command("verify", "STORE"),
    "gc": command("gc", "STORE"),
}
MAKERS: dict[str, Callable[[Path, int], Job]] = {
    "shards": shards, "entities": entities, "columns": columns, "records": sparse,
}  # fmt: skip
FILES = {"text files": text, "table files": table, "records files": records, "image files": images}


def cases() -> dict[str, str]:
    """By name: what is counted."""
    prepared = dict.fromkeys(FILES, "files") | {f"write {kind}": kind for kind in MAKERS if kind != "records"}
    return prepared | {f"{name} of {kind}": kind for kind in MAKERS for name in COMMANDS}


def job(name: str, folder: Path, size: int) -> Job:
    """What is measured; the store that a command reads is there."""
    if name in FILES:
        return FILES[name](folder, size)
    verb, _, kind = name.rpartition(" ")
    if verb == "write":
        return MAKERS[kind](folder, size)
    return COMMANDS[verb.removesuffix(" of")](folder)


def measure(name: str, folder: Path, size: int) -> dict[str, float]:
    run = job(name, folder, size)
    most, is_over = [anonymous_bytes()], threading.Event()

    def sample() -> None:
        while not is_over.wait(0.05):
            most.append(anonymous_bytes())

    watcher = threading.Thread(target=sample, daemon=True)
    watcher.start()
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        run()
    seconds = time.perf_counter() - began
    is_over.set()
    return {"seconds": seconds, "anonymous_bytes": max(*most, anonymous_bytes())}


def in_process(name: str, folder: Path, size: int) -> dict[str, float]:
    folder.mkdir(exist_ok=True)
    call = [sys.executable, "-m", "benchmarks.growth", "--case", name, "--size", str(size), "--folder", str(folder)]
    done = subprocess.run(call, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=cases(), default=list(cases()))
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where files are made")
    for what, size in SIZES.items():
        parser.add_argument(f"--{what}", type=int, default=size)
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.folder, options.size)))
        return
    figures: dict[str, Any] = {}
    print(f"{'':24}{'N':>14}{'seconds':>10}{'8 N':>10}{'times':>8}{'MB':>8}{'8 N':>8}")
    work = Path(tempfile.mkdtemp(prefix="growth-", dir=options.folder))
    try:
        for name in options.only:
            what = cases()[name]
            large = getattr(options, what)
            sizes = (max(large // TIMES, 1), large)
            for size in sizes:
                if name.endswith(f"of {what}") and not (work / f"{what}-{size}" / "store").exists():
                    in_process(f"write {what}", work / f"{what}-{size}", size)
            one, many = (in_process(name, work / f"{what}-{size}", size) for size in sizes)
            times = many["seconds"] / max(one["seconds"], LEAST_S)
            mark = "" if times <= LIMIT else "  MISS"
            memory = [found["anonymous_bytes"] / 1e6 for found in (one, many)]
            print(
                f"{name:24}{sizes[0]:14,}{one['seconds']:10.2f}{many['seconds']:10.2f}{times:8.1f}"
                f"{memory[0]:8.0f}{memory[1]:8.0f}{mark}",
                flush=True,
            )
            figures[name] = {"sizes": sizes, "one": one, "many": many, "times": times}
            for size in sizes:  # stores stay for other commands
                for left in ("text", "table", "records", "images", *(["store"] if name.startswith("write") else [])):
                    shutil.rmtree(work / f"{what}-{size}" / left, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    save("growth", figures, kept=True)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONPATH", "src:.")
    main()
