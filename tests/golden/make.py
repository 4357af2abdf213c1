"""Writes the golden store: every dtype, two axes, text, dictionaries, two splits, and a snapshot appended to the first.

``python tests/golden/make.py`` writes ``tests/golden/store`` anew and prints the digests for test_golden.py. Version 1 of
the format is what these bytes are: if they change, stores that people have no longer read the same.
"""

import hashlib
import shutil
from pathlib import Path

import numpy as np

import millrace as mr

HERE = Path(__file__).parent
WHOLE = [f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u")]
COLUMNS = {
    **{name: mr.Column(name) for name in WHOLE},
    "float16": mr.Column("float16"),
    "bfloat16": mr.Column("bfloat16"),
    "float32": mr.Column("float32", (2,)),
    "float64": mr.Column("float64"),
    "bool": mr.Column("bool"),
    "word": mr.Column("dictionary"),
    "pixels": mr.Column("uint8", axis="image"),
    "label": mr.Column("int64", (2,), per="record"),
    "weight": mr.Column("float32", per="record"),
    "city": mr.Column("dictionary", per="record"),
    "key": mr.Column("string", per="record"),
}
# Bits, so that no library decides what they are: 0, -0, 1, -2, the largest, the smallest, infinity, NaN.
FLOATS = {
    "float16": (np.uint16, [0x0000, 0x8000, 0x3C00, 0xC000, 0x7BFF, 0x0001, 0x7C00, 0x7E01]),
    "float32": (np.uint32, [0, 0x80000000, 0x3F800000, 0xC0000000, 0x7F7FFFFF, 0x00000001, 0x7F800000, 0x7FC00001]),
    "float64": (
        np.uint64,
        [0, 1 << 63, 0x3FF << 52, 1 << 63 | 1 << 62, (0x7FF << 52) - 1, 1, 0x7FF << 52, (0x7FF << 52) + 1],
    ),
}
WORDS = ["rye", "", "rye", "Öl", "麦", "rye", "Öl", "a b"]
KEYS = ["first", "", "drei – 三", "val", "later"]
CITIES = ["Ulm", "Bern", "Ulm", "Bern", "Genf"]
OFFSETS, IMAGE_OFFSETS = [0, 3, 3, 5, 6, 8], [0, 0, 4, 5, 6, 9]


def whole(name: str, rows: np.ndarray) -> np.ndarray:
    """The smallest, the largest, and small numbers between."""
    limits = np.iinfo(name)
    values = [limits.min, limits.max, 0, 1, 2, 3, 100, limits.max - 1]
    return np.array([values[row] for row in rows], name)


def floats(name: str, rows: np.ndarray) -> np.ndarray:
    bits, patterns = FLOATS[name]
    return np.array([patterns[row] for row in rows], bits).view(name)


def record(k: int) -> dict:
    rows = np.arange(OFFSETS[k], OFFSETS[k + 1])
    wide = floats("float32", rows)
    return {
        **{name: whole(name, rows) for name in WHOLE},
        "float16": floats("float16", rows),
        "bfloat16": wide,  # rounded when it is written: the largest becomes infinity, the smallest 0
        "float32": np.stack([wide, np.full(len(rows), k, np.float32)], axis=1),
        "float64": floats("float64", rows),
        "bool": rows % 3 == 1,
        "word": [WORDS[row] for row in rows],
        "pixels": np.arange(IMAGE_OFFSETS[k], IMAGE_OFFSETS[k + 1], dtype=np.uint8) * 31,
        "label": [k, -(2**62) + k],
        "weight": np.float32(0.1) * np.float32(k),
        "city": CITIES[k],
        "key": KEYS[k],
    }


def write(path: Path) -> list[str]:
    """Two snapshots, with shards of about two records each; returns their fingerprints."""
    with mr.StoreWriter(path, columns=COLUMNS, splits=("train", "val"), shard_bytes=400, meta={"golden": 1}) as first:
        for k in range(4):
            first.append(record(k), split="val" if k == 3 else "train")
    with mr.StoreWriter(path, append=True, meta={"golden": 2}) as second:
        second.append(record(4))
    (path / "provenance.json").unlink()  # names the machine; nothing reads it
    return [str(first.fingerprint), str(second.fingerprint)]


def digests(path: Path) -> dict[str, str]:
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()[:16] for file in files}


if __name__ == "__main__":
    shutil.rmtree(HERE / "store", ignore_errors=True)
    print(write(HERE / "store"))
    for name, digest in digests(HERE / "store").items():
        print(f'    "{name}": "{digest}",')
