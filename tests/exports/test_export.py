"""Exports read by the libraries they are for: every column comes back as it was written, and folders appear whole."""

import json
import os
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr
from millrace.cli import run
from millrace.exports.chunks import Source
from millrace.store import platform
from millrace.testing import strategies

JPEG = b"\xff\xd8\xff\xe0" + bytes(range(256))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Two axes, texts, a dictionary, images as bytes, an empty and a giant record, two splits, several shards."""
    columns = {
        "hits": mr.Column("float32", (2,)),
        "flag": mr.Column("bool"),
        "kind": mr.Column("dictionary", values=("muon", "pion")),
        "image": mr.Column("uint8", axis="image"),
        "label": mr.Column("int16", per="record"),
        "half": mr.Column("bfloat16", per="record"),
        "box": mr.Column("float64", (2, 2), per="record"),
        "caption": mr.Column("string", per="record"),
    }
    path, rng = tmp_path_factory.mktemp("export") / "events", np.random.default_rng(0)
    with mr.StoreWriter(path, columns=columns, splits=("train", "val"), shard_bytes=2000) as writer:
        for k in range(40):
            count = (0, 3000, 3)[min(k, 2)]
            record = {
                "hits": rng.normal(size=(count, 2)), "flag": rng.random(count) < 0.5,
                "kind": np.array(["muon", "pion"], object)[rng.integers(0, 2, count)],
                "image": np.frombuffer((JPEG, PNG, b"")[k % 3], np.uint8), "label": k, "half": k / 4,
                "box": rng.normal(size=(2, 2)), "caption": ("", "naïve", "日本")[k % 3],
            }  # fmt: skip
            writer.append(record, split="val" if k % 4 == 3 else "train")
    return mr.open_store(path)


def shown(store, name, record):
    """One record's value of a column, as Python objects."""
    column = store.layout.columns[name]
    if column.dtype == "string":
        return store.columns[name][record]
    if column.axis is None:
        found = store.columns[name][record]
        return found if isinstance(found, str) else np.asarray(found).tolist()  # an array would lose a last NUL
    starts, stops = store.record_spans(column.axis)
    found = np.asarray(store.columns[name][int(starts[record]) : int(stops[record])])
    return found.tolist()


def parts_of(events):
    return {"all": events, "train": events.split("train"), "where": events.where("label > 5 and label != 9")}


@pytest.mark.parametrize("part", ["all", "train", "where"])
def test_parquet_has_a_row_for_each_record(events, part, tmp_path):
    store = parts_of(events)[part]
    report = mr.export(store, tmp_path / "out", to="parquet", file_bytes=2_000)
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == report["files"]
    assert len(files) > 1
    table = pa.concat_tables([parquet.read_table(file) for file in files])
    assert table.num_rows == report["records"] == len(store)
    assert table.schema.field("hits").type == pa.list_(pa.list_(pa.float32(), 2))
    assert table.schema.field("label").type == pa.int16()
    for name in store.layout.columns:
        assert table[name].to_pylist() == [shown(store, name, k) for k in range(len(store))]


@pytest.mark.parametrize("part", ["all", "train", "where"])
def test_npy_has_an_array_for_each_column_and_axis(events, part, tmp_path):
    store = parts_of(events)[part]
    report = mr.export(store, tmp_path / "out", to="npy", file_bytes=20_000)
    assert sorted(report["files"]) == sorted(file.name for file in (tmp_path / "out").iterdir())
    described = json.loads((tmp_path / "out" / "columns.json").read_text())
    assert described["records"] == len(store)
    for name, column in described["columns"].items():
        found = np.load(tmp_path / "out" / f"{name}.npy")
        if column["offsets"] is None:
            assert found.tolist() == [shown(store, name, k) for k in range(len(store))]
            continue
        offsets = np.load(tmp_path / "out" / f"offsets_{column['offsets']}.npy")
        assert (offsets[0], offsets[-1], len(offsets)) == (0, len(found), len(store) + 1)
        for k in range(len(store)):
            item = found[offsets[k] : offsets[k + 1]]
            value = bytes(item).decode() if column["dtype"] == "string" else item.tolist()
            value = [column["values"][code] for code in value] if column["dtype"] == "dictionary" else value
            assert value == shown(store, name, k)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves files open
@pytest.mark.parametrize("part", ["all", "where"])
def test_webdataset_has_the_members_of_each_record_together(events, part, tmp_path):
    store = parts_of(events)[part]
    report = mr.export(store, tmp_path / "out", to="webdataset", file_bytes=20_000)
    files = sorted(str(file) for file in (tmp_path / "out").iterdir())
    assert len(files) == len(report["files"]) > 1
    samples = list(webdataset.WebDataset(files, shardshuffle=False, empty_check=False).decode())
    assert [sample["__key__"] for sample in samples] == [f"{k:09d}" for k in range(len(store))]
    for k, sample in enumerate(samples):
        assert sample["json"] == {"label": shown(store, "label", k), "half": shown(store, "half", k)}
        assert sample["caption.txt"] == shown(store, "caption", k)
        assert sample["hits.npy"].tolist() == shown(store, "hits", k)
        assert sample["box.npy"].tolist() == shown(store, "box", k)
        codes = sample["kind.npy"].tolist()
        assert [("muon", "pion")[code] for code in codes] == shown(store, "kind", k)
    with tarfile.open(files[0]) as tar:
        members = {member.name: tar.extractfile(member).read() for member in tar}
    kinds = [shown(store, "image", k) for k in range(2)]
    for k, data in enumerate(map(bytes, kinds)):
        suffix = {JPEG[:1]: "jpg", PNG[:1]: "png"}.get(data[:1])
        assert members[f"{k:09d}.image.{suffix}"] == data if suffix else f"{k:09d}.image.npy" in members


@settings(max_examples=20)
@given(store=strategies.array_stores())
def test_any_store_goes_to_parquet_and_npy(store, memory_folder):
    folder = Path(tempfile.mkdtemp(dir=memory_folder))
    report = mr.export(store, folder / "parquet", to="parquet", file_bytes=200)
    table = pa.concat_tables([parquet.read_table(folder / "parquet" / name) for name in report["files"]])
    for name, column in store.layout.columns.items():
        if column.dtype not in ("float16", "float32", "float64", "bfloat16"):  # npy below compares those, for NaN
            assert table[name].to_pylist() == [shown(store, name, k) for k in range(len(store))]
    mr.export(store, folder / "npy", to="npy")
    for name, column in store.layout.columns.items():
        if column.dtype not in ("string", "dictionary"):
            found, stored = np.load(folder / "npy" / f"{name}.npy"), np.asarray(store.columns[name])
            assert (found.dtype, found.shape, found.tobytes()) == (stored.dtype, stored.shape, stored.tobytes())


@given(store=strategies.array_stores(), num_bytes=st.integers(1, 200))
def test_chunks_are_bounded_and_hold_every_record_once(store, num_bytes):
    found = list(Source(store, None).chunks(num_bytes))
    assert [chunk.first for chunk in found] == np.cumsum([0, *(chunk.count for chunk in found)])[:-1].tolist()
    assert sum(chunk.count for chunk in found) == len(store)
    for chunk in found:
        values = [value.values if isinstance(value, mr.Ragged) else value for value in chunk.columns.values()]
        size = sum(
            column.item_bytes * len(value) for column, value in zip(store.layout.columns.values(), values, strict=True)
        )
        assert size <= num_bytes or chunk.count == 1


def test_times_are_dates_and_a_split_by_time_has_its_rows(tmp_path):
    arrays = {"values": np.arange(12.0), "time": np.arange(12), "name": ["a", "b"], "cuts": [[4], [2]]}
    cuts, meta = mr.Cuts(("train", "val")), {"time": {"unit": "ms", "zone": "UTC"}, "features": ["values"]}
    store = mr.from_arrays(arrays, [0, 7, 12], kind="series", meta=meta, cuts=cuts, per={"name": "record"})
    mr.export(store, tmp_path / "parquet", to="parquet", split="val", columns=["time", "values", "name"])
    table = parquet.read_table(tmp_path / "parquet")
    assert table.schema.field("time").type == pa.list_(pa.timestamp("ms", tz="UTC"))
    assert table["values"].to_pylist() == [[4.0, 5.0, 6.0], [9.0, 10.0, 11.0]]
    assert [time.microsecond for time in table["time"].to_pylist()[0]] == [4000, 5000, 6000]
    mr.export(store, tmp_path / "npy", to="npy", split="val", columns=["time"])
    assert np.load(tmp_path / "npy" / "time.npy").dtype == np.dtype("M8[ms]")
    mr.export(store.where("name == 'b'"), tmp_path / "b", to="npy", split="train")
    assert np.load(tmp_path / "b" / "values.npy").tolist() == [7.0, 8.0]


def test_no_records_are_files_with_columns_all_the_same(events, tmp_path):
    none = events.where("label > 1000")
    for to in ("parquet", "npy", "webdataset"):
        assert mr.export(none, tmp_path / to, to=to)["records"] == 0
    assert parquet.read_table(tmp_path / "parquet").column_names == list(events.layout.columns)
    assert np.load(tmp_path / "npy" / "hits.npy").shape == (0, 2)


def test_a_folder_appears_whole_or_not_at_all(events, tmp_path, monkeypatch):
    def fail(operation, path):
        if operation == "fsync" and "hits" in path:
            raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(platform, "before_write", fail)
    with pytest.raises(mr.StoreWriteFailed, match="No space left"):
        mr.export(events, tmp_path / "out", to="npy")
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    left = tmp_path / "out.partial"  # what a killed export leaves
    monkeypatch.setattr(platform, "before_write", stop_at_rename)
    monkeypatch.setattr("millrace.store.lock.FolderLock.remove_folder", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        mr.export(events, tmp_path / "out", to="npy")
    monkeypatch.undo()
    assert (left / "data" / "hits.npy").exists()
    assert not (tmp_path / "out").exists()
    report = mr.export(events, tmp_path / "out", to="npy", columns=["label"])  # nothing of the other export is left
    assert os.listdir(tmp_path) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == sorted(report["files"]) == ["columns.json", "label.npy"]
    with pytest.raises(mr.ConfigError, match="out exists; export writes a new folder"):
        mr.export(events, tmp_path / "out", to="parquet")


def stop_at_rename(operation, path):
    if operation == "rename" and path.endswith("out"):
        raise KeyboardInterrupt


def test_a_folder_of_the_users_is_not_touched(events, tmp_path):
    mine = tmp_path / "out.partial"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with pytest.raises(mr.ConfigError, match="is not an unfinished store"):
        mr.export(events, tmp_path / "out", to="npy")
    assert (mine / "thesis.txt").read_text() == "mine"


def test_the_command_exports_a_split_and_what_it_was_asked_for(events, tmp_path, capsys):
    options = [
        "--to",
        "parquet",
        "--out",
        str(tmp_path / "out"),
        "--split",
        "val",
        "--where",
        "n_hits > 1",
        "--columns",
        "label,hits",
    ]
    assert run(["export", events.path, *options]) == 0
    assert "10 records in 1 file" in capsys.readouterr().out
    table = parquet.read_table(tmp_path / "out")
    assert table.column_names == ["hits", "label"]
    assert table["label"].to_pylist() == list(range(3, 40, 4))
    assert run(["export", events.path, *options, "--json"]) == 1
    assert "out exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "hdf5"}, "to='hdf5'; expected one of parquet, npy, webdataset"),
        ({"columns": ["hit"]}, r"'hit' is unknown \(did you mean 'hits'\?\)"),
        ({"columns": []}, "asks for nothing"),
        ({"file_bytes": 0}, "file_bytes=0"),
        ({"split": "test"}, "split 'test' is unknown"),
    ],
)
def test_what_cannot_be_exported_is_refused(events, tmp_path, options, message):
    with pytest.raises(mr.ConfigError, match=message):
        mr.export(events, tmp_path / "out", **{"to": "npy", **options})
    assert os.listdir(tmp_path) == []
