"""Past 2^31 and 2^32 rows and bytes, past 16,384 maps, and very many shards with 64 descriptors."""

import errno
import gc
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.store import platform, reader

EDGES = [0, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1, 2**32, 2**32 + 1]


def sparse(path: Path, num_bytes: int, known: dict[int, bytes]) -> None:
    """A file of this size that is a hole but for the bytes given by offset."""
    with open(path, "wb") as file:
        file.truncate(num_bytes)
        for offset, data in known.items():
            os.pwrite(file.fileno(), data, offset)


@pytest.fixture(params=[16_384, 0], ids=["mapped", "pread"])
def maps(request, monkeypatch):
    monkeypatch.setattr(reader, "MAX_MAPS", request.param)


@pytest.fixture(scope="module")
def long_path(tmp_path_factory, laid_store):
    """Two shards of a byte per row: the first has 2^32 + 10 rows, the second three. Row r holds r % 251 at the edges."""
    folder = tmp_path_factory.mktemp("long")
    store = laid_store(folder / "long", {"x": mr.Column("uint8")})
    rows = 2**32 + 10
    offsets = np.array([0, 2**31 - 1, 2**31 + 1, 2**32 - 1, 2**32 + 1, rows], "<i8")
    shard = store.add(5, rows)
    shard.mkdir()
    offsets.tofile(shard / "offsets.i64")
    sparse(
        shard / "x.u8",
        rows,
        {r: bytes([r % 251]) for edge in [*EDGES, rows - 1] for r in range(edge, min(edge + 3, rows))},
    )
    shard = store.add(2, 3)
    shard.mkdir()
    np.array([0, 1, 3], "<i8").tofile(shard / "offsets.i64")
    np.array([r % 251 for r in range(rows, rows + 3)], np.uint8).tofile(shard / "x.u8")
    yield store.publish()
    shutil.rmtree(folder)


def test_rows_beyond_32_bits_are_read_in_every_way(long_path, maps):
    store = mr.open_store(long_path)
    column, rows = store.columns["x"], 2**32 + 13
    assert (store.num_rows, len(column), store.num_records) == (rows, rows, 7)
    near = np.array([r for edge in [*EDGES, 2**32 + 9] for r in (edge, edge + 1)])
    expected = (near % 251).astype(np.uint8)
    assert [int(column[int(r)]) for r in near] == expected.tolist()
    assert [int(column[int(r) - rows]) for r in near] == expected.tolist()  # negative
    assert np.array_equal(column[near], expected)
    assert np.array_equal(column.take(near[::-1].copy()), expected[::-1])
    for r in near.tolist():
        assert column.span(r, r + 2).tolist()[0] == r % 251
        assert column[r : r + 1].tolist() == [r % 251]
    assert column[2**32 + 9 : 2**32 + 13].tolist() == [r % 251 for r in range(2**32 + 9, 2**32 + 13)]  # over the shards
    assert column[-1:-4:-1].tolist() == [r % 251 for r in range(rows - 1, rows - 4, -1)]
    assert column[2**32 - 1 : 2**32 + 2 : 2].tolist() == [(2**32 - 1) % 251, (2**32 + 1) % 251]
    with pytest.raises(IndexError):
        column[rows]


def test_offsets_beyond_32_bits_are_read_and_joined(long_path, maps):
    store = mr.open_store(long_path)
    first = [0, 2**31 - 1, 2**31 + 1, 2**32 - 1, 2**32 + 1, 2**32 + 10]
    assert store.offsets.dtype == np.int64
    assert store.offsets.tolist() == [*first, 2**32 + 11, 2**32 + 13]
    assert store.columns["x"][int(store.offsets[4]) : int(store.offsets[4]) + 2].tolist() == [
        (2**32 + 1) % 251,
        (2**32 + 2) % 251,
    ]
    shards, inside = store.locate(np.array([2**32 + 9, 2**32 + 10, 2**32 + 12]))
    assert (shards.tolist(), inside.tolist()) == ([0, 1, 1], [2**32 + 9, 0, 2])
    assert store.num_bytes == 2**32 + 13 + 8 * 6 + 8 * 3


@pytest.mark.parametrize(
    ("dtype", "tail", "rows"), [("uint16", (), 2**31 + 5), ("float64", (), 2**29 + 5), ("int32", (1000,), 2**21)]
)
def test_bytes_beyond_32_bits_are_read(laid_store, tmp_path, maps, dtype, tail, rows):
    store = laid_store(tmp_path / "wide", {"x": mr.Column(dtype, tail)})
    shard = store.add(1, rows)
    shard.mkdir()
    np.array([0, rows], "<i8").tofile(shard / "offsets.i64")
    size = np.dtype(dtype).itemsize * int(np.prod(tail, dtype=int))
    assert rows * size > 2**32
    known = [0, 2**31 // size, 2**32 // size - 1, 2**32 // size, 2**32 // size + 1, rows - 1]
    values = {r: np.full(tail or (1,), 7 + k, dtype) for k, r in enumerate(known)}
    file = store.layout.files[1].name
    sparse(shard / file, rows * size, {r * size: value.tobytes() for r, value in values.items()})
    column = mr.open_store(store.publish()).columns["x"]
    for r, value in values.items():
        assert np.array_equal(np.atleast_1d(column[r]), value)
    assert np.array_equal(column[known].reshape(len(known), -1), np.array([values[r] for r in known]))
    assert not np.any(column[known[-1] - 1])


def test_text_beyond_32_bits_is_read(laid_store, tmp_path, maps):
    store = laid_store(tmp_path / "text", {"x": mr.Column("int8"), "key": mr.Column("string", per="record")})
    text = "héllo".encode()
    shard = store.add(3, 0, 2**32 + len(text) + 1)
    shard.mkdir()
    np.zeros(4, "<i8").tofile(shard / "offsets.i64")
    np.array([0, 2**32, 2**32 + len(text), 2**32 + len(text) + 1], "<i8").tofile(shard / "offsets.key.i64")
    (shard / "x.i8").touch()
    sparse(shard / "key.utf8", 2**32 + len(text) + 1, {2**32: text + b"!"})
    key = mr.open_store(store.publish()).columns["key"]
    assert key[1] == "héllo"
    assert key[1:].tolist() == ["héllo", "!"]
    assert [bytes(item) for item in key.ragged(1, 3)] == [text, b"!"]


# More files than maps.


def everything(store):
    found = {}
    for part in (store, *(store.split(name) for name in store.splits)):
        for axis in store.axes:
            found[part.split_name, "offsets", axis] = part.axis_offsets(axis).tolist()
        for name, column in part.columns.items():
            raw = getattr(column, "raw", None) if not hasattr(column, "codes") else column.codes
            found[part.split_name, name] = np.asarray(column).tolist()
            found[part.split_name, name, "raw"] = np.asarray(raw).tolist()
            if len(column) > 3:
                found[part.split_name, name, "some"] = np.asarray(column[[2, 0, -1]]).tolist()
                found[part.split_name, name, "step"] = np.asarray(column[::-2]).tolist()
    return found


@pytest.mark.parametrize("limit", [0, 1, 2, 50])
def test_past_the_maps_rows_are_read_by_pread_and_are_the_same(rich, monkeypatch, limit):
    other = mr.open_store(rich.path)
    mapped = everything(other)
    gc.collect()
    monkeypatch.setattr(reader, "MAX_MAPS", platform.num_maps() + limit)  # which are of all stores
    store = mr.open_store(rich.path)
    assert everything(store) == mapped
    assert len(store._shards._maps) == limit
    del other


@pytest.mark.needs_core
def test_all_stores_of_a_process_share_the_maps(rich, monkeypatch):
    mapped = everything(mr.open_store(rich.path))
    gc.collect()
    before = platform.num_maps()
    monkeypatch.setattr(reader, "MAX_MAPS", before + 40)
    stores = [mr.open_store(rich.path) for _ in range(3)]
    assert all(everything(store) == mapped for store in stores)
    assert platform.num_maps() == before + 40
    views = [mr.Records(store.split("train"), columns=["float64", "key"]) for store in stores]
    assert len({str(view[np.arange(5)]) for view in views}) == 1  # by what feeds would map
    assert platform.num_maps() == before + 40
    del stores, views
    gc.collect()
    assert platform.num_maps() == before


def test_when_the_system_has_no_more_maps_rows_are_read_by_pread(rich, monkeypatch):
    mapped, left = everything(mr.open_store(rich.path)), [3]
    whole = platform.map_file

    def scarce(fd, length, **options):
        if left[0] == 0:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        left[0] -= 1
        return whole(fd, length, **options)

    monkeypatch.setattr(platform, "map_file", scarce)
    assert everything(mr.open_store(rich.path)) == mapped
    assert left == [0]


def test_threads_share_few_descriptors_without_mixing_files(rich, monkeypatch):
    monkeypatch.setattr(reader, "MAX_MAPS", 0)
    monkeypatch.setattr(platform, "descriptor_limit", lambda: 16)
    names = ["label", "wide", "uint8", "image", "float64", "key", "word", "bool"]
    expected = {name: np.asarray(mr.open_store(rich.path).columns[name]).tolist() for name in names}
    store, wrong = mr.open_store(rich.path), []

    def read(name, column):
        for _ in range(20):
            wrong.extend([name] if np.asarray(column).tolist() != expected[name] else [])

    threads = [threading.Thread(target=read, args=(name, store.columns[name])) for name in names]
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(store._shards._descriptors._open) <= 4 + len(names)
    shards = store._shards
    shards._descriptors.close()
    if before:
        assert set(os.listdir("/proc/self/fd")) <= before


# Very many shards.

SHARDS = 100_000 if os.environ.get("MILLRACE_SOAK") else 40_000
MANY = """
import json, os, random, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
import millrace as mr
from millrace.store import reader

path, shards = sys.argv[1], int(sys.argv[2])
held = []
def look(): held.append(len(os.listdir("/proc/self/fd")))
def maps():
    with open("/proc/self/maps") as file:
        return sum(path in line for line in file)

store = mr.open_store(path)
look()
rng = random.Random(7)
for shard in rng.sample(range(shards), 5_000):
    row = 6 * shard + rng.randrange(6)
    expected = row % 6 + 10 * (shard % 2)
    assert store.columns["x"][row] == expected, row
    if shard % 500 == 0: look()
few = maps()
offsets = store.offsets
look()
assert np.array_equal(np.diff(offsets).reshape(-1, 3), np.tile([[1, 2, 3], [3, 3, 0]], (shards // 2, 1)))
full = maps()
rows = np.array(rng.sample(range(6 * shards), 30_000))     # nearly every shard a second time, most of them now by pread
assert np.array_equal(store.columns["x"][rows], rows % 6 + 10 * (rows // 6 % 2))
look()
print(json.dumps({"held": max(held), "few": few, "full": full, "after": maps(), "limit": store._shards._max_maps}))
"""


@pytest.fixture(scope="module")
def many_path(laid_store, memory_folder):
    """Shards that are hard links of two pairs of files: shard k is of kind k % 2."""
    store = laid_store(memory_folder / "many", {"x": mr.Column("int16")})
    for kind, offsets in enumerate(([0, 1, 3, 6], [0, 3, 6, 6])):
        np.array(offsets, "<i8").tofile(memory_folder / f"offsets.{kind}")
        (np.arange(6) + 10 * kind).astype("<i2").tofile(memory_folder / f"x.{kind}")
    for k in range(SHARDS):
        shard = str(store.add(3, 6))
        os.mkdir(shard)
        os.link(f"{memory_folder}/offsets.{k % 2}", f"{shard}/offsets.i64")
        os.link(f"{memory_folder}/x.{k % 2}", f"{shard}/x.i16")
    return store.publish()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors and maps are counted in /proc")
def test_very_many_shards_are_read_with_64_descriptors_and_16_384_maps(many_path, fresh):
    counted = json.loads(fresh(MANY, many_path, SHARDS))
    assert counted["held"] < 64
    assert counted["limit"] <= 16_384
    assert counted["few"] == min(5_000, counted["limit"])
    assert counted["full"] == counted["after"] == counted["limit"]


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system cannot tell what is in memory")
def test_past_the_maps_rows_in_memory_are_read_once(tmp_path, monkeypatch):
    values = np.arange(100_000, dtype=np.float32)
    with mr.StoreWriter(tmp_path / "store", kind="records", columns={"x": mr.Column("float32")}) as writer:
        writer.append({"x": values})
    (path,) = (tmp_path / "store").rglob("x.f32")
    monkeypatch.setattr(reader, "MAX_MAPS", 0)
    column, waits, pread = mr.open_store(tmp_path / "store").columns["x"], [], platform.pread
    monkeypatch.setattr(platform, "pread", lambda *args: waits.append(args) or pread(*args))
    rows = np.array([99_999, 7, 50_000])
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert np.array_equal(column[rows], values[rows])
        file.read()
        can_tell = platform.pread_now(file.fileno(), 1, 0) is not None  # the filesystem
    waits.clear()
    assert np.array_equal(column[rows], values[rows])
    assert len(waits) == (0 if can_tell else 3)


FEED = """
import itertools, json, os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
import numpy as np
import millrace as mr

path, held = sys.argv[1], []
view = mr.Blocks(mr.open_store(path), length=4, stride=5, column="x")
transform = (lambda batch, rng: {"x": batch.x}) if sys.argv[2] == "transform" else None
with mr.Feed(view, batch=512, seed=3, device="numpy", transform=transform) as feed:
    for batch in itertools.islice(feed, 8):     # 4,096 samples, nearly each in a shard of its own
        held.append(len(os.listdir("/proc/self/fd")))
        rows = batch.samples[:, None] * 5 + np.arange(4)
        assert np.array_equal(batch.x, rows % 6 + 10 * (rows // 6 % 2))
    with open("/proc/self/maps") as file:
        maps = sum(path in line for line in file)
    print(json.dumps({"held": max(held), "maps": maps, "way": feed.report().way}))
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors and maps are counted in /proc")
@pytest.mark.parametrize("way", ["numpy", "transform"])
def test_very_many_shards_are_fed_with_64_descriptors_and_16_384_maps(many_path, fresh, way):
    counted = json.loads(fresh(FEED, many_path, way))
    assert counted["held"] < 64
    assert counted["maps"] <= 16_384
    assert counted["way"] == way
