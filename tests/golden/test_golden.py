"""The golden store, as it was written once: version 1 of the format is what these bytes and values are."""

import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

import millrace as mr

HERE = Path(__file__).parent
MAKE = runpy.run_path(str(HERE / "make.py"))

FIRST, SECOND = "5281d9767a906de0ff7422d14f758d7d", "1464ce8e9ab617c146d179c7413a4483"
SPLITS = {
    FIRST: {"train": "927adbcce4cfc325bb876eae6773541d", "val": "fd7986b86ee5d8c67eb6366fdbcd49a6"},
    SECOND: {"train": "fdad705ffe916f6f62e9a9b383aca443", "val": "20b4dfa59821003e5b5110d7b69074be"},
}

# Of the second snapshot: records 0, 1, 2, 4 are train and 3 is val. Floats by their bits.
TRAIN = {
    "int8": [-128, 127, 0, 1, 2, 100, 126],
    "uint8": [0, 255, 0, 1, 2, 100, 254],
    "int16": [-32768, 32767, 0, 1, 2, 100, 32766],
    "uint16": [0, 65535, 0, 1, 2, 100, 65534],
    "int32": [-2147483648, 2147483647, 0, 1, 2, 100, 2147483646],
    "uint32": [0, 4294967295, 0, 1, 2, 100, 4294967294],
    "int64": [-9223372036854775808, 9223372036854775807, 0, 1, 2, 100, 9223372036854775806],
    "uint64": [0, 18446744073709551615, 0, 1, 2, 100, 18446744073709551614],
    "float16": [0x0000, 0x8000, 0x3C00, 0xC000, 0x7BFF, 0x7C00, 0x7E01],
    "bfloat16": [0x0000, 0x8000, 0x3F80, 0xC000, 0x7F80, 0x7F80, 0x7FC0],
    "float32": [
        [0x00000000, 0x00000000], [0x80000000, 0x00000000], [0x3F800000, 0x00000000], [0xC0000000, 0x40000000],
        [0x7F7FFFFF, 0x40000000], [0x7F800000, 0x40800000], [0x7FC00001, 0x40800000],
    ],
    "float64": [
        0x0000000000000000, 0x8000000000000000, 0x3FF0000000000000, 0xC000000000000000, 0x7FEFFFFFFFFFFFFF,
        0x7FF0000000000000, 0x7FF0000000000001,
    ],
    "bool": [False, True, False, False, True, False, True],
    "word": ["rye", "", "rye", "Öl", "麦", "Öl", "a b"],
    "pixels": [0, 31, 62, 93, 124, 186, 217, 248],
    "label": [[0, -(2**62)], [1, -(2**62) + 1], [2, -(2**62) + 2], [4, -(2**62) + 4]],
    "weight": [0x00000000, 0x3DCCCCCD, 0x3E4CCCCD, 0x3ECCCCCD],
    "city": ["Ulm", "Bern", "Ulm", "Genf"],
    "key": ["first", "", "drei – 三", "later"],
}  # fmt: skip
VAL = {
    **{name: [3] for name in TRAIN if "int" in name},
    "float16": [0x0001],
    "bfloat16": [0x0000],
    "float32": [[0x00000001, 0x40400000]],
    "float64": [0x0000000000000001],
    "bool": [False],
    "word": ["rye"],
    "pixels": [155],
    "label": [[3, -(2**62) + 3]],
    "weight": [0x3E99999A],
    "city": ["Bern"],
    "key": ["val"],
}
OFFSETS = {
    ("train", "rows"): [0, 3, 3, 5, 7],
    ("train", "image"): [0, 0, 4, 5, 8],
    ("train", "key"): [0, 5, 5, 17, 22],
    ("val", "rows"): [0, 1],
    ("val", "image"): [0, 1],
    ("val", "key"): [0, 3],
}
DIGESTS = {
    "hashes-0ac04abadae518f5.bin": "01564c8f7ac39712",
    "hashes.bin": "43bfc1e3c4d0dd66",
    "shards/train-00000/bfloat16.bf16": "afe9af61e274dd96",
    "shards/train-00000/bool.bool": "faee935763044f12",
    "shards/train-00000/city.i32": "01acecb507abfe1a",
    "shards/train-00000/float16.f16": "27a0043a913203d7",
    "shards/train-00000/float32.f32": "3961d4d04811b9aa",
    "shards/train-00000/float64.f64": "ab7f3c534b92e0d0",
    "shards/train-00000/int16.i16": "db00561eb47f3b20",
    "shards/train-00000/int32.i32": "28a8c334b717d469",
    "shards/train-00000/int64.i64": "277cd1ec2fe22032",
    "shards/train-00000/int8.i8": "ff4517ea35766ecf",
    "shards/train-00000/key.utf8": "a7937b64b8caa58f",
    "shards/train-00000/label.i64": "584c2e21352156c7",
    "shards/train-00000/offsets.i64": "9fbc253b855c7eb2",
    "shards/train-00000/offsets.image.i64": "aefbdb1098288d5d",
    "shards/train-00000/offsets.key.i64": "c1c0a5e6ae6feffa",
    "shards/train-00000/pixels.u8": "0828fbe8068521d9",
    "shards/train-00000/uint16.u16": "2ac99bb2904d92c5",
    "shards/train-00000/uint32.u32": "8af5bb32e48fb1b4",
    "shards/train-00000/uint64.u64": "6232749f35aab1b1",
    "shards/train-00000/uint8.u8": "2c8d07cd986f58eb",
    "shards/train-00000/weight.f32": "5a1dfa10657e0a21",
    "shards/train-00000/word.i32": "31190090408f837a",
    "shards/train-00001/bfloat16.bf16": "9bf5f93062061b58",
    "shards/train-00001/bool.bool": "b413f47d13ee2fe6",
    "shards/train-00001/city.i32": "df3f619804a92fdb",
    "shards/train-00001/float16.f16": "55f9544c78a9df45",
    "shards/train-00001/float32.f32": "12506fe62a4cc7c1",
    "shards/train-00001/float64.f64": "7f516fc658a5fb2f",
    "shards/train-00001/int16.i16": "7b11c1133330cd16",
    "shards/train-00001/int32.i32": "34fb5c825de7ca4a",
    "shards/train-00001/int64.i64": "0c730b69905c5ef7",
    "shards/train-00001/int8.i8": "a12871fee210fb86",
    "shards/train-00001/key.utf8": "ed5eb002acfe88cb",
    "shards/train-00001/label.i64": "82d918627047c7e6",
    "shards/train-00001/offsets.i64": "c571327cb01ac1de",
    "shards/train-00001/offsets.image.i64": "9d34149fbd1fe777",
    "shards/train-00001/offsets.key.i64": "df065f4871e06699",
    "shards/train-00001/pixels.u8": "cbe5cfdf7c2118a9",
    "shards/train-00001/uint16.u16": "7b11c1133330cd16",
    "shards/train-00001/uint32.u32": "34fb5c825de7ca4a",
    "shards/train-00001/uint64.u64": "0c730b69905c5ef7",
    "shards/train-00001/uint8.u8": "a12871fee210fb86",
    "shards/train-00001/weight.f32": "5d96a77c55b4ac1e",
    "shards/train-00001/word.i32": "0c40fc912bea3d01",
    "shards/train-00002/bfloat16.bf16": "b83459e1034245f9",
    "shards/train-00002/bool.bool": "b413f47d13ee2fe6",
    "shards/train-00002/city.i32": "26b25d457597a7b0",
    "shards/train-00002/float16.f16": "7f99d0d01e15c528",
    "shards/train-00002/float32.f32": "b4007bf89d00ec60",
    "shards/train-00002/float64.f64": "26d438e3c3e7a431",
    "shards/train-00002/int16.i16": "95f7a04a36c75039",
    "shards/train-00002/int32.i32": "0b19722ffcca476f",
    "shards/train-00002/int64.i64": "a1a9f79cce732738",
    "shards/train-00002/int8.i8": "364a4e7fb6f5d836",
    "shards/train-00002/key.utf8": "1d9283d848ea941a",
    "shards/train-00002/label.i64": "738552e25fa4fbac",
    "shards/train-00002/offsets.i64": "c571327cb01ac1de",
    "shards/train-00002/offsets.image.i64": "96fb5e4a2704b410",
    "shards/train-00002/offsets.key.i64": "b15c0825f56c18d8",
    "shards/train-00002/pixels.u8": "66de25d43733a8b9",
    "shards/train-00002/uint16.u16": "9f5915c0a9c222e4",
    "shards/train-00002/uint32.u32": "ccb8f6aee023c88d",
    "shards/train-00002/uint64.u64": "d128e245e9b61684",
    "shards/train-00002/uint8.u8": "68ffc8748a5f17f0",
    "shards/train-00002/weight.f32": "e0fb2d87992a9fc7",
    "shards/train-00002/word.i32": "5821e0d4c400650d",
    "shards/val-00000/bfloat16.bf16": "96a296d224f285c6",
    "shards/val-00000/bool.bool": "6e340b9cffb37a98",
    "shards/val-00000/city.i32": "67abdd721024f0ff",
    "shards/val-00000/float16.f16": "47dc540c94ceb704",
    "shards/val-00000/float32.f32": "9c4c0f3b19ce19f9",
    "shards/val-00000/float64.f64": "7c9fa136d4413fa6",
    "shards/val-00000/int16.i16": "9b4fb24edd6d1d88",
    "shards/val-00000/int32.i32": "9d9f290527a6be62",
    "shards/val-00000/int64.i64": "35be322d094f9d15",
    "shards/val-00000/int8.i8": "084fed08b978af4d",
    "shards/val-00000/key.utf8": "97dfc65f74283f60",
    "shards/val-00000/label.i64": "045e8233fc229109",
    "shards/val-00000/offsets.i64": "9d34149fbd1fe777",
    "shards/val-00000/offsets.image.i64": "9d34149fbd1fe777",
    "shards/val-00000/offsets.key.i64": "96fb5e4a2704b410",
    "shards/val-00000/pixels.u8": "8d36bbb3d6fbf24f",
    "shards/val-00000/uint16.u16": "9b4fb24edd6d1d88",
    "shards/val-00000/uint32.u32": "9d9f290527a6be62",
    "shards/val-00000/uint64.u64": "35be322d094f9d15",
    "shards/val-00000/uint8.u8": "084fed08b978af4d",
    "shards/val-00000/weight.f32": "45a6d738a7607576",
    "shards/val-00000/word.i32": "df3f619804a92fdb",
    "shards-576518f9770eda80.bin": "461653b2ae6cdd35",
    "shards.bin": "fbbaba00bb347564",
    "snapshots/1464ce8e9ab617c146d179c7413a4483.json": "7fcf16b97cc931a2",
    "snapshots/5281d9767a906de0ff7422d14f758d7d.json": "56df0a1b190a145a",
    "store.json": "7fcf16b97cc931a2",
}


def shown(column) -> list:
    """Values, and the bits of floats."""
    values = np.asarray(getattr(column, "raw", column) if column.dtype != object else column)
    return (values.view(f"u{values.dtype.itemsize}") if values.dtype.kind == "f" else values).tolist()


def test_every_file_has_the_bytes_it_had():
    assert MAKE["digests"](HERE / "store") == DIGESTS


@pytest.mark.parametrize(("split", "expected"), [("train", TRAIN), ("val", VAL)])
def test_every_value_is_what_was_written(split, expected):
    part = mr.open_store(HERE / "store", check=True).split(split)
    assert {name: shown(column) for name, column in part.columns.items()} == expected
    assert {axis: part.axis_offsets(axis).tolist() for axis in part.axes} == {
        axis: OFFSETS[split, axis] for axis in ("rows", "image", "key")
    }


def test_the_dtypes_are_those_of_the_columns():
    store = mr.open_store(HERE / "store")
    assert store.layout.columns == {
        **MAKE["COLUMNS"],
        "word": mr.Column("dictionary", values=("rye", "", "Öl", "麦", "a b")),
        "city": mr.Column("dictionary", per="record", values=("Ulm", "Bern", "Genf")),
    }
    assert store.columns["bfloat16"].dtype == np.float32
    assert store.columns["word"].codes[:].tolist() == [0, 1, 0, 2, 3, 0, 2, 4]


def test_both_snapshots_open_with_their_fingerprints():
    now = mr.open_store(HERE / "store")
    before = mr.open_store(HERE / "store", snapshot=FIRST)
    assert (before.fingerprint, now.fingerprint) == (FIRST, SECOND)
    assert (before.num_records, before.num_rows, before.num_shards) == (4, 6, 3)
    assert (now.num_records, now.num_rows, now.num_shards) == (5, 8, 4)
    assert (before.meta, now.meta) == ({"golden": 1}, {"golden": 2})
    assert (now.kind, now.splits, now.axes, now.cuts) == ("records", ("train", "val"), ("rows", "image", "key"), None)
    for store in (before, now):
        assert {name: store.split(name).fingerprint for name in store.splits} == SPLITS[store.fingerprint]
        assert store.split("val").columns["key"][0] == "val"
    assert before.split("train").columns["key"][:].tolist() == TRAIN["key"][:3]


def test_reading_needs_neither_provenance_nor_permissions(tmp_path):
    assert not (HERE / "store" / "provenance.json").exists()
    shutil.copytree(HERE / "store", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*"):
        path.chmod(0o777)
    assert mr.open_store(tmp_path / "copy", check=True).fingerprint == SECOND


def test_written_anew_it_is_the_same_to_the_byte(tmp_path):
    assert MAKE["write"](tmp_path / "store") == [FIRST, SECOND]
    assert MAKE["digests"](tmp_path / "store") == DIGESTS
