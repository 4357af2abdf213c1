"""Compressed sources, and sources that would not fit into memory."""

from __future__ import annotations

import gzip
import importlib
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from millrace.errors import SourceError
from millrace.prepare import inflate
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read import records, streams
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.sources import SourceSlice, cut_parts, find_sources

zstd = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
TEXT = b"".join(b"document %d\nof two lines\n\n" % k for k in range(5000))
DOCUMENTS = [b"document %d\nof two lines" % k for k in range(5000)]


def zstd_compress(data: bytes) -> bytes:
    return bytes(zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}))


PACKERS = {".gz": gzip.compress, ".zst": zstd_compress}


def read(path: Path, **options: object) -> list[bytes]:
    (source,) = find_sources([str(path)])[0]
    found = read_documents(source, SourceSlice(0, 0, -1), ReadOptions(**options))  # type: ignore[arg-type]
    return [getattr(one, "text", one) for one in found]


@pytest.fixture(params=PACKERS)
def packed(request, tmp_path):
    """A path to write to, and what compresses for it."""
    return tmp_path / f"a.txt{request.param}", PACKERS[request.param]


@pytest.mark.parametrize("buffer", [1, 7, 1 << 20])
def test_all_members_are_read(packed, monkeypatch, buffer):
    monkeypatch.setattr(streams, "BUFFER", buffer)
    path, pack = packed
    text, found = (TEXT[:2000], DOCUMENTS[:60]) if buffer == 1 else (TEXT, DOCUMENTS)
    cuts = [0, 1, 2, 100, 101, 1777, len(text)]
    members = [pack(text[a:b]) for a, b in pairwise(cuts)]
    path.write_bytes(pack(b"").join(members) + pack(b""))
    assert read(path)[:60] == found[:60]
    assert b"".join(read(path)) == text.replace(b"\n\n", b"").removesuffix(b"\n")


@pytest.mark.parametrize("zeros", [1, 7, 511, 64 << 10, 200_001])
@pytest.mark.parametrize("place", ["end", "between"])
def test_zeros_that_fill_up_a_block_are_no_damage_in_gzip(tmp_path, zeros, place):
    data = gzip.compress(TEXT) + bytes(zeros) + (gzip.compress(b"\n\nmore") if place == "between" else b"")
    (tmp_path / "a.txt.gz").write_bytes(data)
    assert read(tmp_path / "a.txt.gz") == [*DOCUMENTS, *([b"more"] if place == "between" else [])]
    (tmp_path / "a.txt.gz").write_bytes(data + b"\0rest")
    with pytest.raises(SourceError, match="it is damaged"):
        read(tmp_path / "a.txt.gz")


def test_windows_of_two_gibibytes_are_read(tmp_path):
    packer = zstd.ZstdCompressor()
    data = bytearray(packer.compress(TEXT) + packer.flush())
    assert data[4] & 0x20 == 0, "a frame that does not state its size has a window of its own"
    data[5] = (31 - 10) << 3  # as zstd --long=31 writes it, which would need the memory here
    (tmp_path / "a.txt.zst").write_bytes(data)
    assert read(tmp_path / "a.txt.zst") == DOCUMENTS


def test_a_compressed_file_is_one_unit(packed):
    path, pack = packed
    path.write_bytes(pack(random.Random(1).randbytes(5000)))
    (part,) = cut_parts(find_sources([str(path)])[0], 100)
    assert part.slices == (SourceSlice(0, 0, -1),)


def test_a_file_cut_short_anywhere_is_an_error_and_no_end(packed):
    path, pack = packed
    data = pack(TEXT[:900])
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(SourceError, match=r"a\.txt.*near compressed byte [0-9]+: it ends in the middle") as caught:
            read(path)
        assert caught.value.offset == length
    path.write_bytes(data)
    assert read(path)


def test_a_second_member_cut_short_is_an_error(packed):
    path, pack = packed
    path.write_bytes(pack(TEXT) + pack(TEXT)[:-1])
    with pytest.raises(SourceError, match="cut short"):
        read(path)


def test_csv_cut_short_is_an_error(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(b"text\n" + b"".join(b"line %d\n" % k for k in range(9999)))[:-9])
    with pytest.raises(SourceError, match="cut short"):
        read(path)


def test_garbage_behind_the_last_member_is_an_error(packed):
    path, pack = packed
    path.write_bytes(pack(TEXT) + b"garbage")
    with pytest.raises(SourceError, match="it is damaged"):
        read(path)


def test_a_damaged_file_is_an_error(packed):
    path, pack = packed
    data = bytearray(pack(TEXT))
    for place in (0, 1, len(data) // 2, len(data) - 6):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        with pytest.raises(SourceError, match=r"it is damaged|cut short"):
            read(path)


def test_an_empty_file_and_an_empty_member_have_no_documents(packed):
    path, pack = packed
    for data in (b"", pack(b""), pack(b"\n\n")):
        path.write_bytes(data)
        assert read(path) == []


def test_expansion_is_capped_by_the_ratio(packed, monkeypatch):
    monkeypatch.setattr(inflate, "FREE_EXPANSION", 1000)
    path, pack = packed
    path.write_bytes(pack(b"\n" * 100_000))
    assert read(path, max_ratio=100_000 // path.stat().st_size + 1) == []
    with pytest.raises(SourceError, match=r"expands to more than [0-9,]+ bytes;.*--max-ratio"):
        read(path, max_ratio=100_000 // path.stat().st_size)


def repeated_values(path, count, size):
    """Rows that all have one of two values, which stand in the file once."""
    import pyarrow
    from pyarrow import parquet

    numbers = pyarrow.array([k % 2 for k in range(count)], pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(numbers, pyarrow.array(["x" * size, "y" * size]))
    parquet.write_table(pyarrow.table({"text": column}), path, store_schema=False, dictionary_pagesize_limit=1 << 24)


def test_rows_of_few_values_expand_no_more_than_the_ratio(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    repeated_values(path, 100, 10_000)
    ratio = 1_000_000 // path.stat().st_size
    monkeypatch.setattr(inflate, "FREE_EXPANSION", 1000)
    assert [len(text) for text in read(path, max_ratio=ratio + 1)] == [10_000] * 100
    with pytest.raises(
        SourceError, match=r"a\.parquet', row group 0: it expands to more than [0-9,]+ bytes; .*--max-ratio"
    ):
        read(path, max_ratio=ratio)
    monkeypatch.setattr(records, "FREE_GROUP", 19_000)
    with pytest.raises(SourceError, match="it expands to more than 19,000 bytes"):
        read(path, max_ratio=1)


def test_rows_of_few_long_values_are_read_few_at_a_time(tmp_path, monkeypatch):
    """The size of the file says nothing of them: by that, 1024 rows would be read, and be 10 MB."""
    path = tmp_path / "a.parquet"
    repeated_values(path, 1024, 10_000)
    monkeypatch.setattr(records, "BATCH_BYTES", 200_000)
    sizes, real = [], records._values
    monkeypatch.setattr(records, "_values", lambda column: sizes.append(column.nbytes) or real(column))
    assert len(read(path)) == 1024
    assert max(sizes) < 250_000


def test_a_missing_zstd_is_named_with_its_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstd_compress(TEXT))
    for name in ("compression", "compression.zstd", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SourceError, match=r"needs zstd; pip install '\.\[text\]'"):
        read(path)


def test_a_missing_pyarrow_is_named_with_its_extra(tmp_path, monkeypatch):
    name = "a.parquet"
    (tmp_path / name).write_bytes(b"text\na\n")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(SourceError, match=r"needs pyarrow; pip install '\.\[text\]'"):
        read(tmp_path / name)
    with pytest.raises(SourceError, match=r"needs pyarrow; pip install '\.\[text\]'"):
        cut_parts(find_sources([str(tmp_path / name)])[0], 1)


SCRIPT = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
from millrace.errors import SourceError
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare import inflate
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import SourceSlice, cut_parts, find_sources

path, document, cutting = sys.argv[1:]
(source,) = find_sources([path], ReadOptions(document=document))[0]
options = ReadOptions(long_documents=cutting, max_ratio=100)
size = 0
try:
    for part in cut_parts([source], options.part_bytes):
        for found in read_documents(source, part.slices[0], options):
            size += len(found.text)
    print(f"read {size}")
except SourceError as error:
    print(error.source, error.offset, error)
"""


def in_little_memory(path: Path, document: str, cutting: str = "stop") -> str:
    env = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # one thread for each core would need room of its own
    command = [sys.executable, "-c", SCRIPT, str(path), document, cutting]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def giant(path: Path, size: int, head: bytes = b"", tail: bytes = b"") -> Path:
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size - len(tail))
        file.seek(0, os.SEEK_END)
        file.write(tail)
    return path


@pytest.mark.parametrize("document", ["line", "blank-line", "file"])
def test_a_line_of_2_gib_stops_with_its_offset_in_little_memory(tmp_path_factory, document):
    path = giant(tmp_path_factory.mktemp("giant") / "a.txt", 2 << 30, b"ab\n\n", b"\n" if document == "line" else b"")
    said = in_little_memory(path, document)
    offset = 0 if document == "file" else 4
    assert said.startswith(f"{path} {offset} ")
    assert f"at byte {offset} is longer than 67,108,864 bytes" in said


def test_a_line_of_400_mib_is_cut_into_pieces_in_little_memory(tmp_path_factory):
    path = giant(tmp_path_factory.mktemp("giant") / "a.txt", 400 << 20, tail=b"\n\nab")
    assert in_little_memory(path, "blank-line", "split") == f"read {(400 << 20) - 2}"


def test_a_bomb_is_stopped_at_its_cap_in_little_memory(packed):
    path, pack = packed
    path.write_bytes(pack(b"\n" * (16 << 20)) * 77)  # 1.2 GiB of no documents at all
    said = in_little_memory(path, "line")
    assert said.startswith(f"{path} ")
    assert "it expands to more than 1,073,741,824 bytes" in said
