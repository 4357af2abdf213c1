"""Columns, axes, splits, appends and restarts of records; the formats have tests of their own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from itertools import pairwise

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millrace as mr
from millrace.testing import Fault, count_steps, run_forked, tree_digest


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def lines(tmp_path):
    rows = [
        {"x": [1.5] * (k % 4), "y": [k] * (k % 4), "z": [7] * (k % 3), "label": k, "who": f"p{k % 5}"}
        for k in range(40)
    ]
    return write_lines(tmp_path / "in" / "a.jsonl", rows)


def test_columns_are_chosen_renamed_and_cast(prepare, plain, lines):
    store, _ = prepare(
        lines, columns=["label", "x"], rename={"label": "target"}, cast={"x": "float16", "target": np.uint8}
    )
    assert {name: column.dtype for name, column in store.layout.columns.items()} == {"target": "uint8", "x": "float16"}
    assert plain(store)[3] == {"x": [1.5] * 3, "target": 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"columns": ["lable"]}, r"columns=.*no column is called 'lable'; check the name"),
        ({"rename": {"nope": "a"}}, r"rename=.*no column is called 'nope'"),
        ({"rename": {"x": "y"}}, "two columns one name"),
        ({"rename": {"x": "a/b"}}, "column name 'a/b' is not usable"),
        ({"cast": {"x": "floaty"}}, r'"x": "floaty"}; expected one of bool, float16'),
        ({"cast": {"who": "int64"}}, "this column is text"),
        ({"axis": {"a": ["label"]}}, "'label' has one item per record, and no axis"),
        ({"axis": "owm"}, "expected NAME=COLUMNS, or own"),
        ({"key": "nope"}, "'nope' is no column"),
        ({"key": "x"}, "several values in a record"),
        ({"split": "list:no-such-file"}, "cannot be read"),
        ({"split": "keys:a"}, "needs a column that holds them; name it with key="),
        ({"split": "keys:p9", "key": "who"}, "no record has the key 'p9'"),
        ({"split": "keys:p1;p1", "key": "who"}, "'p1' is named for val and for test"),
        ({"split": "folder"}, "the first folder of .* is none; expected one of train"),
        ({"split": "hash:0.0001"}, "split 'val' would be empty"),
        ({"format": "josnl"}, "did you mean 'jsonl'"),
        ({"formats": "jsonl"}, "unknown options"),
        ({"on_error": "replace"}, "expected stop or skip"),
        ({"decode": 0}, "decode=0; expected a positive number"),
        ({"tree": 5}, "wrong type"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_are_refused_with_a_remedy(prepare, lines, options, said):
    with pytest.raises(mr.ConfigError, match=said):
        prepare(lines, **options)


def test_a_value_that_does_not_fit_its_type_is_named_by_its_record(prepare, lines):
    with pytest.raises(mr.SourceError, match=r"b\.jsonl', byte 1810: column 'label' is int8.*got 128"):
        prepare(write_lines(lines.with_name("b.jsonl"), [{"label": k} for k in range(200)]), cast={"label": "int8"})
    with pytest.raises(mr.SourceError, match=r"byte 0: column 'x' has 0 items; .* expects 2 in every record"):
        prepare(lines, cast={"x": "float32[2]"})


def test_axes_are_guessed_named_or_own(prepare, tmp_path, lines):
    def axes(**options):
        return [prepare(lines, **options)[0].layout.columns[name].axis for name in "xyz"]

    assert axes() == ["x", "x", "z"]
    assert axes(axis="own") == ["x", "y", "z"]
    assert axes(axis={"hits": ["x", "y"]}) == ["hits", "hits", "z"]
    with pytest.raises(
        mr.SourceError, match=r"'x' has 3 items and 'z' has 0, but they share the axis 'all'; .*axis=\"own\""
    ):
        prepare(lines, axis={"all": ["x", "z"]})
    late = write_lines(tmp_path / "late.jsonl", [{"x": [1], "y": [1]}] * 300 + [{"x": [1], "y": []}])
    from millrace.prepare.records.formats import jsonl

    jsonl.HEAD_BYTES, before = 100, jsonl.HEAD_BYTES
    try:
        with pytest.raises(mr.SourceError, match=r"late\.jsonl', byte \d+: 'x' has 1 items and 'y' has 0"):
            prepare(late)
        assert prepare(late, axis="own")[0].num_records == 301
    finally:
        jsonl.HEAD_BYTES = before


def test_splits_by_key_list_hash_tail_and_folder(prepare, plain, tmp_path, lines):
    store, report = prepare(lines, split="keys:p1,p2;p3", key="who")
    assert {record["who"] for record in plain(store.split("val"))} == {"p1", "p2"}
    assert report.records == {"train": 16, "val": 16, "test": 8}
    (tmp_path / "val.txt").write_text("3\n5\n")
    store, _ = prepare(lines, split=f"list:{tmp_path / 'val.txt'}", key="label")
    assert [record["label"] for record in plain(store.split("val"))] == [3, 5]
    store, _ = prepare(lines, split="hash:0.4", key="who")
    names = [{record["who"] for record in plain(store.split(split))} for split in ("train", "val")]
    assert not names[0] & names[1]  # all records of one key are in one split
    store, _ = prepare(lines, split="tail:0.1,0.2")
    assert [record["label"] for record in plain(store.split("val"))] == [28, 29, 30, 31]
    assert [record["label"] for record in plain(store.split("test"))] == list(range(32, 40))
    by_values = [plain(prepare(lines, split="hash:0.3", part_bytes=size)[0].split("val")) for size in (400, 1 << 20)]
    assert by_values[0] == by_values[1]
    for split in ("train", "valid", "test"):
        write_lines(tmp_path / "splits" / split / "a.jsonl", [{"x": [1], "s": split}] * 2)
    assert prepare(tmp_path / "splits")[1].notes[-1].endswith('not taken as splits; if they are, give split="folder"')
    store, report = prepare(tmp_path / "splits", split="folder")
    assert not any("splits" in note for note in report.notes)
    assert report.records == {"train": 2, "val": 2, "test": 2}
    assert {record["s"] for record in plain(store.split("val"))} == {"valid"}


def test_an_append_keeps_what_the_store_is(prepare, plain, tmp_path, lines):
    store, _ = prepare(lines, cast={"x": "float32"}, split="hash:0.2")
    out = store.path
    more = write_lines(tmp_path / "more.jsonl", [{"x": [2], "y": [3], "z": [], "label": 99, "who": "q"}] * 5)
    with pytest.raises(
        mr.ConfigError, match=r"column 'z' of .* is int64 per row, and float64 per row in what is added"
    ):
        mr.prepare_records(more, out, append=True, workers=1)  # empty lists show no type
    report = mr.prepare_records(more, out, append=True, workers=1, cast={"z": "int64"})
    whole = mr.open_store(out, check=True)
    assert (whole.num_records, sum(report.records.values())) == (45, 5)
    assert whole.layout.columns["x"].dtype == "float32"
    with pytest.raises(mr.ConfigError, match=r"was made with val=0.2; an append cannot have val=0.5"):
        mr.prepare_records(more, out, append=True, split="hash:0.5")
    other = write_lines(tmp_path / "other.jsonl", [{"x": [2], "label": "text"}])
    with pytest.raises(mr.ConfigError, match=r"column .* of .* is .*, and .* in what is added"):
        mr.prepare_records(other, out, append=True)


@pytest.mark.parametrize("ending", ["png", "npy"])
def test_of_files_that_are_records_an_append_adds_the_new_ones(plain, tmp_path, ending):
    """The plan knows their folder alone; a run notes each of them."""

    def write(folder, name, number):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        path = tmp_path / folder / f"{name}.{ending}"
        if ending == "png":
            path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes([number]) * 9)
        else:
            np.save(path, np.full(3, number))
        return path

    def append(*paths, **options):
        return mr.prepare_records([str(path) for path in paths], tmp_path / "out", append=True, workers=1, **options)

    old = [write("in/cat", "a", 1), write("in/cat", "b", 2), write("in/dog", "a", 3)]
    made = mr.prepare_records(str(tmp_path / "in"), tmp_path / "out", workers=1)
    for paths in ([tmp_path / "in"], old, [os.path.relpath(tmp_path / "in")], [f"{tmp_path}/in/*/*"]):
        assert append(*paths).fingerprint == made.fingerprint
    shutil.copytree(tmp_path / "in", tmp_path / "copy")  # with their times
    assert append(tmp_path / "copy").fingerprint == made.fingerprint
    fresh = write("in/dog", "b", 4)
    report = append(tmp_path / "in")  # and no cat: labels stay
    assert sum(report.records.values()) == 1
    store = mr.open_store(tmp_path / "out", check=True)
    assert store.num_records == 4
    if ending == "png":
        assert [(record["key"], record["label"]) for record in plain(store)[2:]] == [("dog/a.png", 1), ("dog/b.png", 1)]
    write("in/cat", "a", 5)
    os.utime(tmp_path / "in" / "cat" / f"a.{ending}", ns=(1, 1))
    for paths in ([tmp_path / "in"], [old[0]]):
        with pytest.raises(mr.SourceError, match=rf"a\.{ending}': the store was made from this path"):
            append(*paths)
    assert append(fresh, tmp_path / "in", same_source="skip").fingerprint == store.fingerprint
    line, *lines = (tmp_path / "out" / "provenance.json").read_text().splitlines(keepends=True)
    older = {name: value for name, value in json.loads(line).items() if name not in ("folder", "members")}
    (tmp_path / "out" / "provenance.json").write_text("".join([json.dumps(older) + "\n", *lines]))
    with pytest.raises(mr.SourceError, match="the store was made from this path"):
        append(write("in/cat", "c", 6))  # nobody knows which files of this folder it has


def test_records_from_python_are_added_once(tmp_path):
    records = [{"x": [k], "label": k} for k in range(5)]
    made = mr.prepare_records(records, tmp_path / "out", workers=1)
    assert mr.prepare_records(records[:3], tmp_path / "out", append=True, workers=1).is_new
    again = mr.prepare_records(list(records), tmp_path / "out", append=True, workers=1)
    assert (again.is_new, mr.open_store(tmp_path / "out").num_records) == (False, 8)
    assert mr.open_store(tmp_path / "out").manifest.parent == made.fingerprint
    assert mr.prepare_records(records, tmp_path / "out", append=True, workers=1, same_source="keep").is_new
    assert mr.open_store(tmp_path / "out").num_records == 13


def test_a_filter_keeps_the_records_it_says(prepare, plain, lines, tmp_path, monkeypatch):
    (tmp_path / "my_filter.py").write_text(
        "def few(record):\n    return len(record['x']) < 2 and record['who'] != 'p0'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    store, report = prepare(lines, filter="my_filter:few")
    assert all(len(record["x"]) < 2 and record["who"] != "p0" for record in plain(store))
    assert report.dropped == {"filtered": 40 - store.num_records}


def given():
    rng = np.random.default_rng(2)
    for k in range(60):
        yield {"hits": rng.normal(size=(k % 6, 2)), "label": k, "key": f"é{k}"}


def test_an_iterable_killed_at_any_step_is_the_same_store(tmp_path):
    out = tmp_path / "out"

    def run():
        return mr.prepare_records(given(), out, workers=1, part_bytes=500, shard_bytes=900, split="hash:0.2")

    with count_steps() as steps:
        report = run()
    whole = tree_digest(out)
    assert (run().is_new, len(report.shards)) == (False, 2)
    for at in range(1, len(steps) + 1, 4):
        for name in ("out", "out.partial"):
            subprocess.run(["rm", "-rf", str(tmp_path / name)], check=True)
        assert run_forked(run, fault=Fault(at, "kill")) == -signal.SIGKILL
        assert run().fingerprint == report.fingerprint
        assert tree_digest(out) == whole
    with pytest.raises(mr.ConfigError, match="is finished, but with other sources"):
        mr.prepare_records(list(given())[:9], out, workers=1, part_bytes=500, shard_bytes=900, split="hash:0.2")


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([1, 2], "record 0: it is int; expected a dict"),
        ([{"a": 1}, {"b": 1}], "record 1: it has no 'a'"),
        ([{"a": [1]}, {"a": [[1, 2]]}], r"record 1: column 'a': it is int64 of shape \(1, 2\); the first record has"),
        ([{"a": "x"}, {"a": 5}], "record 1: column 'a': it is int; expected a text"),
        ([{"a": object()}], "column 'a' holds object"),
        ([{"a": ["x", "y"]}], "column 'a' holds list, which cannot be stored"),
    ],
)
def test_records_from_python_that_do_not_fit_are_named(prepare, records, said):
    with pytest.raises(mr.MillraceError, match=said):
        prepare(iter(records))


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path):
    (tmp_path / "a.h5").write_bytes(b"")
    code = "import sys; sys.modules['h5py'] = None; from millrace.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "prepare", "records", str(tmp_path / "a.h5"), "--out", str(tmp_path / "out")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (
        1,
        "error: HDF5 needs h5py; pip install '.[hdf5]'",
    )


def test_the_command_prepares_and_others_show_it(tmp_path, lines, capsys):
    from millrace.cli import run

    out = str(tmp_path / "out")
    options = ["--columns", "x,label,who", "--rename", "who=key", "--cast", "x=float32", "--axis", "own", "--json"]
    assert run(["prepare", "records", str(lines), "--out", out, "--workers", "1", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["format"], report["is_new"]) == ({"train": 40}, "jsonl", True)
    assert run(["prepare", "records", str(lines), "--out", out, "--workers", "1", *options[:-1]]) == 0
    assert capsys.readouterr().out.startswith("already complete")
    assert run(["info", out]) == 0
    assert "40 records" in capsys.readouterr().out
    assert run(["head", out, "-n", "1"]) == 0
    assert "key  'p0'" in capsys.readouterr().out
    assert run(["verify", out]) == 0
    assert run(["prepare", "records", str(lines), "--out", str(tmp_path / "b"), "--cast", "x"]) == 2
    assert "NAME=VALUE" in capsys.readouterr().err
    assert run(["prepare", "records", "--help"]) == 0
    assert "Example: millrace prepare records" in capsys.readouterr().out
    assert os.path.isdir(out)


@pytest.mark.parametrize("kind", ["parquet", "h5", "npz", "iterable"])
def test_giant_and_empty_records_keep_every_row_in_bounded_memory(prepare, tmp_path, kind):
    """A record of 3 million rows between empty ones: memory is a few times that record."""
    values = np.arange(3_000_005, dtype=np.float32)
    offsets = np.array([0, 0, 3_000_000, 3_000_000, 3_000_005, 3_000_005])
    runs = [values[a:b] for a, b in pairwise(offsets)]
    path = tmp_path / f"a.{kind}"
    if kind == "parquet":
        lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(values))
        pq.write_table(pa.table({"hits": lists}), path, row_group_size=2)
    elif kind == "h5":
        with h5py.File(path, "w") as file:
            file["hits"], file["hits_counts"] = values, np.diff(offsets)
    elif kind == "npz":
        path = tmp_path / "in"
        path.mkdir()
        for k, run in enumerate(runs):
            np.savez(path / f"{k}.npz", hits=run)
    tracemalloc.start()
    try:
        store, _ = prepare(({"hits": run} for run in runs) if kind == "iterable" else path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * values.nbytes
    assert np.array_equal(store.columns["hits"], values)
    assert store.offsets.tolist() == offsets.tolist()
    with mr.Feed(mr.Records(store), batch=2, epochs=1, device="numpy", order=mr.Sequential(5)) as feed:
        batches = list(feed)
    assert [batch["hits"].lengths[batch.valid].tolist() for batch in batches] == [[0, 3_000_000], [0, 5], [0]]
    assert np.array_equal(np.concatenate([batch["hits"].values for batch in batches]), values)
    with pytest.warns(UserWarning, match="cuts 1 of 5 records"):
        view = mr.Records(store, pad=8)
    with mr.Feed(view, batch=5, epochs=1, device="numpy", order=mr.Sequential(5)) as feed:
        (batch,) = feed
    assert batch["lengths"].tolist() == [0, 8, 0, 5, 0]
    assert batch["hits"][1].tolist() == list(range(8))
