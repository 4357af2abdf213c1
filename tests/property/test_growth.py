"""Cost grows with the count: eight more files, shards, columns, entities or records cost eight times one more, at most ten.

Counted are lines of Python that run (a loop counts each of its turns) and bytes that are read and written, of N, 2 N and
9 N: what a command costs in any case falls out of the differences, which are 1 and 8 where the cost is a line, and 1 and
27 where it is a square. ``benchmarks/growth.py`` shows the seconds at real sizes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

import millrace as mr
from millrace.cli import explain, head, info, inspect, verify
from millrace.prepare.text.shards import shards as text_shards
from millrace.store.gc import collect

SLACK = 1.25  # 10 for 8
# Lines that count: those of ours, and of the library's functions of paths.
COUNTED = (str(Path(mr.__file__).parent), pathlib.__file__, os.path.join.__code__.co_filename)


class Costs:
    """Counts the lines that run in a block, in all threads, and the bytes that this process reads and writes.

    Most lines of Python's library do not count: how often a thread waits for another depends on the machine.
    """

    def __init__(self) -> None:
        self.lines = 0

    def __enter__(self) -> Costs:
        self._before = self._io()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        self.bytes = self._io() - self._before

    def _trace(self, frame: Any, event: str, argument: Any) -> Any:
        return self._count if frame.f_code.co_filename.startswith(COUNTED) else None

    def _count(self, frame: Any, event: str, argument: Any) -> Any:
        self.lines += 1
        return self._count

    @staticmethod
    def _io() -> int:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return int(fields["rchar"]) + int(fields["wchar"])


Job = Callable[[], object]
JOBS: dict[str, tuple[Callable[[Path, int], Job], int]] = {}  # by name: what makes the job of a size, and N


def job(count: int) -> Callable[[Callable[[Path, int], Job]], Callable[[Path, int], Job]]:
    def wrap(make: Callable[[Path, int], Job]) -> Callable[[Path, int], Job]:
        JOBS[make.__name__] = make, count
        return make

    return wrap


def write_files(folder: Path, count: int, ending: str, content: Callable[[int], bytes]) -> str:
    (folder / "in").mkdir()
    for k in range(count):
        (folder / "in" / f"{k:05d}{ending}").write_bytes(content(k))
    return str(folder / "in")


@job(12)
def text_files(folder: Path, count: int) -> Job:
    source = write_files(folder, count, ".txt", lambda k: b"document %d" % k)
    return lambda: mr.prepare_text(source, folder / "out", tokenizer="bytes", val=0, workers=1)


@job(12)
def text_files_of_an_append(folder: Path, count: int) -> Job:
    text_files(folder, count)()
    for k in range(count):
        (folder / "in" / f"new {k}.txt").write_text(f"new {k}")
    return lambda: mr.prepare_text(str(folder / "in"), folder / "out", append=True, workers=1)


@job(6)
def text_parts_and_shards(folder: Path, count: int) -> Job:
    source = write_files(folder, count, ".txt", lambda k: b"document %05d\n\nanother %05d" % (k, k))
    options = {"tokenizer": "bytes", "val": 0, "workers": 1, "part_bytes": 8, "shard_tokens": 20}
    return lambda: mr.prepare_text(source, folder / "out", **options)


def write_groups(path: Path, count: int) -> str:
    table = pa.table({"e": ["a"] * count * 2, "t": range(count * 2), "x": [1.0] * count * 2})
    parquet.write_table(table.append_column("text", pa.array([f"row {k}" for k in range(count * 2)])), path, 2)
    return str(path)


@job(12)
def text_row_groups(folder: Path, count: int) -> Job:
    source = write_groups(folder / "in.parquet", count)
    return lambda: mr.prepare_text(source, folder / "out", tokenizer="bytes", val=0, workers=1)


@job(8)
def table_files(folder: Path, count: int) -> Job:
    source = write_files(folder, count, ".csv", lambda k: b"t,x\n1,%d\n2,3\n" % k)
    return lambda: mr.prepare_table(source, folder / "out", time="t", workers=1)


@job(12)
def table_row_groups(folder: Path, count: int) -> Job:
    source = write_groups(folder / "in.parquet", count)
    return lambda: mr.prepare_table(source, folder / "out", time="t", entity="e", features="x", workers=1)


def write_entities(path: Path, count: int, first: int = 0) -> str:
    rows = (f"e{k},{t},{k}.5\n" for k in range(count) for t in range(first, first + 3))
    path.write_text("e,t,x\n" + "".join(rows))
    return str(path)


@job(32)
def table_entities(folder: Path, count: int) -> Job:
    source = write_entities(folder / "in.csv", count)
    return lambda: mr.prepare_table(source, folder / "out", time="t", entity="e", workers=1)


@job(16)
def table_entities_of_an_append(folder: Path, count: int) -> Job:
    table_entities(folder, count)()
    source = write_entities(folder / "more.csv", count, 3)
    return lambda: mr.prepare_table(source, folder / "out", append=True, workers=1)


@job(16)
def table_columns(folder: Path, count: int) -> Job:
    names, values = ",".join(f"x{k}" for k in range(count)), ",".join(["1.5"] * count)
    (folder / "in.csv").write_text(f"t,{names}\n" + "".join(f"{t},{values}\n" for t in range(4)))
    return lambda: mr.prepare_table(str(folder / "in.csv"), folder / "out", time="t", workers=1)


@job(8)
def records_files(folder: Path, count: int) -> Job:
    source = write_files(folder, count, ".jsonl", lambda k: b'{"x":[%d],"y":2}\n' % k)
    return lambda: mr.prepare_records(source, folder / "out", workers=1)


@job(24)
def records_images_and_classes(folder: Path, count: int) -> Job:
    for k in range(count):
        (folder / "in" / f"class {k % max(count // 4, 1)}").mkdir(parents=True, exist_ok=True)
        path = folder / "in" / f"class {k % max(count // 4, 1)}" / f"{k}.png"
        path.write_bytes(b"\x89PNG\r\n\x1a\n%d" % k)
    return lambda: mr.prepare_records(str(folder / "in"), folder / "out", workers=1)


@job(12)
def records_arrow_files_and_batches(folder: Path, count: int) -> Job:
    (folder / "in").mkdir()
    for name, batches in [*((f"{k:05d}", 1) for k in range(count)), ("last", count)]:
        with ipc.new_file(folder / "in" / f"{name}.arrow", pa.schema([("x", pa.int64())])) as writer:
            for k in range(batches):
                writer.write_batch(pa.record_batch({"x": pa.array([k, k])}))
    return lambda: mr.prepare_records(str(folder / "in"), folder / "out", workers=1)


@job(12)
def records_row_groups(folder: Path, count: int) -> Job:
    source = write_groups(folder / "in.parquet", count)
    return lambda: mr.prepare_records(source, folder / "out", workers=1)


@job(8)
def records_parts_and_shards(folder: Path, count: int) -> Job:
    source = write_files(folder, count, ".jsonl", lambda k: b'{"x":[%05d],"y":2}\n' % (10**4 + k) * 2)
    return lambda: mr.prepare_records(source, folder / "out", workers=1, part_bytes=8, shard_bytes=20)


@job(48)
def records_left_out(folder: Path, count: int) -> Job:
    lines = [json.dumps({"x": k}) for k in range(count)]
    (folder / "in.jsonl").write_text("\n".join([*lines, json.dumps({"x": 1, "other": 2})]))
    return lambda: mr.prepare_records(
        str(folder / "in.jsonl"), folder / "out", workers=1, on_error="skip", max_skipped=1
    )


@job(16)
def records_columns(folder: Path, count: int) -> Job:
    """Numbers, and lists of which no two have the same lengths: they are asked whether they share an axis."""
    lines = [
        {f"x{k}": k for k in range(count)} | {f"y{k}": [k] * (k // 6**j % 6) for k in range(count)} for j in range(3)
    ]
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return lambda: mr.prepare_records(str(folder / "in.jsonl"), folder / "out", workers=1)


def write_shards(folder: Path, count: int) -> str:
    """A shard for each of the records, of which some came by an append."""
    if not (folder / "out").exists():
        columns = {"tokens": mr.Column("uint16"), "name": mr.Column("string", per="record")}
        for some in (range(count - count // 4), range(count // 4)):
            append = (folder / "out").exists()
            more = {"append": True} if append else {"columns": columns}
            with mr.StoreWriter(folder / "out", shard_bytes=2, **more) as writer:
                for k in some:
                    writer.append({"tokens": np.array([k], np.uint16), "name": f"record {k}"})
    return str(folder / "out")


@job(120)
def writer_shards(folder: Path, count: int) -> Job:
    return lambda: write_shards(folder, count)


@job(16)
def writer_columns(folder: Path, count: int) -> Job:
    return lambda: write_columns(folder, count)


def write_columns(folder: Path, count: int) -> str:
    if not (folder / "out").exists():
        columns = {f"c{k}": mr.Column("float32") for k in range(count)}
        columns |= {f"s{k}": mr.Column("string", per="record") for k in range(count)}
        with mr.StoreWriter(folder / "out", columns=columns) as writer:
            for _ in range(3):
                floats = {f"c{k}": np.ones(2, np.float32) for k in range(count)}
                writer.append(floats | {f"s{k}": "text" for k in range(count)})
    return str(folder / "out")


def from_files(folder: Path, count: int) -> str:
    text_files(folder, count)()
    return str(folder / "out")


def from_entities(folder: Path, count: int) -> str:
    table_entities(folder, count)()
    return str(folder / "out")


def look(path: str, how: dict[str, int]) -> None:
    """What looks at a store, one after the other; ``how`` describes its samples."""
    store = mr.open_store(path)
    for name in store.layout.columns:
        np.asarray(store.columns[name][:])
    for split in store.splits:
        len(mr.Records(store.split(split)))
    info.run(path, as_json=True)
    head.run(path, as_json=True)
    inspect.run(path, as_json=True)
    explain.run(path, step=1, as_json=True, **how)


STORES = {
    "shards": (write_shards, 8),
    "columns": (write_columns, 4),
    "files": (from_files, 16),
    "entities": (from_entities, 32),
}
HOW: dict[str, dict[str, int]] = {"files": {"length": 2}, "entities": {"lookback": 1, "horizon": 1}}
for _what, (_write, _count) in STORES.items():
    for _name, _command in {
        "look": lambda path, what: look(path, HOW.get(what, {})),
        "verify": lambda path, what: verify.run(path, workers=1, as_json=True),
        "gc": lambda path, what: collect(path),
    }.items():
        JOBS[f"{_name} {_what}"] = (
            lambda folder, count, write=_write, command=_command, what=_what: (
                lambda path: lambda: command(path, what)
            )(write(folder, count)),
            _count,
        )


@pytest.fixture
def tmp_path(memory_folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=memory_folder) as folder:
        yield Path(folder)


@contextlib.contextmanager
def made(make: Callable[[Path, int], Job], folder: Path, count: int) -> Iterator[Job]:
    """The job of a size, in a folder of its own."""
    folder.mkdir()
    with contextlib.redirect_stdout(io.StringIO()):
        yield make(folder, count)
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", JOBS)
def test_what_is_eight_times_as_many_costs_at_most_ten_times_as_much(tmp_path, name):
    make, count = JOBS[name]
    costs = []
    with made(make, tmp_path / "first", count) as run:
        run()  # what is imported or learned once is no part of it
    for size in (count, 2 * count, 9 * count):
        with made(make, tmp_path / str(size), size) as run, Costs() as cost:
            run()
        costs.append(cost)
    for what in ("lines", "bytes"):
        one, two, nine = (getattr(cost, what) for cost in costs)
        most = SLACK * 8 * max(two - one, 0) + 0.1 * one  # some of the constant part changes from run to run
        assert nine - one <= most, f"{what}: {one:,}, {two:,}, {nine:,}"


def test_the_task_of_a_shard_does_not_grow_with_the_files_of_a_corpus(tmp_path, monkeypatch):
    """Tasks go to other processes, one for each shard."""
    sizes = []
    shard_tasks = text_shards.shard_tasks

    def measured(*args: Any) -> Any:
        tasks = shard_tasks(*args)
        sizes.append(max(len(pickle.dumps(task)) for task in tasks))
        return tasks

    monkeypatch.setattr(text_shards, "shard_tasks", measured)
    for count in (20, 160):
        (tmp_path / str(count)).mkdir()
        text_files_of_an_append(tmp_path / str(count), count)()
    first, added, *more = sizes
    assert more[0] < 1.2 * first, sizes
    assert more[1] < 1.2 * added, sizes
