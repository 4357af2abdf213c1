"""A store whose files are not what the manifest says is refused by name, before any of it is mapped."""

import errno
import json
import os
import shutil

import numpy as np
import pytest

import millrace as mr
from millrace.store import reader

# Each takes the path of a file; it is replaced, never changed in place, since it may be a hard link.
DAMAGE = """
import json, os, sys
import millrace as mr
from millrace.store import platform

def replaced(path, data):
    os.unlink(path)
    with open(path, "wb") as file:
        file.write(data)

def cut_by_one(path, data, other): replaced(path, data[:-1])
def cut_to_nothing(path, data, other): replaced(path, b"")
def longer_by_one(path, data, other): replaced(path, data + b"x")
def missing(path, data, other): os.unlink(path)
def of_another_shard(path, data, other): replaced(path, open(other, "rb").read())
def a_folder(path, data, other): os.unlink(path); os.mkdir(path)
def a_fifo(path, data, other): os.unlink(path); os.mkfifo(path)
def a_link(path, data, other): os.rename(path, path + ".real"); os.symlink(path + ".real", path)
def a_broken_link(path, data, other): os.unlink(path); os.symlink("nowhere", path)

def restored(path, data):
    os.rmdir(path) if os.path.isdir(path) else os.path.lexists(path) and os.unlink(path)
    with open(path, "wb") as file:
        file.write(data)

def changed(damage, data, other):
    if damage in ("cut_by_one", "cut_to_nothing"):
        return len(data) > 0
    return damage != "of_another_shard" or len(data) != os.path.getsize(other)

def told(error):
    return {"kind": type(error).__name__, "text": str(error), "path": error.path, "column": error.column,
            "expected": error.expected, "found": error.found}
"""
KINDS = [
    "cut_by_one", "cut_to_nothing", "longer_by_one", "missing", "of_another_shard", "a_folder", "a_fifo", "a_link",
    "a_broken_link",
]  # fmt: skip
NO_SIZE = {
    "missing": "nothing",
    **dict.fromkeys(["a_folder", "a_fifo", "a_link", "a_broken_link"], "not a plain file"),
}

EVERY_FILE = """
store, shard, other, damage = sys.argv[1:]
def forbidden(*args, **kwargs): raise AssertionError("mapped before its size was checked")
platform.map_file = forbidden
for name in sorted(os.listdir(shard)):
    path, twin = os.path.join(shard, name), os.path.join(other, name)
    data = open(path, "rb").read()
    if not changed(damage, data, twin):
        continue
    globals()[damage](path, data, twin)
    found = os.path.getsize(path) if os.path.isfile(path) else None
    try:
        mr.open_store(store)
    except mr.StoreCorrupt as error:
        print(json.dumps({"file": name, "bytes": len(data), "now": found, **told(error)}))
    else:
        raise SystemExit(f"{name}: opened although {damage}")
    restored(path, data)
mr.open_store(store)
"""


@pytest.mark.parametrize("damage", KINDS)
def test_a_damaged_file_is_refused_at_open_by_name_and_sizes(rich_copy, fresh, damage):
    shard = rich_copy.path / "shards" / "train-00001"
    lines = fresh(DAMAGE + EVERY_FILE, rich_copy.path, shard, shard.with_name("val-00000"), damage).splitlines()
    files = {file.name: file for file in mr.open_store(rich_copy.path).layout.files}
    assert len(lines) >= (6 if damage == "of_another_shard" else len(files) - 1)
    for line in map(json.loads, lines):
        assert line["path"] == str(shard / line["file"])
        assert line["column"] == files[line["file"]].column
        assert line["expected"] == f"{line['bytes']} bytes"
        assert line["found"] == NO_SIZE.get(damage, f"{line['now']} bytes")
        for part in (line["path"], line["expected"], line["found"], "copy this shard again or prepare the store again"):
            assert part in line["text"]


@pytest.mark.parametrize("how", ["missing", "a file", "a link"])
def test_a_damaged_shard_folder_is_refused_at_open(rich_copy, how):
    shard = rich_copy.path / "shards" / "train-00001"
    shard.rename(rich_copy.path / "elsewhere")
    if how == "a file":
        shard.touch()
    elif how == "a link":
        shard.symlink_to(rich_copy.path / "elsewhere")
    with pytest.raises(mr.StoreCorrupt, match=r"expected a folder, found (nothing|something else)") as caught:
        mr.open_store(rich_copy.path)
    assert str(caught.value.path).rstrip("/") == str(shard)


@pytest.mark.parametrize("check", [False, True])
def test_a_folder_of_shards_that_leads_elsewhere_is_refused(rich_copy, check):
    shards = rich_copy.path / "shards"
    shards.rename(rich_copy.path.parent / "outside")
    with pytest.raises(mr.StoreCorrupt, match="shards: cannot be read"):
        mr.open_store(rich_copy.path, check=check)
    shards.symlink_to(rich_copy.path.parent / "outside")
    with pytest.raises(mr.StoreCorrupt, match="shards: is not a plain folder"):
        mr.open_store(rich_copy.path, check=check)


# Stores of more files than are checked at open.

MANY = 2_100  # shards of two files: more than 4,096 files


def fill(shard, folder):
    shard.mkdir()
    for name in ("offsets.i64", "x.i16"):
        os.link(folder / name, shard / name)


@pytest.fixture(scope="module")
def shared_many(laid_store, memory_folder):
    """Shards of three records and six rows each, all hard links of two files."""
    store = laid_store(memory_folder / "many", {"x": mr.Column("int16")})
    np.array([0, 1, 3, 6], "<i8").tofile(memory_folder / "offsets.i64")
    np.arange(6, dtype="<i2").tofile(memory_folder / "x.i16")
    for _ in range(MANY):
        fill(store.add(3, 6), memory_folder)
    return store.publish()


@pytest.fixture
def many(shared_many, memory_folder):
    """The same, to damage shard train-01000."""
    yield shared_many
    shutil.rmtree(shared_many / "shards" / "train-01000")
    fill(shared_many / "shards" / "train-01000", memory_folder)


TOUCH = """
path, shard, other, damage, name, touch = sys.argv[1:]
file = os.path.join(shard, name)
data = open(file, "rb").read()
globals()[damage](file, data, os.path.join(other, name))
store = mr.open_store(path)
assert store.columns["x"][:12].tolist() == [0, 1, 2, 3, 4, 5] * 2
for attempt in ("first", "again"):
    try:
        print(eval(touch))
    except mr.StoreCorrupt as error:
        print(json.dumps(told(error)))
try:
    mr.open_store(path, check=True)
except mr.StoreCorrupt as error:
    print(json.dumps(told(error)))
"""


@pytest.mark.parametrize("name", ["x.i16", "offsets.i64"])
@pytest.mark.parametrize("damage", [kind for kind in KINDS if kind != "of_another_shard"])
def test_among_many_files_damage_is_found_when_touched_or_by_check(many, fresh, damage, name):
    shard = many / "shards" / "train-01000"
    touch = "store.columns['x'][6003]" if name == "x.i16" else "store.offsets"
    lines = fresh(DAMAGE + TOUCH, many, shard, shard.with_name("train-00000"), damage, name, touch).splitlines()
    assert len(lines) == 3
    for error in map(json.loads, lines):
        assert error["kind"] == "StoreCorrupt"
        assert error["path"] == str(shard / name)


def test_many_undamaged_files_open_with_and_without_check(many):
    assert mr.open_store(many).num_shards == MANY
    store = mr.open_store(many, check=True)
    assert store.num_records == 3 * MANY
    assert store.offsets[-1] == 6 * MANY


def test_only_the_sizes_of_few_files_are_looked_at_when_there_are_many(many, monkeypatch):
    looked_at = []
    whole = reader.Folder.stat
    monkeypatch.setattr(reader.Folder, "stat", lambda self, name: looked_at.append(name) or whole(self, name))
    store = mr.open_store(many)
    assert not [name for name in looked_at if name.startswith("shards/")]
    assert store.columns["x"][6003] == 3
    assert {os.path.dirname(name) for name in looked_at if name.startswith("shards/")} == {
        "shards",
        "shards/train-01000",
    }
    looked_at.clear()
    mr.open_store(many, check=True)
    assert len([name for name in looked_at if name.startswith("shards/")]) == 3 * MANY


# Files that change between open and use.

LATER = """
import numpy as np
from millrace.store import reader
path, shard, maps = sys.argv[1:]
reader.MAX_MAPS = int(maps)
store = mr.open_store(path)
first = store.split("val").columns["float64"][:1].tolist()
for name in sorted(os.listdir(shard)):
    os.chmod(os.path.join(shard, name), 0o644)
    os.truncate(os.path.join(shard, name), os.path.getsize(os.path.join(shard, name)) // 2)
part = store.split("train")
for column in part.columns:
    try:
        part.columns[column][:]
    except mr.StoreCorrupt as error:
        print(json.dumps(told(error)))
    else:
        raise SystemExit(f"{column}: read from a file that was cut")
assert store.split("val").columns["float64"][:1].tolist() == first
"""


@pytest.mark.parametrize("maps", [16_384, 0])
def test_a_file_cut_after_open_is_an_error_and_no_signal(rich_copy, fresh, maps):
    shard = rich_copy.path / "shards" / "train-00001"
    lines = fresh(DAMAGE + LATER, rich_copy.path, shard, maps).splitlines()
    assert len(lines) == len(rich_copy.columns)
    for error in map(json.loads, lines):
        assert error["path"].startswith(str(shard))
        assert error["expected"].endswith("bytes")
        assert error["found"].endswith("bytes")


CUT_WHILE_OPEN = """
import pickle
path, file = sys.argv[1:]
store = pickle.loads(pickle.dumps(mr.open_store(path, safe_read=True))).split("train")
column = store.columns["float64"]
start = int(column.starts[1])
assert column[start] is not None     # its descriptor is kept now
os.chmod(file, 0o644)
os.truncate(file, 0)
try:
    column[start]
except mr.StoreCorrupt as error:
    print(json.dumps(told(error)))
"""


def test_a_file_cut_while_it_is_read_by_descriptor_is_an_error(rich_copy, fresh):
    file = rich_copy.path / "shards" / "train-00001" / "float64.f64"
    error = json.loads(fresh(DAMAGE + CUT_WHILE_OPEN, rich_copy.path, file))
    assert error["path"] == str(file)
    assert "an end after 0 bytes" in error["text"]


CUT_WHILE_FED = """
path, file, is_transformed = sys.argv[1:]
view = mr.Records(mr.open_store(path, safe_read=True).split("train"), columns=["float64", "key"])
transform = (lambda batch, rng: batch) if is_transformed == "True" else None
with mr.Feed(view, batch=8, seed=1, device="numpy", transform=transform) as feed:
    batches = iter(feed)
    next(batches)
    os.chmod(file, 0o644)
    os.truncate(file, 0)
    try:
        for _ in range(20):
            next(batches)
    except mr.StoreCorrupt as error:
        print(json.dumps(told(error)))
with open("/proc/self/maps") as maps:
    assert not any(path in line for line in maps)
"""


@pytest.mark.parametrize("name", ["float64.*", "key.*"])
@pytest.mark.parametrize("is_transformed", [False, True])
def test_a_file_cut_while_it_is_fed_is_an_error_where_nothing_is_mapped(rich_copy, fresh, name, is_transformed):
    (file,) = (rich_copy.path / "shards" / "train-00001").glob(name)
    error = json.loads(fresh(DAMAGE + CUT_WHILE_FED, rich_copy.path, file, is_transformed))
    assert error["path"] == str(file)
    assert "an end after 0 bytes" in error["text"]


def test_foreign_layouts_are_always_mapped(tmp_path):
    np.arange(9, dtype="<u2").tofile(tmp_path / "tokens.bin")
    with pytest.raises(mr.ConfigError, match="always mapped; prepare a store"):
        mr.open_store(tmp_path / "tokens.bin", safe_read=True)


# Offsets that lie.


def falling(offsets):
    offsets[1:-1] = offsets[1:-1][::-1]
    offsets[1] = offsets[-1] + 1


def starting_late(offsets):
    offsets[0] = 1


def ending_early(offsets):
    offsets[-1] -= 1


def ending_late(offsets):
    offsets[-1] += 1


def negative(offsets):
    offsets[1] = -1


def enormous(offsets):
    offsets[1] = 2**63 - 1


@pytest.mark.parametrize("maps", [16_384, 0])
@pytest.mark.parametrize("lie", [falling, starting_late, ending_early, ending_late, negative, enormous])
@pytest.mark.parametrize(
    ("name", "touch"),
    [
        ("offsets.i64", lambda store: store.offsets),
        ("offsets.pixels.i64", lambda store: store.axis_offsets("pixels")),
        ("offsets.key.i64", lambda store: store.columns["key"][0]),
    ],
)
def test_offsets_that_lie_are_refused_when_touched(rich_copy, monkeypatch, name, touch, lie, maps):
    monkeypatch.setattr(reader, "MAX_MAPS", maps)
    path = rich_copy.path / "shards" / "train-00001" / name
    offsets = np.fromfile(path, "<i8")
    last = offsets[-1]
    assert len(offsets) >= 4
    lie(offsets)
    path.unlink()
    offsets.tofile(path)
    store = mr.open_store(rich_copy.path, check=True)  # the size is right
    assert store.split("val").offsets[0] == 0
    for _ in range(2):
        with pytest.raises(mr.StoreCorrupt, match=f"expected offsets rising from 0 to {last}, found") as caught:
            touch(store.split("train"))
        assert caught.value.path == str(path)


# What the system refuses is not damage.


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.EACCES, "fix the permission"), (errno.EMFILE, "ulimit -n"), (errno.ENFILE, "open files")],
)
@pytest.mark.parametrize("when", ["opening", "reading"])
def test_a_refusal_of_the_system_is_no_damage_and_says_its_own_remedy(rich, monkeypatch, code, remedy, when):
    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    if when == "reading":
        store = mr.open_store(rich.path)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(mr.StoreError, match=remedy) as caught:
        mr.open_store(rich.path) if when == "opening" else store.columns["label"][0]
    assert type(caught.value) is mr.StoreError
    assert str(caught.value.path).startswith(str(rich.path))


# No store, or not this one.


def test_no_store_is_not_found_and_says_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun.partial").mkdir()
    cases = {
        "nowhere": "check the path",
        "empty": "holds no store",
        "begun": "run the command or program that writes it again to continue",
    }
    for name, message in cases.items():
        with pytest.raises(mr.StoreNotFound, match=message) as caught:
            mr.open_store(tmp_path / name)
        assert caught.value.path == str(tmp_path / name)
    with pytest.raises(FileNotFoundError):
        mr.open_store("a\0b")
    with pytest.raises(mr.ConfigError, match="gopher:// is not a storage"):
        mr.open_store("gopher://host/store")


def test_a_store_without_its_manifest_is_no_store(rich_copy):
    (rich_copy.path / "store.json").unlink()
    with pytest.raises(mr.StoreNotFound):
        mr.open_store(rich_copy.path)


def test_a_snapshot_is_opened_only_by_its_own_fingerprint(rich_copy):
    now = mr.open_store(rich_copy.path).fingerprint
    assert mr.open_store(rich_copy.path, snapshot=now).fingerprint == now
    for wrong in ("../store", now[:-1], now.upper(), now + "\n", ""):
        with pytest.raises(mr.ConfigError, match="expected a fingerprint of 32 hex digits"):
            mr.open_store(rich_copy.path, snapshot=wrong)
    other = "0" * 32
    with pytest.raises(mr.StoreNotFound, match="removed or belongs to another store"):
        mr.open_store(rich_copy.path, snapshot=other)
    shutil.copy(rich_copy.path / "snapshots" / f"{now}.json", rich_copy.path / "snapshots" / f"{other}.json")
    with pytest.raises(mr.StoreCorrupt, match=f"holds snapshot {now}, expected {other}"):
        mr.open_store(rich_copy.path, snapshot=other)


def test_dtype_is_for_foreign_layouts(rich):
    with pytest.raises(mr.ConfigError, match="leave it out"):
        mr.open_store(rich.path, dtype="uint16")
