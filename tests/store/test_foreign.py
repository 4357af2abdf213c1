"""What every foreign layout promises: mapped in place, read-only, pickled as a path, known by its ends."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millrace.errors import ConfigError, StoreCorrupt, StoreError, StoreNotFound
from millrace.store import foreign_files, platform
from millrace.store.foreign import open_foreign
from millrace.store.store import Store
from millrace.testing import expect_no_leaks

ROWS = 100_000  # both ends of 64 KiB and something between them


def make_bin(folder: Path) -> Path:
    (folder / "x.bin").write_bytes(np.arange(ROWS).astype("<u2").tobytes())
    return folder / "x.bin"


def make_llmc(folder: Path) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, ROWS
    (folder / "x.bin").write_bytes(header.tobytes() + np.arange(ROWS).astype("<u2").tobytes())
    return folder / "x.bin"


def make_bin_folder(folder: Path) -> Path:
    for split in ("train", "val"):
        (folder / f"{split}.bin").write_bytes(np.arange(ROWS).astype("<u2").tobytes())
    return folder


def make_split_folders(folder: Path) -> Path:
    for split in ("train", "val"):
        (folder / split).mkdir()
        (folder / split / "0.bin").write_bytes(np.arange(ROWS, dtype="<u4").tobytes())
    (folder / "dataset_metadata.json").write_text("{}")
    return folder


def make_megatron(folder: Path) -> Path:
    index = struct.pack("<9sQBQQ2i2q2q", b"MMIDIDX\x00\x00", 1, 4, 2, 2, 7, ROWS - 7, 0, 28, 0, 2)
    (folder / "x.idx").write_bytes(index)
    (folder / "x.bin").write_bytes(np.arange(ROWS, dtype="<i4").tobytes())
    return folder / "x.bin"


def make_series(folder: Path) -> Path:
    metadata = {"features": ["a", "b"], "entities": {"one": [0, 7], "two": [7, ROWS]}}
    (folder / "metadata.json").write_text(json.dumps(metadata))
    (folder / "all_features.mmap").write_bytes(np.arange(2 * ROWS, dtype="<f4").tobytes())
    return folder


def make_npy(folder: Path) -> Path:
    np.save(folder / "x.npy", np.arange(2.0 * ROWS).reshape(ROWS, 2))
    return folder / "x.npy"


def make_npy_folder(folder: Path) -> Path:
    np.save(folder / "x.npy", np.arange(ROWS))
    np.save(folder / "y.npy", np.arange(ROWS))
    return folder


MAKERS = [
    make_bin,
    make_llmc,
    make_bin_folder,
    make_split_folders,
    make_megatron,
    make_series,
    make_npy,
    make_npy_folder,
]
every_layout = pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__.removeprefix("make_"))
Make = Callable[[Path], Path]


def open_at(path: Path, dtype: Any = None) -> Store:
    return open_foreign(str(path), dtype)


def data_of(store: Store) -> Any:
    return next(iter(store.columns.values()))


def is_mapped(array: Any) -> bool:
    while isinstance(array, np.ndarray):
        if array.flags.owndata:
            return False
        array = array.base
    return not isinstance(array, bytes)


@every_layout
def test_layout_is_said_in_a_phrase_and_the_path_kept(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path)
    store = open_at(path)
    assert store.path == str(path)
    assert 3 < len(store.meta["layout"]) < 100
    json.dumps(dict(store.meta), allow_nan=False)
    assert store.num_rows == store.offsets[-1] == len(data_of(store))


@every_layout
def test_data_are_mapped_read_only(tmp_path: Path, make: Make) -> None:
    for _, piece in data_of(open_at(make(tmp_path))).pieces():
        assert is_mapped(piece)
        assert not piece.flags.writeable


@every_layout
def test_no_descriptor_stays_open(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path)
    with contextlib.nullcontext() if platform.MAPS_HOLD_DESCRIPTORS else expect_no_leaks(grace_s=0):
        store = open_at(path)
    assert store.num_rows >= ROWS


@every_layout
def test_store_pickles_as_its_path(tmp_path: Path, make: Make) -> None:
    store = open_at(make(tmp_path))
    data = pickle.dumps(store)
    again = pickle.loads(data)  # noqa: S301
    assert len(data) < 500
    assert (again.fingerprint, dict(again.meta)) == (store.fingerprint, dict(store.meta))
    assert np.array_equal(data_of(again), data_of(store))
    train = pickle.loads(pickle.dumps(store.split("train")))  # noqa: S301
    assert np.array_equal(data_of(train), data_of(store.split("train")))


def test_pickle_keeps_the_given_dtype_and_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bin(tmp_path)
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(open_foreign("x.bin", np.uint32))
    monkeypatch.chdir("/")
    assert pickle.loads(data).num_rows == ROWS // 2  # noqa: S301


@every_layout
def test_fingerprint_follows_both_ends_and_the_size_of_the_data(tmp_path: Path, make: Make) -> None:
    path = make(tmp_path)
    seen = [open_at(path).fingerprint, open_at(path).fingerprint]
    largest = max((file for file in tmp_path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = largest.read_bytes()
    for at in (2048, len(data) - 1):
        largest.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        seen.append(open_at(path).fingerprint)
    assert seen[0] == seen[1]
    assert len(set(seen)) == 3


def test_fingerprint_reads_64_kib_of_each_end(tmp_path: Path) -> None:
    path = make_bin(tmp_path)
    data = path.read_bytes()
    seen = {open_at(path).fingerprint, open_at(path, "int16").fingerprint}
    for changed in (0, (64 << 10) - 1, len(data) - (64 << 10), len(data) - 1):
        path.write_bytes(data[:changed] + bytes([data[changed] ^ 1]) + data[changed + 1 :])
        seen.add(open_at(path).fingerprint)
    path.write_bytes(data[:-2])
    seen.add(open_at(path).fingerprint)
    assert len(seen) == 7


@every_layout
def test_fingerprint_does_not_know_the_path_but_the_splits_differ(tmp_path: Path, make: Make) -> None:
    stores = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        stores.append(open_at(make(tmp_path / name)))
    assert stores[0].fingerprint == stores[1].fingerprint
    assert len({stores[0].split(split).fingerprint for split in stores[0].splits}) == len(stores[0].splits)


@every_layout
def test_layouts_refuse_a_dtype_that_is_not_theirs(tmp_path: Path, make: Make) -> None:
    with pytest.raises(ConfigError, match="dtype='float16' given"):
        open_at(make(tmp_path), "float16")


def test_layouts_have_different_fingerprints(tmp_path: Path) -> None:
    seen = set()
    for make in MAKERS:
        folder = tmp_path / make.__name__
        folder.mkdir()
        seen.add(open_at(make(folder)).fingerprint)
    assert len(seen) == len(MAKERS)


@pytest.mark.parametrize("name", ["notes.odd", "x.bin.gz", "empty/"])
def test_unknown_layout_is_not_found(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"abcd")
    with pytest.raises(StoreNotFound, match="no layout that millrace knows"):
        open_at(path)


def test_absent_path_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match="does not exist"):
        open_at(tmp_path / "x.bin")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this platform has no named pipes")
def test_pipe_is_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "train.bin")
    with pytest.raises(StoreCorrupt, match="not a plain file"):
        open_at(tmp_path)


def test_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.bin").mkdir()
    with pytest.raises(StoreError, match=r"train\.bin"):
        open_at(tmp_path)


def test_file_that_cannot_be_opened_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bin(tmp_path)

    def refuse(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(foreign_files.os, "open", refuse)
    with pytest.raises(StoreError, match="fix the permission"):
        open_at(path)


def test_file_that_cannot_be_mapped_is_a_store_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_bin(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(platform, "map_file", refuse)
    with pytest.raises(StoreError, match="cannot be mapped"):
        open_at(path)
