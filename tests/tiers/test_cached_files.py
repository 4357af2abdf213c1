"""The files of a cache: what lies there is what was downloaded, whoever changed it since; nobody else may enter."""

import json
import os
import stat
import subprocess
import sys

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run as millrace
from millrace.store import checked_files
from millrace.testing import tiny_text
from millrace.view import packing

ROWS, SHARDS = 1000, 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def store(tmp_path):
    """A compressed store, whose files come into the cache."""
    with mr.StoreWriter(tmp_path / "plain", columns={"x": mr.Column("int64")}, shard_bytes=ROWS * 8) as writer:
        for shard in range(SHARDS):
            writer.append({"x": np.arange(ROWS) + shard * ROWS})
    mr.push(tmp_path / "plain", tmp_path / "store", compress="lz4")
    return tmp_path / "store"


def numbers(store):
    return mr.open_store(store).columns["x"][:].tolist()


def files(cache):
    """The files of column x."""
    return sorted(
        path for path in (cache / "shards").iterdir() if path.name != "locks" and path.stat().st_size == ROWS * 8
    )


@pytest.fixture
def checks(monkeypatch):
    """The bytes of each file that is read again to compare it with its hashes."""
    sizes, check = [], checked_files.check_blocks

    def note(file, num_bytes, hashes):
        sizes.append(num_bytes)
        return check(file, num_bytes, hashes)

    monkeypatch.setattr(checked_files, "check_blocks", note)
    return sizes


def replaced_bytes(path):
    path.write_bytes(bytes(path.stat().st_size))


def another_file(path):
    aside = path.with_name("aside")
    aside.write_bytes(bytes(path.stat().st_size))
    os.utime(aside, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    aside.rename(path)


def a_link(path):
    """With as many bytes as the file has, to a file with as many wrong ones."""
    target = path.parent.parent / "elsewhere"
    target.write_bytes(bytes(path.stat().st_size))
    path.unlink()
    path.symlink_to(target)


def a_folder(path):
    path.unlink()
    path.mkdir()


def a_fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [replaced_bytes, another_file, a_link, a_folder, a_fifo])
@pytest.mark.parametrize("when", ["between processes", "under a reader"])
def test_a_cached_file_that_was_changed_is_fetched_again(store, cache, checks, change, when):
    expected = list(range(ROWS * SHARDS))
    assert numbers(store) == expected
    reader = mr.open_store(store)
    assert reader.columns["x"][0] == 0
    victim = files(cache)[0]
    change(victim)
    if when == "under a reader":
        again = mr.open_store(store)
        again._shards._cache = reader._shards._cache  # which holds the file
        assert again.columns["x"][:].tolist() == expected
    else:
        del reader
        assert numbers(store) == expected
    assert stat.S_ISREG(victim.lstat().st_mode)
    assert checks == [ROWS * 8] * (change in (replaced_bytes, another_file))
    assert numbers(store) == expected
    assert len(checks) <= 1  # once, whoever asks


READER = "import sys, millrace as mr; print(mr.open_store(sys.argv[1]).columns['x'][:].sum())"


def test_a_file_is_compared_once_for_all_processes(store, cache, checks):
    """Also where it was copied, or touched: that is another identity, and the bytes are right."""
    total = sum(numbers(store))
    assert not checks  # they were as they came
    os.utime(files(cache)[0])
    found = subprocess.run([sys.executable, "-c", READER, str(store)], capture_output=True, text=True, timeout=100)
    assert int(found.stdout) == total
    assert sum(numbers(store)) == total
    assert not checks  # the other process noted it
    os.utime(files(cache)[0])
    assert sum(numbers(store)) == total
    assert checks == [ROWS * 8]


def test_tables_of_another_store_are_not_taken(store, cache, tmp_path):
    mr.open_store(store)
    (tables,) = (cache / "stores").iterdir()
    with mr.StoreWriter(tmp_path / "other", columns={"x": mr.Column("int64")}) as writer:
        writer.append({"x": np.arange(5)})
    mr.push(tmp_path / "other", tmp_path / "small", compress="lz4")
    mr.open_store(tmp_path / "small")
    (other,) = set((cache / "stores").iterdir()) - {tables}
    tables.rename(cache / "aside")
    other.rename(tables)
    assert numbers(store) == list(range(ROWS * SHARDS))


def test_folders_of_the_cache_are_private(store, cache, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "new" / "cache"))
    monkeypatch.setattr(packing, "MIN_CACHED", 0)
    mask = os.umask(0)
    try:
        numbers(store)
        mr.Packed(tiny_text(tmp_path / "text"), length=8)
    finally:
        os.umask(mask)
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "new").rglob("*") if path.is_dir()}
    assert modes == {0o700}
    assert list((tmp_path / "new" / "cache").glob("packing-*"))
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700


def test_verify_reads_the_cache_whatever_was_noted(store, cache, capsys):
    """Also a file that changed without a trace, as a bad disk changes it."""
    numbers(store)
    assert millrace(["verify", "--cache"]) == 0
    assert capsys.readouterr().out.startswith(f"ok: {cache}: 3 files of 1 store, ")
    victim = files(cache)[1]
    replaced_bytes(victim)
    notes = checked_files.CheckedFiles(cache / "checked")
    notes.note(victim.name, victim.lstat())
    assert sum(numbers(store)) != sum(range(ROWS * SHARDS))  # what a note says is believed
    assert millrace(["verify", "--cache", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (damage,) = found["damage"]
    assert damage["path"].startswith(f"{victim} (shards/train-0000")
    assert numbers(store) == list(range(ROWS * SHARDS))
    assert millrace(["verify", "--cache", "--cache-dir", str(cache)]) == 0
    for arguments in (["verify"], ["verify", str(store), "--cache"], ["verify", "--cache", "--cache-dir", str(store)]):
        assert millrace(arguments) == 1
        assert capsys.readouterr().err.startswith("error: ")


def test_a_download_is_on_the_disk_before_it_has_its_name(store, cache, monkeypatch):
    """Else a file might be there without its bytes after a power failure, as one that was checked."""
    synced, sync, replace = set(), os.fsync, os.replace
    early = []

    def note_sync(fd):
        sync(fd)
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))

    def note_rename(source, target):
        if os.path.dirname(target) == str(cache / "shards"):
            early.append(str(source) not in synced)
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(os, "replace", note_rename)
    numbers(store)
    assert early == [False] * SHARDS
