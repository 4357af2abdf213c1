"""Tokens lie on disk once: those of a part are given back when its last shard is journaled, and made anew if that is lost."""

import contextlib
import json
import os
import shutil

import pytest

import millrace as mr
from millrace.prepare.text.read import reader as reading
from millrace.store import journal
from millrace.testing import Fault, count_steps, run_forked, tree_digest

OPTIONS = {
    "tokenizer": "bytes", "part_bytes": 3000, "shard_tokens": 5000, "val": 0, "normalize": False, "mask_field": "loss"
}  # fmt: skip


@pytest.fixture
def source(tmp_path):
    with open(tmp_path / "a.jsonl", "w") as file:
        for k in range(400):
            file.write(json.dumps({"text": f"record {k} " + "abc " * (k % 30), "loss": [[0, 6]]}) + "\n")
    return str(tmp_path / "a.jsonl")


def on_disk(out, name):
    """Bytes in files of this name; other processes go on meanwhile."""
    found = 0
    for folder, _, files in os.walk(out.with_name(out.name + ".partial")):
        if name in files:
            with contextlib.suppress(FileNotFoundError):
                found += os.path.getsize(os.path.join(folder, name))
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_and_masks_hardly_lie_on_disk_twice(source, tmp_path, workers):
    out, seen = tmp_path / "out", []

    def look(stage, done, total, facts):
        if stage == "write":
            seen.append([on_disk(out, name) for name in ("tokens.bin", "mask.bin", "tokens.u16", "mask.u8")])

    mr.prepare_text(source, out, workers=workers, progress=look, **OPTIONS)
    tokens, masks = (len(mr.open_store(out).columns[name]) for name in ("tokens", "mask"))
    in_hand = (2 + workers) * OPTIONS["shard_tokens"]
    assert len(seen) > 5
    assert all(a + b // 2 <= tokens + in_hand and c + d <= masks + in_hand for a, c, b, d in seen)
    assert seen[-1] == [0, 0, 2 * tokens, masks]


def killed_while_shards_are_written(source, out):
    """The digest of an undisturbed run; of the killed one half the parts are given back."""
    with count_steps() as steps:
        mr.prepare_text(source, out, workers=1, **OPTIONS)
    whole = tree_digest(out)
    shutil.rmtree(out)
    truncations = [at for at, (what, _) in enumerate(steps, 1) if what == "truncate"]
    at = truncations[len(truncations) // 2]
    assert run_forked(mr.prepare_text, source, out, workers=1, fault=Fault(at, "kill"), **OPTIONS) == -9
    return whole


def test_a_restart_reads_no_part_again_that_was_given_back(source, tmp_path, parts_read):
    out = tmp_path / "out"
    whole = killed_while_shards_are_written(source, out)
    parts_read.clear()
    mr.prepare_text(source, out, workers=1, **OPTIONS)
    assert parts_read == []
    assert tree_digest(out) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_parts_of_a_shard_that_was_lost_since_are_made_anew(source, tmp_path, parts_read, workers):
    out = tmp_path / "out"
    whole = killed_while_shards_are_written(source, out)
    total = len(set(parts_read))
    partial = tmp_path / "out.partial"
    lost = json.loads((partial / journal.NAME).read_bytes().splitlines()[-2])
    shutil.rmtree(partial / "shards" / f"{lost['split']}-{lost['number']:05d}")
    parts_read.clear()
    report = mr.prepare_text(source, out, workers=workers, **OPTIONS)
    assert tree_digest(out) == whole
    if workers == 1:
        assert 0 < len(parts_read) < total
    assert any(f"{len(parts_read) or ''} parts were read again" in note for note in report.notes)


def test_shards_stay_where_a_part_that_one_needs_cannot_be_read_again(source, tmp_path, monkeypatch):
    out, partial, options = tmp_path / "out", tmp_path / "out.partial", {**OPTIONS, "part_bytes": 1 << 20, "workers": 1}
    with count_steps() as steps:
        mr.prepare_text(source, out, **options)
    whole = tree_digest(out)
    shutil.rmtree(out)
    last = max(at for at, (what, _) in enumerate(steps, 1) if what == "truncate")
    assert run_forked(mr.prepare_text, source, out, fault=Fault(last + 1, "kill"), **options) == -9
    shutil.rmtree(max((partial / "shards").iterdir()))

    def fail(source):
        raise mr.SourceError("it cannot be read now")

    with monkeypatch.context() as patch:
        patch.setattr(reading, "check_unchanged", fail)
        with pytest.raises(mr.SourceError, match="cannot be read now"):
            mr.prepare_text(source, out, **options)
    assert len(list((partial / "shards").iterdir())) > 3
    mr.prepare_text(source, out, **options)
    assert tree_digest(out) == whole
