"""What is read is what was written, bit for bit: any columns, dtypes, shapes, axes, lengths and shard sizes."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.ragged import Array
from millrace.store import shard as shard_module
from millrace.store import writer as writer_module
from millrace.store.layout import DTYPES, bfloat16_bits
from millrace.testing import assert_same_store, tree_digest
from millrace.testing.strategies import Record, StoreContents, array_stores, as_arrays, datasets, records, values


@pytest.fixture(scope="module", autouse=True)
def small_buffers(memory_folder: Path) -> Iterator[None]:
    """So that records are joined, flushed and cut at many places; the constants are no part of the format."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(memory_folder))
        patch.setattr(writer_module, "PENDING_BYTES", 20)
        patch.setattr(shard_module, "BUFFER_BYTES", 10)
        yield


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def write(path: Path, dataset: StoreContents, **options: object) -> str:
    """Record by record."""
    writer = mr.StoreWriter(path, columns=dataset.columns, shard_bytes=dataset.shard_bytes, **options)
    with writer:
        for record, split in zip(dataset.records, dataset.splits, strict=True):
            writer.append(record, split=split)
    return writer.fingerprint


def write_arrays(path: Path, dataset: StoreContents, longest: int) -> None:
    """In arrays of up to ``longest`` records of one split."""
    with mr.StoreWriter(path, columns=dataset.columns, shard_bytes=dataset.shard_bytes) as writer:
        pairs = zip(dataset.splits, dataset.records, strict=True)
        for split, run in itertools.groupby(pairs, key=lambda pair: pair[0]):
            found = [record for _, record in run]
            for first in range(0, len(found), longest):
                arrays, offsets = as_arrays(dataset.columns, found[first : first + longest])
                only = offsets["rows"] if len(offsets) == 1 else offsets
                writer.extend(arrays, only, split=split)


def assert_holds(store: mr.Store, columns: dict[str, mr.Column], expected: list[Record]) -> None:
    """The store, or this split of it, holds exactly these records, compared as bits."""
    arrays, offsets = as_arrays(columns, expected)
    assert store.num_records == len(expected)
    for axis, found in offsets.items():
        assert store.axis_offsets(axis).tolist() == found.tolist()
    for name, column in columns.items():
        found = store.columns[name]
        if column.dtype == "string":
            assert found[:].tolist() == arrays[name]
            assert found.raw[:].tobytes() == "".join(arrays[name]).encode()
        elif column.dtype == "dictionary":
            assert found[:].tolist() == arrays[name].tolist()
            assert [found.values[code] for code in found.codes[:].reshape(-1)] == arrays[name].reshape(-1).tolist()
        else:
            assert found.raw[:].tobytes() == stored(column, arrays[name]).tobytes()
            assert found.shape == arrays[name].shape


def stored(column: mr.Column, array: Array) -> Array:
    if column.dtype != "bfloat16":
        assert array.dtype == column.storage
        return array
    bits = array.view(np.uint32) >> 16  # exact: the values were made from bfloat16 bits
    assert bits.tolist() == bfloat16_bits(array).tolist()
    return bits.astype(np.uint16)


@given(datasets())
def test_store_holds_what_was_written(dataset):
    with folder() as path:
        write(path / "out", dataset)
        store = mr.open_store(path / "out", check=True)
        in_order = [record for split in store.splits for record in dataset.of(split)]
        assert_holds(store, dataset.columns, in_order)
        for split in store.splits:
            assert_holds(store.split(split), dataset.columns, dataset.of(split))
        assert set(dataset.splits) <= set(store.splits)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=5)
@given(st.data())
def test_every_dtype_holds_its_extremes(dtype, data):
    """``datasets`` may miss a dtype in one run; here each has its turn, per record and, but for strings, per row."""
    columns = {"row": mr.Column("uint8" if dtype == "string" else dtype), "record": mr.Column(dtype, per="record")}
    rows = data.draw(values(columns["row"], 12))
    scalars = data.draw(values(columns["record"], 6))
    given = [{"row": rows[2 * k : 2 * k + 2], "record": scalars[k]} for k in range(6)]
    with folder() as path:
        write(path / "out", StoreContents(columns, given, ["train"] * 6, 40))
        assert_holds(mr.open_store(path / "out"), columns, given)


@given(datasets(), st.integers(1, 8))
def test_records_and_arrays_make_the_same_bytes(dataset, longest):
    with folder() as path:
        write(path / "records", dataset)
        write_arrays(path / "arrays", dataset, longest)
        assert_same_store(path / "records", path / "arrays")


@given(st.data(), datasets())
def test_appended_snapshot_holds_both_and_the_old_one_stays(data, dataset):
    more = data.draw(records(dataset.columns))
    splits = [data.draw(st.sampled_from(["train", "val"])) for _ in more]
    added = StoreContents(dataset.columns, more, splits, dataset.shard_bytes)
    with folder() as path:
        old = write(path / "out", dataset)
        shards = tree_digest(path / "out" / "shards")
        new = write(path / "out", added, append=True)
        store, before = mr.open_store(path / "out", check=True), mr.open_store(path / "out", snapshot=old, check=True)
        assert store.fingerprint == new
        for split in before.splits:
            assert_holds(before.split(split), dataset.columns, dataset.of(split))
        for split in store.splits:
            assert_holds(store.split(split), dataset.columns, dataset.of(split) + added.of(split))
        assert (new == old) == (not more)
        assert tree_digest(path / "out" / "shards").items() >= shards.items()


@given(datasets())
def test_same_records_have_the_same_fingerprint_and_others_another(dataset):
    with folder() as path:
        first, again = write(path / "a", dataset), write(path / "b", dataset)
        assert first == again
        if dataset.records:
            fewer = StoreContents(dataset.columns, dataset.records[:-1], dataset.splits[:-1], dataset.shard_bytes)
            assert write(path / "c", fewer) != first


@given(array_stores())
def test_store_in_memory_can_be_written_and_read_back(memory):
    """Column by column and split by split, from one kind of store to the other."""
    columns = dict(memory.layout.columns)
    with folder() as path:
        with mr.StoreWriter(path / "out", columns=columns, splits=memory.splits) as writer:
            for split in memory.splits:
                part = memory.split(split)
                arrays = {name: np.asarray(part.columns[name]) for name in columns}
                axes = [axis for axis in part.axes if axis not in columns or columns[axis].dtype != "string"]
                writer.extend(arrays, {axis: part.axis_offsets(axis) for axis in axes}, split=split)
        disk = mr.open_store(path / "out")
        for split in memory.splits:
            for name in columns:
                ours, theirs = memory.split(split).columns[name], disk.split(split).columns[name]
                raw = "codes" if columns[name].dtype == "dictionary" else "raw"
                assert getattr(ours, raw)[:].tobytes() == getattr(theirs, raw)[:].tobytes()
                assert ours.shape == theirs.shape
