"""Files without rows, rows without a key, entities of any size, strange names: a note, a count, or an error with the place."""

import gzip
import os

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyarrow import parquet

import millrace as mr

NAN = float("nan")


def frame(rows=50, start=0):
    return pd.DataFrame({"t": np.arange(start, start + rows), "x": np.arange(rows) * 1.5, "y": np.arange(rows) % 7})


def prepare(source, out, **options):
    return mr.prepare_table(
        source if isinstance(source, list) else str(source), out, **{"workers": 1, "time": "t", **options}
    )


def empty_files(folder):
    """A file with rows, and every kind of file without."""
    folder.mkdir()
    table = pa.Table.from_pandas(frame())
    parquet.write_table(table, folder / "a.parquet")
    parquet.write_table(table[:0], folder / "b.parquet")
    with parquet.ParquetWriter(folder / "c.parquet", table.schema):
        pass  # a footer, and no row group
    (folder / "d.csv").write_bytes(b"")
    (folder / "e.csv").write_text("t,x,y\n")
    (folder / "f.csv.gz").write_bytes(gzip.compress(b""))
    (folder / "g.csv").write_bytes(b"\n\n \n")
    (folder / "h.parquet").write_bytes(b"")
    return folder


def test_files_without_rows_are_noted_or_refused(tmp_path):
    folder = empty_files(tmp_path / "in")
    report = prepare(folder, tmp_path / "out")
    assert (report.entities, report.rows) == (1, {"train": 50})
    assert [note for note in report.notes if note.startswith("7 files hold no rows, such as")]
    with pytest.raises(
        mr.SourceError, match=r"7 files hold no rows, such as .*b\.parquet'; remove them, or leave strict=True out"
    ):
        prepare(folder, tmp_path / "strict", strict=True)
    for name in sorted(os.listdir(folder))[1:]:
        with pytest.raises(mr.SourceError, match=r"the only file, .*', holds no rows; give files with rows"):
            prepare(folder / name, tmp_path / "none")
    (folder / "a.parquet").unlink()
    with pytest.raises(mr.SourceError, match=r"each of the 7 files, such as .*b\.parquet', holds no rows"):
        prepare(folder, tmp_path / "none")
    assert not list(tmp_path.glob("none*"))


@pytest.mark.parametrize(
    "kind", ["null time", "nan time", "null and nan time", "null key", "all-null time", "all-null key"]
)
def test_rows_without_time_or_entity_stop_the_run_or_are_counted(tmp_path, kind):
    whole = pa.table({"name": pa.array(list("AABB")), "t": pa.array([1.0, 2.0, 1.0, 2.0]), "x": [1.0, 2, 3, 4]})
    parquet.write_table(whole, tmp_path / "a.parquet")
    name, t = ["A", "B", "C", "D"], [5.0, 6.0, 7.0, 8.0]
    bad = {
        "null time": (name, pa.array([5.0, None, 7.0, None])),
        "nan time": (name, pa.array([5.0, NAN, 7.0, float("inf")])),
        "null and nan time": (name, pa.array([5.0, None, 7.0, NAN])),
        "null key": (["A", None, "C", None], pa.array(t)),
        "all-null time": (name, pa.nulls(4)),
        "all-null key": (pa.nulls(4), pa.array(t)),
    }[kind]
    parquet.write_table(pa.table({"name": bad[0], "t": bad[1], "x": [5.0, 6, 7, 8]}), tmp_path / "b.parquet")
    source, column = tmp_path / "?.parquet", "name" if "key" in kind else "t"
    row = 0 if kind.startswith("all") else 1
    with pytest.raises(
        mr.SourceError,
        match=rf"b\.parquet', row {row}: column '{column}' is null; fix it, or drop such rows with on_error=",
    ):
        prepare(source, tmp_path / "out", entity="name")
    report = prepare(source, tmp_path / "skipped", entity="name", on_error="skip")
    gone = 4 if kind.startswith("all") else 2
    assert report.dropped == {"null time or entity": gone}
    assert report.rows == {"train": 8 - gone}


@pytest.mark.parametrize("kind", [pa.timestamp("us", "UTC"), pa.date32(), pa.int32()])
def test_a_file_without_any_time_beside_one_with_times(tmp_path, kind):
    parquet.write_table(
        pa.table(
            {
                "t": pa.array([1, 2], pa.int32())
                .cast(pa.int64() if pa.types.is_timestamp(kind) else pa.int32())
                .cast(kind),
                "x": [1.0, 2.0],
            }
        ),
        tmp_path / "a.parquet",
    )
    parquet.write_table(pa.table({"t": pa.nulls(2), "x": [1.0, 2.0]}), tmp_path / "b.parquet")
    with pytest.raises(mr.SourceError, match=r"b\.parquet', row 0: column 't' is null"):
        prepare(tmp_path / "?.parquet", tmp_path / "out")
    assert prepare(tmp_path / "?.parquet", tmp_path / "skipped", on_error="skip").dropped == {"null time or entity": 2}
    with pytest.raises(mr.ConfigError, match=r"time='t' is null; expected timestamps, dates or numbers"):
        prepare(tmp_path / "b.parquet", tmp_path / "none")


def test_a_null_key_in_a_csv_file(tmp_path):
    (tmp_path / "a.csv").write_text("name,t,x\nA,1,2\n,2,3\nNULL,1,4\n")
    with pytest.raises(mr.SourceError, match=r"a\.csv', row 1: column 'name' is null"):
        prepare(tmp_path / "a.csv", tmp_path / "out", entity="name")
    report = prepare(tmp_path / "a.csv", tmp_path / "out2", entity="name", on_error="skip")
    assert np.asarray(report.open().columns["name"][:]).tolist() == ["A", "NULL"]


def test_entities_of_one_row_and_one_with_nearly_all_of_them(twin, tmp_path):
    rng = np.random.default_rng(0)
    names = np.array(["giant"] * 9000 + [f"small {k:04d}" for k in range(1000)])
    rows = pd.DataFrame(
        {"name": rng.permutation(names), "t": twin.START + np.arange(10_000), "f0": rng.normal(size=10_000)}
    )
    written = twin.write(rows, tmp_path / "in", layout="spread", group_rows=1000)
    with twin.small(slices=500, chunk_rows=700, batch_rows=300, part_bytes=10_000, group_rows=2000):
        report = prepare(written.paths, tmp_path / "out", val_last=0.1, entity="name")
    store = report.open()
    assert (report.entities, report.rows) == (1001, {"train": 9100, "val": 900})
    entities = twin.cleaned(written.frame[written.frame["name"] == "giant"], ["f0"])
    center, scale = store.manifest.scaling["center"], store.manifest.scaling["scale"]
    mine = twin.read(store)["giant"]
    np.testing.assert_array_equal(mine["values"], ((entities[0].values - center) / scale).astype(np.float32))
    assert len(mr.Windows(store.split("train"), lookback=5, horizon=1)) == 8100 - 5
    short = prepare(written.paths, tmp_path / "long", entity="name", min_rows=2)
    assert (short.entities, short.dropped) == (
        1,
        {"entity with too few rows": 1000, "row of an entity with too few": 1000},
    )


def test_strange_names_are_entities_and_readable_in_errors(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    names = [
        b"new\nline.parquet",
        b"a b.PARQUET",
        b"\xff\xfe.parquet",
        "日本.parquet".encode(),
        b"-rf.parquet",
        b"x" * 240 + b".parquet",
        b"quote'\".csv",
        b"tab\t.tsv",
        b"2020.01.parquet",
    ]
    for k, name in enumerate(names):
        path = os.fsencode(folder) + b"/" + name
        with open(path, "wb") as file:
            if name.endswith((b"csv", b"tsv")):
                file.write(frame(5).to_csv(index=False, sep="," if name.endswith(b"csv") else "\t").encode())
            else:
                parquet.write_table(pa.Table.from_pandas(frame(5 + k)), file)
    report = prepare(folder, tmp_path / "out")
    expected = ["-rf", "2020.01", "\\xff\\xfe", "a b", "new\nline", "quote'\"", "tab\t", "x" * 240, "日本"]
    assert np.asarray(report.open().columns["name"][:]).tolist() == sorted(expected, key=str.encode)
    bad = os.fsencode(folder) + b"/\xffbad\n.parquet"
    with open(bad, "wb") as file:
        file.write(b"PAR1 but no more")
    with pytest.raises(mr.SourceError, match=r"\\xffbad\\n\.parquet") as told:
        prepare(folder, tmp_path / "other")
    assert str(told.value).isprintable()


def test_pipes_in_a_folder_are_refused_and_loops_left_out_by_name(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    frame().to_parquet(folder / "a.parquet")
    os.mkfifo(folder / "pipe.parquet")
    with pytest.raises(mr.SourceError, match=r"pipe\.parquet' is not a plain file"):
        prepare(folder, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    (folder / "pipe.parquet").unlink()
    (folder / "again").symlink_to(folder)
    (folder / "self.parquet").symlink_to(folder / "self.parquet")
    (folder / "b.parquet").symlink_to(folder / "a.parquet")
    (folder / "b.parquet.gz").touch()
    with pytest.raises(mr.ConfigError, match=r"b\.parquet\.gz': Parquet is compressed inside; unpack it"):
        prepare(folder / "b.parquet.gz", tmp_path / "out")
    report = prepare(folder, tmp_path / "out")
    assert report.entities == 1
    told = ["again' left out: a link to a folder", "self.parquet' left out: a link that leads nowhere",
            "b.parquet' left out: met again", "other endings left out: 1 .parquet.gz"]  # fmt: skip
    assert all(any(part in note for note in report.notes) for part in told)


def test_many_tiny_files(tmp_path):
    """MILLRACE_SOAK makes it ten thousand."""
    count = 10_000 if os.environ.get("MILLRACE_SOAK") else 2_000
    folder = tmp_path / "in"
    folder.mkdir()
    body = pa.BufferOutputStream()
    parquet.write_table(pa.table({"t": [1, 2], "x": [1.0, 2.0]}), body)
    for k in range(count):
        (folder / f"{k}.parquet").write_bytes(body.getvalue().to_pybytes())
    report = prepare(folder, tmp_path / "out", features="x")
    assert (report.entities, report.rows) == (count, {"train": 2 * count})
    names = np.asarray(report.open().columns["name"][:]).tolist()
    assert names == sorted(map(str, range(count)))


def test_files_that_would_be_one_entity_are_refused(tmp_path):
    for name in ("2019/A.parquet", "2020/A.parquet"):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        frame().to_parquet(tmp_path / "in" / name)
    with pytest.raises(
        mr.ConfigError, match=r"2019/A\.parquet' and .*2020/A\.parquet' would be one entity, 'A'; name the column"
    ):
        prepare(tmp_path / "in", tmp_path / "out")
    name = str(tmp_path / "in" / "2019" / "A.parquet")
    with pytest.raises(mr.ConfigError, match="a file is given twice"):
        prepare([name, name], tmp_path / "out")
    assert prepare([str(tmp_path / "in" / "2019"), name], tmp_path / "out").entities == 1


def test_a_column_in_the_file_and_in_its_path(tmp_path):
    (tmp_path / "x=3").mkdir()
    frame().to_parquet(tmp_path / "x=3" / "a.parquet")
    with pytest.raises(mr.SourceError, match=r"a\.parquet': column 'x' is in the file and in its path; rename one"):
        prepare(tmp_path, tmp_path / "out")
