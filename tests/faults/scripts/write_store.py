"""The write that the fault tests disturb: three shards in two splits; run as a script, or loaded by conftest.

``write_store.py write|append PATH [--resume] [--records N]`` writes; ``write_store.py hold PATH [--append]`` opens a
writer, says "ready", and waits for the end of stdin.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np

import millrace as mr

COLUMNS = {
    "values": mr.Column("float32", (2,)),
    "class": mr.Column("dictionary", per="record"),
    "name": mr.Column("string", per="record"),
}
SHARD_BYTES = 240
NUM_RECORDS = 12


def record(number: int) -> dict[str, object]:
    values = np.arange(2 * (number % 5), dtype=np.float32).reshape(-1, 2) + number
    return {"values": values, "class": f"class {number % 4}", "name": f"récord {number}"}


def fill(writer: mr.StoreWriter, first: int, last: int) -> None:
    for number in range(first, last):
        writer.append(record(number), split="val" if number % 4 == 3 else "train")


def write(path: str, *, resume: bool = False, records: int = NUM_RECORDS) -> None:
    with mr.StoreWriter(path, columns=COLUMNS, shard_bytes=SHARD_BYTES, resume=resume) as writer:
        fill(writer, 0, records)


def append(path: str, *, resume: bool = False, records: int = NUM_RECORDS) -> None:
    with mr.StoreWriter(path, append=True, shard_bytes=SHARD_BYTES, resume=resume) as writer:
        fill(writer, NUM_RECORDS, NUM_RECORDS + records)


def hold(path: str, *, append: bool = False) -> None:
    options = {"append": True} if append else {"columns": COLUMNS}
    with mr.StoreWriter(path, **options) as writer:
        print("ready", flush=True)
        sys.stdin.read()
        fill(writer, 0, NUM_RECORDS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("write", "append", "hold"))
    parser.add_argument("path")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--append", action="store_true")
    parser.add_argument("--records", type=int, default=NUM_RECORDS)
    given = parser.parse_args()
    if given.action == "hold":
        hold(given.path, append=given.append)
    else:
        {"write": write, "append": append}[given.action](given.path, resume=given.resume, records=given.records)


if __name__ == "__main__":
    main()
