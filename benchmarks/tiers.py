"""A remote store against its limits, on a loopback S3 server: python -m benchmarks.tiers [--megabytes 512].

With ``--peers LITDATA_PYTHON MOSAIC_PYTHON`` these libraries read the same tokens from the same server in the same run.

First epoch, from an empty cache: bytes per second against a bare parallel download of the same objects by the same library,
into files and into memory. Second epoch: samples per second against the same store on disk. The server runs on the same
machine: with few cores, what it and the loop compute slows the download.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import millrace as mr
from benchmarks.common import interleave, medians, save, verdict
from millrace.store.remote.objects import Objects

LENGTH, BATCH, SHARD_BYTES = 1024, 256, 16 << 20
SERVER = """
import logging, sys, time
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def write(path: Path, megabytes: int) -> None:
    generator = np.random.default_rng(1)
    with mr.StoreWriter(path, kind="text", columns={"tokens": mr.Column("uint16")}, shard_bytes=SHARD_BYTES) as writer:
        for _ in range(megabytes):
            writer.append({"tokens": generator.integers(0, 50_000, 1 << 19, dtype=np.uint16)})


def epoch(store: mr.Store) -> float:
    """Seconds for one pass."""
    view = mr.Blocks(store, length=LENGTH)
    order = mr.BlockShuffled(len(view), block=SHARD_BYTES // 2 // LENGTH, window=4, seed=1)  # about 4 shards at a time
    began = time.perf_counter()
    with mr.Feed(view, batch=BATCH, order=order, epochs=1, device="numpy") as feed:
        for _ in feed:
            pass
    return time.perf_counter() - began


def bare(url: str, names: list[str], target: Path | None = None) -> float:
    """Seconds to download the objects, unchecked, by as many threads as a remote store uses: into memory or into files."""
    from millrace.store.remote.fetcher import THREADS

    objects = Objects(url)

    def fetch(name: str) -> None:
        with open(os.devnull if target is None else target / name.replace("/", "-"), "wb", buffering=0) as file:
            for chunk in objects.stream(name):
                if target is not None:
                    file.write(chunk)

    began = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(fetch, names))
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", nargs=2, metavar="PYTHON", help="those that have LitData and MosaicML Streaming")
    options = parser.parse_args()
    logging.disable()
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        with tempfile.TemporaryDirectory(dir=base) as folder:
            assert server.stdout is not None
            lines = iter(server.stdout)
            port = next(int(line) for line in lines if line.strip().isdigit())
            run(Path(folder), port, options)
    finally:
        server.kill()
        server.wait()


def run(folder: Path, port: int, options: argparse.Namespace) -> None:
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ALLOW_HTTP": "true", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
    write(folder / "store", options.megabytes)
    url = "s3://bucket/store"
    mr.push(folder / "store", url)
    local = mr.open_store(folder / "store")
    names = [
        path.relative_to(folder / "store").as_posix() for path in sorted((folder / "store/shards").rglob("tokens.u16"))
    ]
    num_bytes = sum((folder / "store" / name).stat().st_size for name in names)

    def first_epoch() -> float:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        return num_bytes / epoch(mr.open_store(url, cache_dir=folder / "cache")) / 1e6

    def to_files() -> float:
        shutil.rmtree(folder / "bare", ignore_errors=True)
        (folder / "bare").mkdir()
        return num_bytes / bare(url, names, folder / "bare") / 1e6

    contestants = {
        "bare": lambda: num_bytes / bare(url, names) / 1e6,
        "bare to files": to_files,
        "first epoch": first_epoch,
    }
    found = interleave(contestants, options.rounds)
    remote = mr.open_store(url, cache_dir=folder / "cache")
    epoch(remote), epoch(local)
    samples = len(mr.Blocks(local, length=LENGTH))
    later = interleave(
        {"local": lambda: samples / epoch(local), "second epoch": lambda: samples / epoch(remote)}, 3 * options.rounds
    )
    middle = medians(found) | medians(later)
    for name, value in middle.items():
        print(f"{name}: {value:,.0f} {'MB/s' if name in found else 'samples/s'}")
    verdicts = [
        verdict("first epoch / bare download to files", middle["first epoch"] / middle["bare to files"], 0.8),
        verdict("first epoch / bare download to memory", middle["first epoch"] / middle["bare"], 0.8),
        verdict("second epoch / local store", middle["second epoch"] / middle["local"], 0.95),
    ]
    figures: dict[str, Any] = {"megabytes": options.megabytes, "MB_per_s": found, "samples_per_s": later}
    if options.peers:
        peers = {
            library: peer(library, program, folder, [folder / "store" / name for name in names])
            for library, program in zip(("litdata", "streaming"), options.peers, strict=True)
        }
        figures["peers"] = peers
        ours = {"first": statistics.median(found["first epoch"]) * 1e6 / (2 * LENGTH), "second": middle["second epoch"]}
        verdicts += [
            verdict(f"{which} epoch / {library}", ours[which] / max(peers[library][which].values()), limit)
            for library in peers
            for which, limit in (("first", 3), ("second", 5))
        ]
    save("tiers", figures | {"verdicts": verdicts})


def peer(library: str, program: str, folder: Path, shards: list[Path]) -> dict[str, dict[str, float]]:
    """Samples per second of the first and the best later epoch of another library, by its number of workers."""
    tokens, made, cache = folder / "tokens", folder / library, folder / f"{library}-cache"
    tokens.write_bytes(b"".join(path.read_bytes() for path in shards))
    command = [program, "-m", "benchmarks.peers_tiers"]
    environment = os.environ | {"PYTHONPATH": "src:.", "AWS_DEFAULT_REGION": "us-east-1"}
    subprocess.run([*command, "write", library, tokens, made], env=environment, check=True, stdout=subprocess.DEVNULL)
    tokens.unlink()
    objects = Objects(f"s3://bucket/{library}")
    for path in made.iterdir():
        objects.put(path.name, path)
    shutil.rmtree(made)
    found: dict[str, dict[str, float]] = {"first": {}, "second": {}}
    for workers in (0, 1, 2):
        done = subprocess.run(
            [*command, "read", library, objects.url, cache, str(workers)], env=environment, check=True,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        shutil.rmtree(cache)
        epochs = json.loads(done.stdout.strip().splitlines()[-1])
        rates = [samples / seconds for samples, seconds in zip(epochs["samples"], epochs["seconds"], strict=True)]
        found["first"][str(workers)], found["second"][str(workers)] = rates[0], max(rates[1:])
        print(f"{library}, {workers} workers: {rates[0]:,.0f}, then {max(rates[1:]):,.0f} samples/s", flush=True)
    return found


if __name__ == "__main__":
    main()
