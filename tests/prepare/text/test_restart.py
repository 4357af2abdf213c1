"""Killed anywhere and continued, with any number of workers: everything but provenance.json is the same bytes."""

import errno
import os
import shutil
import subprocess
import sys
import textwrap

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
    tree_digest,
)

OPTIONS = {"tokenizer": "bytes", "part_bytes": 20_000, "shard_tokens": 15_000, "val": 0.1}

SOAK = os.environ.get("MILLRACE_SOAK")


@pytest.fixture(scope="module")
def paths(corpus):
    return [str(corpus / "a.txt"), str(corpus / "code"), str(corpus / "b.txt")]


@pytest.fixture(scope="module")
def expected(paths, memory_folder):
    """An undisturbed run."""
    out = memory_folder / "undisturbed-text"
    mr.prepare_text(paths, out, workers=1, **OPTIONS)
    assert len(list((out / "shards").iterdir())) > 5
    return tree_digest(out)


class Tiny:
    """Few documents in four parts and four shards, so that a fault can strike at every step."""

    options = {"tokenizer": "bytes", "part_bytes": 70, "shard_tokens": 80, "val": 0.5, "workers": 1}  # noqa: RUF012

    def __init__(self, folder):
        self.first, self.second, self.out = folder / "a.txt", folder / "b.txt", folder / "out"
        for path, numbers in ((self.first, range(12)), (self.second, range(6, 18))):
            path.write_text("\n\n".join(f"document {k}: " + "abc " * (k % 5) for k in numbers))

    def prepare(self, **options):
        return mr.prepare_text(str(self.first), self.out, **{**self.options, **options})

    def append(self, **options):
        return mr.prepare_text(str(self.second), self.out, append=True, **{**self.options, **options})

    def finished_parts(self):
        return len(list(self.out.with_name("out.partial").glob("parts/*[0-9a-f]/done.json")))

    def clear(self):
        for path in (self.out, self.out.with_name("out.partial")):
            if path.exists():
                shutil.rmtree(path)


def moments(steps):
    """Where to strike: at every step in a soak, else at every third, and at all of the last ones, which publish."""
    return [at for at in range(1, len(steps) + 1) if SOAK or at % 5 == 1 or at > len(steps) - 15]


def open_files():
    return [file.path for file in psutil.Process().open_files()]


@pytest.fixture
def tiny(tmp_path):
    return Tiny(tmp_path)


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_makes_the_same_bytes(paths, tmp_path, expected, workers):
    with expect_no_leaks(grace_s=20):  # others of this machine come and go in /dev/shm
        mr.prepare_text(paths, tmp_path / "out", workers=workers, **OPTIONS)
    assert tree_digest(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]


def is_manifest(name):
    """Which names the filter, that an undisturbed run did not have."""
    return name == "store.json" or name.startswith("snapshots/")


def test_kill_9_at_random_moments_changes_nothing(paths, tmp_path, expected, kill_midway):
    """MILLRACE_SOAK is the number of kills."""
    (tmp_path / "slowly.py").write_text("import time\n\ndef keep(text):\n    time.sleep(0.002)\n    return True\n")
    out = tmp_path / "out"
    script = (
        f"import millrace as mr; mr.prepare_text({paths!r}, {str(out)!r}, workers=2, filter='slowly:keep', **{OPTIONS})"
    )

    env = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    kill_midway([sys.executable, "-c", script], out, int(SOAK or 5), env)
    found = tree_digest(out)
    assert {name: found[name] for name in found if not is_manifest(name)} == {
        name: expected[name] for name in expected if not is_manifest(name)
    }
    assert mr.open_store(out, check=True).fingerprint + ".json" in os.listdir(out / "snapshots")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == ["out"]


def test_kill_9_at_every_step_continues_what_was_finished(tiny, parts_read):
    with count_steps() as steps:
        tiny.prepare()
    total, whole = len(set(parts_read)), tree_digest(tiny.out)
    assert total >= 4
    for at in moments(steps):
        tiny.clear()
        assert run_forked(tiny.prepare, fault=Fault(at, "kill")) == -9
        if not tiny.out.exists():
            with pytest.raises(mr.StoreError):
                mr.open_store(tiny.out)
        finished, is_there = tiny.finished_parts(), tiny.out.exists()
        is_named_last = (tiny.out.with_name("out.partial") / "store.json").exists()
        parts_read.clear()
        report = tiny.prepare()
        assert tree_digest(tiny.out) == whole, f"after a kill at step {at}, {steps[at - 1]}"
        assert len(parts_read) == (0 if is_there or is_named_last else total - finished), f"step {at}, {steps[at - 1]}"
        assert report.fingerprint == mr.open_store(tiny.out).fingerprint
        assert not tiny.out.with_name("out.partial").exists()


@pytest.mark.parametrize("dedup", ["exact", pytest.param("none", marks=pytest.mark.soak)])
def test_kill_9_at_every_step_of_an_append_appends_once(tiny, dedup, tmp_path):
    tiny.prepare(dedup=dedup)
    shutil.copytree(tiny.out, tmp_path / "before")
    before = mr.open_store(tiny.out).fingerprint
    with count_steps() as steps:
        tiny.append(dedup=dedup)
    after, whole = mr.open_store(tiny.out).fingerprint, tree_digest(tiny.out)
    for at in moments(steps):
        tiny.clear()
        shutil.copytree(tmp_path / "before", tiny.out)
        assert run_forked(tiny.append, fault=Fault(at, "kill"), dedup=dedup) == -9
        assert mr.open_store(tiny.out, check=True).fingerprint in (before, after)
        report = tiny.append(dedup=dedup)
        assert report.fingerprint == after
        assert tree_digest(tiny.out) == whole, f"after a kill at step {at}, {steps[at - 1]}"
        assert not tiny.out.with_name("out.partial").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_a_disk_that_fails_at_any_step_is_said_and_the_rerun_continues(tiny, code):
    with count_steps() as steps:
        tiny.prepare()
    whole = tree_digest(tiny.out)
    for at in moments(steps):
        tiny.clear()
        with pytest.raises(mr.StoreWriteFailed) as failed, iofault(at, code):
            tiny.prepare()
        assert [path for path in open_files() if str(tiny.out) in path] == []
        assert failed.value.errno == code
        assert "run the same command again" in str(failed.value)
        assert not tiny.out.exists()
        tiny.prepare()
        assert tree_digest(tiny.out) == whole, f"after {errno.errorcode[code]} at step {at}, {steps[at - 1]}"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_said_and_the_rerun_continues(paths, expected, workers):
    try:
        with small_disk(500_000) as disk:
            out = disk / "out"
            ballast = disk / "ballast"
            ballast.write_bytes(bytes(400_000))
            with pytest.raises(mr.StoreWriteFailed, match=r"No space left on device.*; free space"):
                mr.prepare_text(paths, out, workers=workers, **OPTIONS)
            assert not out.exists()
            ballast.unlink()
            grow(disk)
            mr.prepare_text(paths, out, workers=workers, **OPTIONS)
            assert tree_digest(out) == expected
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def grow(disk):

    subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)


def test_the_repeats_and_splits_of_a_run_are_found_on_a_full_disk_too(tiny, monkeypatch):
    """What is written between the parts and the shards is scratch, but its failure is the disk's too."""
    from millrace.prepare.text.dedup import repeats as dedup

    monkeypatch.setattr(dedup, "PARTITION_ENTRIES", 2)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dedup, "_partition", full)
    with pytest.raises(mr.StoreWriteFailed, match="No space left"):
        tiny.prepare()
    monkeypatch.undo()
    assert tiny.finished_parts() >= 4
    tiny.prepare()


def test_no_home_and_a_folder_that_cannot_be_written_are_no_matter(paths, tmp_path, expected):
    """cwd is /proc, where nobody can write."""

    script = textwrap.dedent(f"""
        import millrace as mr
        mr.prepare_text({paths!r}, {str(tmp_path / "out")!r}, workers=2, **{OPTIONS})
    """)
    env = {key: value for key, value in os.environ.items() if key not in ("HOME", "XDG_CACHE_HOME", "TMPDIR")}
    subprocess.run([sys.executable, "-c", script], check=True, cwd="/proc", env=env, timeout=100)
    assert tree_digest(tmp_path / "out") == expected
