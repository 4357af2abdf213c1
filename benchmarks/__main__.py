"""All benchmarks one after the other, beside other libraries, then the tables and the chart of the documentation.

    python -m benchmarks [--only feed feed_peers] [--peers .venv-peers] [--install]

`make bench` runs this. Other libraries get environments of their own, since some exclude each other. A library that
does not install, or a benchmark that fails, is left out: the others go on, and the last lines say what and why
(`benchmarks/results/left_out.json`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.common import save

CONSTRAINTS = ("-c", "constraints.txt")
# By name: constraints, then packages; each is installed by itself. torch comes first and by its exact version.
ENVIRONMENTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "own": (CONSTRAINTS, ("gigatoken", "polars", "duckdb", "lmdb", "opencv-python-headless")),
    "feed": (
        CONSTRAINTS,
        (
            "spdl==0.8.0",
            "grain==0.2.18",
            "torchdata==0.11.0",
            "datasets==5.2.0",
            "webdataset==1.0.2",
            "litdata==0.2.76",
            "boto3",
            "obstore",
        ),
    ),
    "older": ((), ("mosaicml-streaming==0.13.0", "gluonts==0.17.0")),  # these want an older numpy
    "text": (CONSTRAINTS, ("litdata==0.2.76", "datatrove[processing]==0.9.0", "orjson", "tokenizers")),
}
# By result: the environment and the command; {text} and the like are the Pythons of those environments.
STEPS: dict[str, tuple[str, str]] = {
    "store": ("own", "benchmarks.store"),
    "feed": ("own", "benchmarks.feed"),
    "feed_peers": ("feed", "benchmarks.feed --peers"),
    "feed_older": ("older", "benchmarks.feed --peers --name feed_older"),
    "records": ("own", "benchmarks.records"),
    "images": ("own", "benchmarks.images"),
    "workers": ("own", "benchmarks.workers"),
    "cores": ("own", "benchmarks.cores"),
    "cold": ("own", "benchmarks.cold"),
    "queue": ("own", "benchmarks.queue"),
    "tiers": ("own", "benchmarks.tiers --peers {feed} {older}"),
    "packing": ("own", "benchmarks.packing"),
    "prepare_text": ("own", "benchmarks.prepare_text --peers {text}"),
    "prepare_table": ("own", "benchmarks.prepare_table"),
    "engines": ("own", "benchmarks.engines"),
    "problem": ("own", "benchmarks.problem"),
    "train": ("own", "benchmarks.train --quick"),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS), help="results to make")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers"), help="folder of the environments")
    parser.add_argument("--install", action="store_true", help="only install the other libraries")
    options = parser.parse_args()
    steps = {name: STEPS[name] for name in options.only}
    needed = {environment for environment, _ in steps.values()}
    needed |= {name for _, command in steps.values() for name in ENVIRONMENTS if f"{{{name}}}" in command}
    left_out: dict[str, str] = {}
    for environment in sorted(needed):
        left_out |= install(environment, options.peers)
    if not options.install:
        pythons = {name: python(name, options.peers) for name in ENVIRONMENTS}
        for name, (environment, command) in steps.items():
            print(f"== {name}", flush=True)
            left_out |= run(name, [str(python(environment, options.peers)), "-m", *command.format(**pythons).split()])
        left_out |= run("table", [sys.executable, "-m", "benchmarks.table"])
        left_out |= run("chart", [sys.executable, "-m", "benchmarks.chart"])
    save("left_out", {"left_out": left_out}, kept=False)
    for name, reason in left_out.items():
        print(f"left out: {name}: {reason}")


def python(environment: str, peers: Path) -> Path:
    return Path(sys.executable) if environment == "own" else peers / environment / "bin/python"


def install(environment: str, peers: Path) -> dict[str, str]:
    """The packages that could not be installed, and why."""
    constraints, packages = ENVIRONMENTS[environment]
    own = python(environment, peers)
    if environment != "own":
        if not own.exists():
            subprocess.run([sys.executable, "-m", "venv", own.parents[1]], check=True)
        packages = ("torch==2.13.0", *packages, "numpy", "msgspec", "xxhash", "psutil")  # the numpy that they want
    left_out = {}
    for package in packages:
        print(f"== install {package} ({environment})", flush=True)
        done = subprocess.run(
            [own, "-m", "pip", "install", "--quiet", *constraints, package], capture_output=True, text=True
        )
        if done.returncode:
            left_out[package] = reason(done.stderr)
    return left_out


def run(name: str, command: list[str]) -> dict[str, str]:
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": "src:."}, stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="")
    return {name: reason(done.stderr)} if done.returncode else {}


def reason(errors: str) -> str:
    """The last line that names an error."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next(
        (line for line in reversed(lines) if "Error: " in line or "ERROR: " in line), lines[-1] if lines else "?"
    )


if __name__ == "__main__":
    main()
