"""A push to a URL that holds the store mends what is wrong there; stores that 0.1 pushed, under the names of a disk, go on."""

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.store.remote import objects
from millrace.store.remote.contents import Contents
from millrace.store.remote.objects import Objects
from millrace.testing import tiny_records

from .test_transfer import same_files


@pytest.fixture(autouse=True)
def direct(s3, s3_port, monkeypatch, tmp_path):
    """The server without the proxy before it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_port}")
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    return s3


def push_as_old(folder, url):
    """As 0.1 did: every file has the name it has on a disk."""
    there = Objects(url, create=True)
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "store.json"]
    for path in [*files, Path(folder) / "store.json"]:
        there.put(path.relative_to(folder).as_posix(), path.read_bytes())


def other_bytes(there, name):
    """As many as before."""
    there.put(name, bytes(there.sizes("")[name]))


def fewer_bytes(there, name):
    there.put(name, b"short")


def nothing(there, name):
    there.remove(name)


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n")
    mr.prepare_text([str(tmp_path / "a.txt")], out=tmp_path / "text", tokenizer="bytes", val=0)
    return tmp_path / "text"


def objects_of_each_kind(there):
    """What readers of the newest snapshot may ask for."""
    contents = Contents.read(there)
    files = [file.stored_name for file in contents.files()]
    names = [name for name in there.sizes("") if not name.startswith(("shards", "hashes"))]
    return [*names, contents.manifest.shards.name, contents.manifest.hashes.name, files[0], files[-1]]


@pytest.mark.parametrize("way", [mr.push, push_as_old], ids=["new", "old"])
@pytest.mark.parametrize("damage", [other_bytes, fewer_bytes, nothing])
def test_a_push_repairs_what_is_damaged(tmp_path, direct, text, way, damage, monkeypatch):
    monkeypatch.setattr(objects, "ATTEMPTS", 2)
    way(text, direct)
    there = Objects(direct)
    for number in range(len(objects_of_each_kind(there))):
        name = objects_of_each_kind(there)[number]
        damage(there, name)
        if name == "store.json" and damage is nothing:
            mr.push(text, direct)  # there was no store
            continue
        if name.startswith(("store.json", "shards", "hashes")):
            with pytest.raises(mr.StoreError):
                mr.pull(direct, tmp_path / f"none-{number}")
        mr.push(text, direct)
        mr.pull(direct, tmp_path / f"copy-{number}")
        same_files(text, tmp_path / f"copy-{number}")
        assert not there.listed("pushes")


def test_a_push_of_the_same_store_sends_nothing_and_reads_what_was_written_since(tmp_path, direct):
    tiny_records(tmp_path / "store")
    first = mr.push(tmp_path / "store", direct)
    there = Objects(direct)
    before = {name: entry["e_tag"] for name, entry in there.listed("").items()}
    assert mr.push(tmp_path / "store", direct).files == 0
    assert {name: entry["e_tag"] for name, entry in there.listed("").items()} == before
    victim = next(name for name in before if name.startswith("shards/"))
    other_bytes(there, victim)
    report = mr.push(tmp_path / "store", direct)
    assert (report.files, report.sent_files) == (first.files, 1)
    assert {name: entry["e_tag"] for name, entry in there.listed("").items()} == before


def grow(folder):
    with mr.StoreWriter(folder, append=True) as writer:
        writer.append({"x": np.arange(7)})


@pytest.fixture
def store(tmp_path):
    with mr.StoreWriter(tmp_path / "store", columns={"x": mr.Column("int64")}) as writer:
        writer.append({"x": np.arange(5)})
    return tmp_path / "store"


def test_what_0_1_pushed_is_read_pulled_and_appended_to(tmp_path, direct, store):
    push_as_old(store, direct)
    old = mr.open_store(store).fingerprint
    assert mr.open_store(direct).columns["x"][:].tolist() == [0, 1, 2, 3, 4]
    mr.pull(direct, tmp_path / "copy")
    same_files(store, tmp_path / "copy")
    names = set(Objects(direct).sizes("shards"))
    grow(store)
    report = mr.push(store, direct)
    assert report.sent_files == 2
    assert names < set(Objects(direct).sizes("shards"))
    assert mr.open_store(direct).columns["x"][:].tolist() == [0, 1, 2, 3, 4, *range(7)]
    assert mr.open_store(direct, snapshot=old).num_rows == 5
    mr.pull(direct, tmp_path / "both")
    shards = {path.name for path in (store / "shards").iterdir()}
    assert {path.name for path in (tmp_path / "both" / "shards").iterdir()} == shards  # as on a disk, not as at the URL
    for name in ("store.json", *(path.name for path in store.glob("*-*.bin"))):
        assert (tmp_path / "both" / name).read_bytes() == (store / name).read_bytes()


def test_a_pulled_store_is_appended_to_and_pushed_back(tmp_path, direct, store):
    mr.push(store, direct)
    for number in range(3):
        mr.pull(direct, tmp_path / f"copy-{number}")
        grow(tmp_path / f"copy-{number}")
        assert mr.push(tmp_path / f"copy-{number}", direct).sent_files == 2
    assert mr.open_store(direct).num_rows == 5 + 3 * 7
    assert len(mr.open_store(direct, snapshot=mr.open_store(store).fingerprint)) == 1


def test_a_folder_that_was_copied_from_a_url_as_it_is_is_a_store(tmp_path, direct, store):
    """By the server's own tools: names of a push are names of a store too."""
    mr.push(store, direct)
    there = Objects(direct)
    for name in there.sizes(""):
        path = tmp_path / "copy" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(there.read(name, 1 << 20))
    assert mr.open_store(tmp_path / "copy").fingerprint == mr.open_store(store).fingerprint
    grow(tmp_path / "copy")
    assert mr.push(tmp_path / "copy", direct).sent_files == 2
    mr.pull(direct, tmp_path / "again")
    assert sorted(os.listdir(tmp_path / "again" / "shards")) == ["train-00000", "train-00001"]


@pytest.mark.parametrize("compress", [None, "lz4"])
def test_a_push_repairs_a_folder(tmp_path, text, compress):
    out = tmp_path / "out"
    mr.push(text, out, compress=compress)
    assert mr.push(text, out, compress=compress).files == 0
    for victim in sorted((out / "shards").rglob("*"))[-1], out / "tokenizer.json", out / "provenance.json":
        victim.unlink()
        mr.push(text, out, compress=compress)
        victim.chmod(0o644)
        victim.write_bytes(bytes(victim.stat().st_size))
        mr.push(text, out, compress=compress)
        mr.pull(out, tmp_path / f"copy {victim.name}")
        same_files(text, tmp_path / f"copy {victim.name}")


def shards_store(path, shards):
    with mr.StoreWriter(path, columns={"x": mr.Column("int64")}, shard_bytes=80) as writer:
        for number in range(shards):
            writer.append({"x": np.full(10, number)})
    return path


def test_requests_grow_with_the_files_alone(tmp_path, direct, monkeypatch):
    """An append asks for what it sends, however large the store is."""
    requests, tried = [], Objects.tried

    def counted(there, name, *arguments):
        requests.append(name)
        return tried(there, name, *arguments)

    monkeypatch.setattr(Objects, "tried", counted)
    counts = {}
    for shards in (4, 32):
        store, url = shards_store(tmp_path / f"{shards}", shards), f"{direct}-{shards}"
        for step in ("push", "again", "append", "pull"):
            if step == "append":
                grow(store)
            before = len(requests)
            mr.pull(url, tmp_path / f"copy-{shards}") if step == "pull" else mr.push(store, url)
            counts.setdefault(step, []).append(len(requests) - before)
    assert all(more <= 8 * few for few, more in counts.values()), counts
    assert counts["append"][0] == counts["append"][1]


def test_calls_grow_with_the_files_alone(tmp_path):
    counts = {}

    def count(step, work):
        calls = [0]

        def note(frame, event, argument):
            calls[0] += event in ("call", "c_call")

        threading.setprofile(note)
        sys.setprofile(note)
        try:
            work()
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        counts.setdefault(step, []).append(calls[0])

    for shards in (20, 160):
        store = shards_store(tmp_path / f"{shards}", shards)
        count("push", lambda store=store: mr.push(store, f"{store}-lz4", compress="lz4"))
        count("push again", lambda store=store: mr.push(store, f"{store}-lz4", compress="lz4"))
        count("pull", lambda store=store: mr.pull(f"{store}-lz4", f"{store}-copy"))
        count("read", lambda store=store: mr.open_store(f"{store}-lz4").columns["x"][:])
    assert all(few < more <= 10 * few for few, more in counts.values()), counts
