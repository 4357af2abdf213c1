"""verify finds any flipped bit, and says which shard, file, block and records it is in."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.store.layout import BLOCK_BYTES
from millrace.store.verify import verify_store


def flip(path: Path, byte: int, bit: int) -> None:
    os.chmod(path, 0o644)
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def write_store(path: Path) -> Path:
    columns = {
        "x": mr.Column("float32", (2,)),
        "key": mr.Column("string", per="record"),
        "label": mr.Column("int16", per="record"),
    }
    with mr.StoreWriter(path, columns=columns, shard_bytes=300, meta={"note": "of no matter"}) as writer:
        for k in range(20):
            writer.append({"x": np.full((k, 2), k), "key": f"é{k}", "label": k}, split="val" if k % 4 == 0 else "train")
    with mr.StoreWriter(path, append=True) as writer:
        writer.append({"x": np.zeros((3, 2)), "key": "late", "label": -1})
    return path


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("verify") / "store")


@pytest.fixture(scope="module")
def checked_files(original: Path) -> list[str]:
    """Every file with a byte in it, but provenance, which is outside the fingerprint."""
    found = [path for path in original.rglob("*") if path.is_file() and path.stat().st_size]
    return sorted(str(path.relative_to(original)) for path in found if path.name != "provenance.json")


def test_an_untouched_store_has_no_damage(original: Path) -> None:
    report = verify_store(original)
    assert report.damage == []
    assert report.snapshots == 2
    assert report.bytes == mr.open_store(original).num_bytes


@given(data=st.data())
def test_any_flipped_bit_is_found_in_its_file(original: Path, checked_files: list[str], tmp_path_factory, data) -> None:
    copy = tmp_path_factory.mktemp("flip") / "store"
    shutil.copytree(original, copy)
    name = data.draw(st.sampled_from(checked_files))
    path = copy / name
    flip(path, data.draw(st.integers(0, path.stat().st_size - 1)), data.draw(st.integers(0, 7)))
    try:
        named = [damage.path for damage in verify_store(copy).damage]
    except mr.StoreError as error:  # the manifest itself is beyond telling what should be there
        named = [str(error)]
    assert any(name in text or (name == "store.json" and "store.json" in text) for text in named), (name, named)
    shutil.rmtree(copy)


def test_a_flip_in_an_old_snapshots_manifest_is_found(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "store")
    current = mr.open_store(tmp_path / "store").fingerprint
    old = next(path for path in (tmp_path / "store" / "snapshots").iterdir() if path.stem != current)
    data = old.read_bytes()
    flip(old, data.index(b"of no matter"), 0)
    assert [Path(damage.path).name for damage in verify_store(tmp_path / "store").damage] == [old.name]


def test_damage_is_located_to_block_and_records(tmp_path: Path) -> None:
    rows_per_record = 1000
    with mr.StoreWriter(tmp_path / "s", columns={"t": mr.Column("uint16")}) as writer:
        rows = np.zeros(3 * BLOCK_BYTES // 2 // rows_per_record * rows_per_record, np.uint16)
        writer.extend({"t": rows}, np.arange(0, len(rows) + 1, rows_per_record))
    byte = BLOCK_BYTES + 12_345
    flip(tmp_path / "s" / "shards" / "train-00000" / "t.u16", byte, 3)
    (damage,) = verify_store(tmp_path / "s").damage
    assert (damage.shard, damage.block, damage.bytes) == ("train-00000", 1, (BLOCK_BYTES, 2 * BLOCK_BYTES))
    assert damage.records is not None
    first, last = damage.records
    assert first * rows_per_record * 2 <= BLOCK_BYTES < (first + 1) * rows_per_record * 2
    assert (last - 1) * rows_per_record * 2 < 2 * BLOCK_BYTES <= last * rows_per_record * 2
    assert first <= byte // 2 // rows_per_record < last


def test_damage_in_a_record_column_names_its_records(tmp_path: Path) -> None:
    columns = {"t": mr.Column("uint8"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(tmp_path / "s", columns=columns) as writer:
        writer.extend({"t": np.zeros(10, np.uint8), "label": np.arange(5)}, [0, 2, 4, 6, 8, 10])
    flip(tmp_path / "s" / "shards" / "train-00000" / "label.i64", 17, 0)
    (damage,) = verify_store(tmp_path / "s").damage
    assert damage.records == (0, 5)


@pytest.mark.parametrize("how", ["missing", "short", "long"])
def test_a_file_of_another_size_is_damage_not_an_exception(original: Path, tmp_path: Path, how: str) -> None:
    shutil.copytree(original, tmp_path / "store")
    path = tmp_path / "store" / "shards" / "train-00001" / "x.f32"
    os.chmod(path, 0o644)
    if how == "missing":
        path.unlink()
    else:
        os.truncate(path, path.stat().st_size + (8 if how == "long" else -1))
    assert [(damage.shard, damage.path) for damage in verify_store(tmp_path / "store").damage] == [
        ("train-00001", str(path))
    ]


def test_a_missing_shard_is_one_damage(original: Path, tmp_path: Path) -> None:
    shutil.copytree(original, tmp_path / "store")
    folder = tmp_path / "store" / "shards" / "train-00001"
    shutil.rmtree(folder)
    assert [damage.path for damage in verify_store(tmp_path / "store").damage] == [str(folder)]


def test_progress_adds_up_to_every_byte(original: Path) -> None:
    seen: list[int] = []
    report = verify_store(original, workers=3, progress=seen.append)
    assert sum(seen) == report.bytes
