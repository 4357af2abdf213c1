"""Stores and preparations of another version of millrace, whose parts were cut and kept in another way."""

import json

import numpy as np
import pytest

import millrace as mr
from millrace.prepare.text.recipe import VERSION
from millrace.prepare.text.tokens import vocabulary
from millrace.testing import tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0, "dedup": "none", "workers": 1, "document": "line"}


@pytest.fixture
def files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("".join(f"line {k} of {name}\n" for k in range(5)))
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


def made_by_another(out):
    """Rewrites what the store says of its making as if an earlier version had made it."""
    path = out / "provenance.json"
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for line in lines:
        line["plan"]["version"], line["plan"]["options"]["part_bytes"] = VERSION - 1, 12345
    path.chmod(0o644)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_a_finished_store_of_another_version_is_the_same_store(files, tmp_path):
    out = tmp_path / "out"
    made = mr.prepare_text(files, out, **OPTIONS)
    made_by_another(out)
    again = mr.prepare_text(files, out, **OPTIONS)
    assert (again.is_new, again.fingerprint, again.documents) == (False, made.fingerprint, made.documents)
    assert not mr.prepare_text(files, out, part_bytes=100, **OPTIONS).is_new
    with pytest.raises(mr.ConfigError, match="normalize was true, now false"):
        mr.prepare_text(files, out, normalize=False, **OPTIONS)


def test_an_append_of_another_version_is_not_done_again(files, tmp_path):
    out = tmp_path / "out"
    mr.prepare_text(files[:1], out, **OPTIONS)
    appended = mr.prepare_text(files[1:], out, append=True, workers=1)
    made_by_another(out)
    for part_bytes in ({}, {"part_bytes": 100}):
        again = mr.prepare_text(files[1:], out, append=True, workers=1, **part_bytes)
        assert (again.is_new, again.fingerprint) == (False, appended.fingerprint)
    assert mr.open_store(out).num_records == 10


def test_a_preparation_that_another_version_began_is_told_apart(files, tmp_path):
    partial = tmp_path / "out.partial"
    with pytest.raises(mr.ConfigError, match="would be empty"):
        mr.prepare_text(files, tmp_path / "out", **{**OPTIONS, "val": 1e-9})
    plan = json.loads((partial / "plan.json").read_bytes())
    (partial / "plan.json").write_text(json.dumps({**plan, "version": VERSION - 1}))
    with pytest.raises(
        mr.ConfigError, match=r"out\.partial was begun by another version .* begin afresh with restart=True"
    ):
        mr.prepare_text(files, tmp_path / "out", **OPTIONS)
    assert list((partial / "parts").glob("*/done.json")), "what was read is kept"


def test_a_learnt_vocabulary_does_not_depend_on_how_parts_are_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabulary, "TRAIN_BYTES", 300_000)
    monkeypatch.setattr(vocabulary, "SLICE_BYTES", 100_000)
    rng = np.random.default_rng(0)
    with open(tmp_path / "a.txt", "w") as file:
        for k in range(20_000):  # words that change along the file
            words = rng.integers(k // 20, k // 20 + 50, 8)
            file.write(" ".join(f"word{n * n}" for n in words) + "\n")
    options = {**OPTIONS, "tokenizer": "train:400"}
    digests = []
    for part_bytes in (50_000, 400_000, 16 << 20):
        out = tmp_path / f"out{part_bytes}"
        mr.prepare_text(str(tmp_path / "a.txt"), out, part_bytes=part_bytes, **options)
        digests.append(tree_digest(out))
    assert digests[0] == digests[1] == digests[2]
