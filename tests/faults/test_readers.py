"""Readers are never disturbed: by appends, by a store that takes the place of theirs, by gc."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.store import gc
from millrace.testing import Fault, expect_no_leaks, run_forked, tree_digest

COLUMNS = {"x": mr.Column("int64"), "number": mr.Column("int64", per="record")}


def add(path, first: int, last: int, *, append: bool = True) -> str:
    """Records ``first`` to ``last``: record n is n % 3 rows of the number n."""
    writer = mr.StoreWriter(path, columns=None if append else COLUMNS, append=append, shard_bytes=100)
    with writer:
        for number in range(first, last):
            writer.append({"x": np.full(number % 3, number), "number": number})
    return writer.fingerprint


def check(store: mr.Store, records: int) -> None:
    """The store holds records 0 to ``records``, all of them right."""
    assert store.columns["number"][:].tolist() == list(range(records))
    lengths = np.arange(records) % 3
    assert np.diff(store.offsets).tolist() == lengths.tolist()
    assert store.columns["x"][:].tolist() == np.repeat(np.arange(records), lengths).tolist()


def test_reading_while_appending(tmp_path):
    """A store opened at any moment is one of the snapshots, whole; one opened before does not change."""
    out = tmp_path / "out"
    add(out, 0, 10, append=False)
    first, seen, problems = mr.open_store(out), [], []
    done = threading.Event()

    def read() -> None:
        try:
            while not done.is_set():
                store = mr.open_store(out, check=True)
                seen.append(store.num_records)
                check(store, store.num_records)
                check(first, 10)
        except BaseException as error:
            problems.append(error)
            raise

    reader = threading.Thread(target=read)
    reader.start()
    for start in range(10, 100, 10):
        add(out, start, start + 10)
    done.set()
    reader.join()
    assert problems == []
    assert seen == sorted(seen)
    assert set(seen) <= set(range(10, 101, 10))
    check(mr.open_store(out), 100)


def test_store_moved_aside_and_replaced_under_a_reader(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 30, append=False)
    reader = mr.open_store(out)
    assert reader.columns["x"][0] == 1  # one file is mapped, the others are not yet
    out.rename(tmp_path / "aside")
    add(out, 0, 5, append=False)
    check(reader, 30)
    check(mr.open_store(out), 5)


def test_store_removed_under_a_reader_that_has_touched_it(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 30, append=False)
    reader = mr.open_store(out)
    check(reader, 30)
    shutil.rmtree(out)
    check(reader, 30)


def test_pickled_store_opens_its_own_snapshot_in_another_process(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 10, append=False)
    pickled = pickle.dumps(mr.open_store(out))
    split = pickle.dumps(mr.open_store(out).split("train"))
    add(out, 10, 20)
    script = "import pickle, sys; s = pickle.load(sys.stdin.buffer); print(s.fingerprint, s.columns['number'][:].sum())"
    for data, store in ((pickled, mr.open_store(out, snapshot=mr.open_store(out).manifest.parent)), (split, None)):
        said = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, check=True)
        fingerprint, total = said.stdout.decode().split()
        assert total == "45"
        assert store is None or fingerprint == store.fingerprint


def test_pickled_store_that_was_replaced_is_refused(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 10, append=False)
    pickled = pickle.dumps(mr.open_store(out))
    shutil.rmtree(out)
    add(out, 0, 5, append=False)
    with pytest.raises(mr.StoreNotFound, match=r"snapshot was removed or belongs to another store"):
        pickle.loads(pickled)  # noqa: S301 - made two lines above


def test_gc_removes_old_snapshots_and_keeps_the_data(tmp_path):
    out = tmp_path / "out"
    old = [add(out, 0, 10, append=False), add(out, 10, 20), add(out, 20, 30)]
    before = tree_digest(out / "shards")
    done = gc.collect(out, keep=1)
    assert done["kept"] == [old[2]]
    assert tree_digest(out / "shards") == before  # every shard is still part of the newest snapshot
    assert len(os.listdir(out / "snapshots")) == 1
    check(mr.open_store(out, check=True), 30)
    for snapshot in old[:2]:
        with pytest.raises(mr.StoreNotFound):
            mr.open_store(out, snapshot=snapshot)
    add(out, 30, 40)
    check(mr.open_store(out), 40)


def test_gc_removes_what_an_interrupted_append_left(tmp_path):
    """Wherever the append was killed, in the store and beside it."""
    out, clean = tmp_path / "out", tmp_path / "clean"
    add(clean, 0, 10, append=False)
    before, at, left = tree_digest(clean), 0, set()
    while True:
        at += 1
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(clean, out)
        if run_forked(add, out, 10, 20, fault=Fault(at, "kill")) == 0:
            break
        left |= {name for name in tree_digest(out) if name not in before}
        done = gc.collect(out, keep=1)
        if mr.open_store(out).num_records == 10:
            assert tree_digest(out) == before, f"killed at step {at}"
        else:
            check(mr.open_store(out, check=True), 20)
        assert sorted(os.listdir(tmp_path)) == ["clean", "out"], f"killed at step {at}"
        assert gc.collect(out, keep=1)["removed"] == [], done
    assert any(name.endswith(".tmp") for name in left)
    assert any(name.startswith("shards/") for name in left)


def test_reader_of_a_snapshot_that_gc_removed_is_told_so(tmp_path):
    """An append that replaces shards, then gc: what an older reader has yet to open is gone, and not damaged."""
    out, table = tmp_path / "out", tmp_path / "in.csv"
    columns = "name,time,value\n"
    table.write_text(columns + "".join(f"a,{k},{k}.5\n" for k in range(20)))
    mr.prepare_table([str(table)], out=out, entity="name", time="time", workers=1)
    reader, pickled = mr.open_store(out), pickle.dumps(mr.open_store(out))
    old, safe = reader.fingerprint, mr.open_store(out, safe_read=True)
    feed = mr.Feed(mr.Windows(mr.open_store(out), lookback=4, horizon=1), batch=2, device="numpy")
    later = tmp_path / "later.csv"
    later.write_text(columns + "".join(f"a,{k},{k}.5\n" for k in range(20, 40)))
    mr.prepare_table([str(later)], out=out, append=True, workers=1)
    assert "shards/train-00000" in gc.collect(out, keep=1)["removed"]
    said = rf"removed the snapshot {old} that this store was opened at; open the store again, .* larger --keep"
    for store in (reader, safe):
        with pytest.raises(mr.StoreNotFound, match=said):
            store.columns["values"][:]
    with feed, pytest.raises(mr.StoreNotFound, match=said):
        next(iter(feed))
    with pytest.raises(mr.StoreNotFound, match=r"snapshot was removed .* gc --keep"):
        pickle.loads(pickled)  # noqa: S301 - made above


def test_shard_that_is_missing_from_a_snapshot_that_is_there_is_damage(tmp_path):
    out = tmp_path / "out"
    old = add(out, 0, 10, append=False)
    add(out, 10, 20)
    reader = mr.open_store(out, snapshot=old)
    shutil.rmtree(out / "shards" / "train-00000")
    with pytest.raises(mr.StoreCorrupt, match=r"expected .* found nothing"):
        reader.columns["number"][:]


def test_gc_shows_what_it_would_remove_without_doing_so(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 10, append=False)
    add(out, 10, 20)
    (tmp_path / "out.partial").mkdir()
    before = tree_digest(tmp_path)
    planned = gc.collect(out, keep=1, dry_run=True)
    assert tree_digest(tmp_path) == before
    assert gc.collect(out, keep=1)["removed"] == planned["removed"]
    assert "out.partial" in planned["removed"]


def test_reader_holds_one_descriptor_and_gives_it_back(tmp_path):
    out = tmp_path / "out"
    add(out, 0, 60, append=False)
    with expect_no_leaks():
        store = mr.open_store(out)
        check(store, 60)
        held = [
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        ]
        assert held.count(str(out)) == 1
        del store
