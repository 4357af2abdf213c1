"""The kinds of preparation, each as the contract suites need it: sources, options, and a tiny job.

Another kind joins by a class like ``Text`` and an entry in ``KINDS``.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.parts import write_part

SCRIPTS = Path(__file__).parent / "scripts"


class Text:
    """Text in many small parts."""

    prepare = staticmethod(mr.prepare_text)
    function = "filter"  # the option for a function of the user's
    part_module = "millrace.prepare.text.part"
    part_file = "length.bin"  # of every part
    sizes: dict[str, int] = {}  # noqa: RUF012 - constants that are made small
    options = {"tokenizer": "bytes", "part_bytes": 20_000, "shard_tokens": 15_000, "val": 0.1}  # noqa: RUF012
    other = (
        {"val": 0.3},
        r'shards: split= was "hash:0\.5", now "hash:0\.3"',
    )  # an option that the tiny job does not have
    tiny = {"tokenizer": "bytes", "part_bytes": 70, "shard_tokens": 80, "val": 0.5, "workers": 1}  # noqa: RUF012
    fragile = {"tokenizer": "bytes", "part_bytes": 300, "val": 0}  # noqa: RUF012 - for functions that fail
    one_part = {"part_bytes": 1 << 20}  # noqa: RUF012
    bad_part = r"part \d+ \('.*1\.txt' from"
    raised = mr.SourceError, r"user_functions:{how}. raised {error}.*1\.txt' from 2\d\d: {said}"
    disk_bytes, ballast_bytes = 500_000, 400_000

    def write(self, folder: Path) -> list[str]:
        """Prose, code and repeats."""
        folder.mkdir()
        library = Path(os.__file__).parent
        names = ("textwrap", "bisect", "heapq", "keyword", "stat", "string", "contextlib", "queue", "shlex")
        texts = [(library / f"{name}.py").read_bytes().replace(b"\x0c", b"") for name in names]
        (folder / "a.txt").write_bytes(b"\n\n".join(texts[:6]).rstrip())
        (folder / "b.txt").write_bytes(b"\n\n\n".join(texts[4:]))
        (folder / "c.py").write_bytes(texts[3])
        return [str(folder / name) for name in ("a.txt", "c.py", "b.txt")]

    def write_tiny(self, folder: Path) -> tuple[str, str]:
        folder.mkdir()
        for name, numbers in (("a", range(12)), ("b", range(6, 18))):
            texts = [f"document {k}: " + "abc " * (k % 5) for k in numbers]
            (folder / f"{name}.txt").write_text("\n\n".join(texts))
        return str(folder / "a.txt"), str(folder / "b.txt")

    def write_fragile(self, folder: Path) -> Any:
        for k, name in enumerate(("first", "second")):
            texts = [f"document {k} of the {name} file" for k in range(60)]
            (folder / f"{k}.txt").write_text("\n\n".join(texts))
        return [str(folder / "0.txt"), str(folder / "1.txt")]

    def large_command(self, folder: Path) -> list[str]:
        """The arguments of a command with several parts of the usual size."""
        (folder / "big.txt").write_bytes(b"\n\n".join(b"%d %s" % (k, b"word " * 2000) for k in range(4000)))
        return ["text", str(folder / "big.txt"), "--tokenizer", "bytes", "--no-dedup"]


class Table:
    """A table in many small parts, groups and shards."""

    prepare = staticmethod(mr.prepare_table)
    function = "transform"
    part_module = "millrace.prepare.table.read.part"
    part_file = "values.bin"
    sizes = {  # noqa: RUF012
        "millrace.prepare.table.read.sources.PART_BYTES": 1500,
        "millrace.prepare.table.settle.fit.GROUP_ROWS": 150,
        "millrace.prepare.table.write.shards.MIN_SHARD": 1,
        "millrace.prepare.table.write.shards.SHARDS": 6,
    }
    options = {  # noqa: RUF012
        "time": "t", "entity": "name", "categorical": "kind", "static": ["weight", "sector"],
        "nulls": {"x": "interpolate", "*": "mask"}, "duplicates": "mean", "per_entity": True, "scale": "robust",
        "val_last": 0.2, "gap": 1, "calendar": "hour", "freq": "h",
    }  # fmt: skip
    other = ({"scale": "minmax"}, r"scale was \"standard\", now \"minmax\"")
    tiny = {  # noqa: RUF012
        "time": "t", "entity": "name", "val_last": 0.2, "workers": 1, "duplicates": "last", "categorical": "kind",
    }  # fmt: skip
    fragile = {"time": "t"}  # noqa: RUF012
    one_part: dict[str, Any] = {}  # noqa: RUF012
    bad_part = r"part \d \('.*2\.parquet'"
    raised = mr.ConfigError, r"user_functions:{how}. raised {error}: {said} \(on '.*2\.parquet'"
    disk_bytes, ballast_bytes = 400_000, 310_000

    def write(self, folder: Path, rows: int = 800, files: int = 5, names: int = 12, day: int = 0) -> str:
        """Entities spread over files, unsorted, with gaps and repeats."""
        rng = np.random.default_rng(3)
        folder.mkdir(parents=True)
        which = rng.integers(0, names, rows)
        hours = 24 * day + rng.integers(0, 200, rows)
        frame = pd.DataFrame(
            {
                "name": [f"entity {k}" for k in which],
                "t": pd.Timestamp("2021-03-01") + pd.to_timedelta(hours, "h"),
                "x": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(5, 2, rows)),
                "y": rng.integers(0, 9, rows).astype(float),
                "kind": rng.choice(["a", "b", None], rows),
                "weight": which * 1.5,
                "sector": [f"s{k % 3}" for k in which],
            }
        )
        for k in range(files):
            frame[k::files].to_parquet(folder / f"{k}.parquet", row_group_size=40)
        return str(folder)

    def write_tiny(self, folder: Path) -> tuple[str, str]:
        first = self.write(folder / "first", rows=120, files=3, names=4)
        return first, self.write(folder / "second", rows=60, files=2, names=5, day=10)

    def write_fragile(self, folder: Path) -> Any:
        """Four files, and as many parts; 77.0 is in the third."""
        for k in range(4):
            frame = pd.DataFrame({"t": np.arange(30), "x": 30.0 * k + np.arange(30)})
            frame.to_parquet(folder / f"{k}.parquet")
        return str(folder / "?.parquet")

    def large_command(self, folder: Path) -> list[str]:
        rng, rows = np.random.default_rng(0), 1_300_000
        columns = {f"x{j}": rng.normal(size=rows) for j in range(3)}
        pd.DataFrame({"t": np.arange(rows), **columns}).to_parquet(folder / "0.parquet", row_group_size=rows)
        for k in range(1, 4):  # each large enough for a part of its own
            shutil.copy(folder / "0.parquet", folder / f"{k}.parquet")
        return ["table", *(str(folder / f"{k}.parquet") for k in range(4)), "--time", "t"]


class Records:
    """Events with hits, tracks and names, in many small parts."""

    prepare = staticmethod(mr.prepare_records)
    function = "filter"
    part_module = "millrace.prepare.records.read.part"
    part_file = "label.i64"
    sizes: dict[str, int] = {}  # noqa: RUF012
    options = {  # noqa: RUF012
        "part_bytes": 20_000, "shard_bytes": 12_000, "split": "hash:0.1,0.1", "cast": {"x": "float32"},
        "rename": {"name": "key"},
    }  # fmt: skip
    other = ({"split": "hash:0.4"}, r'options: split= was "hash:0\.3", now "hash:0\.4"')
    tiny = {"part_bytes": 300, "shard_bytes": 500, "split": "hash:0.3", "workers": 1}  # noqa: RUF012
    fragile = {"part_bytes": 300}  # noqa: RUF012
    one_part = {"part_bytes": 1 << 20}  # noqa: RUF012
    bad_part = r"part \d+ \('.*1\.jsonl' from"
    raised = mr.SourceError, r"user_functions:{how}. raised {error} on '.*1\.jsonl', byte \d+: {said}"
    disk_bytes, ballast_bytes = 500_000, 400_000

    def write(self, folder: Path, events: int = 900, first: int = 0) -> str:
        """Two axes, texts, empty and long records, and a file with nothing in it."""
        folder.mkdir(parents=True)
        rng = np.random.default_rng(5 + first)
        lines = []
        for k in range(first, first + events):
            hits, tracks = int(rng.integers(0, 8)) if k % 50 else 60, int(rng.integers(0, 3))
            lines.append(
                {
                    "x": rng.normal(size=hits).round(3).tolist(), "y": rng.normal(size=hits).round(3).tolist(),
                    "tracks": [{"p": float(t), "q": t} for t in range(tracks)], "label": k % 7, "name": f"event {k} é",
                }
            )  # fmt: skip
        for number, some in enumerate((lines[: events // 3], [], lines[events // 3 :])):
            text = "".join(msgspec.json.encode(line).decode() + "\n" for line in some)
            (folder / f"{number}.jsonl").write_text(text)
        return str(folder)

    def write_tiny(self, folder: Path) -> tuple[str, str]:
        first = self.write(folder / "first", 30)
        return f"{first}/2.jsonl", self.write(folder / "second", 12, 100)

    def write_fragile(self, folder: Path) -> Any:
        for k in range(2):
            values = [{"x": [float(60 * k + number)], "label": number} for number in range(60)]
            (folder / f"{k}.jsonl").write_bytes(b"".join(msgspec.json.encode(value) + b"\n" for value in values))
        return [str(folder / "0.jsonl"), str(folder / "1.jsonl")]

    def large_command(self, folder: Path) -> list[str]:
        """Two parts: those of a split are apart."""
        for split in ("train", "val"):
            self.write(folder / "big" / split, 200)
        return ["records", str(folder / "big"), "--split", "folder"]


KINDS = {"text": Text(), "table": Table(), "records": Records()}


def set_sizes(kind: Any, patch: pytest.MonkeyPatch) -> None:
    for name, value in kind.sizes.items():
        patch.setattr(name, value)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A kind, with its constants made small."""
    with pytest.MonkeyPatch.context() as patch:
        set_sizes(KINDS[request.param], patch)
        yield KINDS[request.param]


def script(kind: Any, source: Any, out: Path, **options: Any) -> list[str]:
    """A program that prepares as the tests do, in pieces as small."""
    sizes = "".join(f"import {name.rpartition('.')[0]}; {name} = {value}; " for name, value in kind.sizes.items())
    code = f"import millrace as mr; {sizes}mr.{kind.prepare.__name__}({source!r}, {str(out)!r}, **{options!r})"
    return [sys.executable, "-c", code]


@pytest.fixture(scope="session")
def program() -> Any:
    return script


class Tiny:
    """Few rows or documents in some parts and shards, so that a fault can strike at every step."""

    def __init__(self, kind: Any, folder: Path) -> None:
        self.kind, self.out, self.partial = kind, folder / "out", folder / "out.partial"
        self.first, self.second = kind.write_tiny(folder / "in")

    def prepare(self, **options: Any) -> Any:
        return self.kind.prepare(self.first, self.out, **{**self.kind.tiny, **options})

    def append(self, **options: Any) -> Any:
        return self.kind.prepare(self.second, self.out, append=True, workers=1, **options)

    def finished_parts(self) -> int:
        return sum(not path.parent.suffix for path in self.partial.glob("parts/*/done.json"))

    def clear(self) -> None:
        for path in (self.out, self.partial):
            shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def tiny(kind: Any, tmp_path: Path) -> Tiny:
    return Tiny(kind, tmp_path)


@pytest.fixture
def parts_read(kind: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The names of the parts that were read in this process, not found finished."""
    names: list[Any] = []

    def counted(folder: Any, name: Any, report: Any, make: Any, **more: Any) -> Any:
        return write_part(folder, name, report, lambda place: (names.append(name), make(place))[1], **more)

    monkeypatch.setattr(importlib.import_module(kind.part_module), "write_part", counted)
    return names


@pytest.fixture(scope="module")
def stuck() -> Iterator[Path]:
    """While this file is there, ``held`` does not end in workers of clusters either."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "stuck"
        patch.syspath_prepend(SCRIPTS)
        patch.setenv("PYTHONPATH", os.pathsep.join((str(SCRIPTS), os.environ.get("PYTHONPATH", ""))))
        patch.setenv("STUCK", str(path))
        yield path


@pytest.fixture(scope="module")
def ray_address(stuck: Path) -> Iterator[str]:
    """A Ray cluster of two workers, to which this process is connected."""
    import ray

    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ray.init(
            "local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=folder
        )
        yield ray.get_runtime_context().gcs_address
        ray.shutdown()


@pytest.fixture(scope="module")
def dask_address(stuck: Path) -> Iterator[str]:
    """A Dask cluster of two workers."""
    import dask
    import distributed

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        dask.config.set({"distributed.scheduler.allowed-failures": 2}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, memory_limit=0, host="127.0.0.1", dashboard_address="127.0.0.1:0",
            scheduler_kwargs={"dashboard": False}, local_directory=folder, silence_logs="CRITICAL",
        ) as cluster,
    ):  # fmt: skip
        yield cluster.scheduler_address


@pytest.fixture
def tmp_path(memory_folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory_folder) as folder:
        yield Path(folder)


@pytest.fixture
def user_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes ``user_functions`` importable, also in workers; while the file it names is there, ``held`` does not end."""
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(SCRIPTS), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("STUCK", str(tmp_path / "stuck"))
    return tmp_path / "stuck"
