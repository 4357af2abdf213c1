"""``.npy`` files and folders of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from millrace.errors import ConfigError, MillraceError, StoreCorrupt
from millrace.store.foreign import open_foreign
from millrace.store.layout import DTYPES

PLAIN = sorted(set(DTYPES) - {"string", "dictionary", "bfloat16"})


def save(path: Path, array: Any, version: tuple[int, int] | None = None) -> Path:
    with open(path, "wb") as file:
        np.lib.format.write_array(file, np.asarray(array), version)
    return path


def refused(path: Path, *words: str) -> None:
    with pytest.raises(StoreCorrupt) as caught:
        open_foreign(str(path), None)
    for word in (str(path), *words):
        assert word in str(caught.value)


def with_header(header: str, data: bytes = bytes(24)) -> bytes:
    text = header.encode("latin1") + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def test_line_of_integers_is_tokens(tmp_path: Path) -> None:
    store = open_foreign(str(save(tmp_path / "x.npy", np.arange(5))), None)
    assert (store.kind, store.num_records, list(store.columns)) == ("text", 1, ["tokens"])
    assert np.asarray(store.columns["tokens"]).tolist() == [0, 1, 2, 3, 4]
    assert store.meta["layout"] == ".npy of int64 [5]"


@pytest.mark.parametrize("array", [np.arange(5.0), np.arange(6).reshape(3, 2), np.ones((2, 3, 4), bool)])
def test_other_arrays_are_values(tmp_path: Path, array: Any) -> None:
    store = open_foreign(str(save(tmp_path / "x.npy", array)), None)
    assert (store.kind, store.num_records, list(store.columns)) == ("records", 1, ["values"])
    assert np.array_equal(store.columns["values"], array)


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_versions_1_to_3_are_read(tmp_path: Path, version: tuple[int, int]) -> None:
    store = open_foreign(str(save(tmp_path / "x.npy", np.arange(5), version)), None)
    assert store.num_rows == 5


@given(array=npst.arrays(st.sampled_from(PLAIN), npst.array_shapes(min_dims=1, max_dims=4, max_side=4)))
def test_any_plain_array_comes_back_bit_by_bit(tmp_path_factory: pytest.TempPathFactory, array: Any) -> None:
    store = open_foreign(str(save(tmp_path_factory.mktemp("npy") / "x.npy", array)), None)
    column = next(iter(store.columns.values()))
    assert (column.dtype, column.shape) == (array.dtype, array.shape)
    assert np.asarray(column).tobytes() == array.tobytes()


def test_empty_array_is_one_record_of_no_rows(tmp_path: Path) -> None:
    store = open_foreign(str(save(tmp_path / "x.npy", np.zeros((0, 3)))), None)
    assert (store.num_records, store.num_rows, store.columns["values"].shape) == (1, 0, (0, 3))


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.asfortranarray(np.ones((3, 2))), ("Fortran", "ascontiguousarray")),
        (np.arange(5, dtype=">i4"), ("big-endian >i4", ".astype('<i4')")),
        (np.array([{}, "x"], object), ("object", "plain numbers")),
        (np.zeros(3, [("a", "i4"), ("b", "f4")]), ("plain numbers",)),
        (np.array(["a", "bc"]), ("<U2", "plain numbers")),
        (np.zeros(3, "M8[s]"), ("datetime64", "plain numbers")),
        (np.zeros(3, "c8"), ("complex64", "plain numbers")),
        (np.float32(3), ("shape ()", "one or more axes")),
        (np.zeros((3, 0)), ("shape (3, 0)",)),
        (np.zeros((1,) * 10), ("shape", "at most 8")),
    ],
    ids=["fortran", "big-endian", "object", "structured", "text", "dates", "complex", "scalar", "no-tail", "10-axes"],
)
def test_what_cannot_be_used_in_place_is_refused(tmp_path: Path, array: Any, words: tuple[str, ...]) -> None:
    refused(save(tmp_path / "x.npy", array), *words, "np.save")


def test_fortran_order_of_one_axis_is_the_same_thing(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(with_header("{'descr': '<i8', 'fortran_order': True, 'shape': (3,)}"))
    assert open_foreign(str(tmp_path / "x.npy"), None).num_rows == 3


@pytest.mark.parametrize("change", [-1, 1])
def test_size_other_than_the_header_says_is_refused(tmp_path: Path, change: int) -> None:
    path = save(tmp_path / "x.npy", np.arange(5))
    path.write_bytes((path.read_bytes() + b"\x00")[: 128 + 40 + change])
    refused(path, f"{168 + change} bytes", "expected 168")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (-3,)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (4611686018427387904, 4)}",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (0, 4611686018427387904)}",
        "{'descr': ('<i8', (2,)), 'fortran_order': False, 'shape': (3,)}",
        "{'descr': (), 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '(', 'fortran_order': False, 'shape': (3,)}",
        "{'descr': '<i8', 'shape': (3,)}",
        "__import__('os').abort()",
        "(" * 900,
        "-" * 9000 + "1",
        "{" * 5 + "'",
    ],
)
def test_malformed_header_is_refused(tmp_path: Path, header: str) -> None:
    (tmp_path / "x.npy").write_bytes(with_header(header))
    refused(tmp_path / "x.npy")


@pytest.mark.filterwarnings("ignore")  # numpy warns of headers written by Python 2 and of old dtype letters
@given(data=st.data())
def test_damaged_file_is_opened_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(6, dtype=np.int16).reshape(3, 2))
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 79))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.npy"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        store = open_foreign(str(path), None)
    except MillraceError:
        return
    assert store.num_bytes <= len(content) + 16


def test_dtype_conflict_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "x.npy", np.arange(5, dtype=np.int32))
    assert open_foreign(str(path), "int32").num_rows == 5
    with pytest.raises(ConfigError, match="dtype='int64' given"):
        open_foreign(str(path), "int64")


def test_folder_of_npy_has_a_record_per_file_by_name(tmp_path: Path) -> None:
    for name, rows in (("b", 2), ("a", 3), ("C", 1)):
        save(tmp_path / f"{name}.npy", np.full((rows, 2), ord(name), np.float32))
    (tmp_path / ".DS_Store").write_bytes(b"hidden")
    store = open_foreign(str(tmp_path), None)
    assert (store.offsets.tolist(), store.num_shards, store.splits) == ([0, 1, 4, 6], 3, ())
    assert np.asarray(store.columns["values"])[:, 0].tolist() == [67, 97, 97, 97, 98, 98]
    assert store.meta["layout"] == "3 .npy of float32 [6, 2]"


@pytest.mark.parametrize("other", [np.zeros((2, 3), np.float32), np.zeros((2, 2)), np.zeros(2, np.float32)])
def test_folder_of_unlike_npy_is_refused(tmp_path: Path, other: Any) -> None:
    save(tmp_path / "a.npy", np.zeros((2, 2), np.float32))
    save(tmp_path / "b.npy", other)
    with pytest.raises(StoreCorrupt, match=r"b\.npy.*a\.npy.*same dtype"):
        open_foreign(str(tmp_path), None)


def test_folder_with_other_files_is_not_taken_for_npy(tmp_path: Path) -> None:
    save(tmp_path / "a.npy", np.zeros(2))
    (tmp_path / "labels.csv").write_text("a,b")
    with pytest.raises(MillraceError, match="no layout"):
        open_foreign(str(tmp_path), None)
