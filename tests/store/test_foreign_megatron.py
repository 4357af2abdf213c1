"""Megatron .bin/.idx: sequences become records, and no damaged index gets past the checks."""

from __future__ import annotations

import itertools
import os
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, MillraceError, StoreCorrupt, StoreError
from millrace.store import foreign_megatron
from millrace.store.foreign import open_foreign
from millrace.store.foreign_megatron import CODES

HEADER = "<9sQBQQ"
MAGIC = b"MMIDIDX\x00\x00"


def index_bytes(lengths: list[int], itemsize: int, code: int, modes: bytes = b"", **changes: Any) -> bytes:
    pointers = [end * itemsize for end in itertools.accumulate([0, *lengths[:-1]])][: len(lengths)]
    given_pointers = changes.get("pointers", pointers)
    documents = changes.get("documents", list(range(len(lengths) + 1)))
    head = struct.pack(
        HEADER, MAGIC, changes.get("version", 1), code, changes.get("sequences", len(lengths)), len(documents)
    )
    arrays = (np.array(lengths, "<i4"), np.array(given_pointers, "<i8"), np.array(documents, "<i8"))
    return head + b"".join(array.tobytes() for array in arrays) + modes


def write_pair(folder: Path, lengths: list[int], code: int = 8, name: str = "x", **changes: Any) -> Path:
    dtype = np.dtype(CODES.get(code, "uint16"))
    (folder / f"{name}.idx").write_bytes(index_bytes(lengths, dtype.itemsize, code, **changes))
    tokens = np.arange(sum(max(length, 0) for length in lengths)) + changes.get("first", 0)
    (folder / f"{name}.bin").write_bytes(tokens.astype(dtype).tobytes())
    return folder / f"{name}.bin"


def refused(path: Path, *words: str) -> None:
    with pytest.raises(StoreCorrupt) as caught:
        open_foreign(str(path), None)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["x.bin", "x.idx", "x"])
def test_pair_opens_by_either_file_or_the_prefix(tmp_path: Path, name: str) -> None:
    write_pair(tmp_path, [3, 0, 2])
    store = open_foreign(str(tmp_path / name), None)
    assert (store.offsets.tolist(), np.asarray(store.columns["tokens"]).tolist()) == ([0, 3, 3, 5], [0, 1, 2, 3, 4])
    assert (store.meta["layout"], store.kind, store.splits) == ("Megatron .bin/.idx", "text", ())
    assert store.fingerprint == open_foreign(str(tmp_path / "x.bin"), None).fingerprint


def test_the_fingerprint_is_what_it_was_before_documents_were_a_column(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3, 0, 2])
    assert open_foreign(str(path), None).fingerprint == "0fba6d4d78278702febf5e653ade4dd7"


def test_sequences_know_their_document(tmp_path: Path) -> None:
    """A document of several sequences, an empty one, and indexes that say nothing of documents."""
    path = write_pair(tmp_path, [3, 1, 2, 2, 4], documents=[0, 2, 2, 5])
    store = open_foreign(str(path), None)
    assert store.columns["document"][:].tolist() == [0, 0, 2, 2, 2]
    assert store.offsets.tolist() == [0, 3, 4, 6, 8, 12]
    alone = open_foreign(str(write_pair(tmp_path, [3, 1, 2, 2, 4])), None)
    assert alone.columns["document"][:].tolist() == [0, 1, 2, 3, 4]
    assert alone.fingerprint != store.fingerprint
    for unknown in ([], [0]):
        found = open_foreign(str(write_pair(tmp_path, [3, 1], documents=unknown)), None)
        assert found.columns["document"][:].tolist() == [0, 1]


@pytest.mark.parametrize("documents", [[0, 3], [1, 2], [-1, 2], [0, 1]])
def test_documents_that_are_not_the_sequences_are_refused(tmp_path: Path, documents: list[int]) -> None:
    refused(write_pair(tmp_path, [3, 1], documents=documents), "documents go from sequence", "expected from 0 to 2")


def test_documents_that_fall_are_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3, 1], documents=[0, 3, 2])
    refused(path, "document 2 begins at sequence 2, before document 1 at 3")


def test_pairs_in_a_folder_open_as_one(tmp_path: Path) -> None:
    write_pair(tmp_path, [3, 2], name="b", first=10)
    write_pair(tmp_path, [1, 1, 2], name="a", documents=[0, 2, 3])
    (tmp_path / "README.md").write_text("notes")
    store = open_foreign(str(tmp_path), None)
    assert store.meta["layout"] == "folder of 2 Megatron .bin/.idx"
    assert np.asarray(store.columns["tokens"]).tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 14]
    assert store.columns["document"][:].tolist() == [0, 0, 1, 2, 3]
    assert (store.splits, [store.shard_name(k) for k in range(2)]) == ((), ["a.bin", "b.bin"])


def test_pairs_in_a_folder_have_the_splits_that_all_names_say(tmp_path: Path) -> None:
    write_pair(tmp_path, [3, 2], name="web_val_document")
    write_pair(tmp_path, [1, 1], name="web_train_document")
    store = open_foreign(str(tmp_path), None)
    assert store.splits == ("train", "val")
    assert store.split("val").num_rows == 5
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train", "val"):
        write_pair(other, [3, 2], name=name)
    assert open_foreign(str(other), None).splits == ("train", "val")
    write_pair(tmp_path, [1], name="books")
    with pytest.raises(ConfigError, match=r"books: its name says no split, and others say one of train, val, test"):
        open_foreign(str(tmp_path), None)


def test_pairs_in_a_folder_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, [3], name="a")
    (tmp_path / "c.bin").write_bytes(b"12")
    with pytest.raises(ConfigError, match=r"c\.bin has no \.idx beside it"):
        open_foreign(str(tmp_path), None)
    (tmp_path / "c.bin").unlink()
    write_pair(tmp_path, [3], code=4, name="b")
    refused(tmp_path, "b.idx", "says int32", "uint16")


@pytest.mark.parametrize("code", list(CODES))
def test_every_dtype_code_is_read(tmp_path: Path, code: int) -> None:
    store = open_foreign(str(write_pair(tmp_path, [4, 1], code)), None)
    column = store.columns["values" if "float" in CODES[code] else "tokens"]
    assert (column.dtype, np.asarray(column).tolist()) == (np.dtype(CODES[code]), [0, 1, 2, 3, 4])
    assert store.kind == ("records" if "float" in CODES[code] else "text")


def test_modes_of_multimodal_indexes_are_ignored(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3, 2], modes=b"\x00\x01")
    assert open_foreign(str(path), None).offsets.tolist() == [0, 3, 5]


def test_pair_without_sequences_has_no_records(tmp_path: Path) -> None:
    store = open_foreign(str(write_pair(tmp_path, [])), None)
    assert (store.num_records, store.num_rows, store.offsets.tolist()) == (0, 0, [0])


@given(lengths=st.lists(st.integers(0, 20), max_size=12), chunk=st.integers(1, 5))
def test_records_are_the_sequences(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], chunk: int) -> None:
    path = write_pair(tmp_path_factory.mktemp("pair"), lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(foreign_megatron, "CHUNK", chunk)
        store = open_foreign(str(path), None)
    assert np.diff(store.offsets).tolist() == lengths
    assert np.asarray(store.columns["tokens"]).tolist() == list(range(sum(lengths)))


def test_pointers_with_a_gap_or_out_of_order_are_refused(tmp_path: Path) -> None:
    refused(write_pair(tmp_path, [3, 2], pointers=[0, 8]), "x.idx", "sequence 1 begins at byte 8, expected 6", "gaps")
    refused(write_pair(tmp_path, [3, 3], pointers=[6, 0]), "sequence 0 begins at byte 6, expected 0")


def test_negative_length_is_refused(tmp_path: Path) -> None:
    refused(write_pair(tmp_path, [3, -1, 2]), "sequence 1 has length -1")


@pytest.mark.parametrize("change", [-1, 1, 2])
def test_bin_of_another_size_than_the_index_says_is_refused(tmp_path: Path, change: int) -> None:
    path = write_pair(tmp_path, [3, 2])
    path.write_bytes(bytes(10 + change))
    refused(path, "x.bin", f"{10 + change} bytes", "expected 10", "2 sequences")


def test_other_version_and_dtype_code_are_refused(tmp_path: Path) -> None:
    refused(write_pair(tmp_path, [1], version=2), "version 2", "expected 1")
    refused(write_pair(tmp_path, [1], code=9), "dtype code 9", "1 to 8")


def test_index_cut_short_anywhere_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3, 2])
    whole = (tmp_path / "x.idx").read_bytes()
    for num_bytes in range(len(whole)):
        (tmp_path / "x.idx").write_bytes(whole[:num_bytes])
        refused(path, "x.idx")


def test_claimed_counts_allocate_nothing(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3, 2], sequences=1 << 60)
    tracemalloc.start()
    try:
        refused(path, "x.idx", f"{1 << 60} sequences")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_more_records_than_a_store_may_have_are_refused(tmp_path: Path) -> None:
    """In a sparse file of the size that the claim makes."""
    path = write_pair(tmp_path, [3, 2], sequences=1 << 37)
    os.truncate(tmp_path / "x.idx", 34 + (12 << 37) + 8 * 3)
    refused(path, "x.idx", f"{1 << 37} sequences in 3 documents; at most {1 << 36}")


def test_index_without_its_bin_is_refused(tmp_path: Path) -> None:
    write_pair(tmp_path, [3]).unlink()
    with pytest.raises(StoreError, match=r"x\.bin: cannot be read"):
        open_foreign(str(tmp_path / "x"), None)


def test_other_idx_beside_a_bin_is_refused_unless_dtype_is_given(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3])
    (tmp_path / "x.idx").write_bytes(b"TNTIDX\x00\x00 something else")
    refused(path, "x.idx", "does not begin as a Megatron index", "dtype=")
    assert open_foreign(str(path), "uint16").meta["layout"] == "headerless .bin of uint16 tokens"
    refused(tmp_path / "x.idx", "Megatron")


def test_dtype_conflict_is_refused(tmp_path: Path) -> None:
    path = write_pair(tmp_path, [3])
    assert open_foreign(str(path), "uint16").num_rows == 3
    with pytest.raises(ConfigError, match=r"dtype='int32' given, but .*x\.idx says uint16"):
        open_foreign(str(path), "int32")


def test_fingerprint_knows_every_boundary(tmp_path: Path) -> None:
    lengths = [1] * 40_000  # the changed pair lies in the middle of the index, beyond both ends
    seen = {open_foreign(str(write_pair(tmp_path, lengths)), None).fingerprint}
    lengths[20_000:20_002] = [2, 0]
    seen.add(open_foreign(str(write_pair(tmp_path, lengths)), None).fingerprint)
    assert len(seen) == 2


@given(data=st.data())
def test_damaged_index_opens_with_its_own_rows_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = write_pair(folder, [3, 0, 2], code=data.draw(st.sampled_from([1, 4, 8])))
    index = bytearray((folder / "x.idx").read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        index[data.draw(st.integers(0, len(index) - 1))] = data.draw(st.integers(0, 255))
    (folder / "x.idx").write_bytes(bytes(index[: data.draw(st.integers(0, len(index)))]))
    try:
        store = open_foreign(str(path), None)
    except MillraceError:
        return
    assert store.num_rows * data_itemsize(store) == path.stat().st_size


def data_itemsize(store: Any) -> int:
    return int(next(iter(store.columns.values())).dtype.itemsize)
