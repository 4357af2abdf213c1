"""Stores at a URL: the same batches and cursors as on disk, nothing wrong is ever served, and the cache keeps to its size."""

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.errors import StoreError
from millrace.store.remote import cache as caches
from millrace.store.remote.cache import size_of
from millrace.store.remote.contents import Contents
from millrace.store.remote.objects import Objects
from millrace.store.remote.shards import Window
from millrace.testing import tiny_records, tiny_series, tiny_text

ROWS, SHARDS = 2000, 12
SHARD_BYTES = ROWS * 8
TABLES_BYTES = 4000  # the most that manifest and tables take


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))


VIEWS = {
    "text": (tiny_text, lambda store: mr.Blocks(store.split("train"), length=8)),
    "series": (tiny_series, lambda store: mr.Windows(store, lookback=5, horizon=2, include=["time"])),
    "records": (tiny_records, lambda store: mr.Records(store.split("train"))),
}


def shards_store(path):
    """Shards of one record each, so that a sequential order reads one after the other."""
    columns = {"x": mr.Column("int64")}
    with mr.StoreWriter(path, kind="records", columns=columns, shard_bytes=SHARD_BYTES) as writer:
        for shard in range(SHARDS):
            writer.append({"x": np.arange(ROWS) + shard * ROWS})
    store = mr.open_store(path)
    assert store.num_shards == SHARDS
    return store


def blocks(store, **options):
    view = mr.Blocks(store, length=100)
    order = mr.BlockShuffled(len(view), block=20, window=2, seed=5)
    return mr.Feed(view, batch=10, order=order, device="numpy", **{"epochs": 2, **options})


def plain(batch):
    columns = {
        name: (column.values, column.offsets) if isinstance(column, mr.Ragged) else column
        for name, column in batch.items()
    }
    return {**columns, "samples": batch.samples, "positions": batch.positions, "valid": batch.valid}


def same_batches(a, b):
    """The two feeds give the same batches, bit for bit, and the same state after each."""
    count = 0
    for one, other in zip(a, b, strict=True):
        np.testing.assert_equal(plain(other), plain(one))
        assert a.state_dict() == b.state_dict()
        count += 1
    return count > 0


def used(folder):
    """The bytes of all files below a folder."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize(
    ("options", "many"),
    [({}, None), ({"transform": lambda batch, rng: batch}, None), ({}, 0)],
    ids=["plain", "transform", "many records"],
)
def test_batches_are_those_of_the_local_store(tmp_path, s3, proxy, monkeypatch, kind, options, many):
    if many is not None:  # records beyond which their offsets stay in the files
        for limit in ("store.store.MAX_JOINED", "store.reader.MANY_OFFSETS", "view.windows.MAX_TABLE"):
            monkeypatch.setattr(f"millrace.{limit}", many)
    make, view = VIEWS[kind]
    local = make(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    before = len(proxy.requests)
    remote = mr.open_store(s3)
    assert not [path for _, path in proxy.requests[before:] if "/shards/" in path]
    assert remote.fingerprint == local.fingerprint
    assert view(remote).spec() == view(local).spec()
    feeds = [mr.Feed(view(store), batch=7, seed=3, epochs=2, device="numpy", **options) for store in (local, remote)]
    with feeds[0], feeds[1]:
        assert same_batches(*feeds)
    fetched = proxy.gets("/shards/")
    assert len(fetched) == len(set(fetched))  # each file once
    again = mr.open_store(s3)
    with (
        mr.Feed(view(local), batch=7, seed=3, epochs=1, device="numpy") as a,
        mr.Feed(view(again), batch=7, seed=3, epochs=1, device="numpy") as b,
    ):
        assert same_batches(a, b)
    assert proxy.gets("/shards/") == fetched


def test_checkpoints_of_one_tier_continue_on_another(tmp_path, s3):
    local = shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    stores = [
        local,
        mr.open_store(s3),
        mr.open_store(s3, cache_dir=tmp_path / "small", cache_size=5 * SHARD_BYTES + TABLES_BYTES),
    ]
    with blocks(local) as feed:
        expected = [batch["x"].copy() for batch in feed]
    state, got = None, []
    for number in range(len(expected)):  # the tier changes at every batch
        with blocks(stores[number % 3]) as feed:
            if state is not None:
                feed.load_state_dict(json.loads(json.dumps(state)))
            got.append(next(iter(feed))["x"].copy())
            state = feed.state_dict()
    np.testing.assert_array_equal(got, expected)


def test_text_comes_with_its_tokenizer_and_commands_take_urls(tmp_path, s3, capsys):
    (tmp_path / "a.txt").write_text("to be or not to be\n" * 50)
    assert (
        millrace(
            [
                "prepare",
                "text",
                str(tmp_path / "a.txt"),
                "--out",
                str(tmp_path / "store"),
                "--tokenizer",
                "bytes",
                "--val",
                "0",
            ]
        )
        == 0
    )
    mr.push(tmp_path / "store", s3)
    assert mr.open_store(s3).decode(mr.open_store(s3).encode("to be")) == "to be"
    capsys.readouterr()
    for command in (["info", s3], ["info", s3, "--json"], ["head", s3]):
        assert millrace(command) == 0
        assert capsys.readouterr().out


@pytest.mark.parametrize("fault", [503, "reset", "short", "flip"])
def test_nothing_wrong_is_served_through_faults(tmp_path, s3, proxy, fault):
    local = shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    counts = {}

    def twice(method, path):
        counts[path] = counts.get(path, 0) + 1
        return fault if "/shards/" in path and counts[path] <= 2 else None

    proxy.fault = twice
    with blocks(local) as a, blocks(mr.open_store(s3)) as b:
        assert same_batches(a, b)
    assert max(counts.values()) == 3


def test_a_fault_that_stays_reaches_the_loop_and_leaves_no_file(tmp_path, s3, proxy):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    store = mr.open_store(s3)
    view_is_made = blocks(store)
    proxy.fault = lambda method, path: "flip" if path.endswith("x.i64") else None
    with pytest.raises(mr.StoreCorrupt, match=r"x\.i64"), view_is_made as feed:
        next(iter(feed))
    assert not [
        name
        for name in os.listdir(tmp_path / "cache/shards")
        if os.path.getsize(tmp_path / "cache/shards" / name) == SHARD_BYTES
    ]
    proxy.fault = lambda method, path: None
    with blocks(store) as feed:
        assert len(list(feed)) == len(feed)


@pytest.mark.parametrize("shards", [5, pytest.param(8, marks=pytest.mark.soak), SHARDS - 1])
@pytest.mark.parametrize(
    "options", [{}, {"transform": lambda batch, rng: batch, "workers": 1}], ids=["plain", "transform"]
)
def test_the_size_of_the_cache_is_never_exceeded(tmp_path, s3, proxy, shards, options):
    local = shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    limit = shards * SHARD_BYTES + 1000  # it is for the tables too, so a shard less fits
    folder, most, ends = tmp_path / "small", [0], threading.Event()
    store = mr.open_store(s3, cache_dir=folder, cache_size=limit)

    def watch():
        while not ends.is_set():
            with store._shards._cache._room:  # neither twice nor never: files are made, renamed and removed under it
                most[0] = max(most[0], used(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with blocks(local, **options) as a, blocks(store, **options) as b:
            assert same_batches(a, b)
    finally:
        ends.set()
        watcher.join()
    assert 0 < most[0] <= limit


def test_a_cache_that_is_too_small_for_a_batch_is_refused_at_once(tmp_path, s3):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    store = mr.open_store(s3, cache_size=3 * SHARD_BYTES)
    view = mr.Blocks(store, length=100)
    with pytest.raises(mr.ConfigError, match=r"cache_size is 48,000 \([\d,]+ of it for tables .*BlockShuffled"):
        iter(mr.Feed(view, batch=100, seed=1, device="numpy"))


def test_what_is_needed_last_goes_first(tmp_path, s3):
    """Of the files that are there, the one whose next batch is furthest away makes room."""
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    store = mr.open_store(s3, cache_size=4 * SHARD_BYTES + TABLES_BYTES)
    shards = store._shards
    x = store.layout.file_of["x"]
    for shard in (1, 2, 0):
        shards.expect([(shard, x)])
    shards.expect([(1, x)])
    for shard in (0, 1, 2):
        assert shards.rows(shard, x, 0, 1)[0] == shard * ROWS
    shards.expect([(3, x)])
    assert shards.rows(3, x, 0, 1)[0] == 3 * ROWS  # four files: it is full
    uses = {shard: shards._window.next_use(shards._contents.file(shard, x).key) for shard in range(5)}
    assert uses == {0: 2, 1: 0, 2: 1, 3: 4, 4: float("inf")}
    assert shards.rows(4, x, 0, 1)[0] == 4 * ROWS
    there = set(os.listdir(tmp_path / "cache/shards"))
    assert [shard for shard in range(5) if shards._contents.file(shard, x).key in there] == [0, 1, 2, 4]


def test_the_window_knows_when_a_file_is_needed_next():
    window = Window(length=2)
    for keys in (["a", "b"], ["a"], ["c"], ["b"], ["c"]):
        window.add(keys)
    assert [window.next_use(key) for key in "abc"] == [float("inf"), 3, 2]


READER = """
import hashlib, sys, millrace as mr
store = mr.open_store(sys.argv[1], cache_size=sys.argv[2] if len(sys.argv) > 2 else None)
view = mr.Blocks(store, length=100)
seen = hashlib.sha256()
with mr.Feed(view, batch=10, order=mr.BlockShuffled(len(view), block=20, window=2, seed=5), epochs=2, device="numpy") as feed:
    for batch in feed:
        seen.update(batch["x"].tobytes())
print(seen.hexdigest())
"""


def reader(*arguments):
    return subprocess.Popen([sys.executable, "-c", READER, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize("size", [[], [9 * SHARD_BYTES]], ids=["no limit", "limit"])
def test_jobs_share_one_cache(tmp_path, s3, proxy, size):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    jobs = [reader(s3, *size) for _ in range(2 if size else 3)]
    found = {job.communicate(timeout=100)[0] for job in jobs}
    local = reader(tmp_path / "store").communicate(timeout=100)[0]
    assert found == {local}
    assert all(job.returncode == 0 for job in jobs)
    fetched = proxy.gets("/shards/")
    if size:
        assert used(tmp_path / "cache") <= size[0]
    else:
        assert len(fetched) == len(set(fetched)) == SHARDS  # one download for each file


def test_kill_9_while_downloading_leaves_nothing_wrong(tmp_path, s3, proxy):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    job = []

    name = Contents.read(Objects(s3)).file(7, 1).stored_name

    def killed(method, path):
        if path.endswith(name) and job:
            job[0].kill()
        return

    proxy.fault = killed
    job.append(reader(s3))
    job[0].communicate(timeout=100)
    assert job[0].returncode == -9
    (tables,) = (tmp_path / "cache/stores").iterdir()
    tables.rename(f"{tables}.0123.tmp")  # as one leaves them who is killed before he is done
    proxy.fault = lambda method, path: None
    found = reader(s3).communicate(timeout=100)[0]
    assert found == reader(tmp_path / "store").communicate(timeout=100)[0]
    assert not list((tmp_path / "cache").rglob("*.tmp"))


def test_the_tables_of_a_store_make_room_for_themselves(tmp_path, s3, monkeypatch):
    """They count too, whichever store comes second."""
    shards_store(tmp_path / "store")
    tiny_series(tmp_path / "other")
    mr.push(tmp_path / "store", s3)
    mr.push(tmp_path / "other", f"{s3}-2")
    with pytest.raises(mr.ConfigError, match="the tables of this store have"):
        mr.open_store(s3, cache_size=500)
    store = mr.open_store(s3)
    tables = used(tmp_path / "cache")
    limit = tables + 2 * SHARD_BYTES
    store = mr.open_store(s3, cache_size=limit)
    for shard in (0, 1):
        store._shards.rows(shard, store.layout.file_of["x"], 0, 1)
    assert used(tmp_path / "cache") == limit
    mr.open_store(f"{s3}-2", cache_size=limit)
    assert tables + SHARD_BYTES < used(tmp_path / "cache") <= limit
    mr.open_store(f"{s3}-2", cache_size=limit)


def test_a_file_that_somebody_holds_stays(tmp_path, s3, monkeypatch):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    monkeypatch.setattr(caches, "WAIT_S", 0.2)
    stores = [
        mr.open_store(s3, cache_size=2 * SHARD_BYTES + TABLES_BYTES) for _ in range(2)
    ]  # two descriptors: like two processes
    x = stores[0].layout.file_of["x"]
    held = [stores[0]._shards.rows(shard, x, 0, ROWS) for shard in (0, 1)]
    for store in stores:  # also in the process that holds it
        with pytest.raises(StoreError, match=r"in use.*raise cache_size"):
            store._shards.rows(2, x, 0, 1)
    assert held[1][0] == ROWS
    held.clear()
    assert stores[1]._shards.rows(2, x, 0, 1)[0] == 2 * ROWS


FULL = """
import resource, sys, millrace as mr
store = mr.open_store(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    store.columns["x"][0]
except mr.StoreWriteFailed as error:
    print(error)
"""


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, s3):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    done = subprocess.run([sys.executable, "-c", FULL, s3], capture_output=True, text=True, timeout=100)
    assert "downloading" in done.stdout
    assert "File too large" in done.stdout
    assert used(tmp_path / "cache/shards") == 0
    assert mr.open_store(s3).columns["x"][0] == 0


def test_http_serves_a_store_too(tmp_path, web):
    folder, url, _ = web
    local = shards_store(folder / "store")
    with blocks(local) as a, blocks(mr.open_store(f"{url}/store")) as b:
        assert same_batches(a, b)


def test_worker_processes_and_forked_children_read_a_remote_store(tmp_path, s3):
    local = shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    store = mr.open_store(s3)
    with blocks(local, epochs=1) as a, blocks(store, epochs=1, processes=True, workers=2) as b:
        assert same_batches(a, b)
    child = os.fork()
    if child == 0:
        os._exit(0 if np.array_equal(store.columns["x"][:], local.columns["x"][:]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_missing_store_and_wrong_options_say_so(tmp_path, s3):
    with pytest.raises(mr.StoreNotFound, match="push a store there"):
        mr.open_store(s3)
    with pytest.raises(mr.ConfigError, match="cache_size='much'"):
        size_of("much")
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    with pytest.raises(mr.ConfigError, match="dtype"):
        mr.open_store(s3, dtype="uint16")
    with pytest.raises(mr.ConfigError, match="for stores at a URL"):
        mr.open_store(tmp_path / "store", cache_size="1GB")
    assert mr.open_store(f"file://{tmp_path}/store").num_shards == SHARDS


def test_a_store_that_is_replaced_while_it_is_read_is_named_and_an_append_disturbs_nobody(tmp_path, s3, proxy):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    stores = [mr.open_store(s3, cache_dir=tmp_path / name) for name in "ab"]
    with mr.StoreWriter(tmp_path / "store", append=True) as writer:
        writer.append({"x": np.arange(ROWS)})
    mr.push(tmp_path / "store", s3)
    assert stores[0].columns["x"][5] == 5
    again = mr.open_store(s3, snapshot=stores[0].fingerprint)
    assert (again.fingerprint, again.num_shards) == (stores[0].fingerprint, SHARDS)
    assert mr.open_store(s3).num_shards == SHARDS + 1
    with mr.StoreWriter(tmp_path / "other", columns={"x": mr.Column("int64")}, shard_bytes=SHARD_BYTES) as writer:
        writer.append({"x": -np.arange(ROWS)})
    there = Objects(s3)
    there.remove_all(["store.json", *there.sizes("shards")])  # by hand
    mr.push(tmp_path / "other", s3)
    with pytest.raises(mr.StoreCorrupt, match=r"was replaced by another store since it was opened.*; open it again"):
        stores[1].columns["x"][5]
    assert stores[0].columns["x"][5] == 5  # it has the file


def test_damaged_tables_in_the_cache_are_fetched_again(tmp_path, s3):
    local = shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    mr.open_store(s3)
    (table,) = (tmp_path / "cache/stores").rglob("shards-*.bin")
    os.chmod(table, 0o644)
    table.write_bytes(bytes(table.stat().st_size))
    assert mr.open_store(s3).columns["x"][-1] == local.columns["x"][-1]


def test_a_cache_that_was_deleted_under_a_reader_is_filled_again(tmp_path, s3, monkeypatch):
    monkeypatch.setattr(caches, "MISSING_TRIES", 2)
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", s3)
    first = mr.open_store(s3).columns["x"]
    held = first[:10]
    for name in os.listdir(tmp_path / "cache/shards"):
        if name != "locks":
            os.unlink(tmp_path / "cache/shards" / name)
    assert mr.open_store(s3).columns["x"][0] == held[0] == 0


def test_plan_says_what_an_epoch_costs_and_the_order_for_a_cache(tmp_path, s3, capsys):
    view = mr.Blocks(shards_store(tmp_path / "store"), length=100)
    mr.push(tmp_path / "store", s3)
    arguments = ["plan", s3, "--length", "100", "--price-requests", "1000", "--price-gb", "0"]
    millrace([*arguments, "--json", "--cache-dir", str(tmp_path / "planned")])
    facts = json.loads(capsys.readouterr().out)
    assert (facts["samples"], facts["bytes"]) == (len(view), int(view.shard_bytes().sum()))
    assert facts["money"] == facts["requests"] == SHARDS + 3
    assert facts["samples_per_s"] > 0
    assert facts["order"] is None
    limit = int(view.shard_bytes().max()) * 8
    few = str(int(view.shard_bytes().max()) * 5)  # fewer files than are measured with
    millrace([*arguments, "--cache-size", few, "--cache-dir", str(tmp_path / "few")])
    shown = capsys.readouterr().out
    assert "as many, since the cache does not hold it" in shown
    assert "expected: " in shown
    millrace([*arguments, "--cache-size", str(limit), "--mb-per-s", "1"])
    shown = capsys.readouterr().out.splitlines()
    order = mr.BlockShuffled.for_cache(view, limit)
    assert shown[-1] == f"order=mr.BlockShuffled({len(view)}, block={order.block}, window={order.window}, seed=0)"
    assert any(line.startswith("expected: ") and "samples/s" in line for line in shown)
    assert "MILLRACE_CACHE_SIZE" not in os.environ
    remote = mr.open_store(s3, cache_dir=tmp_path / "small", cache_size=limit)
    with mr.Feed(mr.Blocks(remote, length=100), batch=8, order=order, epochs=1, device="numpy") as feed:
        assert sum(int(batch.valid.sum()) for batch in feed) == len(view)  # it fits
    with pytest.raises(mr.errors.ConfigError, match=r"4 must fit; give [\d,]+ or more"):
        mr.BlockShuffled.for_cache(view, 100)
