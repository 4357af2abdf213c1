"""Files beside the shards: whatever stands in their place is one clear error for readers, and damage for verify."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import millrace as mr
from millrace.cli import run
from millrace.store import gc
from millrace.store.verify import verify_store


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("beside")
    (folder / "in.txt").write_text("one line of text\nand another\n")
    mr.prepare_text([str(folder / "in.txt")], out=folder / "store", tokenizer="char", val=0, workers=1)
    return folder / "store"


@pytest.fixture
def store(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "store")
    return tmp_path / "store"


def deleted(path: Path) -> None:
    path.unlink()


def garbled(path: Path) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:-9] + b"}")


def linked(path: Path) -> None:
    path.rename(path.parent.parent / "real")
    path.symlink_to(path.parent.parent / "real")


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def huge(path: Path) -> None:
    os.chmod(path, 0o644)
    os.truncate(path, 1 << 40)


HOW = [deleted, garbled, linked, endless, fifo, folder, huge]


def said_of(path: Path, action: Callable[[], object], kind: type[Exception] = mr.StoreCorrupt) -> str:
    """The one line with which an action is refused; it names the file, and takes little memory."""
    tracemalloc.start()
    try:
        with pytest.raises(kind) as caught:
            action()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def damaged(store: Path) -> list[str]:
    return [damage.path for damage in verify_store(store).damage]


def test_an_untouched_store_is_whole(store):
    assert damaged(store) == []
    assert mr.open_store(store).decode(mr.open_store(store).columns["tokens"][:8]) == "one line"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_tokenizer(store, how, capsys):
    path = store / "tokenizer.json"
    how(path)
    assert damaged(store) == [str(path)]
    said_of(path, lambda: mr.open_store(store).tokenizer)
    assert run(["verify", str(store)]) == 1
    assert f"damaged: {path}: " in capsys.readouterr().out
    assert run(["head", str(store)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    (store.parent / "more.txt").write_text("one more line\n")
    more = [str(store.parent / "more.txt")]
    said_of(path, lambda: mr.prepare_text(more, out=store, append=True, workers=1))


def test_tokenizer_of_a_store_that_was_replaced_is_read_from_its_own_folder(store, original):
    reader = mr.open_store(store)
    store.rename(store.parent / "aside")
    shutil.copytree(original, store)
    (store / "tokenizer.json").unlink()
    assert reader.decode(reader.columns["tokens"][:3]) == "one"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [garbled, linked, endless, fifo, folder, huge])
def test_provenance(store, how):
    path = store / "provenance.json"
    how(path)
    assert damaged(store) == [str(path)]
    if how is not garbled:
        said_of(path, lambda: mr.prepare_text([__file__], out=store, append=True, workers=1))
        said_of(path, lambda: add_nothing(store))


def add_nothing(store: Path) -> None:
    """An append that reaches the provenance of the store it adds to."""
    from millrace.store.publish import Partial
    from millrace.store.reader import read_base

    partial, base = Partial(store, append=True), read_base(store)
    partial.acquire()
    try:
        partial.begin({}, base.manifest.layout, base, resume=False)
        partial.publish({**_fields(base.manifest)}, base, {})
    finally:
        partial.close(remove=True)


def _fields(manifest) -> dict[str, object]:
    columns = manifest.layout.columns
    return {"kind": manifest.kind, "columns": columns, "splits": manifest.splits, "tokenizer": manifest.tokenizer}


def test_a_store_without_provenance_is_whole(store):
    (store / "provenance.json").unlink()
    assert damaged(store) == []


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", [deleted, linked, endless, fifo, folder, "short"])
def test_quarantine(store, how):
    """Its size is known from the run that wrote it."""
    path, runs = store / "quarantine.jsonl", store / "provenance.json"
    path.write_bytes(b'{"reason": "unreadable"}\n')
    lines = [json.loads(line) | {"quarantine_bytes": 25} for line in runs.read_bytes().splitlines()]
    runs.unlink()
    runs.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert damaged(store) == []
    if how == "short":
        os.truncate(path, 20)
    else:
        how(path)
    assert damaged(store) == [str(path)]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", HOW)
def test_snapshots(store, how):
    (path,) = (store / "snapshots").iterdir()
    how(path)
    assert damaged(store) == [str(path)]
    if how is not deleted:
        said_of(path, lambda: mr.open_store(store, snapshot=path.stem))
        said_of(path, lambda: gc.collect(store))


@pytest.mark.parametrize("name", ["snapshots", "shards"])
def test_a_folder_behind_a_link_is_refused_and_nothing_in_it_is_deleted(store, name):
    real = store.parent / "real"
    (store / name).rename(real)
    (store / name).symlink_to(real)
    spare = real / ("train-00099" if name == "shards" else f"{'0' * 32}.json")
    spare.write_text("mine")
    assert str(store / name) in damaged(store)
    said_of(store / name, lambda: gc.collect(store, keep=1))
    assert spare.read_text() == "mine"
