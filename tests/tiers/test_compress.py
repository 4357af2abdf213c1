"""Compressed stores: the same batches and cursors as plain ones, any bytes by the block table, and hostile files refused."""

import contextlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millrace as mr
from millrace.cli import run as millrace
from millrace.errors import MillraceError
from millrace.store import compressed as files
from millrace.store.codec import Codec
from millrace.store.compressed import CompressedFile, compressed, encode_table
from millrace.store.remote import objects
from millrace.store.remote.inflate import Inflater
from millrace.store.remote.objects import WrongBytes
from millrace.store.verify import verify_store
from millrace.testing import tiny_records, tiny_series, tiny_text

from .test_remote import VIEWS, blocks, same_batches, shards_store
from .test_transfer import large, same_files

CODECS = ["zstd:3", "lz4"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "FIRST_WAIT_S", 0.001)


def packed(data, codec, block_bytes):
    return b"".join(
        compressed(lambda length, offset: data[offset : offset + length], len(data), Codec.parse(codec), block_bytes)
    )


@contextlib.contextmanager
def opened(data, num_bytes, codec="zstd:3"):
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        yield CompressedFile(file.fileno(), num_bytes, Codec.parse(codec), "file")


def inflated(data, num_bytes, codec="zstd:3", step=1 << 20):
    inflater = Inflater(Codec.parse(codec), num_bytes)
    found = b"".join(
        bytes(part)
        for first in range(0, len(data), step)
        for part in inflater.add(memoryview(data)[first : first + step])
    )
    inflater.check_end()
    return found


def bodies():
    """Bytes that compress well, hardly, and not at all."""
    runs = st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 60)), max_size=12)
    return runs.map(lambda parts: b"".join(part * count for part, count in parts)) | st.binary(max_size=400)


@pytest.mark.parametrize("codec", CODECS)
@given(data=bodies(), block_bytes=st.integers(1, 500), step=st.integers(1, 300), choices=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_of_a_compressed_file_are_those_of_the_plain_one(codec, data, block_bytes, step, choices):
    stored = packed(data, codec, block_bytes)
    with opened(stored, len(data), codec) as reading:
        for _ in range(4):
            first = choices.draw(st.integers(0, len(data)))
            length = choices.draw(st.integers(0, len(data)))
            assert reading.read(length, first) == data[first : first + length]
    assert inflated(stored, len(data), codec, step) == data


@pytest.mark.parametrize("codec", CODECS)
@given(data=bodies(), block_bytes=st.integers(1, 500), choices=st.data())
@settings(max_examples=60, deadline=None)
def test_a_download_goes_on_in_the_middle_of_a_file(codec, data, block_bytes, choices):
    """It breaks off anywhere, and the plain bytes that were checked by then end anywhere before."""
    stored = packed(data, codec, block_bytes)
    inflater, got = Inflater(Codec.parse(codec), len(data)), b""
    for _ in range(3):
        done = choices.draw(st.integers(0, len(got)))
        got, first = got[:done], inflater.resume(done)
        stop = choices.draw(st.integers(first, len(stored)))
        got += b"".join(bytes(part) for part in inflater.add(memoryview(stored)[first:stop]))
        assert got == data[: len(got)]
    got += b"".join(bytes(part) for part in inflater.add(memoryview(stored)[inflater.resume(len(got)) :]))
    inflater.check_end()
    assert got == data


@pytest.mark.parametrize("kind", VIEWS)
@pytest.mark.parametrize("codec", CODECS)
def test_batches_are_those_of_the_plain_store_on_disk_and_elsewhere(tmp_path, s3, kind, codec):
    make, view = VIEWS[kind]
    local = make(tmp_path / "store")
    for target in (str(tmp_path / "small"), s3):
        mr.push(tmp_path / "store", target, compress=codec)
    assert not [path for path in (tmp_path / "small" / "shards").rglob("*") if path.suffix in (".f32", ".i64", ".u16")]
    for place, name in ((tmp_path / "small", "a"), (s3, "b")):
        other = mr.open_store(place, cache_dir=tmp_path / name)
        assert other.fingerprint == local.fingerprint
        assert view(other).spec() == view(local).spec()
        feeds = [mr.Feed(view(store), batch=7, seed=3, epochs=2, device="numpy") for store in (local, other)]
        with feeds[0], feeds[1]:
            assert same_batches(*feeds)


def test_checkpoints_continue_on_any_form_of_a_store(tmp_path):
    local = shards_store(tmp_path / "store")
    for codec in CODECS:
        mr.push(tmp_path / "store", str(tmp_path / codec), compress=codec)
    stores = [local, *(mr.open_store(tmp_path / codec) for codec in CODECS)]
    stores.append(mr.open_store(tmp_path / "lz4", cache_dir=tmp_path / "few", cache_size=5 * 16_000))
    with blocks(local) as feed:
        expected = [batch["x"].copy() for batch in feed]
    state, got = None, []
    while True:
        feed = blocks(stores[0])
        stores.append(stores.pop(0))
        with feed:
            if state is not None:
                feed.load_state_dict(json.loads(json.dumps(state)))
            batch = next(iter(feed), None)
            if batch is None:
                break
            got.append(batch["x"].copy())
            state = feed.state_dict()
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("make", [tiny_records, tiny_series, tiny_text])
def test_a_pull_or_stage_of_a_compressed_store_is_the_plain_one(tmp_path, make, codec):
    make(tmp_path / "store")
    mr.push(tmp_path / "store", str(tmp_path / "small"), compress=codec)
    mr.pull(tmp_path / "small", tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")
    mr.push(tmp_path / "small", str(tmp_path / "again"))  # as it is
    same_files(tmp_path / "small", tmp_path / "again")
    assert mr.push(tmp_path / "store", str(tmp_path / "small"), compress=codec).files == 0
    with pytest.raises(mr.ConfigError, match="compressed already"):
        mr.push(tmp_path / "small", str(tmp_path / "other"), compress="zstd:5")
    with pytest.raises(mr.ConfigError, match=r"compressed by .*not plain"):
        mr.push(tmp_path / "store", str(tmp_path / "small"))


def test_large_files_go_in_parts_and_come_back_after_faults(tmp_path, s3, proxy):
    with mr.StoreWriter(tmp_path / "store", kind="records", columns={"x": mr.Column("uint8")}) as writer:
        writer.append({"x": np.random.default_rng(1).integers(0, 256, 10 << 20, dtype=np.uint8)})
    mr.push(tmp_path / "store", s3, compress="zstd:1")
    gets = []

    def breaks_off(method, path):
        gets.append(path) if "x.u8" in path and method == "GET" else None
        return ("short", "flip", "reset")[len(gets) - 1] if "x.u8" in path and len(gets) <= 3 else None

    proxy.fault = breaks_off
    mr.pull(s3, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")
    assert len(gets) >= 4


def test_an_interrupted_push_sends_only_the_rest(tmp_path, s3, proxy):
    tiny_text(tmp_path / "store")
    puts = []

    def fails_after_three(method, path):
        puts.append(path) if method == "PUT" and "/shards/" in path else None
        return 403 if len(puts) > 3 and path == puts[-1] else None

    proxy.fault = fails_after_three
    with pytest.raises(MillraceError, match="403"):
        mr.push(tmp_path / "store", s3, compress="lz4", workers=1)
    proxy.fault = lambda method, path: None
    report = mr.push(tmp_path / "store", s3, compress="lz4")
    assert report.files - report.sent_files == 3
    mr.pull(s3, tmp_path / "copy")
    same_files(tmp_path / "store", tmp_path / "copy")


def test_files_of_an_interrupted_push_with_another_level_are_sent_again(tmp_path, s3, proxy):
    tiny_text(tmp_path / "store")
    proxy.fault = lambda method, path: 403 if method == "PUT" and path.endswith("store.json") else None
    with pytest.raises(MillraceError, match="403"):
        mr.push(tmp_path / "store", s3, compress="zstd:1")
    proxy.fault = lambda method, path: None
    report = mr.push(tmp_path / "store", s3, compress="zstd:2")
    assert report.sent_files == report.files > 0


def test_kill_9_while_a_compressed_store_comes_into_the_cache(tmp_path, s3, proxy):
    large(tmp_path / "store")
    mr.push(tmp_path / "store", s3, compress="lz4")
    program = "import sys, millrace; millrace.open_store(sys.argv[1]).columns['x'][:5]"
    child = subprocess.Popen([sys.executable, "-c", program, s3])

    def killed(method, path):
        if "x.u8" in path:
            child.kill()
            child.wait()

    proxy.fault = killed
    assert child.wait(60) == -9
    proxy.fault = lambda method, path: None
    np.testing.assert_array_equal(mr.open_store(s3).columns["x"][:], mr.open_store(tmp_path / "store").columns["x"][:])


def test_after_an_append_only_new_shards_are_sent(tmp_path, s3):
    with mr.StoreWriter(tmp_path / "a", kind="records", columns={"x": mr.Column("int64")}) as writer:
        writer.append({"x": np.arange(5)})
    for target in (s3, str(tmp_path / "b")):
        mr.push(tmp_path / "a", target, compress="zstd")
    with pytest.raises(mr.ConfigError, match="cannot be appended to"):
        mr.StoreWriter(tmp_path / "b", append=True).__enter__()
    with mr.StoreWriter(tmp_path / "a", append=True) as writer:
        writer.append({"x": np.arange(7)})
    report = mr.push(tmp_path / "a", s3, compress="zstd")
    assert report.files - report.sent_files == 2
    assert mr.open_store(s3).fingerprint == mr.open_store(tmp_path / "a").fingerprint
    mr.pull(s3, tmp_path / "copy")
    assert verify_store(tmp_path / "copy").damage == []
    with pytest.raises(mr.ConfigError, match="an earlier snapshot"):
        mr.push(tmp_path / "a", str(tmp_path / "b"), compress="zstd")


def damaged(path, change):
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    path.write_bytes(bytes(change(data)))


def flip(place):
    def change(data):
        data[place] ^= 1
        return data

    return change


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "change",
    [
        flip(20),
        flip(-1),
        flip(-9),
        flip(-13),
        flip(-20),
        lambda data: data[:-1],
        lambda data: data[:10],
        lambda data: data + b"x",
    ],
    ids=["block", "mark", "count", "length", "size", "cut", "short", "long"],
)
def test_damage_is_located_and_never_served(tmp_path, codec, change):
    tiny_series(tmp_path / "store")
    mr.push(tmp_path / "store", str(tmp_path / "small"), compress=codec)
    assert verify_store(tmp_path / "small").damage == []
    victim = next((tmp_path / "small").rglob("values.f32.*"))
    damaged(victim, change)
    found = verify_store(tmp_path / "small").damage
    assert {item.path for item in found} == {str(victim)}
    with pytest.raises(mr.StoreCorrupt, match=r"values\.f32"):
        mr.pull(tmp_path / "small", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
    store = mr.open_store(tmp_path / "small")
    with pytest.raises(mr.StoreCorrupt, match=r"values\.f32"):
        store.columns["values"][:]
    with pytest.raises(mr.StoreCorrupt, match=r"values\.f32"):
        mr.push(tmp_path / "small", str(tmp_path / "again"))


def test_verify_names_the_records_of_a_damaged_block(tmp_path):
    shards_store(tmp_path / "store")
    mr.push(tmp_path / "store", str(tmp_path / "small"), compress="zstd:3")
    damaged(next((tmp_path / "small").rglob("x.i64.zst")), flip(40))
    (item,) = verify_store(tmp_path / "small").damage
    assert (item.block, item.bytes, item.records) == (0, (0, 16_000), (0, 1))


def test_a_missing_file_is_found_at_open_with_check(tmp_path):
    tiny_series(tmp_path / "store")
    mr.push(tmp_path / "store", str(tmp_path / "small"), compress="lz4")
    next((tmp_path / "small").rglob("values.f32.lz4")).unlink()
    with pytest.raises(mr.StoreCorrupt, match=r"values\.f32\.lz4.*missing"):
        mr.open_store(tmp_path / "small", check=True)
    assert [item.path for item in verify_store(tmp_path / "small").damage if item.path.endswith("values.f32.lz4")]


ZEROS = bytes(1 << 20)


@pytest.mark.parametrize("codec", CODECS)
def test_a_bomb_gets_no_more_memory_than_the_manifest_says(codec, monkeypatch):
    """A block that holds more than its share, in a file whose table is right: what is made stays below the claim."""
    made, maker = [], Codec.decompressor

    class Noting:
        def __init__(self, codec):
            self._real = maker(codec)

        def decompress(self, data, most):
            plain = self._real.decompress(data, most)
            made.append(len(plain))
            return plain

        def __getattr__(self, name):
            return getattr(self._real, name)

    frame = Codec.parse(codec).compress(ZEROS * 64)
    if codec == "zstd:3":
        assert len(frame) < 10_000
    data = frame[: 1 << 18]  # lz4 hardly reaches 255 times
    stored = data + encode_table([len(data)], 1 << 22)
    monkeypatch.setattr(Codec, "decompressor", lambda self: Noting(self))
    with pytest.raises(WrongBytes):
        inflated(stored, 1 << 22, codec)
    assert sum(made) <= (1 << 22) + (1 << 20)
    made.clear()
    with opened(stored, 1 << 22, codec) as reading, pytest.raises(mr.StoreCorrupt, match="does not hold"):
        reading.read(1, 0)
    assert sum(made) <= (1 << 22) + 1


def table(sizes, block_bytes, blocks=None, kind=0x184D2A5E, length=None, mark=b"MRBLOCKS"):
    blocks = len(sizes) if blocks is None else blocks
    body = np.array(sizes, "<u4").tobytes() + struct.pack("<II8s", block_bytes, blocks, mark)
    return struct.pack("<II", kind, len(body) if length is None else length) + body


@pytest.mark.parametrize(
    ("tail", "problem"),
    [
        (table([10, 10], 100, blocks=0xFFFFFFFF), "the manifest says"),
        (table([10, 10], 1), "the manifest says"),
        (table([10, 10, 10], 100), "the manifest says"),
        (table([10, 10], 0), "does not end with a block table"),
        (table([10, 10], 0xFFFFFFFF), "does not end with a block table"),
        (table([10, 10], 100, mark=b"notmarks"), "does not end with a block table"),
        (table([10, 11], 100), "the file has"),
        (table([19, 0], 100), "a block of 0"),
        (table([0xFFFFFFFF, 10], 100), "4294967295 bytes"),
        (table([10, 10], 100, kind=1), "does not begin as one"),
        (table([10, 10], 100, length=7), "does not begin as one"),
        (b"", "no block table|does not end"),
    ],
    ids=[
        "bomb of blocks",
        "too little",
        "too many",
        "no length",
        "giant blocks",
        "mark",
        "sum",
        "empty",
        "giant block",
        "kind",
        "length",
        "none",
    ],
)
def test_hostile_tables_are_refused_before_anything_is_read(tail, problem, monkeypatch):
    """For a plain file of 200 bytes, in two blocks of 10 bytes each; nothing larger than the file is ever asked for."""
    lengths, pread = [], files.platform.pread
    monkeypatch.setattr(
        files.platform, "pread", lambda fd, length, offset: lengths.append(length) or pread(fd, length, offset)
    )
    with pytest.raises(mr.StoreCorrupt, match=problem), opened(bytes(20) + tail, 200):
        pass
    assert max(lengths) <= 20 + len(tail)


def test_a_frame_with_a_giant_window_is_refused():
    """Magic, a descriptor without a size, a window of 2 GiB, one empty last block."""
    frame = struct.pack("<IBB", 0xFD2FB528, 0, 21 << 3) + b"\x01\x00\x00"
    with pytest.raises(WrongBytes, match="not zstd"):
        inflated(frame + encode_table([len(frame)], 100), 100)


def test_commands_show_codec_ratio_and_sizes(tmp_path, capsys):
    store = shards_store(tmp_path / "store")
    command = ["stage", str(tmp_path / "store"), "--to", str(tmp_path / "small"), "--compress", "zstd:3"]
    assert millrace(command) == 0
    assert "(zstd:3, " in capsys.readouterr().out
    assert millrace(["push", str(tmp_path / "store"), str(tmp_path / "other"), "--compress", "lz4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["codec"], report["sent_bytes"]) == ("lz4:0", store.num_bytes)
    lying = sum(path.stat().st_size for path in (tmp_path / "other" / "shards").rglob("*.lz4"))
    assert report["stored_bytes"] == lying < store.num_bytes
    assert millrace(["info", str(tmp_path / "other"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["codec"], facts["stored_bytes"], facts["bytes"]) == ("lz4:0", lying, store.num_bytes)
    assert millrace(["info", str(tmp_path / "other")]) == 0
    assert "compressed by lz4:0 to" in capsys.readouterr().out
    assert millrace(["verify", str(tmp_path / "small")]) == 0
    assert millrace([*command[:-1], "zstd:99"]) == 1
    assert "expected zstd:1 to zstd:22" in capsys.readouterr().err
    assert millrace([*command[:-1], "brotli"]) == 1
    assert "expected zstd:3" in capsys.readouterr().err


def test_a_missing_library_is_one_line_that_names_the_extra(tmp_path, monkeypatch, capsys):
    tiny_series(tmp_path / "store")
    mr.push(tmp_path / "store", str(tmp_path / "small"), compress="lz4")
    monkeypatch.setitem(sys.modules, "lz4.frame", None)
    for command in (
        ["info", str(tmp_path / "small")],
        ["push", str(tmp_path / "store"), str(tmp_path / "x"), "--compress", "lz4"],
    ):
        assert millrace(command) == 1
        assert "pip install '.[compress]'" in capsys.readouterr().err
    assert not Path(tmp_path / "x").exists()


@pytest.mark.parametrize("codec", CODECS)
def test_other_readers_unpack_the_files(codec):
    data = bytes(range(256)) * 4000
    stored = pyarrow.BufferReader(packed(data, codec, 100_000))
    assert pyarrow.CompressedInputStream(stored, codec.split(":")[0]).read() == data
