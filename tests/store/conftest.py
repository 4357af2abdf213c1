"""What several of these tests need: a store with every kind of column, stores laid or forged by hand, fresh interpreters."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import millrace as mr
from millrace.store import manifest as manifests
from millrace.store.layout import DTYPES, Layout, num_blocks
from millrace.store.publish import build
from millrace.store.shard import ShardEntry, shard_name

NUMBERS = [name for name in DTYPES if name not in ("string", "dictionary")]
COLUMNS = {
    **{name: mr.Column(name) for name in NUMBERS},
    "wide": mr.Column("float32", (2, 3)),
    "image": mr.Column("uint8", axis="pixels"),
    "depth": mr.Column("float16", axis="pixels"),
    "label": mr.Column("int64", per="record"),
    "brain": mr.Column("bfloat16", (2,), per="record"),
    "key": mr.Column("string", per="record"),
    "text": mr.Column("string", per="record"),
    "word": mr.Column("dictionary"),
    "city": mr.Column("dictionary", per="record"),
}
CITIES = ["Ulm", "Zürich", "", "東京"]


def record(k: int) -> dict[str, Any]:
    """Record k of the rich store: a function of k alone, some of them empty on one or both axes."""
    rng = np.random.default_rng(k)
    rows, pixels = int(rng.integers(0, 7)), int(rng.integers(0, 5))
    whole = {name: rng.integers(0, 100, rows).astype(np.dtype(name)) for name in NUMBERS if "int" in name}
    return {
        **whole,
        **{name: rng.normal(size=rows).astype(np.dtype(name)) for name in ("float16", "float32", "float64")},
        "bool": rng.random(rows) < 0.5,
        "bfloat16": rng.normal(size=rows).astype(np.float32),
        "wide": rng.normal(size=(rows, 2, 3)).astype(np.float32),
        "image": rng.integers(0, 256, pixels).astype(np.uint8),
        "depth": rng.normal(size=pixels).astype(np.float16),
        "label": int(rng.integers(-5, 5)),
        "brain": rng.normal(size=2).astype(np.float32),
        "key": f"record {k} é",
        "text": "ab" * (k % 4),
        "word": [CITIES[code] for code in rng.integers(0, 4, rows)],
        "city": CITIES[k % 3],
    }


class RichStore:
    """A store on disk with every kind of column over many shards, and the records it was made of."""

    columns = COLUMNS
    splits = ("train", "val")

    def __init__(self, path: Path, num_records: int = 40) -> None:
        self.path = path
        self.records = [record(k) for k in range(num_records)]
        with mr.StoreWriter(
            path, columns=COLUMNS, splits=self.splits, shard_bytes=2500, meta={"made": "here"}
        ) as writer:
            for k, one in enumerate(self.records):
                writer.append(one, split=self.split_of(k))

    def split_of(self, k: int) -> str:
        return "val" if k % 5 == 4 else "train"

    def of_split(self, split: str) -> list[dict[str, Any]]:
        return [one for k, one in enumerate(self.records) if self.split_of(k) == split]


@pytest.fixture(scope="session")
def rich(tmp_path_factory: pytest.TempPathFactory) -> RichStore:
    """Read it, never change it: all tests of a process share it."""
    return RichStore(tmp_path_factory.mktemp("rich") / "store")


@pytest.fixture
def rich_copy(tmp_path: Path) -> RichStore:
    """One to damage."""
    return RichStore(tmp_path / "damaged", num_records=12)


class LaidStore:
    """A store laid by hand: shards are made by the caller, tables and manifest here."""

    def __init__(self, path: Path, columns: dict[str, mr.Column]) -> None:
        self.path, self.columns = path, columns
        self.layout = Layout(columns)
        self.entries: list[ShardEntry] = []
        (path / "shards").mkdir(parents=True)

    def add(self, records: int, *rows: int, split: str = "train") -> Path:
        """The folder of the next shard, its counts noted; the caller fills it. Block hashes are left zero."""
        counts = np.array([[records, *rows]], np.int64)
        blocks = int(num_blocks(self.layout.file_bytes(counts)).sum())
        number = len(self.entries)
        self.entries.append(ShardEntry(split, number, records, tuple(rows), ("0" * 16,) * blocks))
        return self.path / "shards" / shard_name(split, number)

    def publish(self) -> Path:
        splits = tuple(dict.fromkeys(entry.split for entry in self.entries))
        manifest, table, hashes = build({"kind": "records", "columns": self.columns}, splits, self.entries, None)
        (self.path / manifest.shards.name).write_bytes(table)
        (self.path / manifest.hashes.name).write_bytes(hashes)
        (self.path / "store.json").write_bytes(manifests.encode(manifest))
        return self.path


@pytest.fixture(scope="session")
def laid_store() -> type[LaidStore]:
    return LaidStore


@pytest.fixture(scope="module")
def memory_folder() -> Iterator[Path]:
    """A folder for very many files: in memory where there is such a place, and gone when the module is done."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="many-stores-", dir=place) as folder:
        yield Path(folder)


HIDE = "import sys; sys.modules['fcntl'] = sys.modules['millrace._core'] = None\n"


def run_fresh(script: str, *args: object) -> str:
    """What a script prints in a fresh interpreter; a signal or a traceback fails the test."""
    hide = HIDE if os.environ.get("MILLRACE_TEST_HIDE") else ""
    done = subprocess.run(
        [sys.executable, "-c", hide + script, *map(str, args)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def fresh():
    return run_fresh


VICTIM_COLUMNS = {
    "x": mr.Column("float32", (2,)),
    "image": mr.Column("uint8", axis="pixels"),
    "word": mr.Column("dictionary", values=("a", "b")),
    "key": mr.Column("string", per="record"),
    "cuts": mr.Column("int64", (1,), per="record"),
}


class Victim:
    """A small store whose manifest and table are forged again and again; ``reset`` brings the true ones back."""

    width = 6  # numbers per shard in its table: split, number, records, rows of three axes

    def __init__(self, path: Path) -> None:
        self.path = path
        cuts = mr.Cuts(("train", "val"))
        with mr.StoreWriter(
            path, columns=VICTIM_COLUMNS, shard_bytes=150, cuts=cuts, meta={"a": [1, {"b": None}]}
        ) as writer:
            for k in range(6):
                one = {
                    "x": np.ones((k, 2)),
                    "image": np.arange(k),
                    "word": ["a"] * k,
                    "key": f"record {k}",
                    "cuts": [k // 2],
                }
                writer.append(one)
        self.manifest = (path / "store.json").read_bytes()
        self.table = (path / "shards.bin").read_bytes()

    def reset(self) -> None:
        self.put("store.json", self.manifest)
        self.put("shards.bin", self.table)

    def put(self, name: str, data: bytes) -> None:
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).write_bytes(data)

    @property
    def body(self) -> dict:
        return json.loads(self.manifest)

    def forge(self, body, table: bytes | None = None) -> None:
        """Writes them with checksum, hash and fingerprint made right where that can be done: only the lie is left."""
        if table is not None:
            self.put("shards.bin", table)
            body["shards"] |= {"bytes": len(table), "hash": manifests.digest(table)}
        with contextlib.suppress(Exception):  # a body too broken has none
            rows = np.frombuffer(self.table if table is None else table, "<u8").reshape(-1, self.width)
            body["fingerprint"] = manifests.fingerprint(msgspec.convert(body, manifests.Manifest), rows)
        with contextlib.suppress(Exception):
            body["checksum"] = manifests._checksum(body)
        self.put("store.json", json.dumps(body).encode())


@pytest.fixture(scope="module")
def shared_victim(tmp_path_factory):
    victim = Victim(tmp_path_factory.mktemp("hostile") / "store")
    mr.open_store(victim.path)  # what millrace imports lazily is imported now, not under ``Opened``
    return victim


@pytest.fixture
def victim(shared_victim):
    yield shared_victim
    shared_victim.reset()


OPENED: list[str] | None = None


def _note(event: str, args: tuple) -> None:
    if OPENED is not None and event == "open":
        OPENED.append(os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else repr(args[0]))


sys.addaudithook(_note)  # cannot be taken back: it costs one comparison per event


class Opened:
    """Which paths were opened in the block."""

    def __enter__(self) -> list[str]:
        global OPENED
        OPENED = []
        return OPENED

    def __exit__(self, *error: object) -> None:
        global OPENED
        OPENED = None


def inside(path: str, root: Path) -> bool:
    return os.path.normpath(os.path.join(root, path)).startswith(str(root)) and os.path.realpath(
        os.path.join(root, path)
    ).startswith(str(root))


@pytest.fixture(scope="session")
def opened() -> type[Opened]:
    return Opened


@pytest.fixture(scope="session")
def lies_inside():
    return inside
