"""What only a preparation of text has between its parts and its shards; tests/contract has what all kinds promise."""

import errno
import functools
import shutil

import pytest

import millrace as mr
from millrace.prepare.text.dedup import repeats
from millrace.testing import Fault, count_steps, run_forked, tree_digest

OPTIONS = {"tokenizer": "bytes", "part_bytes": 70, "shard_tokens": 80, "val": 0.5, "workers": 1}


def test_the_repeats_and_splits_of_a_run_are_found_on_a_full_disk_too(tmp_path, monkeypatch):
    """What is written between the parts and the shards is scratch, but its failure is the disk's too."""
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {k}: " + "abc " * (k % 5) for k in range(12)))
    prepare = functools.partial(mr.prepare_text, str(tmp_path / "a.txt"), tmp_path / "out", **OPTIONS)
    monkeypatch.setattr(repeats, "PARTITION_ENTRIES", 2)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(repeats, "_partition", full)
    with pytest.raises(mr.StoreWriteFailed, match="No space left"):
        prepare()
    monkeypatch.undo()
    assert len(list(tmp_path.glob("out.partial/parts/*/done.json"))) >= 4
    prepare()


@pytest.mark.soak
def test_kill_9_at_every_step_of_an_append_without_deduplication_appends_once(tmp_path):
    for name, numbers in (("a", range(12)), ("b", range(6, 18))):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(f"document {k}: " + "abc " * (k % 5) for k in numbers))
    options, out = {**OPTIONS, "dedup": "none"}, tmp_path / "out"
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "before", **options)
    shutil.copytree(tmp_path / "before", out)
    append = functools.partial(mr.prepare_text, str(tmp_path / "b.txt"), out, append=True, **options)
    with count_steps() as steps:
        append()
    whole = tree_digest(out)
    for at in range(1, len(steps) + 1):
        shutil.rmtree(out)
        shutil.copytree(tmp_path / "before", out)
        assert run_forked(append, fault=Fault(at, "kill")) == -9
        append()
        assert tree_digest(out) == whole, f"after a kill at step {at}, {steps[at - 1]}"
