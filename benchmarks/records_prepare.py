"""``prepare records`` on 20,000 small JPEGs beside ``tar cf`` of the same folder: files/s, in turns.

python -m benchmarks.records_prepare [--files 20000] [--rounds 3]
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

import millrace as mr


def write_images(folder: Path, count: int) -> int:
    """JPEGs of about 9 KiB in 20 classes; returns their bytes."""
    rng = np.random.default_rng(0)
    kinds = []
    for _ in range(64):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 255, (112, 112, 3), dtype=np.uint8)).save(file, "JPEG", quality=80)
        kinds.append(file.getvalue())
    for k in range(20):
        (folder / f"class{k:02d}").mkdir(parents=True)
    for k in range(count):
        (folder / f"class{k % 20:02d}" / f"{k:06d}.jpg").write_bytes(kinds[k % 64])
    return sum(len(kinds[k % 64]) for k in range(count))


def timed(run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default=None)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        folder = Path(name)
        num_bytes = write_images(folder / "in", asked.files)
        ways = {
            "tar cf": lambda: subprocess.run(
                ["tar", "cf", str(folder / "out.tar"), "-C", str(folder), "in"], check=True
            ),
            "tar cf, sync": lambda: subprocess.run(
                f"tar cf {folder}/out.tar -C {folder} in && sync -d {folder}/out.tar", shell=True, check=True
            ),
            "prepare, 1 worker": lambda: mr.prepare_records(folder / "in", folder / "out", workers=1),
            "prepare, 2 workers": lambda: mr.prepare_records(folder / "in", folder / "out", workers=2),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(asked.rounds):
            for way, run in ways.items():
                seconds[way].append(timed(run))
                shutil.rmtree(folder / "out", ignore_errors=True)
        found = {way: asked.files / statistics.median(times) for way, times in seconds.items()}
        print(
            json.dumps(
                {"files": asked.files, "bytes": num_bytes, "files per second": {w: round(v) for w, v in found.items()}}
            )
        )


if __name__ == "__main__":
    main()
