"""Damaged files: an error that names the file and the place, before any work where a footer tells it."""

import gzip

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr

NAN = float("nan")


def frame(rows=50, start=0):
    return pd.DataFrame({"t": np.arange(start, start + rows), "x": np.arange(rows) * 1.5, "y": np.arange(rows) % 7})


def prepare(source, out, **options):
    return mr.prepare_table(
        source if isinstance(source, list) else str(source), out, **{"workers": 1, "time": "t", **options}
    )


@settings(max_examples=120)
@given(data=st.data())
def test_flipped_bytes_of_parquet_are_an_error_that_names_the_file_or_change_nothing_but_values(twin, damaged, data):
    """Page checksums are verified where the file has them; what no checksum covers must at least read cleanly."""
    body = bytearray(damaged)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, len(body) - 1), st.integers(len(body) - 700, len(body) - 1)))
        body[place] ^= 1 << data.draw(st.integers(0, 7))
    with twin.folder() as folder:
        (folder / "bad.parquet").write_bytes(body)
        try:
            report = prepare(
                folder / "bad.parquet", folder / "out", features=["x", "y"], duplicates="first", on_error="skip"
            )
        except mr.MillraceError as error:
            text = str(error)
            other = ("is no column", "cannot hold", "too large", "expected timestamps", "a feature is a number")
            named = any(part in text for part in ("bad.parquet", *other))
            assert named or "no rows are left" in text, text
            assert "\n" not in text
            return
        store = mr.open_store(folder / "out", check=True)
        assert np.isfinite(store.columns["values"][:]).all()
        assert report.rows_read == len(store.columns["values"]) + sum(report.dropped.values())


@pytest.fixture(scope="module")
def damaged(memory_folder):
    path = memory_folder / "whole.parquet"
    parquet.write_table(
        pa.Table.from_pandas(frame(400)), path, row_group_size=100, write_page_checksum=True, compression="snappy"
    )
    return path.read_bytes()


def test_a_page_whose_checksum_is_wrong_is_told_with_its_row_group(tmp_path, damaged):
    body = bytearray(damaged)
    footer = parquet.ParquetFile(pa.BufferReader(damaged)).metadata
    column = footer.row_group(2).column(1)
    place = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 5
    body[place] ^= 1
    (tmp_path / "bad.parquet").write_bytes(body)
    with pytest.raises(
        mr.SourceError, match=r"bad\.parquet' \(row group 2, column 'x'\) cannot be read: .*CRC.*; write the file again"
    ):
        prepare(tmp_path / "bad.parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("cut", [0.99, 0.5, 8, 4, 3])
def test_a_truncated_file_is_refused_before_any_work(tmp_path, damaged, cut):
    size = int(len(damaged) * cut) if cut < 1 else cut
    parquet.write_table(pa.Table.from_pandas(frame()), tmp_path / "good.parquet")
    (tmp_path / "short.parquet").write_bytes(damaged[:size])
    with pytest.raises(mr.SourceError, match=r"short\.parquet' is not readable as parquet: .*; copy or write it again"):
        prepare(tmp_path / "*.parquet", tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_a_footer_that_claims_what_the_file_cannot_hold(tmp_path, damaged):
    """Row counts in the footer are little thrift varints: 400 rows in all, 100 in each group."""
    claims = 0
    huge = bytes([0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0x0F])  # 2**38 - 1 or so, six bytes for two
    length = int.from_bytes(damaged[-8:-4], "little")
    footer = damaged[-8 - length : -8]
    for number in (400, 100):
        zigzag = number * 2
        small = bytes([zigzag & 0x7F | 0x80, zigzag >> 7])
        for place in (k for k in range(len(footer)) if footer.startswith(small, k)):
            changed = footer[:place] + huge + footer[place + 2 :]
            body = damaged[: -8 - length] + changed + len(changed).to_bytes(4, "little") + b"PAR1"
            (tmp_path / f"{claims}.parquet").write_bytes(body)
            claims += 1
            try:
                report = prepare(tmp_path / f"{claims - 1}.parquet", tmp_path / f"out{claims}", features=["x", "y"])
            except mr.SourceError as error:
                assert f"{claims - 1}.parquet" in str(error)  # noqa: PT017
            else:
                assert sum(report.rows.values()) == 400  # a count that nobody needs
    assert claims >= 5


def test_a_file_of_another_kind_and_folders_without_tables(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"this is no parquet file, only its name is\n" * 20)
    with pytest.raises(mr.SourceError, match=r"a\.parquet' is not readable as parquet"):
        prepare(tmp_path / "a.parquet", tmp_path / "out")
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(mr.ConfigError, match=r"notes\.txt' has an unknown ending; expected \.parquet, .*\.csv"):
        prepare(tmp_path / "notes.txt", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        mr.ConfigError, match=r"no files in .*empty'; give files, folders or patterns of Parquet or CSV"
    ):
        prepare(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(mr.ConfigError, match="does not exist and matches nothing"):
        prepare(tmp_path / "*.pq", tmp_path / "out")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("t,x\n1,2\n3\n4,5\n", r"a\.csv', line 3: it has 1 field, but the header has 2; fix that line"),
        ("t,x\n1,2\n3,4,5\n", r"a\.csv', line 3: it has 3 fields, but the header has 2; fix that line"),
        ("t,x\n1,2\n2,abc\n" * 1, r"a\.csv'.*|column 'x' is string; a feature is a number"),
        ('t,x\n1,"2\n3,4\n', "column 'x' is string; a feature is a number"),
        ("t,x\n1,2\n", None),
        ("﻿t,x\n1,2\n", None),
        ("t,x\r\n1,2\r\n2,3", None),
        ("t,x\n1,\n2,NaN\n3,inf\n4,1\n", None),
    ],
)
def test_csv_with_broken_rows(tmp_path, body, said):
    (tmp_path / "a.csv").write_text(body, newline="")
    if said is None:
        assert prepare(tmp_path / "a.csv", tmp_path / "out", features="x").rows_read == len(
            body.split("\n")
        ) - 1 - body.endswith("\n")
        return
    with pytest.raises(mr.MillraceError, match=said):
        prepare(tmp_path / "a.csv", tmp_path / "out", features="x")
    assert not list(tmp_path.glob("out*"))


def test_a_value_far_down_a_csv_file_that_is_no_number_is_named_with_its_row(tmp_path):
    lines = ["t,x", *(f"{k},{k}.5" for k in range(200_000)), "200000,abc"]
    (tmp_path / "a.csv").write_text("\n".join(lines))
    said = r"a\.csv', line 200002: column 'x' holds 'abc', but is of type double; fix it, or leave the column or the file out"
    with pytest.raises(mr.SourceError, match=said):
        prepare(tmp_path / "a.csv", tmp_path / "out")


@pytest.mark.parametrize(
    ("first", "later", "what"),
    [
        ("1", "2.5", "of type int64"),
        ("1", "A7", "of type int64"),
        ("", "3", "empty"),
        ("2020-01-01", "soon", r"of type date32\[day\]"),
        ("true", "maybe", "of type bool"),
    ],
)
def test_before_a_transform_the_beginning_of_a_csv_file_fixes_its_types(tmp_path, monkeypatch, first, later, what):
    """Only the function knows what its columns are: a later value of another type is named with its line, and what to do."""
    (tmp_path / "untouched.py").write_text("def same(table): return table")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [f"{k},{k}.5,{first}" for k in range(100_000)]
    (tmp_path / "a.csv").write_text("\n".join(["t,x,note", *rows, f"100000,1.5,{later}"]))
    said = (
        rf"a\.csv', line 100002: column 'note' holds '{later}', but is {what}; before transform= a CSV column has the type of "
        r"its values in the first 1 MiB of the file: write the file as Parquet"
    )
    with pytest.raises(mr.SourceError, match=said) as caught:
        prepare(tmp_path / "a.csv", tmp_path / "out", features="x", transform="untouched:same", workers=2)
    assert caught.value.row == 100_002
    if first:  # without one, a column that nobody asks for is not read
        assert prepare(tmp_path / "a.csv", tmp_path / "out2", features="x").rows_read == 100_001


def test_latin_1_and_truncated_gzip(tmp_path):
    (tmp_path / "a.csv").write_bytes("name,t,x\nStra\xdfe,1,2\n".encode("latin-1"))
    with pytest.raises(
        mr.SourceError,
        match=r"a\.csv': column 'name' is not UTF-8: it holds b'Stra.xdfe'; name the encoding .*encoding=.latin-1.",
    ):
        prepare(tmp_path / "a.csv", tmp_path / "out", entity="name")
    whole = gzip.compress(frame(5000).to_csv(index=False).encode())
    (tmp_path / "b.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(mr.SourceError, match=r"b\.csv\.gz' is not readable as csv: Truncated compressed stream"):
        prepare(tmp_path / "b.csv.gz", tmp_path / "out")
    (tmp_path / "c.csv.gz").write_bytes(b"not gzip at all, is it?" * 10)
    with pytest.raises(mr.SourceError, match=r"c\.csv\.gz' is not readable as csv"):
        prepare(tmp_path / "c.csv.gz", tmp_path / "out")
