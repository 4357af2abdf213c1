"""Killed anywhere and continued, with any number of workers: everything but provenance.json is the same bytes."""

import errno
import os
import shutil
import subprocess
import sys
import threading
import time

import psutil
import pytest

import millrace as mr
from millrace.testing import (
    Fault,
    NotPossibleHere,
    count_steps,
    expect_no_leaks,
    iofault,
    run_forked,
    small_disk,
    stopped,
    tree_digest,
)

SOAK = os.environ.get("MILLRACE_SOAK")


@pytest.fixture(scope="module")
def source(kind, tmp_path_factory):
    return kind.write(tmp_path_factory.mktemp("whole") / "in")


@pytest.fixture(scope="module")
def expected(kind, source, tmp_path_factory):
    """An undisturbed run with one worker."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    kind.prepare(source, out, workers=1, **kind.options)
    assert len(list((out / "shards").iterdir())) > 4
    return tree_digest(out)


def moments(steps):
    """Where to strike: at every step in a soak, else at about 15 of them, and at all of the last ones, which publish."""
    each = 1 if SOAK else max(5, len(steps) // 15)
    return [at for at in range(1, len(steps) + 1) if at % each == 1 % each or at > len(steps) - 15]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_makes_the_same_bytes(kind, source, tmp_path, expected, workers):
    with expect_no_leaks(grace_s=20):  # others of this machine come and go in /dev/shm
        report = kind.prepare(source, tmp_path / "out", workers=workers, **kind.options)
    assert tree_digest(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]
    assert report.fingerprint == mr.open_store(tmp_path / "out", check=True).fingerprint


def test_kill_9_at_every_step_continues_what_was_finished(tiny, parts_read):
    with count_steps() as steps:
        report = tiny.prepare()
    total, whole = len(set(parts_read)), tree_digest(tiny.out)
    assert total >= 3
    for at in moments(steps):
        tiny.clear()
        assert run_forked(tiny.prepare, fault=Fault(at, "kill")) == -9
        if not tiny.out.exists():
            with pytest.raises(mr.StoreError):
                mr.open_store(tiny.out)
        finished, is_there = tiny.finished_parts(), tiny.out.exists()
        is_named_last = (tiny.partial / "store.json").exists()
        parts_read.clear()
        again = tiny.prepare()
        where = f"after a kill at step {at}, {steps[at - 1]}"
        assert tree_digest(tiny.out) == whole, where
        assert len(parts_read) == (0 if is_there or is_named_last else total - finished), where
        assert again.fingerprint == report.fingerprint == mr.open_store(tiny.out).fingerprint
        assert (again.shards, again.dropped) == (report.shards, report.dropped), where
        assert not tiny.partial.exists()


def test_kill_9_at_every_step_of_an_append_appends_once(tiny, tmp_path):
    tiny.prepare()
    shutil.copytree(tiny.out, tmp_path / "before")
    before = mr.open_store(tiny.out).fingerprint
    with count_steps() as steps:
        tiny.append()
    after, whole = mr.open_store(tiny.out).fingerprint, tree_digest(tiny.out)
    assert before != after
    for at in moments(steps):
        tiny.clear()
        shutil.copytree(tmp_path / "before", tiny.out)
        assert run_forked(tiny.append, fault=Fault(at, "kill")) == -9
        assert mr.open_store(tiny.out, check=True).fingerprint in (before, after)
        assert tiny.append().fingerprint == after
        assert tree_digest(tiny.out) == whole, f"after a kill at step {at}, {steps[at - 1]}"
        assert not tiny.partial.exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_a_disk_that_fails_at_any_step_is_said_and_the_rerun_continues(tiny, code):
    with count_steps() as steps:
        tiny.prepare()
    whole = tree_digest(tiny.out)
    for at in moments(steps):
        tiny.clear()
        with pytest.raises(mr.StoreWriteFailed) as failed, iofault(at, code):
            tiny.prepare()
        assert [file.path for file in psutil.Process().open_files() if str(tiny.out) in file.path] == []
        assert failed.value.errno == code
        assert "run the same command again" in str(failed.value)
        assert not tiny.out.exists()
        tiny.prepare()
        assert tree_digest(tiny.out) == whole, f"after {errno.errorcode[code]} at step {at}, {steps[at - 1]}"


@pytest.mark.parametrize(
    "kind", ["text", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("table", "records"))], indirect=True
)
def test_kill_9_at_random_moments_changes_nothing(
    kind, source, tmp_path, expected, kill_midway, user_functions, program
):
    """MILLRACE_SOAK is the number of kills. The manifest names the function, which an undisturbed run did not have."""
    out = tmp_path / "out"
    options = {**kind.options, "workers": 2, kind.function: "user_functions:slow"}
    kill_midway(program(kind, source, out, **options), out, int(SOAK or 2))
    shards = {name: digest for name, digest in tree_digest(out).items() if name.startswith("shards")}
    assert shards == {name: digest for name, digest in expected.items() if name.startswith("shards")}
    assert mr.open_store(out, check=True).fingerprint + ".json" in os.listdir(out / "snapshots")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_said_and_the_rerun_continues(kind, source, expected, workers):
    try:
        with small_disk(kind.disk_bytes) as disk:
            out, ballast = disk / "out", disk / "ballast"
            ballast.write_bytes(bytes(kind.ballast_bytes))
            with pytest.raises(mr.StoreWriteFailed, match=r"No space left on device.*; free space"):
                kind.prepare(source, out, workers=workers, **kind.options)
            assert not out.exists()
            ballast.unlink()
            subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
            kind.prepare(source, out, workers=workers, **kind.options)
            assert tree_digest(out) == expected
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def test_a_second_writer_is_refused_also_while_the_first_stands_still(kind, source, tmp_path, user_functions, program):
    out, options = tmp_path / "out", {**kind.options, "workers": 1, kind.function: "user_functions:held"}
    user_functions.touch()
    with subprocess.Popen(program(kind, source, out, **options)) as first:
        while not list(out.with_name("out.partial").glob("parts/*.tmp")):
            assert first.poll() is None
            time.sleep(0.01)
        user_functions.unlink()
        with stopped(first.pid), pytest.raises(mr.StoreLocked, match=rf"process {first.pid}"):
            kind.prepare(source, out, **options)
    assert first.returncode == 0
    assert mr.open_store(out, check=True).num_records > 0


def test_a_finished_output_is_complete_and_other_options_are_refused_with_the_difference(tiny):
    first, before = tiny.prepare(), tree_digest(tiny.out)
    again = tiny.prepare()
    assert (again.is_new, again.fingerprint, again.shards) == (False, first.fingerprint, first.shards)
    options, said = tiny.kind.other
    with pytest.raises(mr.ConfigError, match=rf"is finished, but with other .*{said}; choose another out="):
        tiny.prepare(**options)
    path = tiny.first if os.path.isfile(tiny.first) else f"{tiny.first}/1.parquet"
    os.utime(path, ns=(1, 1))
    with pytest.raises(mr.ConfigError, match=r"' was last written 20.* UTC, now 1970-01-01 00:00:00"):
        tiny.prepare()
    assert tree_digest(tiny.out) == before
    assert not tiny.partial.exists()


def test_a_part_that_lost_bytes_is_read_again(tiny, parts_read):
    with count_steps() as steps:
        tiny.prepare()
    whole, first_shard = tree_digest(tiny.out), next(k for k, step in enumerate(steps, 1) if "/shards/" in step[1])
    tiny.clear()
    assert run_forked(tiny.prepare, fault=Fault(first_shard, "kill")) == -9
    os.truncate(sorted(tiny.partial.glob(f"parts/*/{tiny.kind.part_file}"))[1], 8)
    parts_read.clear()
    tiny.prepare()
    assert len(parts_read) == 1
    assert tree_digest(tiny.out) == whole


def test_what_killed_workers_left_is_removed_when_the_next_run_begins(tiny, monkeypatch):
    with count_steps() as steps:
        tiny.prepare()
    tiny.clear()
    writes = [k for k, (what, path) in enumerate(steps, 1) if what == "write" and "/parts/" in path]
    assert run_forked(tiny.prepare, fault=Fault(writes[len(writes) // 2], "kill")) == -9
    assert len(list(tiny.partial.glob("parts/*.tmp"))) == 1
    with pytest.raises(ZeroDivisionError):
        tiny.prepare(progress=lambda stage, *_: 1 / 0 if stage == "read" else None)
    assert list(tiny.partial.rglob("*.tmp")) == []


def test_an_output_that_is_in_the_way_is_refused_before_any_work(tiny, parts_read):
    tiny.out.mkdir()
    (tiny.out / "mine.txt").write_text("precious")
    with pytest.raises(mr.ConfigError, match="exists and is not empty; choose another path"):
        tiny.prepare()
    assert (tiny.out / "mine.txt").read_text() == "precious"
    assert not tiny.partial.exists()
    shutil.rmtree(tiny.out)
    tiny.out.write_text("a file")
    with pytest.raises(mr.ConfigError, match="is a file; a store is a folder"):
        tiny.prepare()
    assert parts_read == []


def test_no_home_and_a_folder_that_cannot_be_written_are_no_matter(kind, source, tmp_path, expected, program):
    """cwd is /proc, where nobody can write."""
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = program(kind, source, tmp_path / "out", workers=2, **kind.options)
    subprocess.run(command, check=True, cwd="/proc", env=env, timeout=100)
    assert tree_digest(tmp_path / "out") == expected


def test_every_note_is_shown_once_and_kept_in_the_report(tiny):
    """Also those of what was left out, and of a run that was begun before."""
    with pytest.raises(ZeroDivisionError):
        tiny.prepare(progress=lambda stage, done, *_: 1 / 0 if stage == "read" and done else None)
    shown = []
    report = tiny.prepare(
        exclude=["no such file"], progress=lambda *call: shown.append(call[3]["note"]) if call[0] == "note" else None
    )
    assert len(set(shown)) == len(shown) >= 2
    assert shown == report.notes


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_store_that_is_whole_but_for_its_name_outlives_a_failure_to_name_it(tiny, parts_read, is_killed):
    """A rename that fails; also after a kill just before it, when the next run has nothing else to do."""
    with count_steps() as steps:
        tiny.prepare()
    whole = tree_digest(tiny.out)
    name_it = max(k for k, (what, path) in enumerate(steps, 1) if what == "rename")
    tiny.clear()
    if is_killed:
        assert run_forked(tiny.prepare, fault=Fault(name_it, "kill")) == -9
        shutil.copytree(tiny.partial, tiny.partial.with_name("copy"))
        with count_steps() as steps:
            tiny.prepare()
        name_it = 1 + [what for what, _ in steps].index("rename")
        shutil.rmtree(tiny.out)
        tiny.partial.with_name("copy").rename(tiny.partial)
    with pytest.raises(mr.StoreWriteFailed, match="run the same command again"), iofault(name_it, errno.EIO):
        tiny.prepare()
    assert (tiny.partial / "store.json").exists()
    parts_read.clear()
    tiny.prepare()
    assert parts_read == []
    assert tree_digest(tiny.out) == whole


def test_no_task_runs_on_when_an_error_has_reached_the_caller(kind, source, tmp_path):
    def fail(stage, done, *_):
        if stage == "read" and done:
            raise ZeroDivisionError

    try:
        kind.prepare(source, tmp_path / "out", workers=3, progress=fail, **kind.options)
    except ZeroDivisionError:  # here, where the traceback holds every frame of the run
        assert [thread.name for thread in threading.enumerate() if thread.name.startswith("millrace-prepare")] == []
        assert [child.cmdline() for child in psutil.Process().children() if "spawn_main" in str(child.cmdline())] == []
    else:
        pytest.fail("nothing was read")
