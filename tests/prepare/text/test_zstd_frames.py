"""zstd files of many frames are cut into slices, and give the documents of their text."""

from __future__ import annotations

import gzip
import importlib
import os
import random
import struct
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.errors import SourceError
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.sources import SourceSlice, cut_parts, find_sources

zstd = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")


NOISE = random.Random(1).randbytes(9000)  # which does not compress


def zst(data: bytes) -> bytes:
    return bytes(zstd.compress(data))


def checked_zst(data: bytes) -> bytes:
    return bytes(zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}))


def skippable(data: bytes) -> bytes:
    return zst(data) + struct.pack("<II", 0x184D2A53, 5) + b"notes"


PACKERS = {
    "zst": zst,
    "checked": checked_zst,
    "skippable": skippable,
}


def slices_of(path: Path, part_bytes: int, document: str | None = None) -> list[SourceSlice]:
    sources, _ = find_sources([str(path)], ReadOptions(document=document))
    return [piece for part in cut_parts(sources, part_bytes) for piece in part.slices]


def read(path: Path, slices: list[SourceSlice], document: str | None = None, **options: object) -> list[object]:
    (source,) = find_sources([str(path)], ReadOptions(document=document))[0]
    asked = ReadOptions(**options)  # type: ignore[arg-type]
    return [found for piece in slices for found in read_documents(source, piece, asked)]


@pytest.mark.parametrize("packer", PACKERS)
@pytest.mark.parametrize("document", ["line", "blank-line"])
@given(frames=st.lists(st.text("ab\n\r", max_size=40).map(str.encode), max_size=12), part_bytes=st.integers(1, 200))
def test_slices_of_frames_give_the_documents_of_the_text(memory_folder, packer, document, frames, part_bytes):
    pack = PACKERS[packer]
    plain, packed = memory_folder / f"frames-{packer}.txt", memory_folder / f"frames-{packer}.txt.zst"
    plain.write_bytes(b"".join(frames))
    packed.write_bytes(b"".join(map(pack, frames)))
    whole = [SourceSlice(0, 0, -1)]
    expected = read(plain, whole, document)
    assert read(packed, whole, document) == expected
    slices = slices_of(packed, part_bytes, document) or whole
    assert read(packed, slices, document) == expected
    assert all(before.stop == after.start for before, after in pairwise(slices))


@pytest.mark.parametrize("packer", PACKERS)
def test_a_large_file_of_many_frames_is_cut(tmp_path, packer, tools):
    pack = PACKERS[packer]
    rng = np.random.default_rng(0)
    text = b"\n".join(b"%d %s" % (k, os.urandom(int(rng.integers(1, 60))).hex().encode()) for k in range(20_000))
    cuts = [*range(0, len(text), 40_000), len(text)]
    plain, packed = tmp_path / "a.txt", tmp_path / "a.txt.zst"
    plain.write_bytes(text)
    packed.write_bytes(b"".join(pack(text[a:b]) for a, b in pairwise(cuts)))
    assert len(slices_of(packed, 60_000, "line")) > 5
    options = {"tokenizer": "bytes", "val": 0, "document": "line", "part_bytes": 60_000}
    mr.prepare_text(str(plain), tmp_path / "plain", workers=1, **options)
    done = []
    mr.prepare_text(
        str(packed),
        tmp_path / "packed",
        workers=2,
        progress=lambda stage, at, total, _: done.append((at, total)),
        **options,
    )
    assert (packed.stat().st_size, packed.stat().st_size) in done
    plain_store, store = (tools.records(mr.open_store(tmp_path / name)) for name in ("plain", "packed"))
    assert [entry[1:] for entry in store] == [entry[1:] for entry in plain_store]


def streamed(data: bytes) -> bytes:
    packer = zstd.ZstdCompressor()
    return bytes(packer.compress(data) + packer.flush())


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        (".gz", gzip.compress(NOISE[:3000]) * 3),  # members, which only inflating can find
        (".zst", streamed(NOISE[:3000]) * 3),  # frames that do not state what they hold
        (".zst", zst(NOISE[:9000])),
        (".zst", zst(NOISE[:3000]) * 3 + b"more"),
        (".zst", (zst(NOISE[:3000]) * 3)[:-1]),
    ],
)
def test_what_cannot_be_found_without_inflating_is_one_task(tmp_path, ending, data):
    (tmp_path / f"a.txt{ending}").write_bytes(data)
    assert slices_of(tmp_path / f"a.txt{ending}", 1000) == [SourceSlice(0, 0, -1)]


@pytest.mark.parametrize("packer", PACKERS)
def test_frames_that_hold_another_amount_than_they_state_are_an_error(tmp_path, packer):
    pack = PACKERS[packer]
    frame = bytearray(pack(b"some lines of text\n" * 100))
    frame[5] += 1  # the second byte of the header: the size, of frames that are so small
    path = tmp_path / "a.txt.zst"
    path.write_bytes(bytes(frame) + pack(b"more\n" * 400) * 5)
    slices = slices_of(path, 30, "line")
    assert len(slices) > 1
    with pytest.raises(SourceError, match="it is damaged"):
        read(path, slices[:1], "line")
