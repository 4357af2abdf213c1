"""Very many records: their offsets stay in the files of the shards, and windows are counted once for a machine.

The limits beyond which that begins are lowered here, and everything must be what it is below them.
"""

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.native import cache_folder
from millrace.store import kept_tables, offsets, reader
from millrace.store import store as stores
from millrace.store.offsets import Offsets
from millrace.view import records, windows

COLUMNS = {
    "values": mr.Column("float32", (2,)), "image": mr.Column("uint8", axis="image"),
    "label": mr.Column("int64", per="record"), "key": mr.Column("string", per="record"),
}  # fmt: skip
COUNT = 230


def few(monkeypatch):
    """So few records are many."""
    monkeypatch.setattr(stores, "MAX_JOINED", 0)
    monkeypatch.setattr(windows, "MAX_TABLE", 0)
    monkeypatch.setattr(records, "MAX_COUNTED", 0)
    monkeypatch.setattr(reader, "MANY_OFFSETS", 0)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Shards of few records, some without rows, and one record that is longer than all others."""
    rng, folder = np.random.default_rng(1), tmp_path_factory.mktemp("index") / "store"
    lengths = np.where(np.arange(COUNT) % 7 < 2, 0, rng.integers(0, 9, COUNT))
    lengths[90:110], lengths[150] = 0, 70
    with mr.StoreWriter(folder, columns=COLUMNS, splits=("train", "val"), shard_bytes=400) as writer:
        for k, rows in enumerate(lengths.tolist()):
            record = {
                "values": rng.normal(size=(rows, 2)), "image": rng.integers(0, 255, k % 3), "label": k, "key": f"é{k}"[: k % 4]
            }  # fmt: skip
            writer.append(record, split="val" if k % 11 == 10 else "train")
    assert mr.open_store(folder).num_shards > 10
    return folder


def pairs(store):
    return mr.Windows(store, lookback=1, horizon=1)


VIEWS = {
    "windows": lambda store: mr.Windows(store, lookback=2, horizon=1),
    "windows with strides": lambda store: mr.Windows(store, lookback=2, horizon=1, stride=3, lead=1),
    "windows that few records have": lambda store: mr.Windows(store, lookback=6, horizon=2),
    "records": lambda store: mr.Records(store),
    "records of numbers": lambda store: mr.Records(store, columns=["values", "image", "label"]),
    "padded records": lambda store: mr.Records(store, columns=["values", "label"], pad=5),
    "a concatenation": lambda store: mr.Concat([mr.Subset(pairs(store), [9, 2]), pairs(store), pairs(store)]),
    "chosen records": lambda store: mr.Records(store.where("label > 20 and n_values < 5"), columns=["values", "label"]),
}  # fmt: skip


def flat(batch):
    columns = [
        column
        for value in batch.values()
        for column in ((value.values, value.offsets) if isinstance(value, mr.Ragged) else (value,))
    ]
    return [np.asarray(column).tolist() for column in columns]


@pytest.mark.filterwarnings("ignore:Records")
@pytest.mark.parametrize("split", [None, "train", "val"])
@pytest.mark.parametrize("name", VIEWS)
def test_many_records_are_read_as_few_are(path, monkeypatch, name, split):
    def opened():
        store = mr.open_store(path)
        return store if split is None else store.split(split)

    expected = VIEWS[name](opened())
    batches = [flat(batch) for batch in mr.Feed(expected, batch=16, seed=5, epochs=1, device="numpy")]
    few(monkeypatch)
    for _ in ("made", "from the cache"):
        store = opened()
        view = VIEWS[name](store)
        assert len(view) == len(expected)
        assert repr(view) == repr(expected)
        assert view.fingerprint == expected.fingerprint
        assert flat(view[:]) == flat(expected[:])
        samples = np.random.default_rng(2).integers(0, len(view), 30)
        for axis in ("rows", "image") if "records" in name else ("rows",):
            assert [edges.tolist() for edges in vars(view.spans(samples, axis)).values() if edges is not None] == [
                edges.tolist() for edges in vars(expected.spans(samples, axis)).values() if edges is not None
            ]
        assert view.records(samples).tolist() == expected.records(samples).tolist()
        assert len(store.whole.axis_index("rows").pieces) == store.num_shards
        feed = mr.Feed(view, batch=16, seed=5, epochs=1, device="numpy")
        assert feed.explain(0).rows == mr.Feed(expected, batch=16, seed=5, epochs=1, device="numpy").explain(0).rows
        assert [flat(batch) for batch in feed] == batches


@pytest.mark.needs_core  # and processes
def test_worker_processes_find_the_same(path, monkeypatch):
    few(monkeypatch)
    from millrace.augment import Compose

    view = mr.Windows(mr.open_store(path), lookback=2, horizon=1)
    plain, sent = (
        [flat(batch) for batch in mr.Feed(view, batch=16, seed=5, epochs=1, device="numpy", **options)]
        for options in ({}, {"processes": True, "workers": 1, "transform": Compose([])})
    )
    assert sent == plain


@given(lengths=st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=6), data=st.data())
def test_offsets_in_pieces_are_those_that_are_joined(lengths, data):
    pieces = [np.cumsum([0, *own]) for own in lengths]
    records, rows = (np.cumsum([0, *counts]) for counts in (map(len, lengths), map(sum, lengths)))
    joined = np.cumsum([0, *(length for own in lengths for length in own)])
    several, one = Offsets(pieces, records, rows), Offsets.of(joined)
    assert len(several) == len(one) == len(joined) - 1
    assert several.joined.tolist() == joined.tolist()
    first = data.draw(st.integers(0, len(one)))
    last = data.draw(st.integers(first, len(one)))
    assert several.slice(first, last).tolist() == joined[first : last + 1].tolist()
    wanted = np.array(data.draw(st.lists(st.integers(0, max(len(one) - 1, 0)))) if len(one) else [], np.int64)
    assert [edges.tolist() for edges in several.spans(wanted)] == [edges.tolist() for edges in one.spans(wanted)]
    inside = np.arange(joined[-1])
    assert several.owners(inside).tolist() == one.owners(inside).tolist()


def test_windows_are_counted_and_offsets_compared_once_for_a_machine(path, monkeypatch):
    few(monkeypatch)
    made, compared = [], []
    make, falls = windows.Windows._make_ranks, reader._falls
    monkeypatch.setattr(windows.Windows, "_make_ranks", lambda self: made.append(1) or make(self))
    monkeypatch.setattr(reader, "_falls", lambda part: compared.append(1) or falls(part))

    def work():
        made.clear()
        compared.clear()
        view = mr.Windows(mr.open_store(path), lookback=2, horizon=1)
        assert view.spans([len(view) - 1]).lengths.tolist() == [3]
        return len(view), len(made), len(compared)

    count, _, shards = work()
    assert shards > 10
    assert work() == (count, 0, 0)
    (table,) = (cache_folder() / kept_tables.FOLDER).iterdir()
    assert table.stat().st_mode & 0o077 == table.parent.stat().st_mode & 0o077 == 0
    right = table.read_bytes()
    table.chmod(0o600)
    table.write_bytes(bytes(len(right)))  # another's: its times differ
    assert work() == (count, 1, 0)
    assert table.read_bytes() == right
    os.utime(path / "shards/train-00003/offsets.i64")
    assert work() == (count, 0, 1)
    table.unlink()
    table.symlink_to("/dev/zero")
    assert work() == (count, 1, 0)
    table.unlink()
    os.mkfifo(table)
    assert work() == (count, 1, 0)
    (cache_folder() / "index").rename(cache_folder() / "other")
    (cache_folder() / "index").touch()  # no folder can be made there
    assert work() == (count, 1, 0)


def test_offsets_that_fall_are_found_however_many_they_are(path, tmp_path, monkeypatch):
    import shutil

    few(monkeypatch)
    monkeypatch.setattr(reader, "CHUNK", 3)
    shutil.copytree(path, tmp_path / "store")
    view = mr.Records(mr.open_store(tmp_path / "store"))
    view[0]
    file = tmp_path / "store/shards/train-00001/offsets.i64"
    numbers = np.fromfile(file, "<i8")
    for place in range(1, len(numbers) - 1):
        wrong = numbers.copy()
        wrong[place] = numbers[-1] + 1
        file.chmod(0o644)
        file.write_bytes(wrong.tobytes())
        with pytest.raises(mr.StoreCorrupt, match="expected offsets rising from 0"):
            mr.Records(mr.open_store(tmp_path / "store"))[0]


def test_memory_does_not_grow_with_records(tmp_path, monkeypatch):
    """Joined they took 8 bytes each, and 24 with windows."""
    few(monkeypatch)
    monkeypatch.setattr(offsets, "CHUNK", 1 << 12)
    monkeypatch.setattr(reader, "CHUNK", 1 << 12)
    used = {}
    for count in (1_000, 50_000, 500_000):  # the first imports what is imported lazily
        columns, rows = {"values": mr.Column("uint8")}, np.zeros(2 * count, np.uint8)
        with mr.StoreWriter(tmp_path / str(count), columns=columns, shard_bytes=count * 4) as writer:
            writer.extend({"values": rows}, np.arange(count + 1) * 2)
        for turn in ("first", "second"):
            tracemalloc.start()
            store = mr.open_store(tmp_path / str(count))
            assert store.num_shards > 1
            padded = mr.Records(store, pad=2)
            for view in (pairs(store), mr.Concat([pairs(store), pairs(store)]), mr.Records(store), padded):
                assert repr(view)
                with mr.Feed(view, batch=256, device="numpy") as feed:
                    next(iter(feed))
            used[turn, count] = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
    for turn in ("first", "second"):
        assert used[turn, 500_000] < used[turn, 50_000] + 400_000
