"""Input that is damaged, hostile or odd: refused by name before or while it is read, never followed out of its file."""

import gzip
import io
import json
import os
import struct
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import millrace as mr
from millrace.prepare import inflate
from millrace.prepare.records.formats import images, jsonl


class Kind(NamedTuple):
    """A member that is no file."""

    code: bytes


def write_tar(path, members, mode="w"):
    with tarfile.open(path, mode) as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            if not isinstance(data, Kind):
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            else:
                info.type = data.code
                info.linkname = "/etc/passwd"
                archive.addfile(info)
    return path


GOOD = [("a.txt", b"one"), ("a.cls", b"1"), ("b.txt", b"two"), ("b.cls", b"2")]


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([("/etc/c.txt", b"x"), ("/etc/c.cls", b"1")], r"'/etc/c.txt' has a path that leads out"),
        ([("../c.txt", b"x"), ("../c.cls", b"1")], r"'../c.txt' has a path that leads out"),
        ([("c.txt", Kind(tarfile.SYMTYPE)), ("c.cls", b"1")], r"'c.txt' is a link"),
        ([("c.txt", Kind(tarfile.LNKTYPE)), ("c.cls", b"1")], r"'c.txt' is a hard link"),
        ([("c.txt", Kind(tarfile.CHRTYPE)), ("c.cls", b"1")], r"'c.txt' is a device"),
        ([("c.txt", Kind(tarfile.FIFOTYPE)), ("c.cls", b"1")], r"'c.txt' is a pipe"),
        ([("a.txt", b"x"), ("a.cls", b"1")], r"the key 'a' comes again, apart from its first members"),
        ([("c.txt", b"x"), ("c.txt", b"y"), ("c.cls", b"1")], r"two members are called 'c.txt'"),
        ([("c.txt", b"x")], r"it has no member .cls"),
        ([("c.txt", b"x"), ("c.cls", b"many")], r"\.cls holds b'many'; expected a whole number"),
        ([("c.txt", b"\xff\xfe"), ("c.cls", b"1")], r"column 'txt' is not valid UTF-8"),
    ],
)
def test_hostile_members_are_refused_by_name_or_skipped_and_listed(prepare, plain, tmp_path, members, said):
    path = write_tar(tmp_path / "a.tar", [*GOOD, *members])
    with pytest.raises(mr.SourceError, match=rf"a\.tar', sample '.*{said}.*; fix it, or go on with on_error=\"skip\""):
        prepare(path)
    store, report = prepare(path, on_error="skip")
    assert [(record["txt"], record["cls"]) for record in plain(store)] == [("one", 1), ("two", 2)]
    assert report.dropped == {"unreadable": 1}
    (line,) = (tmp_path / store.path / "quarantine.jsonl").read_text().splitlines()
    assert set(json.loads(line)) == {"source", "place", "reason"}


def test_pickles_in_a_tar_are_refused_and_can_be_left_out(prepare, plain, tmp_path):
    path = write_tar(tmp_path / "a.tar", [("a.pkl", b"cos\nsystem\n(S'x'\ntR."), ("a.cls", b"1")])
    with pytest.raises(mr.ConfigError, match=r"members \.pkl are pickles, which may run code and are never loaded"):
        prepare(path)
    assert plain(prepare(path, columns=["cls"])[0]) == [{"cls": 1}]


@pytest.mark.parametrize("cut", [100, 512, 700, 1024, 2048, 3000])
def test_a_tar_that_was_cut_short_is_an_error_not_an_end(prepare, tmp_path, cut):
    whole = write_tar(tmp_path / "whole.tar", GOOD).read_bytes()
    (tmp_path / "cut.tar").write_bytes(whole[:cut])
    with pytest.raises(mr.SourceError, match=r"cut\.tar', byte \d+: it is no whole tar file"):
        prepare(tmp_path / "cut.tar")
    assert os.listdir(tmp_path).count("store0.partial") == 0


def test_a_tar_member_that_claims_more_than_there_is(prepare, tmp_path):
    info = tarfile.TarInfo("a.txt")
    info.size = 1 << 60
    (tmp_path / "a.tar").write_bytes(info.tobuf() + bytes(1024))
    with pytest.raises(mr.SourceError, match=r"a member claims 1,152,921,504,606,846,976 bytes"):
        prepare(tmp_path / "a.tar")


@pytest.mark.parametrize("kind", ["tar.gz", "jsonl.gz", "npz", "parquet", "h5"])
def test_bombs_stop_at_the_limit(prepare, tmp_path, monkeypatch, kind):
    import h5py

    monkeypatch.setattr(inflate, "FREE_EXPANSION", 100_000)
    monkeypatch.setattr("millrace.prepare.records.formats.npy.FREE_EXPANSION", 100_000)
    monkeypatch.setattr("millrace.prepare.records.formats.parquet.FREE_GROUP", 100_000)
    path = tmp_path / f"bomb.{kind}"
    if kind == "tar.gz":
        write_tar(path, [("a.txt", bytes(2_000_000)), ("a.cls", b"1")], "w:gz")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(b'{"x": [1], "t": "%s"}\n' % (b"a" * 2_000_000)))
    elif kind == "npz":
        np.savez_compressed(path, x=np.zeros(300_000))
    elif kind == "parquet":
        pq.write_table(pa.table({"x": np.zeros(300_000)}), path, use_dictionary=False, compression="zstd")
    else:
        with h5py.File(path, "w") as file:
            file.create_dataset("x", (1 << 40,), "f8", chunks=(1 << 20,), fillvalue=1.0)
    with pytest.raises(mr.SourceError, match=r"bomb.*raise max_ratio="):
        prepare(path, max_ratio=2)


def test_an_image_that_claims_a_billion_pixels_is_not_decoded(prepare, tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_PIXELS", 1000)
    (tmp_path / "in" / "c").mkdir(parents=True)
    Image.new("RGB", (40, 40)).save(tmp_path / "in" / "c" / "a.png")
    with pytest.raises(mr.SourceError, match=r"a\.png'.*it has 40 x 40 pixels, more than max_pixels=1,000"):
        prepare(tmp_path / "in", decode=8)
    with pytest.raises(mr.SourceError, match=r"a\.png'.*it has 40 x 40 pixels; at most 1,000 are decoded"):
        prepare(tmp_path / "in", check=True)
    assert prepare(tmp_path / "in")[0].num_records == 1


def test_corrupt_images_are_named_counted_and_listed(prepare, plain, tmp_path):
    folder = tmp_path / "in" / "cat"
    folder.mkdir(parents=True)
    for k in range(6):
        Image.fromarray(np.full((20, 20, 3), 40 * k, np.uint8)).save(folder / f"{k}.png")
    (folder / "1.png").write_bytes(b"")
    (folder / "3.png").write_bytes(b"<html>no image</html>")
    whole = (folder / "4.png").read_bytes()
    (folder / "4.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(mr.SourceError, match=r"cat/1\.png': it is empty; fix it, or go on with on_error=\"skip\""):
        prepare(folder.parent)
    store, report = prepare(folder.parent, on_error="skip")
    assert [record["key"] for record in plain(store)] == [f"cat/{k}.png" for k in (0, 2, 4, 5)]
    assert report.dropped == {"unreadable": 2}
    checked, report = prepare(folder.parent, on_error="skip", check=True)
    assert [record["key"] for record in plain(checked)] == [f"cat/{k}.png" for k in (0, 2, 5)]
    lines = [json.loads(line) for line in (Path(checked.path) / "quarantine.jsonl").read_text().splitlines()]
    assert [os.path.basename(line["source"]) for line in lines] == ["1.png", "3.png", "4.png"]
    decoded, _ = prepare(folder.parent, on_error="skip", decode=4)
    assert decoded.columns["image"][:, 0, 0, 0].tolist() == [0, 80, 200]


def test_hdf5_never_leaves_its_file(prepare, tmp_path):
    import h5py

    (tmp_path / "secret.bin").write_bytes(bytes(80))
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.arange(10)
    for name in ("link", "storage", "virtual"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(10)
            if name == "link":
                file["y"] = h5py.ExternalLink("other.h5", "/x")
            elif name == "storage":
                file.create_dataset("y", (10,), "f8", external=[(str(tmp_path / "secret.bin"), 0, 80)])
            else:
                layout = h5py.VirtualLayout((10,), "i8")
                layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", (10,))
                file.create_virtual_dataset("y", layout)
        with pytest.raises(
            mr.SourceError, match=r"'y' (is a link to another file|lies in other files|is made of other)"
        ):
            prepare(tmp_path / f"{name}.h5")


def test_hdf5_groups_that_contain_each_other_end(prepare, plain, tmp_path):
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["g/x"] = np.arange(3)
        file["g/again"] = file["g"]
    assert plain(prepare(tmp_path / "a.h5")[0]) == [{"g.x": 0}, {"g.x": 1}, {"g.x": 2}]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"x": [1, NaN]}', "JSON is malformed"),
        (b'{"x": [1, 2', "Input data was truncated"),
        (b"[1, 2]", "changed from object to array"),
        (b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "maximum recursion depth"),
        (b'{"x": [1], "x": [2]}', "specified twice"),
        (b'{"x": "text"}', "changed from array to string"),
        (b'{"x": null}', "column 'x' is null or missing"),
        (b'{"x": [1, null]}', None),
        (b"{}", "column 'x' is null or missing"),
        (b'{"x": [1], "new": 5}', "unexpected field"),
    ],
)
def test_odd_json_is_named_by_its_byte_or_skipped(prepare, plain, tmp_path, monkeypatch, line, said):
    monkeypatch.setattr(jsonl, "HEAD_BYTES", 200)  # types come from the first lines, which are good
    good = b'{"x": [1.5, 2]}\n'
    (tmp_path / "a.jsonl").write_bytes(good * 40 + line + b"\n" + good * 3)
    if said is None:  # a null among floats is NaN
        assert np.isnan(plain(prepare(tmp_path / "a.jsonl")[0])[40]["x"][1])
        return
    with pytest.raises(mr.SourceError, match=rf"a\.jsonl', byte {40 * len(good)}: .*{said}"):
        prepare(tmp_path / "a.jsonl", part_bytes=300)
    store, report = prepare(tmp_path / "a.jsonl", on_error="skip", part_bytes=300)
    assert (store.num_records, report.dropped) == (43, {"unreadable": 1})


def test_odd_json_among_the_first_lines_is_named_or_skipped(prepare, plain, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"x": [1]}\n{"x": "text"}\n{"x": [2.5]}\n{"x": [')
    with pytest.raises(mr.SourceError, match=r"a\.jsonl', byte 11: the line cannot be read: .*incompatible types"):
        prepare(tmp_path / "a.jsonl")
    store, report = prepare(tmp_path / "a.jsonl", on_error="skip")
    assert (plain(store), report.dropped) == ([{"x": [1.0]}, {"x": [2.5]}], {"unreadable": 2})


@pytest.mark.parametrize("kind", ["parquet", "npz", "arrow"])
def test_another_type_in_file_17_of_20_is_named_before_any_work(prepare, tmp_path, kind):
    (tmp_path / "in").mkdir()
    for k in range(20):
        values, path = np.arange(4, dtype=np.float32 if k == 17 else np.int32), tmp_path / "in" / f"{k:02d}.{kind}"
        if kind == "npz":
            np.savez(path, x=values)
        elif kind == "parquet":
            pq.write_table(pa.table({"x": values}), path)
        else:
            pyarrow.feather.write_feather(pa.table({"x": values}), path)
    with pytest.raises(mr.SourceError, match=r"'x' is float32 .*17\..*int32 .*00\..*cast="):
        prepare(tmp_path / "in")
    assert not (tmp_path / "store0.partial").exists()
    store, _ = prepare(tmp_path / "in", cast={"x": "float64"})
    assert store.columns["x"].dtype == np.float64


def test_objects_in_numpy_files_are_never_loaded(prepare, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([{}], object))
    with pytest.raises(mr.SourceError, match=r"array 'x' holds objects, which are pickles and are never loaded"):
        prepare(tmp_path / "a.npz")


@pytest.mark.parametrize("kind", ["parquet", "arrow", "h5", "root", "tree.root", "npz", "tar.gz"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_an_error_of_ours_or_other_values(tmp_path_factory, kind, data):
    """Whatever bytes change, there is a store that verifies or an error of ours, never another one."""
    folder = tmp_path_factory.mktemp("damage")
    path = folder / f"a.{kind}"
    _write_small(path, kind)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del raw[data.draw(st.integers(1, len(raw))) :]
    path.write_bytes(raw)
    try:
        report = mr.prepare_records(path, folder / "out", workers=1)
    except mr.MillraceError:
        return
    mr.open_store(report.path, check=True)


@pytest.mark.parametrize("kind", ["parquet", "root", "tree.root", "arrow"])
def test_damaged_values_name_the_file_before_any_work(prepare, tmp_path, kind):
    """The first records are read to see what lists share: what a library raises then is an error of ours too."""
    path = tmp_path / f"a.{kind}"
    _write_small(path, kind)
    raw = bytearray(path.read_bytes())
    if kind == "arrow":
        at = raw.index(b"ab")  # the texts: no longer UTF-8
        raw[at : at + 2] = b"\xff\xff"
    elif kind == "parquet":
        raw[30:40] = b"\xff" * 10  # in the first page
    else:
        del raw[2 * len(raw) // 3 :]
    path.write_bytes(raw)
    with pytest.raises(mr.SourceError, match=rf"a\.{kind}' is not readable .*; copy it again"):
        prepare(path)


def test_a_damaged_page_is_named_with_its_row_group_and_column(prepare, tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"x": np.arange(600.0), "y": np.arange(600.0), "hits": [[k] for k in range(600)]})
    pq.write_table(table, path, row_group_size=200, use_dictionary=False, compression="none", write_page_checksum=True)
    whole, groups = path.read_bytes(), pq.ParquetFile(path).metadata
    for group, column, name in ((2, 1, "y"), (0, 2, "hits"), (1, 2, "hits")):
        raw = bytearray(whole)
        raw[groups.row_group(group).column(column).data_page_offset + 900] ^= 0xFF
        path.write_bytes(raw)
        with pytest.raises(
            mr.SourceError, match=rf"a\.parquet' is not readable Parquet in row group {group}, column '{name}'"
        ):
            prepare(path)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "h5", "root", "tree.root", "npz", "tar.gz", "jsonl", "png"])
def test_every_format_killed_and_run_again_is_the_same_store(tmp_path, expect_same_after_kills, kind):
    (tmp_path / "in").mkdir()
    for k in range(2):
        path = tmp_path / "in" / f"{k}.{kind}"
        if kind == "png":
            Image.new("RGB", (4 + k, 4)).save(path)
        elif kind == "jsonl":
            path.write_text('{"x": [1, 2], "s": "a"}\n{"x": [], "s": "b"}\n')
        else:
            _write_small(path, kind)
    sizes = {"part_bytes": 4000, "shard_bytes": 4000} if kind == "tree.root" else {}
    expect_same_after_kills(tmp_path / "in", **sizes)


def test_a_file_of_hostile_members_only_is_refused_by_name(prepare, tmp_path):
    path = write_tar(tmp_path / "a.tar", [("../c.txt", b"x")])
    with pytest.raises(mr.SourceError, match=r"a\.tar', sample '../c': member '../c.txt' has a path that leads out"):
        prepare(path)


def _write_small(path, kind):
    import h5py
    import uproot

    values = np.arange(30, dtype=np.float32)
    if kind == "parquet":
        pq.write_table(pa.table({"x": [[1.0, 2.0], []], "s": ["a", "b"]}), path, write_page_checksum=True)
    elif kind == "arrow":
        pyarrow.feather.write_feather(
            pa.table({"x": [[1.0, 2.0], []], "s": ["a", "b"]}), path, compression="uncompressed"
        )
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file["x"], file["hits"], file["hits_counts"] = np.arange(3), values, [10, 0, 20]
    elif kind == "root":
        with uproot.recreate(path) as file:
            file["t"] = {"x": values}
    elif kind == "tree.root":
        with uproot.recreate(path) as file:
            file.mktree("t", {"x": "float32"})
            file["t"].extend({"x": np.random.default_rng(0).normal(size=3000)})
    elif kind == "npz":
        np.savez(path, x=values)
    else:
        write_tar(path, GOOD, "w:gz")


def test_folders_with_pipes_loops_and_odd_names(prepare, plain, tmp_path):
    folder = tmp_path / "in" / "c\u00e9 \n"
    folder.mkdir(parents=True)
    odd = os.fsencode(str(folder)) + b"/\xff\xfe.png"
    Image.new("RGB", (4, 4)).save(folder / "a.png")
    os.link(folder / "a.png", folder / ("n" * 200 + ".png"))
    with open(odd, "wb") as file:
        file.write((folder / "a.png").read_bytes())
    os.symlink(tmp_path / "in", folder / "loop")
    store, _ = prepare(tmp_path / "in")
    assert [record["key"].rpartition("/")[2] for record in plain(store)] == ["a.png", "\\xff\\xfe.png"]
    assert store.meta["classes"] == ["c\u00e9 \n"]
    os.mkfifo(folder / "pipe.png")
    with pytest.raises(mr.SourceError, match="is not a plain file"):
        prepare(tmp_path / "in")


def test_nothing_to_read_is_said(prepare, tmp_path):
    (tmp_path / "in").mkdir()
    with pytest.raises(mr.ConfigError, match="no files in"):
        prepare(tmp_path / "in")
    (tmp_path / "in" / "a.jsonl").write_bytes(b"\n\n")
    with pytest.raises(mr.SourceError, match="no record is in"):
        prepare(tmp_path / "in")
    (tmp_path / "in" / "b.npz").write_bytes(b"")
    with pytest.raises(mr.ConfigError, match=r"several formats \(1 of .*say which with format="):
        prepare(tmp_path / "in")
    with pytest.raises(mr.SourceError, match="the iterable is empty"):
        prepare(iter([]))


def test_a_zip_with_the_size_of_another_is_refused(prepare, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(4))
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", 60000))
    with pytest.raises(mr.SourceError, match=r"b\.npz': it is no readable"):
        prepare(tmp_path / "b.npz")


def test_parquet_that_describes_a_column_in_two_ways_is_refused(prepare, tmp_path):
    """Of the two copies of its metadata one is damaged."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    features = {"info": {"features": {"image": {"_type": "Image"}}}}
    schema = pa.schema([("image", kind)], {"huggingface": json.dumps(features)})
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": pa.array([{"bytes": b"x", "path": "p"}], kind)}, schema=schema), path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"_type": "Image"', b'"_type": "Imbge"'))
    assert path.read_bytes() != data
    with pytest.raises(mr.SourceError, match=r"a.parquet', row 0: column 'image' is not here"):
        prepare(path)
