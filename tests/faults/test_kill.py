"""kill -9 while a store is written: at every I/O step, and at random moments.

Before the last rename there is no store; a rerun finishes; the result is what an undisturbed run makes, byte for
byte; nothing is left.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

import millrace as mr
from millrace.store import gc
from millrace.testing import Fault, count_steps, expect_no_leaks, kill_loop, run_forked, tree_digest

from .conftest import moments

KILLED = -signal.SIGKILL


def steps_of(function, *args, **kwargs) -> int:
    with count_steps() as steps:
        function(*args, **kwargs)
    return len(steps)


def labels(store: mr.Store) -> list[str]:
    return store.columns["name"][:].tolist()


def left_beside(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir() if entry != path)


@pytest.mark.parametrize("resume", [False, True])
def test_fresh_write_killed_at_every_step(tmp_path, job, undisturbed, resume):
    out = tmp_path / "out"
    total = steps_of(job.write, tmp_path / "counted", resume=resume)
    shutil.rmtree(tmp_path / "counted")
    finished = 0
    with expect_no_leaks():
        for at in moments(total):
            assert run_forked(job.write, out, resume=resume, fault=Fault(at, "kill")) == KILLED
            if (out / "store.json").exists():
                finished += 1
                assert labels(mr.open_store(out)) == labels(mr.open_store(undisturbed.fresh))
            else:
                with pytest.raises(mr.StoreNotFound):
                    mr.open_store(out)
                job.write(out, resume=resume)
            assert tree_digest(out) == undisturbed.fresh_tree, f"killed at step {at}"
            assert left_beside(out) == [], f"killed at step {at}"
            shutil.rmtree(out)
    assert finished == 1  # only the sync of the parent folder comes after the rename that makes the store


@pytest.mark.parametrize("resume", [False, True])
def test_append_killed_at_every_step(fresh_copy, job, undisturbed, resume):
    total = steps_of(job.append, fresh_copy(), resume=resume)
    states = []
    with expect_no_leaks():
        for at in moments(total):
            out = fresh_copy()
            assert run_forked(job.append, out, resume=resume, fault=Fault(at, "kill")) == KILLED
            assert labels(mr.open_store(out, snapshot=undisturbed.old)) == labels(mr.open_store(undisturbed.fresh))
            states.append(mr.open_store(out, check=True).fingerprint)
            if states[-1] == undisturbed.old:
                job.append(out, resume=resume)
            else:
                gc.collect(out)  # the append is in the store; what it had yet to clean up goes
            assert tree_digest(out) == undisturbed.appended_tree, f"killed at step {at}"
            assert left_beside(out) == [], f"killed at step {at}"
    assert states == sorted(states, key=[undisturbed.old, undisturbed.new].index)  # one moment of commitment
    assert set(states) == {undisturbed.old, undisturbed.new}


def test_append_killed_after_its_commitment_is_not_repeated_by_resume(fresh_copy, job, undisturbed):
    """Whoever reruns with ``resume=True`` need not know whether the killed append had come through."""
    total = steps_of(job.append, fresh_copy(), resume=True)
    committed = 0
    for at in moments(total):
        out = fresh_copy()
        run_forked(job.append, out, resume=True, fault=Fault(at, "kill"))
        if mr.open_store(out).fingerprint == undisturbed.new and left_beside(out) and journal(out).exists():
            committed += 1
            job.append(out, resume=True)
            assert tree_digest(out) == undisturbed.appended_tree, f"killed at step {at}"
            assert left_beside(out) == [], f"killed at step {at}"
    assert committed >= 3


def journal(out: Path) -> Path:
    return out.with_name(f"{out.name}.partial") / "journal.jsonl"


@pytest.mark.parametrize("append", [False, True])
def test_resume_skips_what_is_durable(fresh_copy, tmp_path, job, undisturbed, append):
    """Wherever it was killed, a resumed run opens only the files of shards that were not journaled."""
    action, expected = (job.append, undisturbed.appended_tree) if append else (job.write, undisturbed.fresh_tree)

    def start() -> Path:
        return fresh_copy() if append else tmp_path / "out"

    total = steps_of(action, start(), resume=True)
    shards = len([name for name in expected if name.count("/") == 2 and name.endswith("/")])
    new_shards = shards - append * mr.open_store(undisturbed.fresh).num_shards
    most = 0
    for at in moments(total):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "out.partial", ignore_errors=True)
        out = start()
        run_forked(action, out, resume=True, fault=Fault(at, "kill"))
        if not journal(out).exists() or (append and mr.open_store(out).fingerprint == undisturbed.new):
            continue
        durable = journal(out).read_bytes().count(b"\n") - 1
        with count_steps("open") as opened:
            action(out, resume=True)
        written = {Path(path).parent.name for _, path in opened if path.split("/")[-2].endswith(".tmp")}
        assert len(written) == new_shards - durable, f"killed at step {at}"
        assert tree_digest(out) == expected, f"killed at step {at}"
        most = max(most, durable)
    assert most == new_shards


@pytest.mark.parametrize("append", [False, True])
def test_resume_writes_a_damaged_shard_again(fresh_copy, tmp_path, job, undisturbed, append):
    """One byte of any file changed, its size kept, as a disk may do to it while the writer is dead."""
    action, expected = (job.append, undisturbed.appended_tree) if append else (job.write, undisturbed.fresh_tree)
    total = steps_of(action, fresh_copy() if append else tmp_path / "counted", resume=True)
    damaged = 0
    while True:
        out = fresh_copy() if append else tmp_path / f"out-{damaged}"
        for at in range(total // 3, total):  # the first kill behind two finished shards
            run_forked(action, out, resume=True, fault=Fault(at, "kill"))
            if journal(out).read_bytes().count(b"\n") >= 3:
                break
        files = sorted((journal(out).parent / "shards").glob("*-[0-9]*[0-9]/*"))
        files = [file for file in files if file.stat().st_size]
        if damaged == len(files):
            break
        data = bytearray(files[damaged].read_bytes())
        data[len(data) // 2] ^= 1
        files[damaged].chmod(0o644)
        files[damaged].write_bytes(data)
        action(out, resume=True)
        assert tree_digest(out) == expected, files[damaged]
        damaged += 1
    assert damaged >= 4


def test_resume_after_a_torn_journal_line(tmp_path, job, undisturbed):
    out = tmp_path / "out"
    durable = 0
    for at in range(1, steps_of(job.write, tmp_path / "counted", resume=True)):
        run_forked(job.write, out, resume=True, fault=Fault(at, "kill"))
        if journal(out).exists() and journal(out).read_bytes().count(b"\n") == 3:
            break
    for cut in (1, 20):  # a torn line, and one whose end only is missing
        data = journal(out).read_bytes()
        durable = data.count(b"\n")
        journal(out).write_bytes(data[:-cut])
        assert run_forked(job.write, out, resume=True, fault=Fault(12, "kill")) == KILLED
    assert durable
    job.write(out, resume=True)
    assert tree_digest(out) == undisturbed.fresh_tree


def test_resume_writes_a_journaled_shard_again_if_it_is_damaged(tmp_path, job, undisturbed):
    """A line in the journal is not enough: the files must be there, with their sizes."""
    out = tmp_path / "out"
    at = steps_of(job.write, tmp_path / "counted", resume=True) - 12
    for damage in (shutil.rmtree, lambda shard: os.truncate(shard / "values.f32", 3)):
        run_forked(job.write, out, resume=True, fault=Fault(at, "kill"))
        shard = out.with_name("out.partial") / "shards" / "train-00001"
        damage(shard)
        job.write(out, resume=True)
        assert tree_digest(out) == undisturbed.fresh_tree
        shutil.rmtree(out)


@pytest.mark.parametrize("append", [False, True])
def test_resume_with_other_options_is_refused_and_loses_nothing(fresh_copy, tmp_path, job, undisturbed, append):
    """Also where the killed append had already moved its shards into the store."""
    out = fresh_copy() if append else tmp_path / "out"
    action, options = (job.append, {"append": True}) if append else (job.write, {"columns": job.COLUMNS})
    with count_steps() as steps:
        action(out, resume=True)
    renames = [at for at, (doing, path) in enumerate(steps, 1) if doing == "rename" and "/shards/" in path]
    shutil.rmtree(out)
    out = fresh_copy() if append else out
    assert run_forked(action, out, resume=True, fault=Fault(renames[-1] + 2, "kill")) == KILLED
    before = tree_digest(tmp_path)
    with pytest.raises(mr.ConfigError, match="was begun with other columns or options"):
        mr.StoreWriter(out, shard_bytes=99, resume=True, **options)
    left = tree_digest(tmp_path)
    assert {name for name in before if name not in left} == set()
    action(out, resume=True)
    assert tree_digest(out) == (undisturbed.appended_tree if append else undisturbed.fresh_tree)


def test_killed_at_random_moments(tmp_path, scripts, job, undisturbed_s, seed):
    """MILLRACE_SOAK is the number of kills."""
    rounds = int(os.environ.get("MILLRACE_SOAK", "5"))
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    job.write(undisturbed, records=1200)
    command = [sys.executable, str(scripts / "write_store.py"), "write", str(out), "--resume", "--records", "1200"]
    whole_s = undisturbed_s(command, out)

    def between() -> None:
        seen.append(journal(out).exists())
        if (out / "store.json").exists():
            assert tree_digest(out) == tree_digest(undisturbed)
        else:
            with pytest.raises(mr.StoreNotFound):
                mr.open_store(out)

    kills, runs, seen = 0, 0, []
    while kills < rounds and runs < rounds:
        with expect_no_leaks():
            found = kill_loop(
                command,
                rounds - kills,
                seed + runs,
                within_s=(0.2 * whole_s, whole_s),
                done=out.exists,
                between=between,
            )
        assert tree_digest(out) == tree_digest(undisturbed)
        assert left_beside(out) == ["undisturbed"]
        shutil.rmtree(out)
        kills, runs = kills + found, runs + 1
        whole_s /= 1 if found else 2  # it was measured while others were busy, and takes less now
    print(f"{kills} kills in {runs} runs, {sum(seen)} of them while shards were written")
    assert kills
