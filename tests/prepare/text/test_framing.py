"""Plain text into documents: the same documents at the same offsets, wherever the file is cut and read."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read import framing as documents
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.records import Bad
from millrace.prepare.text.read.sources import SourceSlice, find_sources

MARK = b"\xef\xbb\xbf"
PIECES = [
    b"a",
    b"bc",
    b"\n",
    b"\r\n",
    b"\r",
    b"\n\n\n",
    b"\r\n\r\n",
    b"\x00",
    "\u2028".encode(),
    MARK,
    "é😀".encode(),
    b" ",
]
texts = st.lists(st.sampled_from(PIECES), max_size=14).map(b"".join)


def read(path: Path, document: str, cuts: list[int] | None = None, **options: object) -> list[tuple[int, bytes]]:
    (source,) = find_sources([str(path)], ReadOptions(document=document))[0]
    edges = [0, *sorted(cuts or []), -1]
    units = [SourceSlice(0, start, stop) for start, stop in pairwise(edges) if start != stop]
    found = [found for unit in units for found in read_documents(source, unit, ReadOptions(**options))]  # type: ignore[arg-type]
    return [(one.offset, one if isinstance(one, Bad) else one.text) for one in found]


def expected(data: bytes, document: str) -> list[tuple[int, bytes]]:
    """The same by hand: line by line."""
    lines, at = [], 0
    if data.startswith(MARK):
        at, data = len(MARK), data.removeprefix(MARK)
    *ended, last = data.split(b"\n")
    for line in ended:
        lines.append((at, line, line.removesuffix(b"\r") if document == "blank-line" else line))
        at += len(line) + 1
    lines.append((at, last, last))
    found: list[tuple[int, bytes]] = []
    run = b""  # the lines of a document, the last without its end
    for start, line, content in [*lines, (0, b"", b"")]:
        if content and document == "blank-line":
            if not run:
                found.append((start, b""))
            found[-1] = (found[-1][0], run + content)
            run += line + b"\n"
        elif content:
            found.append((start, content))
        else:
            run = b""
    return found


@pytest.mark.parametrize("document", ["blank-line", "line"])
@pytest.mark.parametrize("block", [1, 2, 3, 5, 1 << 20])
def test_slices_give_the_documents_of_the_whole_at_their_offsets(memory_folder, monkeypatch, document, block):
    monkeypatch.setattr(documents, "BLOCK", block)
    path = memory_folder / f"framing-{document}-{block}.txt"

    @given(texts, st.data())
    @settings(max_examples=150)
    def holds(data, draws):
        path.write_bytes(data)
        cuts = draws.draw(st.lists(st.integers(1, len(data) - 1), unique=True, max_size=4)) if len(data) > 1 else []
        whole = expected(data, document)
        assert read(path, document) == whole
        assert read(path, document, cuts) == whole
        assert all(data[offset : offset + len(text)] == text for offset, text in whole)

    holds()


def test_every_way_to_cut_a_file_in_three_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "BLOCK", 2)
    path = tmp_path / "a.txt"
    data = b"\n\r\nab\r\n\r\n\r\nc\nd\n\n\n\ne\r\n"
    path.write_bytes(data)
    whole = [(3, b"ab"), (11, b"c\nd"), (18, b"e")]
    assert read(path, "blank-line") == whole
    for first in range(1, len(data)):
        for second in range(first + 1, len(data)):
            assert read(path, "blank-line", [first, second]) == whole


@given(texts, st.integers(1, 9), st.lists(st.integers(1, 30), unique=True, max_size=3))
def test_long_documents_are_cut_into_pieces_that_join_to_them(memory_folder, data, most, cuts):
    path = memory_folder / "split.txt"
    path.write_bytes(data)
    cuts = [cut for cut in cuts if cut < len(data)]
    for document in ("blank-line", "line"):
        pieces = read(path, document, cuts, max_document=most, long_documents="split")
        whole = expected(data, document)
        assert sorted(pieces) == pieces
        for offset, text in whole:
            mine = [piece for place, piece in pieces if offset <= place < offset + len(text)]
            assert b"".join(mine) == text
            assert all(len(piece) <= most for piece in mine)
        assert sum(len(piece) for _, piece in pieces) == sum(len(text) for _, text in whole)


def test_long_documents_are_cut_between_characters(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("é😀" * 50)
    for document in ("blank-line", "line", "file"):
        for most in (4, 5, 6, 7, 50):
            pieces = read(path, document, max_document=most, long_documents="split")
            assert "".join(piece.decode() for _, piece in pieces) == "é😀" * 50


def test_a_cut_document_goes_on_past_the_end_of_its_slice(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 100 + b"\n\nb")
    pieces = read(path, "blank-line", [30], max_document=40, long_documents="split")
    assert [(offset, len(piece)) for offset, piece in pieces] == [(0, 40), (40, 40), (80, 20), (102, 1)]


@pytest.mark.parametrize("document", ["blank-line", "line"])
def test_a_document_that_is_too_long_stops_with_its_offset(tmp_path, document):
    path = tmp_path / "a.txt"
    path.write_bytes(b"x\n\n" + b"a" * 11 + b"\n\ny")
    assert len(read(path, document, max_document=11)) == 3
    with pytest.raises(SourceError, match=r"a\.txt.*at byte 3 is longer than 10 bytes.*--max-document") as caught:
        read(path, document, max_document=10)
    assert caught.value.offset == 3
    assert caught.value.source == str(path)


def test_a_million_empty_lines_are_no_documents(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" + b"\n" * 10**6 + b"b" + b"\r\n" * 10**6 + b"c")
    for document in ("blank-line", "line"):
        found = [text for _, text in read(path, document, [500_000, 1_000_002, 2_000_000]) if text.strip()]
        assert found == [b"a", b"b", b"c"] if document == "blank-line" else [b"a", b"b\r", b"c"]


def test_a_whole_file_is_one_document_to_the_byte(tmp_path):
    path = tmp_path / "a.py"
    data = b"\n\n def f():\r\n\r\n\tpass\x00\n\n"
    path.write_bytes(data)
    assert read(path, "file") == [(0, data)]
    path.write_bytes(MARK + data)
    assert read(path, "file") == [(3, data)]


@given(texts, st.integers(1, 20))
def test_a_long_file_is_cut_into_pieces_that_join_to_it(memory_folder, data, most):
    path = memory_folder / "whole.txt"
    path.write_bytes(data)
    pieces = read(path, "file", max_document=most, long_documents="split")
    text = data.removeprefix(MARK)
    assert b"".join(piece for _, piece in pieces) == text
    assert all(data[offset : offset + len(piece)] == piece for offset, piece in pieces)
    assert all(len(piece) <= most for _, piece in pieces)


def test_a_whole_file_that_is_too_long_stops(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(MARK + b"a" * 10)
    assert read(path, "file", max_document=10) == [(3, b"a" * 10)]
    with pytest.raises(SourceError, match="longer than 9 bytes"):
        read(path, "file", max_document=9)


@pytest.mark.parametrize("order", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.csv"])
def test_utf16_is_refused_with_the_command_that_converts_it(tmp_path, name, order):
    (tmp_path / name).write_bytes("\ufefftext\nhello\n".encode(order))
    with pytest.raises(SourceError, match=rf"{name}.*UTF-16; give --encoding utf-16"):
        read(tmp_path / name, None)  # type: ignore[arg-type]


def test_every_slice_of_a_file_that_begins_with_mark_and_line_ends(tmp_path):
    for start in (b"", MARK, MARK + b"\n", MARK + b"\r\n", MARK + b"\n\r\n", b"\n", b"\r\n", b"\r"):
        path = tmp_path / "a.txt"
        path.write_bytes(start + b"a\n\nb")
        for document in ("blank-line", "line"):
            whole = expected(start + b"a\n\nb", document)
            assert read(path, document, list(range(1, len(start) + 4))) == whole


def test_a_slice_within_one_document_reads_no_further_than_itself(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_bytes(b"a" * 1_000_000)
    calls = []
    read_on = documents._Window.read_on

    def counted(window, keep):
        calls.append(keep)
        return read_on(window, keep)

    monkeypatch.setattr(documents, "BLOCK", 1000)
    monkeypatch.setattr(documents._Window, "read_on", counted)
    (source,) = find_sources([str(path)], ReadOptions(document="line"))[0]
    assert list(read_documents(source, SourceSlice(0, 100_000, 200_000), ReadOptions())) == []
    assert 100 <= len(calls) <= 102


@pytest.mark.needs_core
@given(st.lists(st.sampled_from([b"\n", b"\n\n", b"a", b"some words", b"x" * 40]), max_size=30).map(b"".join))
@settings(max_examples=300)
def test_documents_between_empty_lines_are_found_with_and_without_the_core(data):
    text = np.frombuffer(data, np.uint8)
    for found, expected in zip(documents.between_gaps(text), documents.between_gaps_numpy(text), strict=True):
        assert found.tolist() == expected.tolist()
