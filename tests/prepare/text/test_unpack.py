"""Parquet that is compressed as a whole is unpacked beside the parts, within the cap, and leaves nothing behind."""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import millrace as mr
from millrace.prepare.text import part
from millrace.prepare.text.read import streams, unpack
from millrace.testing import tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1}
TEXTS = [f"text {k} of {k * k}" for k in range(100)]


@pytest.fixture
def data():
    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": TEXTS}), file, row_group_size=17)
    return file.getvalue()


@pytest.fixture
def source(tmp_path, data):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(data))
    return str(tmp_path / "a.parquet.gz")


@pytest.mark.parametrize("workers", [1, 2])
def test_several_files_give_the_rows_of_all(tmp_path, source, workers):
    for k in range(3):
        file = io.BytesIO()
        parquet.write_table(pyarrow.table({"text": [f"{text} again {k}" for text in TEXTS]}), file, row_group_size=9)
        (tmp_path / f"b{k}.parquet.gz").write_bytes(gzip.compress(file.getvalue()))
    paths = [str(tmp_path / "b0.parquet.gz"), source, str(tmp_path / "b2.parquet.gz")]
    mr.prepare_text(paths, tmp_path / "out", **{**OPTIONS, "workers": workers})
    store = mr.open_store(tmp_path / "out")
    assert store.columns["source"][:].tolist() == [os.path.basename(path) for path in paths for _ in TEXTS]
    assert store.columns["offset"][:].tolist() == [*range(100)] * 3
    assert store.decode(store.columns["tokens"][:]).startswith("text 0 of 0 again 0<|endoftext|>text 1")
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out"]
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_a_run_that_broke_off_continues_with_what_is_unpacked(tmp_path, source, monkeypatch):
    mr.prepare_text(source, tmp_path / "straight", **OPTIONS)

    def broken(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(part._Maker, "run", broken)
        with pytest.raises(KeyboardInterrupt):
            mr.prepare_text(source, tmp_path / "out", **OPTIONS)
    (kept,) = (tmp_path / "out.partial" / "unpacked").iterdir()
    then = kept.stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(part._Maker, "run", broken)
        with pytest.raises(KeyboardInterrupt):
            mr.prepare_text(source, tmp_path / "out", **OPTIONS)
    assert kept.stat().st_mtime_ns == then
    mr.prepare_text(source, tmp_path / "out", **OPTIONS)
    assert tree_digest(tmp_path / "out") == tree_digest(tmp_path / "straight")
    assert not (tmp_path / "out.partial").exists()


def test_what_is_cut_short_or_no_parquet_is_refused_by_name(tmp_path, data):
    for name, packed, said in (
        ("cut", gzip.compress(data)[:-20], r"cut\.parquet\.gz', near compressed byte \d+: it ends in the middle"),
        ("none", gzip.compress(b"no parquet"), r"none\.parquet\.gz' is not readable Parquet"),
        ("plain", data, r"plain\.parquet\.gz', near compressed byte \d+: it is damaged"),
    ):
        path = tmp_path / f"{name}.parquet.gz"
        path.write_bytes(packed)
        with pytest.raises(mr.SourceError, match=said) as caught:
            mr.prepare_text(str(path), tmp_path / "out", **OPTIONS)
        assert caught.value.source == str(path)
        assert not (tmp_path / "out.partial").exists()


def test_a_bomb_is_stopped_by_the_cap_before_it_fills_the_disk(tmp_path, monkeypatch):
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(bytes(50 << 20)))
    monkeypatch.setattr(streams, "FREE_EXPANSION", 1 << 20)
    written = []
    copy = unpack.shutil.copyfileobj

    def copied(packed, file, *sizes):
        try:
            copy(packed, file, *sizes)
        finally:
            written.append(file.tell())

    monkeypatch.setattr(unpack.shutil, "copyfileobj", copied)
    with pytest.raises(mr.SourceError, match=r"it expands to more than [\d,]+ bytes; .*max_ratio="):
        mr.prepare_text(str(tmp_path / "a.parquet.gz"), tmp_path / "out", max_ratio=10, **OPTIONS)
    assert written[0] <= 1 << 20
    assert not (tmp_path / "out.partial").exists()


def test_a_disk_that_is_too_small_is_told_before(tmp_path, source, monkeypatch):
    from millrace.prepare import run as room

    monkeypatch.setattr(room.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 100}))
    with pytest.raises(mr.StoreWriteFailed, match=r"needs at least [0-9,]+ bytes, 100 are free"):
        mr.prepare_text(source, tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out.partial").exists()


def test_memory_is_that_of_a_block(tmp_path):
    """Random bytes, which do not compress: what is unpacked is never in memory as a whole."""
    import tracemalloc

    from millrace.prepare.text.options import ReadOptions
    from millrace.prepare.text.read.sources import find_sources

    noise = np.random.default_rng(1).integers(0, 256, 32 << 20, np.uint8).tobytes()
    (tmp_path / "a.parquet.gz").write_bytes(gzip.compress(noise, 0))
    (source,) = find_sources([str(tmp_path / "a.parquet.gz")], None)[0]
    task = unpack.UnpackTask(source, str(tmp_path / "a"), ReadOptions())
    del noise
    tracemalloc.start()
    try:
        assert unpack.unpack(task) == 32 << 20
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert Path(task.path).stat().st_size == 32 << 20
