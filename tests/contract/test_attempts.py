"""Two attempts at one task cannot destroy each other: one result, whole, and nothing left of the other."""

import os
import threading

import msgspec
import numpy as np
import pytest

import millrace as mr
from millrace.prepare.parts import part_folder, read_done, write_part
from millrace.prepare.records.records import Records
from millrace.prepare.table.table import Table
from millrace.prepare.text.text import Text
from millrace.store import platform
from millrace.store.shard import ShardWriter
from millrace.testing import tree_digest

COLUMNS = {"x": mr.Column("float32")}


def write(writer, first):
    rows = np.arange(first, first + 4, dtype="<f4")
    writer.write({"x": rows}, {"rows": np.array([0, 1, 4])})


def test_two_attempts_at_a_shard_write_it_in_turns(tmp_path):
    alone = ShardWriter(tmp_path / "alone", "train", 0, COLUMNS)
    write(alone, 0)
    write(alone, 4)
    expected = alone.finish()
    one, other = (ShardWriter(tmp_path / "both", "train", 0, COLUMNS) for _ in range(2))
    write(one, 0)
    write(other, 0)
    write(other, 4)
    assert other.finish() == expected
    write(one, 4)
    assert one.finish() == expected
    assert tree_digest(tmp_path / "both") == tree_digest(tmp_path / "alone")
    assert os.listdir(tmp_path / "both") == ["train-00000"]


def test_an_attempt_at_a_shard_that_is_abandoned_leaves_the_other_alone(tmp_path):
    one, other, third = (ShardWriter(tmp_path, "train", 0, COLUMNS) for _ in range(3))
    write(one, 0)
    write(other, 0)
    other.abandon()
    assert len(os.listdir(tmp_path)) == 1
    one.finish()
    third.abandon()  # which wrote nothing
    assert os.listdir(tmp_path) == ["train-00000"]


class Done(msgspec.Struct, frozen=True):
    sizes: dict[str, int]


@pytest.mark.parametrize("first", ["inner", "none"])
def test_two_attempts_at_a_part_run_in_turns(tmp_path, first):
    """The second one begins and ends, or fails, while the first is at work."""

    def inner(folder):
        (folder / "data.bin").write_bytes(b"the same bytes")
        if first == "none":
            raise LookupError
        return Done({"data.bin": 14})

    def outer(folder):
        (folder / "data.bin").write_bytes(b"the same")
        if first == "none":
            with pytest.raises(LookupError):
                write_part(tmp_path, "key", Done, inner)
        else:
            assert write_part(tmp_path, "key", Done, inner) == Done({"data.bin": 14})
            assert read_done(tmp_path, "key", Done) == Done({"data.bin": 14})
        with open(folder / "data.bin", "ab") as file:
            file.write(b" bytes")
        return Done({"data.bin": 14})

    assert write_part(tmp_path, "key", Done, outer) == read_done(tmp_path, "key", Done) == Done({"data.bin": 14})
    assert (part_folder(tmp_path, "key") / "data.bin").read_bytes() == b"the same bytes"
    assert os.listdir(tmp_path / "parts") == ["key"]


def late(folder, write):
    """Runs an attempt whose run ends in the middle of it, and another that begins after that."""
    attempts = folder / "attempts"
    attempts.mkdir()
    with platform.attempts_in(str(attempts)):
        for in_the_middle in (lambda: attempts.rename(folder / "gone"), lambda: pytest.fail("it has begun")):
            with pytest.raises(mr.StoreWriteFailed, match="No such file"):
                write(in_the_middle)
    assert not attempts.exists()


def test_an_attempt_at_a_part_whose_run_is_over_can_neither_end_nor_begin(tmp_path):
    (tmp_path / "parts").mkdir()

    def write(in_the_middle):
        def make(folder):
            (folder / "data.bin").write_bytes(b"bytes")
            in_the_middle()
            return Done({"data.bin": 5})

        write_part(tmp_path, "key", Done, make)

    late(tmp_path, write)
    assert os.listdir(tmp_path / "parts") == []


def test_an_attempt_at_a_shard_whose_run_is_over_can_neither_end_nor_begin(tmp_path):
    (tmp_path / "shards").mkdir()

    def write_shard(in_the_middle):
        writer = ShardWriter(tmp_path / "shards", "train", 0, COLUMNS)
        write(writer, 0)
        in_the_middle()
        writer.finish()

    late(tmp_path, write_shard)
    assert os.listdir(tmp_path / "shards") == []


def twice(function):
    """The function, run by two threads at once, whose results must be equal."""

    def run(task):
        results, barrier = {}, threading.Barrier(2)

        def attempt(number):
            barrier.wait()
            results[number] = function(task)

        threads = [threading.Thread(target=attempt, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1]
        return results[0]

    return staticmethod(run)


@pytest.mark.parametrize("kind", ["text", "table", "records"], indirect=True)
def test_a_store_whose_tasks_all_run_twice_at_once_is_the_same(tiny, monkeypatch):
    tiny.prepare()
    whole = tree_digest(tiny.out)
    tiny.clear()
    for made in (Text, Table, Records):
        for name in ("make_part", "write_shard"):
            monkeypatch.setattr(made, name, twice(getattr(made, name)))
    tiny.prepare()
    assert tree_digest(tiny.out) == whole
    assert not tiny.partial.exists()
