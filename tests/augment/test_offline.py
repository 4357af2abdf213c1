"""millrace augment: copies of records, seeded, the same bytes for any number of workers."""

import json
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.feed.rng import RecordRng


def shaken(record, rng):
    return {**record, "hits": record["hits"] + rng.normal(*record["hits"].shape)}


@pytest.fixture
def path(tmp_path):
    columns = {
        "hits": mr.Column("float32", (2,)), "image": mr.Column("uint8", (6, 6, 3), per="record"),
        "kind": mr.Column("dictionary", per="record"), "key": mr.Column("string", per="record"),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    with mr.StoreWriter(tmp_path / "store", columns=columns, meta={"classes": ["a", "b"]}) as writer:
        for k in range(10):
            record = {
                "hits": rng.normal(size=(k % 4, 2)),
                "image": rng.integers(0, 256, (6, 6, 3)),
                "kind": "ab"[k % 2],
            }
            writer.append({**record, "key": f"key {k}"}, split="train" if k < 7 else "val")
    return tmp_path / "store"


def files_of(path):
    names = sorted(file.relative_to(path) for file in Path(path).rglob("*") if file.is_file())
    return {name: (path / name).read_bytes() for name in names if name.name != "provenance.json"}


def test_copies_are_passes_of_a_feed_and_other_splits_stay(path, tmp_path):
    options = {"copies": 3, "record": shaken, "seed": 5, "keep": True}
    result = mr.augment.augment_store(path, tmp_path / "out", workers=2, **options)
    assert result["records"] == {"train": 28, "val": 3}
    mr.augment.augment_store(path, tmp_path / "again", workers=1, **options)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "again")
    before, after = mr.open_store(path), mr.open_store(tmp_path / "out")
    old, new = mr.Records(before.split("train")), mr.Records(after.split("train"))
    for k in range(28):
        record = old[k % 7]
        expected = record if k < 7 else shaken(record, RecordRng(5, k - 7))
        assert np.abs(new[k]["hits"] - expected["hits"]).max(initial=0) < 1e-6
        assert new[k]["key"] == record["key"]
        assert new[k]["image"].tolist() == record["image"].tolist()
    assert list(after.columns["kind"][:7]) == list(before.columns["kind"][:7])
    assert after.meta["classes"] == ["a", "b"]
    assert after.split("val").columns["hits"][:].tolist() == before.split("val").columns["hits"][:].tolist()
    said = json.loads((tmp_path / "out" / "provenance.json").read_text().splitlines()[-1])
    assert said["source"] == before.fingerprint
    assert said["seed"] == 5


def test_a_copy_is_whole_in_one_task_of_several(path, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert mr.augment.augment_store(path, tmp_path / "out", copies=1, record=shaken)["records"] == {
        "train": 7,
        "val": 3,
    }


def test_the_command_changes_pixels(path, tmp_path, capsys):
    options = ["--copies", "2", "--flip", "0.5", "--crop", "1", "--color", "0.3", "--seed", "4"]
    assert run(["augment", str(path), "--out", str(tmp_path / "out"), *options, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["records"] == {"train": 14, "val": 3}
    flips = ["--copies", "1", "--flip", "1"]
    assert run(["augment", str(path), "--out", str(tmp_path / "flipped"), *flips]) == 0
    assert "train 7 records, val 3 records; fingerprint" in capsys.readouterr().out
    before, after = (mr.open_store(one).columns["image"] for one in (path, tmp_path / "flipped"))
    assert after[:7].tolist() == before[:7, :, ::-1].tolist()
    assert after[7:].tolist() == before[7:].tolist()


def test_pixels_may_be_the_one_row_of_their_record(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5, 4, 3), dtype=np.uint8)
    with mr.StoreWriter(tmp_path / "rows", columns={"image": mr.Column("uint8", (5, 4, 3))}) as writer:
        writer.extend({"image": pixels}, offsets=range(4))
    options = ["--copies", "1", "--flip", "1"]
    assert run(["augment", str(tmp_path / "rows"), "--out", str(tmp_path / "out"), *options]) == 0
    store = mr.open_store(tmp_path / "out")
    assert store.columns["image"][:].tolist() == pixels[:, :, ::-1].tolist()
    decode = mr.images.decode(size=(5, 4), crop=None, dtype="uint8", layout="hwc")
    (batch,) = mr.Feed(mr.Records(store), batch=3, epochs=1, order=mr.Sequential(3), decode=decode, device="numpy")
    assert batch.image.tolist() == pixels[:, :, ::-1].tolist()


def test_a_function_by_its_name(path, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_augment.py").write_text(
        "def double(record, rng):\n    return {**record, 'hits': record['hits'] * 2}\n"
    )
    monkeypatch.chdir(tmp_path)
    command = ["augment", str(path), "--copies", "1", "--out"]
    assert run([*command, "out", "--transform", "my_augment:double"]) == 0
    assert mr.open_store("out").columns["hits"][:9].tolist() == (mr.open_store(path).columns["hits"][:9] * 2).tolist()
    assert run([*command, "none"]) == 1
    assert "give --transform module:function, or some of --flip" in capsys.readouterr().err
    assert run([*command, "none", "--flip", "1", "--column", "hits"]) == 1
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_augmented_is_refused(path, tmp_path):
    text = tmp_path / "text"
    with mr.StoreWriter(text, kind="text", columns={"tokens": mr.Column("uint16")}) as writer:
        writer.append({"tokens": [1, 2]})
    for wrong, options, message in [
        (text, {"copies": 1, "record": shaken}, "is a text store"),
        (path, {"copies": 0, "record": shaken}, "copies=0"),
        (path, {"copies": 1}, "give record="),
        (path, {"copies": 1, "record": shaken, "split": "dev"}, "split='dev'; the store has train, val"),
        (
            path,
            {"copies": 1, "record": lambda record, rng: {"hits": record["hits"]}},
            "expected the columns of the store",
        ),
    ]:
        with pytest.raises(mr.ConfigError, match=message):
            mr.augment.augment_store(wrong, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()


def test_encoded_images_are_refused_with_the_remedy(tmp_path, capsys):
    with mr.StoreWriter(tmp_path / "files", columns={"image": mr.Column("uint8", axis="image")}) as writer:
        writer.append({"image": np.arange(9, dtype=np.uint8)})
    assert (
        run(["augment", str(tmp_path / "files"), "--out", str(tmp_path / "out"), "--copies", "1", "--flip", "1"]) != 0
    )
    assert "prepare the store with --decode N, or augment as it is fed" in capsys.readouterr().err
