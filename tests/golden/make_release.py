"""Writes what a released version makes, for later versions to open, append to, feed from, train on and continue.

``python tests/golden/make_release.py VERSION`` ran with the code of that version and wrote ``release-VERSION.tar.xz``: sources,
a store of each kind, the same stores as a bucket holds them, feeds stopped in the middle with the samples that follow, and a
training run of six steps. Nothing here is run again with later code: test_release.py reads the archive.
"""

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import millrace as mr
from millrace.testing import tree_digest

HERE = Path(__file__).parent
WORK = Path("/tmp/millrace-release")
MILLRACE = [sys.executable, "-m", "millrace"]
PREPARE = {
    "text": ["text", "--tokenizer", "bytes", "--val", "0.1", "--shard-tokens", "3k"],
    "series": [
        "table",
        "--entity",
        "stock",
        "--time",
        "time",
        "--split",
        "tail:0.2",
        "--gap",
        "2",
        "--target",
        "close",
    ],
    "events": ["records", "--format", "jsonl", "--split", "hash:0.2"],
}
SOURCES = {"text": "tales.jsonl", "series": "days.parquet", "events": "events.jsonl"}
LATER = {"text": "more-tales.jsonl", "series": "more-days.parquet", "events": "more-events.jsonl"}
SETTINGS = {
    "data.length": 32, "model.width": 8, "model.layers": 1, "model.heads": 1, "checkpoint.every": 3, "train.log_every": 1,
    "train.threads": 1, "optimizer.warmup": 2, "optimizer.decay_steps": 12,
}  # fmt: skip
TRAIN = ["train", "nano", "--store", "stores/text", "--run", "run"]
TRAIN += [word for key, value in SETTINGS.items() for word in ("--set", f"{key}={value}")]


def write_sources(folder: Path) -> None:
    random.seed(7)
    rng = np.random.default_rng(7)
    for name, count in (("tales", 60), ("more-tales", 20)):
        words = ["The miller sees the wheel.", "A heron follows the river.", "Grain leaves by the road."]
        texts = [
            " ".join(random.choice(words) for _ in range(random.randint(1, 9))) + f" {name} {k}" for k in range(count)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, first, days in (("days", 0, 40), ("more-days", 40, 12)):
        rows = [
            (stock, 1_700_000_000 + 86_400 * (first + day)) for stock in ("elm", "oak", "yew") for day in range(days)
        ]
        close = np.round(100 + np.cumsum(rng.normal(size=len(rows))), 2)
        columns = {
            "stock": [stock for stock, _ in rows],
            "time": pa.array([second for _, second in rows], pa.timestamp("s")),
            "close": close,
            "volume": rng.integers(1, 10_000, len(rows)),
        }
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    for name, count in (("events", 50), ("more-events", 10)):
        with (folder / f"{name}.jsonl").open("w") as file:
            for k in range(count):
                hits = np.round(rng.normal(size=int(rng.integers(1, 9))), 3).tolist()
                file.write(json.dumps({"hits": hits, "label": k % 3, "key": f"{name}-{k}"}) + "\n")


def run(*arguments: str) -> None:
    subprocess.run([*MILLRACE, *arguments], check=True, stdout=subprocess.DEVNULL)


def feeds(stores: Path) -> dict[str, mr.Feed]:
    """A feed of each kind of view and order; they are stopped after three batches."""
    text, series, events = (mr.open_store(stores / name) for name in PREPARE)
    blocks, records = mr.Blocks(text.split("train"), length=32), mr.Records(events.split("train"))
    windows = mr.Windows(series.split("train"), lookback=6, horizon=2)
    padded = mr.Records(events.split("train"), pad=4)
    mixed = mr.Mixture([(blocks, 0.7), (mr.Blocks(text.split("val"), length=32), 0.3)])
    return {
        "blocks": mr.Feed(blocks, batch=8, seed=3),
        "windows": mr.Feed(windows, batch=8, order=mr.BlockShuffled(len(windows), block=4, window=3, seed=3)),
        "records": mr.Feed(records, batch=8, seed=3),
        "padded": mr.Feed(padded, batch=8, seed=3, epochs=1),
        "subset": mr.Feed(mr.Subset(records, np.arange(0, len(records), 2)), batch=4, seed=3),
        "packed": mr.Feed(mr.Packed(text.split("train"), length=64), batch=4, seed=3),
        "mixture": mr.Feed(mixed, batch=8, seed=3),
        "budget": mr.Feed(records, batch=2, seed=3, max_rows=16),
    }


def stopped_feeds(stores: Path) -> dict[str, dict]:
    """The state of each feed after three batches, its view as JSON, and the samples of the two batches that follow."""
    expected = {}
    for name, feed in feeds(stores).items():
        with feed:
            batches = iter(feed)
            for _ in range(3):
                next(batches)
            state = feed.state_dict()
            samples = [next(batches).samples.tolist() for _ in range(2)]
        expected[name] = {"state": state, "spec": feed.view.spec(), "samples": samples}
    return expected


def push_stores(stores: Path, bucket: Path) -> None:
    """The stores as ``push`` lays them out at a URL, one of them compressed."""
    for name in PREPARE:
        compress = ["--compress", "zstd"] if name == "events" else []
        run("push", f"{stores}/{name}", f"file://{bucket}/{name}", *compress)


def main(version: str) -> None:
    if not mr.__version__.startswith(version):
        raise SystemExit(f"this is millrace {mr.__version__}, not {version}: run it with the code of that version")
    shutil.rmtree(WORK, ignore_errors=True)
    base = WORK / "release"
    (base / "sources").mkdir(parents=True)
    write_sources(base / "sources")
    os.chdir(base)
    expected: dict[str, dict] = {"fingerprints": {}, "appended": {}, "digests": {}, "feeds": {}}
    for name, options in PREPARE.items():
        run("prepare", *options, f"sources/{SOURCES[name]}", "--out", f"stores/{name}")
        expected["fingerprints"][name] = str(mr.open_store(f"stores/{name}").fingerprint)
    run(*TRAIN, "--set", "train.max_steps=6")
    expected["feeds"] = stopped_feeds(base / "stores")
    shutil.copytree("stores", "appended")
    for name, options in PREPARE.items():
        run("prepare", options[0], f"sources/{LATER[name]}", "--out", f"appended/{name}", "--append")
        expected["appended"][name] = str(mr.open_store(f"appended/{name}").fingerprint)
        expected["digests"][name] = tree_digest(base / "appended" / name)
    shutil.copytree("run", "continued")
    run(*[word if word != "run" else "continued" for word in TRAIN], "--set", "train.max_steps=12")
    lines = [json.loads(line) for line in Path("continued/metrics.jsonl").read_text().splitlines()]
    expected["losses"] = {str(line["step"]): line["loss"] for line in lines if "loss" in line}
    push_stores(base / "stores", base / "bucket")
    Path("expected.json").write_text(json.dumps(expected))
    for name in ("appended", "continued", "run/loss.png", "run/owner.json"):
        path = base / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with tarfile.open(HERE / f"release-{version}.tar.xz", "w:xz") as archive:
        archive.add(base, "release", filter=lambda entry: entry.replace(uid=0, gid=0, uname="", gname="", deep=False))


if __name__ == "__main__":
    main(sys.argv[1])
