"""What a StoreWriter takes and refuses; its faults and crashes are in tests/faults."""

import os
import re

import numpy as np
import pytest

import millrace as mr
from millrace.store import gc, pending

COLUMNS = {"a": mr.Column("int64"), "l": mr.Column("int8", per="record")}


def rows(*values: int) -> dict:
    return {"a": np.array(values), "l": np.zeros(1, np.int8)}


@pytest.mark.parametrize(
    ("columns", "offsets", "message"),
    [
        ({"a": np.arange(3)}, [0, 3], "expected ['a', 'l']"),
        (rows(1, 2, 3), [0, 4], "the offsets make 4"),
        (rows(1, 2, 3), [1, 3], "offsets start at 1"),
        ({**rows(1), "q": np.zeros(1)}, [0, 1], "expected ['a', 'l']"),
        ({"a": [1], "l": np.zeros(1, np.int8)}, [0, 1], "numpy array"),
        ({"a": np.arange(3), "l": np.zeros(2, np.int8)}, [0, 4, 3], "offsets fall"),
    ],
)
def test_a_shard_of_ones_own_must_make_whole_records(tmp_path, columns, offsets, message):
    with mr.StoreWriter(tmp_path / "s", columns=COLUMNS) as writer, writer.shard(0) as shard:
        with pytest.raises(mr.ConfigError, match=re.escape(message)):
            shard.write(columns, {"rows": np.array(offsets)})
        writer.abort()


def test_a_shard_that_was_given_out_must_be_added(tmp_path):
    writer = mr.StoreWriter(tmp_path / "s", columns=COLUMNS)
    shard = writer.shard(0)
    shard.write(rows(1), {"rows": np.array([0, 1])})
    shard.finish()
    with pytest.raises(mr.ConfigError, match=r"train-00000.*never added"):
        writer.commit()
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_a_split_is_written_by_shards_or_by_records(tmp_path):
    with mr.StoreWriter(tmp_path / "s", columns=COLUMNS) as writer:
        writer.append({"a": [1], "l": 1})
        with pytest.raises(mr.ConfigError, match="not both"):
            writer.shard(0)
        shard = writer.shard(0, split="val")
        with pytest.raises(mr.ConfigError, match="not both"):
            writer.append({"a": [1], "l": 1}, split="val")
        shard.write(rows(5), {"rows": np.array([0, 1])})
        writer.add(shard.finish())
        with pytest.raises(mr.ConfigError, match="finished"):
            shard.finish()
    assert mr.open_store(tmp_path / "s").split("val").columns["a"][:].tolist() == [5]


def test_a_continued_run_that_gives_fewer_records_is_refused(tmp_path):
    first = mr.StoreWriter(tmp_path / "s", columns=COLUMNS, shard_bytes=100, resume=True)
    first.extend({"a": np.arange(60), "l": np.zeros(60, np.int8)}, np.arange(61))
    first.abort()
    with (
        pytest.raises(mr.ConfigError, match="fewer records"),
        mr.StoreWriter(tmp_path / "s", columns=COLUMNS, shard_bytes=100, resume=True) as again,
    ):
        again.append({"a": [0], "l": 0})


def test_large_arrays_are_cast_piece_by_piece_to_the_same_bytes(tmp_path, monkeypatch):
    columns = {"a": mr.Column("uint16"), "b": mr.Column("bfloat16", (2,)), "name": mr.Column("string", per="record")}
    rng = np.random.default_rng(0)
    given = {
        "a": rng.integers(0, 9, 500),
        "b": rng.normal(size=(500, 2)),
        "name": np.array([str(k) for k in range(50)], object),
    }
    offsets = np.arange(0, 501, 10)
    prints = []
    for piece, name in ((1 << 30, "whole"), (300, "pieces")):
        monkeypatch.setattr(pending, "PIECE_BYTES", piece)
        with mr.StoreWriter(tmp_path / name, columns=columns, shard_bytes=1000) as writer:
            writer.extend(given, offsets)
        prints.append(writer.fingerprint)
    assert prints[0] == prints[1]
    monkeypatch.setattr(pending, "PIECE_BYTES", 300)
    given["a"] = given["a"].copy()
    given["a"][400] = 70_000
    with mr.StoreWriter(tmp_path / "torn", columns=columns) as writer:
        with pytest.raises(mr.ConfigError, match="got 70000"):
            writer.extend(given, offsets)
        with pytest.raises(mr.ConfigError, match="refused half-way"):
            writer.commit()
        writer.abort()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float32", 1e300), ("float16", 100_000.0), ("bfloat16", 1e39), ("uint8", 256), ("int8", 1.5), ("bool", 2)],
)
def test_a_value_that_does_not_fit_is_refused(tmp_path, dtype, value):
    with mr.StoreWriter(tmp_path / "s", columns={"a": mr.Column(dtype)}) as writer:
        with pytest.raises(mr.ConfigError, match="column 'a'"):
            writer.append({"a": [value]})
        writer.abort()


def test_infinities_and_bytes_and_tensors_are_taken(tmp_path):
    torch = __import__("torch")
    columns = {"f": mr.Column("float16"), "b": mr.Column("bfloat16"), "u": mr.Column("uint8", axis="image")}
    with mr.StoreWriter(tmp_path / "s", columns=columns) as writer:
        writer.append({"f": [np.inf, np.nan], "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "u": b"\x00\xff"})
        with pytest.raises(mr.ConfigError, match="masked"):
            writer.append({"f": np.ma.array([1.0], mask=[True]), "b": [1.0], "u": b""})
    store = mr.open_store(tmp_path / "s")
    assert np.isinf(store.columns["f"][0])
    assert store.columns["b"][:].tolist() == [1.5, -2.0]
    assert store.columns["u"][:].tolist() == [0, 255]


@pytest.mark.parametrize(
    "options",
    [
        {"columns": {"a": "int8"}},
        {"columns": ["a"]},
        {"columns": None},
        {"columns": COLUMNS, "splits": "train"},
        {"columns": COLUMNS, "shard_bytes": "10M"},
        {"columns": COLUMNS, "provenance": {"x": np.float32(1)}},
        {"columns": COLUMNS, "kind": "nothing"},
    ],
)
def test_arguments_that_cannot_be_used_are_refused_before_any_work(tmp_path, options):
    with pytest.raises(mr.ConfigError):
        mr.StoreWriter(tmp_path / "s", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_is_dropped_gives_its_lock_back(tmp_path):
    writer = mr.StoreWriter(tmp_path / "s", columns=COLUMNS)
    del writer
    with mr.StoreWriter(tmp_path / "s", columns=COLUMNS) as writer:
        writer.append({"a": [1], "l": 1})


def test_an_unknown_column_is_named_with_those_there_are(tmp_path):
    store = mr.from_arrays({"a": np.arange(3)})
    with pytest.raises(KeyError, match="the store has a"):
        store.columns["nope"]
    assert store.columns.get("nope") is None
    with (
        pytest.raises(mr.ConfigError, match="expected a dict"),
        mr.StoreWriter(tmp_path / "s", columns=COLUMNS) as writer,
    ):
        writer.append([1])
    for record, said in (
        ({"a": [1]}, r"the record lacks column 'l'; expected \['a', 'l'\]"),
        ({"a": [1], "b": 1}, "the record lacks column 'l' and has unknown column 'b'; expected"),
    ):
        with (
            pytest.raises(mr.ConfigError, match=said),
            mr.StoreWriter(tmp_path / "s", columns=COLUMNS) as writer,
        ):
            writer.append(record)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/", r"/ cannot be a store: it has no name; choose a folder in it"),
        ("/..", r"/ cannot be a store"),
        ("x" * 300, r"the name x{40}\.\.\. has 300 bytes; expected at most 247: choose a shorter one"),
        ("x" * 248, r"has 248 bytes; expected at most 247"),
        ("é" * 124, r"has 248 bytes; expected at most 247"),
        ("x" * 300 + "/out", r"has 300 bytes; expected at most 255"),
        (
            "/".join(["d" * 100] * 50),
            r"the path /.{39}\.\.\. has \d+ bytes; expected at most 3584: choose a shorter one",
        ),
    ],
)
def test_a_path_that_cannot_be_a_store_is_refused(tmp_path, monkeypatch, path, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.txt").write_text("text\n")
    (tmp_path / "in.csv").write_text("name,time,value\na,1,1.5\na,2,2.5\n")
    before = sorted(os.listdir(tmp_path))
    for write in (
        lambda: mr.StoreWriter(path, columns={"x": mr.Column("int8")}),
        lambda: mr.StoreWriter(path, append=True),
        lambda: mr.prepare_text(["in.txt"], out=path, tokenizer="bytes"),
        lambda: mr.prepare_text(["in.txt"], out=path, append=True),
        lambda: mr.prepare_table(["in.csv"], out=path, entity="name", time="time"),
        lambda: mr.prepare_table(["in.csv"], out=path, append=True),
    ):
        with pytest.raises(mr.ConfigError, match=said):
            write()
    for read in (
        lambda: mr.open_store(path),
        lambda: gc.collect(path),
    ):
        with pytest.raises(mr.StoreNotFound):
            read()
    assert sorted(os.listdir(tmp_path)) == before


def test_the_longest_name_that_fits_is_a_store(tmp_path):
    with mr.StoreWriter(tmp_path / ("x" * 247), columns={"x": mr.Column("int8")}) as writer:
        writer.append({"x": [1]})
    assert mr.open_store(tmp_path / ("x" * 247)).num_rows == 1
