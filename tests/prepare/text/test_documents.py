"""Documents that are records, and what happens to text that cannot be read."""

from __future__ import annotations

import base64
import csv
import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import millrace as mr
from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import BLOCK, read_chunks, read_documents
from millrace.prepare.text.read.records import Bad
from millrace.prepare.text.read.sources import cut_parts, find_sources


def read(path: Path, **options: object) -> list[tuple[int, bytes | Bad]]:
    sources = find_sources([str(path)])[0]
    asked = ReadOptions(**options)  # type: ignore[arg-type]
    parts = cut_parts(sources, asked.part_bytes)
    found = [found for part in parts for piece in part.slices for found in read_documents(sources[0], piece, asked)]
    return [(one.offset, one if isinstance(one, Bad) else one.text) for one in found]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def only_bad(path: Path, **options: object) -> Bad:
    (bad,) = (found for _, found in read(path, **options) if isinstance(found, Bad))
    return bad


def prepared(path: Path, out: Path, **options: object) -> tuple[object, list[str]]:
    chosen = {"tokenizer": "bytes", "val": 0, "workers": 1, "normalize": False, "dedup": "none", **options}
    report = mr.prepare_text(str(path), out, **chosen)
    return report, mr.open_store(out).decode(mr.open_store(out).columns["tokens"][:]).split("<|endoftext|>")[:-1]


@pytest.mark.parametrize("part_bytes", [5, 17, 1 << 20])
def test_the_text_of_json_lines_at_their_offsets(tmp_path, part_bytes):
    lines = [b'{"text": "a\\nb", "id": 1}', b"", b'  {"text": "\xc3\xa9\\u2028"}\r', b"   ", b'{"text": ""}']
    data = b"\n".join(lines)
    found = read(written(tmp_path / "a.jsonl", data), part_bytes=part_bytes)
    assert found == [(0, b"a\nb"), (data.index(b"  {"), "é\u2028".encode()), (data.index(b'{"text": ""'), b"")]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"body": "x"}', "no field 'text'; it has \\['body'\\]; choose one with text_field="),
        (b'["text"]', "not a JSON object: a list"),
        (b'"text"', "not a JSON object: a str"),
        (b'{"text": 7}', "field 'text' is not text: it is int"),
        (b'{"text": null}', "field 'text' is not text: it is NoneType"),
        (b'{"text": "a", "text": "b"}', "field 'text' is twice"),
        (b'{"text": "a", "text": 1}', "field 'text' is twice"),
        (b'{"text": "\\ud800"}', "a lone surrogate \\(U\\+D800\\)"),
        (b'{"text": ' + b"[" * 100_000, "not JSON"),
        (b'{"n": ' + b"9" * 10_000 + b', "text": "a"}', "not JSON that can be read"),
        (b'{"text": "cut sh', "not JSON: Unterminated string"),
        (b"{\x00\"\x00t\x00", "not JSON"),
        (b'\xef\xbb\xbf{"text": "a"}', "not JSON: a byte order mark at character 0"),
        (b'{"text": "a", "\\u0074ext": "b"}', "field 'text' is twice"),
    ],
)  # fmt: skip
def test_a_line_that_is_not_a_record_is_told_with_its_offset(tmp_path, line, reason):
    path = written(tmp_path / "a.jsonl", b'{"text": "ok"}\n\n' + line)
    bad = only_bad(path)
    assert bad.offset == 16
    with pytest.raises(SourceError, match=rf"a\.jsonl', byte 16: {reason}") as caught:
        prepared(path, tmp_path / "out")
    assert (caught.value.source, caught.value.offset) == (str(path), 16)
    report, texts = prepared(path, tmp_path / "skipped", on_error="skip")
    assert texts == ["ok"]
    assert sum(count for why, count in report.dropped.items() if why.startswith("unreadable")) == 1
    (aside,) = map(json.loads, (tmp_path / "skipped/quarantine.jsonl").read_text().splitlines())
    assert (aside["source"], aside["offset"], base64.b64decode(aside["start"])) == (str(path), 16, line[:1024])


def test_a_field_of_the_same_name_deeper_inside_is_another(tmp_path):
    line = b'{"meta": {"text": "a", "text": "b"}, "text": "\\"text\\"", "last": {"text": 1}}'
    assert read(written(tmp_path / "a.jsonl", line)) == [(0, b'"text"')]


def test_invalid_utf8_in_json_stops_at_the_byte_itself(tmp_path):
    path = written(tmp_path / "a.jsonl", b'{"text": "ok"}\n{"text": "a\xff"}\n')
    assert only_bad(path).offset == path.read_bytes().index(b"\xff")


def test_replace_goes_on_with_the_replacement_character_and_counts(tmp_path):
    path = written(tmp_path / "a.jsonl", b'{"text": "a\xff!"}\n{"text": "b\\ud800\xfe!"}\n{"text": "c"}')
    report, texts = prepared(path, tmp_path / "out", on_error="replace")
    assert texts == ["a\ufffd!", "b\ufffd\ufffd!", "c"]
    assert report.dropped == {"documents with invalid characters replaced": 2}


@pytest.mark.parametrize("start", [b"", b"\xef\xbb\xbf", b"\n\n"])
@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_invalid_utf8_stops_with_the_offset_of_the_bad_byte(tmp_path, name, start):
    data = start + "é one\n\ntwo ".encode() + b"\xe2\x28\xa1 three\n\nfour"
    path = written(tmp_path / name, data)
    with pytest.raises(SourceError, match=r"invalid utf-8 \(e2 28 a1") as caught:
        prepared(path, tmp_path / "out")
    assert caught.value.offset == data.index(b"\xe2\x28")
    assert str(path) in str(caught.value)


def test_skipped_documents_are_counted_and_quarantined(tmp_path):
    path = written(tmp_path / "a.txt", b"one\n\nt\xffo\n\nthree\n\n\xc3")
    report, texts = prepared(path, tmp_path / "out", on_error="skip")
    assert texts == ["one", "three"]
    assert report.dropped == {"unreadable: invalid utf-8": 2}
    lines = [json.loads(line) for line in (tmp_path / "out/quarantine.jsonl").read_text().splitlines()]
    assert [(line["offset"], base64.b64decode(line["start"])) for line in lines] == [(6, b"t\xffo"), (17, b"\xc3")]


def test_replaced_documents_are_counted(tmp_path):
    path = written(tmp_path / "a.txt", b"one\n\nt\xffo\n\nthree")
    report, texts = prepared(path, tmp_path / "out", on_error="replace")
    assert texts == ["one", "t\ufffdo", "three"]
    assert report.dropped == {"documents with invalid characters replaced": 1}


CSV = b'id,text\n1,plain\n2,"two\nlines, and a ""quote"""\n3,NULL\n4,\n5,"' + "é".encode() + b'"\r\n'


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_the_text_column_of_csv_with_newlines_in_quotes(tmp_path, name):
    path = written(tmp_path / name, gzip.compress(CSV) if name.endswith("gz") else CSV)
    texts = [b"plain", b'two\nlines, and a "quote"', b"NULL", b"", "é".encode()]
    assert read(path) == [(CSV.index(b"\n%d," % (k + 1)) + 1, text) for k, text in enumerate(texts)]


def test_other_columns_of_csv_may_hold_anything(tmp_path):
    rows = [b"%d,text %d\n" % (k, k) for k in range(500)] + [b"\xff word,last\n"]
    for mark in (b"", b"\xef\xbb\xbf"):
        data = mark + b"\xc3\xa9,text\r\n\n" + b"".join(rows)
        found = read(written(tmp_path / "a.csv", data))
        assert [text for _, text in found] == [b"text %d" % k for k in range(500)] + [b"last"]
        assert [data[place : data.index(b"\n", place) + 1] for place, _ in found] == rows


@given(
    rows=st.lists(st.tuples(st.text('aé\n\r,"東 ', max_size=6), st.booleans()), max_size=8),
    ending=st.sampled_from(["\n", "\r\n"]),
    mark=st.booleans(),
)
@settings(deadline=None)
def test_the_place_of_a_row_of_csv_is_where_it_begins(memory_folder, rows, ending, mark):
    """A file cut there, with the names of its columns before it, begins with that row."""
    names = b"id,text" + ending.encode()
    lines = [
        f'{k},"{text.replace(chr(34), chr(34) * 2)}"{ending}{ending * blank}' for k, (text, blank) in enumerate(rows)
    ]
    data = b"\xef\xbb\xbf" * mark + names + "".join(lines).encode()
    found = read(written(memory_folder / "places.csv", data))
    assert [text for _, text in found] == [text.encode() for text, _ in rows]
    for number, (place, _) in enumerate(found):
        assert data[place:].startswith(b"%d," % number)
        rest = read(written(memory_folder / "rest.csv", names + data[place:]))
        assert [text for _, text in rest] == [text for _, text in found[number:]]


def test_invalid_utf8_in_csv_is_told_with_its_row(tmp_path):
    path = written(tmp_path / "a.csv", b"text\nok\nb\xffd\nfine\n")
    with pytest.raises(SourceError, match=r"byte 8: invalid utf-8 \(.*; fix line 3, or") as caught:
        prepared(path, tmp_path / "out")
    assert caught.value.offset == 8
    assert prepared(path, tmp_path / "skipped", on_error="skip")[1] == ["ok", "fine"]


@pytest.mark.parametrize("data", [b"", b"text\n"])
def test_csv_of_no_rows_has_no_documents(tmp_path, data):
    assert read(written(tmp_path / "a.csv", data)) == []


def test_csv_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(SourceError, match=r"a\.csv.*not readable CSV"):
        read(written(tmp_path / "a.csv", b'"a"b,text\n1,2\n'))
    with pytest.raises(SourceError, match=r"a\.csv.*more than one column 'text'"):
        read(written(tmp_path / "a.csv", b"text,text\n1,2\n"))
    with pytest.raises(SourceError, match=r"a\.csv.*no column 'text'; it has a, b;.*--text-field"):
        read(written(tmp_path / "a.csv", b"a,b\n1,2\n"))


BROKEN = {
    b"too,many,fields\n": "3 fields where the first row has 2",
    b"few\xff\n": "1 fields where the first row has 2",
    b'9,"a"b\n': "not CSV: ',' expected after",
}


@pytest.mark.parametrize("row", BROKEN)
def test_a_row_of_csv_that_is_wrong_obeys_the_policy(tmp_path, row):
    path = written(tmp_path / "a.csv", b'id,text\n1,one\n\n2,"two\n\nx"\n' + row + b"4,four\n")
    with pytest.raises(SourceError, match=f"a.csv', byte 26: {BROKEN[row]}.*; fix line 7, or") as caught:
        prepared(path, tmp_path / "out")
    assert caught.value.offset == 26
    report, texts = prepared(path, tmp_path / "skipped", on_error="skip")
    assert texts == ["one", "two\n\nx", "four"]
    assert sum(report.dropped.values()) == 1
    assert mr.open_store(tmp_path / "skipped").columns["offset"][:].tolist() == [8, 15, 26 + len(row)]
    assert json.loads((tmp_path / "skipped" / "quarantine.jsonl").read_text())["offset"] == 26


def test_csv_that_ends_within_quotes_is_not_taken_for_whole(tmp_path):
    path = written(tmp_path / "a.csv", b'text\none\n"two and\nmore')
    with pytest.raises(SourceError, match="byte 9: not CSV: a quote opened in line 3 is never closed; fix line 3, or"):
        prepared(path, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
def test_a_quote_that_is_never_closed_takes_no_more_than_its_row(tmp_path, name):
    data = b'\xef\xbb\xbfid,text\n1,"a\nb"\n2,two\n"3\n",x,"three\n4,four\n5,five\n6,5" pipe\n7,"seven\n8,eight'
    path = written(tmp_path / name, gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(SourceError, match="byte 25: not CSV: ',' expected after"):  # the pipe closed it
        prepared(path, tmp_path / "out")
    report, texts = prepared(path, tmp_path / "skipped", on_error="skip")
    assert texts == ["a\nb", "two", "four", "five", '5" pipe', "eight"]
    assert report.dropped == {"unreadable: not CSV": 2}
    lines = [json.loads(line) for line in (tmp_path / "skipped" / "quarantine.jsonl").read_text().splitlines()]
    assert "near line 9 of the file, in quotes opened in line 6" in lines[0]["reason"]
    assert lines[1]["reason"] == "not CSV: a quote opened in line 10 is never closed"
    assert [base64.b64decode(line["start"]) for line in lines] == [b'"3\n",x,"three\n', b'7,"seven\n']
    assert [line["offset"] for line in lines] == [25, data.index(b"7,")]


@pytest.mark.parametrize("row", [b'%d,"stray\n', b'%d,"stray ""one""\n', b'%d,"a" and "b\n'])
def test_of_many_rows_with_a_stray_quote_all_others_stay(tmp_path, row):
    rows = [row % k if k % 3 == 0 else b'%d,"good, %d"\n' % (k, k) if k % 3 == 1 else b"%d,good\n" % k
            for k in range(3000)]  # fmt: skip
    report, texts = prepared(
        written(tmp_path / "a.csv", b"id,text\n" + b"".join(rows)), tmp_path / "out", on_error="skip", max_skipped=0.4
    )
    assert texts == [f"good, {k}" if k % 3 == 1 else "good" for k in range(3000) if k % 3]
    assert report.dropped == {"unreadable: not CSV": 1000}
    lines = [json.loads(line) for line in (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()]
    assert [base64.b64decode(line["start"]) for line in lines] == rows[::3]
    assert [line["offset"] for line in lines] == [8 + sum(map(len, rows[:k])) for k in range(0, 3000, 3)]


@given(
    st.lists(st.sampled_from(['a"', '"b', "c,d", '"e\nf"', '"g""h"', '""', "i", '"', '""j']), min_size=1, max_size=12)
)
@settings(deadline=None)
def test_every_line_of_csv_is_in_a_row_or_set_aside(memory_folder, cells):
    data = "text\n" + "".join(f"{cell}\n" for cell in cells)
    found = read(written(memory_folder / "lines.csv", data.encode()), on_error="skip")
    places = [place for place, _ in found]
    assert places == sorted(set(places))
    for (place, document), stop in zip(found, [*places[1:], len(data)], strict=True):
        if isinstance(document, Bad) and "fields" not in document.reason:
            assert data[place:stop].strip("\n") == document.data.decode().strip("\n")
        elif not isinstance(document, Bad):
            (row,) = (row for row in csv.reader(data[place:stop].splitlines(keepends=True), strict=True) if row)
            assert row == [document.decode()]


def test_a_quote_that_is_not_closed_within_a_document_tells_its_line(tmp_path):
    rows = b"".join(
        b"%d,one\n" % k for k in range(40_000)
    )  # a quoted field may have 131,072 characters whatever is asked
    long = b"1," + b"x" * (1 << 21) + b"\n2,two\n"
    for number, more in enumerate((rows, long)):
        path = written(tmp_path / "a.csv", b'id,text\n0,zero\n0,"zero\n' + more)
        csv.field_size_limit(131_072)  # which only ever grows in a process
        with pytest.raises(
            SourceError, match=r"the row at byte 15 is longer than 100 bytes: a quote opened in line 3 is not closed"
        ):
            prepared(path, tmp_path / "out", max_document=100)
        report, texts = prepared(path, tmp_path / f"skipped{number}", max_document=100, on_error="skip")
        assert texts == ["zero", *["one"] * 40_000] if more is rows else texts == ["zero", "two"]
        assert report.dropped.pop("unreadable: not CSV") == 1
        assert list(report.dropped.values()) == [1] * (more is long)  # which is too long itself
        first = json.loads((tmp_path / f"skipped{number}" / "quarantine.jsonl").read_text().splitlines()[0])
        assert (first["offset"], base64.b64decode(first["start"])) == (15, b'0,"zero\n')
        assert first["reason"] == "not CSV: a quote opened in line 3 is not closed within 100 bytes"


def table(path: Path, column: pyarrow.Array, name: str = "text", group: int = 3) -> Path:
    parquet.write_table(pyarrow.table({"other": np.arange(len(column)), name: column}), path, row_group_size=group)
    return path


DICTIONARY = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view(), DICTIONARY])
def test_the_text_column_of_parquet_by_row_groups(tmp_path, kind):
    texts = [f"text {k} é" for k in range(10)]
    path = table(tmp_path / "a.parquet", pyarrow.array(texts).cast(kind))
    assert len(cut_parts(find_sources([str(path)])[0], 1)) == 4
    assert read(path) == read(path, part_bytes=1) == [(k, text.encode()) for k, text in enumerate(texts)]


def test_null_and_other_values_in_parquet_are_told_with_their_row(tmp_path):
    bad = only_bad(table(tmp_path / "a.parquet", pyarrow.array(["a", "b", "c", None])))
    assert (bad.offset, bad.reason) == (3, "'text' is null")
    path = table(tmp_path / "b.parquet", pyarrow.array([1]))
    with pytest.raises(SourceError, match="row 0: 'text' is not text: it is int") as caught:
        prepared(path, tmp_path / "out")
    assert caught.value.row == 0


def test_invalid_utf8_in_parquet_is_told_with_its_row(tmp_path):
    column = pyarrow.array([b"ok", b"b\xffd"]).view(pyarrow.string())
    with pytest.raises(SourceError, match="row 1: invalid utf-8") as caught:
        prepared(table(tmp_path / "a.parquet", column), tmp_path / "out")
    assert caught.value.row == 1


def test_parquet_without_the_column_names_those_it_has(tmp_path):
    with pytest.raises(SourceError, match=r"no column 'text'; it has other, body; choose one with --text-field"):
        read(table(tmp_path / "a.parquet", pyarrow.array(["a"]), "body"))
    assert read(tmp_path / "a.parquet", text_field="body") == [(0, b"a")]


def test_parquet_of_no_rows_has_no_documents(tmp_path):
    assert read(table(tmp_path / "a.parquet", pyarrow.array([], pyarrow.string()))) == []


def test_parquet_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(SourceError, match=r"a\.parquet.*not readable Parquet"):
        read(written(tmp_path / "a.parquet", b"PAR1 no PAR1"))


@pytest.mark.parametrize("how", ["stop", "split"])
def test_records_longer_than_the_limit_stop_with_their_place_and_are_never_cut(tmp_path, how):
    table(tmp_path / "a.parquet", pyarrow.array(["a", "b" * 20]))
    (tmp_path / "a.csv").write_text(f"text\na\n{'b' * 20}\n")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "bbbbbb"}\n')
    places = {"a.parquet": "row 1", "a.csv": "the row at byte 7", "a.jsonl": "the document at byte 14"}
    for name, place in places.items():
        with pytest.raises(SourceError) as caught:
            read(tmp_path / name, max_document=13, long_documents=how)
        remedy = "raise --max-document, or go on with --on-error skip"
        why = " (--long-documents split cuts plain text, not records)" if how == "split" else ""
        assert str(caught.value).endswith(f"{name}': {place} is longer than 13 bytes; {remedy}{why}")


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("length", [14, 15, 16, 40, 5_000, 3 << 20])
@pytest.mark.parametrize("place", ["first", "within", "last"])
def test_records_longer_than_the_limit_can_be_skipped(tmp_path, on_error, length, place):
    texts = ["a", "bb", "ccc"]
    texts.insert({"first": 0, "within": 1, "last": 3}[place], "x" * length)
    lines = [json.dumps({"text": text}) for text in texts]
    limit = len(json.dumps({"text": "x" * 13}))
    written(tmp_path / "a.jsonl", "\n".join(lines).encode())
    written(tmp_path / "a.csv", "\n".join(["text", *texts]).encode())
    table(tmp_path / "a.parquet", pyarrow.array(texts))
    for name, most in (("a.jsonl", limit), ("a.csv", 13), ("a.parquet", 13)):
        options = {"max_document": most, "on_error": on_error, "part_bytes": max(40, length // 3)}
        report, found = prepared(tmp_path / name, tmp_path / f"out-{name}", **options)
        assert found == ["a", "bb", "ccc"]
        assert report.dropped == {f"unreadable: longer than {most} bytes": 1}
        told = json.loads((tmp_path / f"out-{name}" / "quarantine.jsonl").read_text())
        number = texts.index("x" * length)
        rows = {"a.jsonl": lines[:number], "a.csv": ["text", *texts[:number]]}
        assert told["offset"] == (sum(len(row) + 1 for row in rows[name]) if name in rows else number)


@pytest.mark.parametrize("size", [200, 5_000, 60_000, 600_000])
def test_of_a_file_in_hand_are_a_block_or_two_however_long_it_is(tmp_path, size):
    path = written(tmp_path / "lines.txt", (b"x" * (size - 1) + b"\n") * (12_000_000 // size))
    options = ReadOptions(document="line")
    (source,) = find_sources([str(path)], options)[0]
    chunks = list(read_chunks(source, cut_parts([source], 1 << 30)[0].slices[0], options))
    assert sum(map(len, chunks)) == 12_000_000 // size
    assert max(len(chunk.text) for chunk in chunks) <= 3 * max(BLOCK, size)
