"""Token files without an index: headerless and llm.c .bin, and folders of them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError, MillraceError, StoreCorrupt, StoreNotFound
from millrace.store import foreign_files
from millrace.store.foreign import open_foreign
from millrace.store.store import Store

TOKENS = np.arange(100, 110)


def write_bin(path: Path, tokens: Any = TOKENS, dtype: str = "<u2") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(np.asarray(tokens, dtype).tobytes())
    return path


def write_llmc(path: Path, tokens: Any = TOKENS, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, dtype).tobytes())
    return path


def open_at(path: Path, dtype: Any = None) -> Store:
    return open_foreign(str(path), dtype)


def tokens_of(store: Store) -> list[int]:
    return np.asarray(store.columns["tokens"]).tolist()


def refused(kind: type[MillraceError], path: Path, *words: str, dtype: Any = None) -> None:
    with pytest.raises(kind) as caught:
        open_at(path, dtype)
    for word in words:
        assert word in str(caught.value)


# Headerless .bin


def test_headerless_bin_is_one_record_of_uint16_tokens(tmp_path: Path) -> None:
    store = open_at(write_bin(tmp_path / "x.bin"))
    assert tokens_of(store) == TOKENS.tolist()
    assert (store.kind, store.num_records, store.num_rows, store.splits) == ("text", 1, 10, ())
    assert store.meta["layout"] == "headerless .bin of uint16 tokens"
    assert store.path == str(tmp_path / "x.bin")
    assert store.columns["tokens"].dtype == np.uint16
    assert store.split("train") is store


@pytest.mark.parametrize("dtype", ["uint32", np.uint32, np.dtype("<u4"), "u4", "<u4"])
def test_given_dtype_says_what_a_headerless_bin_holds(tmp_path: Path, dtype: Any) -> None:
    store = open_at(write_bin(tmp_path / "x.bin", dtype="<u4"), dtype)
    assert tokens_of(store) == TOKENS.tolist()
    assert "uint32" in store.meta["layout"]


@pytest.mark.parametrize("name", ["dataset_metadata.json", "metadata.json", "meta.json", "x.json"])
@pytest.mark.parametrize("key", ["dtype", "token_dtype"])
def test_metadata_beside_names_the_dtype(tmp_path: Path, name: str, key: str) -> None:
    (tmp_path / name).write_text(json.dumps({key: "int32", "vocab": [1, {"a": None}]}))
    assert tokens_of(open_at(write_bin(tmp_path / "x.bin", dtype="<i4"))) == TOKENS.tolist()


def test_metadata_without_a_dtype_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"vocab_size": 50257}')
    assert tokens_of(open_at(write_bin(tmp_path / "x.bin"))) == TOKENS.tolist()


@pytest.mark.parametrize("value", ["float32", ">u2", "uint17", 16, None, ["uint16"], "(2,3)i4"])
def test_invalid_dtype_in_metadata_is_refused(tmp_path: Path, value: Any) -> None:
    (tmp_path / "meta.json").write_text(json.dumps({"dtype": value}))
    refused(StoreCorrupt, write_bin(tmp_path / "x.bin"), "meta.json", repr(value), "correct the file")


@pytest.mark.parametrize("text", ["{", "[1]", '{"a": NaN}', '{"a": 1, "a": 2}', '{"a": 1}\n{"a": 2}', "[" * 5000])
def test_unreadable_metadata_is_refused_unless_dtype_is_given(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    path = write_bin(tmp_path / "x.bin")
    refused(StoreCorrupt, path, "x.json", "give dtype=")
    assert tokens_of(open_at(path, "uint16")) == TOKENS.tolist()


def test_json_over_the_cap_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with open(tmp_path / "x.json", "wb") as file:
        file.truncate((32 << 20) + 1)
    refused(StoreCorrupt, write_bin(tmp_path / "x.bin"), "x.json", str((32 << 20) + 1))


def test_dtype_that_is_given_wins_over_metadata(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"dtype": "uint32"}')
    path = write_bin(tmp_path / "x.bin")
    assert tokens_of(open_at(path, "uint16")) == TOKENS.tolist()


def test_metadata_that_disagree_are_refused(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"dtype": "uint16"}')
    (tmp_path / "x.json").write_text('{"dtype": "uint32"}')
    refused(StoreCorrupt, write_bin(tmp_path / "x.bin"), "meta.json uint16 and x.json uint32")


def test_size_that_is_no_multiple_of_the_item_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"1234567")
    refused(StoreCorrupt, path, str(path), "7 bytes", "multiple of 2", "dtype=")
    refused(StoreCorrupt, path, "multiple of 4", dtype="int32")
    assert open_at(path, "uint8").num_rows == 7


@pytest.mark.parametrize(
    "dtype", ["float32", "bool", "bfloat16", "string", ">u2", np.dtype(">u2"), "junk", "(", object]
)
def test_dtype_that_no_token_has_is_refused(tmp_path: Path, dtype: Any) -> None:
    refused(ConfigError, write_bin(tmp_path / "x.bin"), "dtype=", "expected", dtype=dtype)


def test_empty_file_is_one_record_of_no_rows(tmp_path: Path) -> None:
    store = open_at(write_bin(tmp_path / "x.bin", []))
    assert (store.num_records, store.num_rows, tokens_of(store)) == (1, 0, [])
    assert len(store.fingerprint) == 32


def test_symlinked_file_is_followed(tmp_path: Path) -> None:
    write_bin(tmp_path / "blobs" / "1234")
    (tmp_path / "x.bin").symlink_to(tmp_path / "blobs" / "1234")
    assert tokens_of(open_at(tmp_path / "x.bin")) == TOKENS.tolist()


# llm.c


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "name"), [(20240520, 1, "<u2", "uint16"), (20240801, 7, "<u4", "uint32")]
)
def test_llmc_header_names_the_dtype(tmp_path: Path, magic: int, version: int, dtype: str, name: str) -> None:
    (tmp_path / "meta.json").write_text('{"dtype": "int64"}')  # the header knows better
    store = open_at(write_llmc(tmp_path / "x.bin", magic=magic, version=version, dtype=dtype))
    assert tokens_of(store) == TOKENS.tolist()
    assert store.meta["layout"] == f"llm.c .bin of {name} tokens"


@pytest.mark.parametrize("num_bytes", [8, 11, 1023, 1024, 1043, 1045, 2000])
def test_llmc_size_other_than_its_header_says_is_refused(tmp_path: Path, num_bytes: int) -> None:
    path = write_llmc(tmp_path / "x.bin")
    os.truncate(path, num_bytes)
    refused(StoreCorrupt, path, f"{num_bytes} bytes", "llm.c header")


def test_llmc_dtype_conflict_is_refused(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "x.bin")
    refused(ConfigError, path, "uint32", "uint16", dtype="uint32")
    assert open_at(path, "uint16").num_rows == 10


def test_llmc_header_of_unknown_version_is_refused(tmp_path: Path) -> None:
    refused(StoreCorrupt, write_llmc(tmp_path / "x.bin", version=2), "x.bin", "version 2")


# Folders of .bin


def test_llmc_evaluation_file_is_refused_by_name(tmp_path: Path) -> None:
    """It was taken for headerless tokens: its magic number is not that of a corpus."""
    path = write_llmc(tmp_path / "hellaswag_val.bin", magic=20240522)
    refused(ConfigError, path, "hellaswag_val.bin is an evaluation file of llm.c", "open its training files instead")
    write_llmc(tmp_path / "web_train_000001.bin")
    refused(ConfigError, tmp_path, "hellaswag_val.bin is an evaluation file of llm.c", "move it out of their folder")


def test_llmc_shards_in_a_folder_open_as_one(tmp_path: Path) -> None:
    for name, tokens in (
        ("web_train_000002.bin", [4, 5]),
        ("web_train_000001.bin", [1, 2, 3]),
        ("web_val_000000.bin", [9]),
    ):
        write_llmc(tmp_path / name, tokens)
    (tmp_path / "fetch.py").write_text("")
    store = open_at(tmp_path)
    assert store.meta["layout"] == "folder of 3 llm.c .bin of uint16 tokens"
    assert store.splits == ("train", "val")
    assert tokens_of(store.split("train")) == [1, 2, 3, 4, 5]
    assert tokens_of(store.split("val")) == [9]
    assert store.split("train").num_records == 2


def test_llmc_shards_in_a_folder_have_a_header_and_a_split(tmp_path: Path) -> None:
    write_llmc(tmp_path / "web_train_1.bin")
    write_bin(tmp_path / "web_val_1.bin")
    refused(StoreCorrupt, tmp_path, "web_val_1.bin", "has no header of llm.c")
    (tmp_path / "web_val_1.bin").unlink()
    write_llmc(tmp_path / "gpt2.bin")
    refused(ConfigError, tmp_path, "gpt2.bin", "no split", "move it away")
    (tmp_path / "gpt2.bin").rename(tmp_path / "a_train_b_val.bin")
    refused(ConfigError, tmp_path, "train and val")
    (tmp_path / "a_train_b_val.bin").rename(tmp_path / "model_training.bin")
    refused(ConfigError, tmp_path, "model_training.bin", "no split")


def test_headerless_shards_in_a_folder_open_by_their_dtype(tmp_path: Path) -> None:
    write_bin(tmp_path / "web_train.bin", [1, 2], "<u4")
    write_bin(tmp_path / "web_val.bin", [3], "<u4")
    assert tokens_of(open_at(tmp_path, "uint32").split("train")) == [1, 2]


def test_nanogpt_folder_has_splits_in_order(tmp_path: Path) -> None:
    for split, tokens in (("val", [3]), ("train", [1, 2]), ("test", [4, 5, 6])):
        write_bin(tmp_path / f"{split}.bin", tokens)
    (tmp_path / "meta.pkl").write_bytes(b"never opened")
    store = open_at(tmp_path)
    assert store.splits == ("train", "val", "test")
    assert [tokens_of(store.split(split)) for split in store.splits] == [[1, 2], [3], [4, 5, 6]]
    assert (tokens_of(store), store.offsets.tolist()) == ([1, 2, 3, 4, 5, 6], [0, 2, 3, 6])
    assert "train.bin, val.bin, test.bin" in store.meta["layout"]


def test_nanogpt_folder_with_one_file_has_one_split(tmp_path: Path) -> None:
    write_bin(tmp_path / "val.bin")
    assert open_at(tmp_path).splits == ("val",)


def test_nanogpt_folder_reads_dtype_from_metadata(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin", dtype="<i8")
    (tmp_path / "dataset_metadata.json").write_text('{"token_dtype": "int64"}')
    assert tokens_of(open_at(tmp_path)) == TOKENS.tolist()


def test_nanogpt_folder_may_hold_llmc_files_of_one_dtype(tmp_path: Path) -> None:
    write_llmc(tmp_path / "train.bin")
    write_bin(tmp_path / "val.bin", [7])
    assert tokens_of(open_at(tmp_path)) == [*TOKENS.tolist(), 7]
    write_llmc(tmp_path / "train.bin", magic=20240801, version=7, dtype="<u4")
    refused(StoreCorrupt, tmp_path, "val.bin", "uint16", "train.bin", "uint32")


def test_dangling_link_is_no_missing_split(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin")
    (tmp_path / "val.bin").symlink_to(tmp_path / "gone")
    refused(StoreCorrupt, tmp_path, "val.bin", "cannot be read")


def test_megatron_pair_in_a_folder_of_splits_is_not_taken_for_headerless(tmp_path: Path) -> None:
    path = write_bin(tmp_path / "train/0.bin", dtype="<u4")
    path.with_suffix(".idx").write_bytes(b"MMIDIDX\x00\x00")
    (tmp_path / "dataset_metadata.json").write_text("{}")
    refused(ConfigError, tmp_path, str(path), "Megatron index", "open that file alone")


def test_split_folders_are_shards_by_name_of_uint32(tmp_path: Path) -> None:
    for name, tokens in (("train/b.bin", [3]), ("train/B.bin", [2]), ("train/10.bin", [1]), ("val/0.bin", [9])):
        write_bin(tmp_path / name, tokens, "<u4")
    (tmp_path / "train" / "._10.bin").write_bytes(b"macOS")
    (tmp_path / "train" / "notes.txt").write_text("other files are not data")
    (tmp_path / "dataset_metadata.json").write_text('{"shards": ["../../etc/passwd"], "total": 3}')
    store = open_at(tmp_path)
    assert (store.splits, store.num_records, store.num_shards) == (("train", "val"), 4, 4)
    assert (tokens_of(store.split("train")), tokens_of(store.split("val"))) == ([1, 2, 3], [9])
    assert store.shard_name(0) == "train/10.bin"
    assert store.meta["layout"] == "dataset_metadata.json with 4 .bin of uint32 tokens"


@pytest.mark.parametrize("given_dtype", [None, "uint16"])
def test_split_folders_take_the_dtype_metadata_names(tmp_path: Path, given_dtype: str | None) -> None:
    write_bin(tmp_path / "train" / "0.bin")
    (tmp_path / "dataset_metadata.json").write_text('{"dtype": "uint16"}')
    (tmp_path / "val").mkdir()
    store = open_at(tmp_path, given_dtype)
    assert (tokens_of(store), store.splits) == (TOKENS.tolist(), ("train",))


def test_split_folders_say_their_vocabulary(tmp_path: Path) -> None:
    write_bin(tmp_path / "train" / "0.bin", dtype="<u4")
    metadata = tmp_path / "dataset_metadata.json"
    plain = open_at(tmp_path) if metadata.write_text("{}") else None
    assert plain is not None
    assert "vocabulary" not in plain.meta
    metadata.write_text('{"vocab_size": 50257}')
    assert open_at(tmp_path).meta["vocabulary"] == 50257
    assert open_at(tmp_path).fingerprint == plain.fingerprint
    for wrong in ('"many"', "-1", "true", "1.5", "1e99", "[]"):
        metadata.write_text(f'{{"vocab_size": {wrong}}}')
        refused(StoreCorrupt, tmp_path, str(metadata), "vocab_size", "expected a whole number from 1 to")


def test_split_folders_without_data_are_refused(tmp_path: Path) -> None:
    (tmp_path / "dataset_metadata.json").write_text("{}")
    (tmp_path / "train").mkdir()
    refused(StoreNotFound, tmp_path, str(tmp_path), "no .bin")


def test_both_kinds_of_folder_at_once_are_refused(tmp_path: Path) -> None:
    write_bin(tmp_path / "train.bin")
    write_bin(tmp_path / "train" / "0.bin")
    (tmp_path / "dataset_metadata.json").write_text("{}")
    refused(ConfigError, tmp_path, "move one kind away")


def test_more_files_than_can_be_mapped_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_files, "MAX_MAPS", 2)
    for number in range(3):
        write_bin(tmp_path / "train" / f"{number}.bin", dtype="<u4")
    (tmp_path / "dataset_metadata.json").write_text("{}")
    refused(ConfigError, tmp_path, "3 data files", "2")


@given(data=st.binary(max_size=64), dtype=st.sampled_from(["uint8", "uint16", "int32", "int64"]))
def test_any_bytes_open_exactly_or_are_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, dtype: str
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "x.bin"
    path.write_bytes(data)
    if len(data) % np.dtype(dtype).itemsize:
        refused(StoreCorrupt, path, "multiple", dtype=dtype)
    else:
        assert tokens_of(open_at(path, dtype)) == np.frombuffer(data, dtype).tolist()
