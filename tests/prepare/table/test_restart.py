"""Killed anywhere and continued, with any number of workers: everything but provenance.json is the same bytes."""

import errno
import os
import shutil
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import psutil
import pytest

import millrace as mr
from millrace.prepare.table.read import part, sources
from millrace.prepare.table.settle import fit
from millrace.prepare.table.write import shards
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
SIZES = {"PART_BYTES": (sources, 1500), "GROUP_ROWS": (fit, 150), "MIN_SHARD": (shards, 1), "SHARDS": (shards, 6)}
OPTIONS = {
    "time": "t",
    "entity": "name",
    "categorical": "kind",
    "static": ["weight", "sector"],
    "nulls": {"x": "interpolate", "*": "mask"},
    "duplicates": "mean",
    "per_entity": True,
    "scale": "robust",
    "val_last": 0.2,
    "gap": 1,
    "calendar": "hour",
    "freq": "h",
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """What the parent decides is small: many parts, groups and shards. Workers are as they are."""
    for name, (module, value) in SIZES.items():
        monkeypatch.setattr(module, name, value)


def write(folder, rows=800, files=5, names=12):
    """Entities spread over files, unsorted, with gaps and repeats."""
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True, exist_ok=True)
    which = rng.integers(0, names, rows)
    frame = pd.DataFrame(
        {
            "name": [f"entity {k}" for k in which],
            "t": pd.Timestamp("2021-03-01") + pd.to_timedelta(rng.integers(0, 200, rows), "h"),
            "x": np.where(rng.random(rows) < 0.2, np.nan, rng.normal(5, 2, rows)),
            "y": rng.integers(0, 9, rows).astype(float),
            "kind": rng.choice(["a", "b", None], rows),
            "weight": which * 1.5,
            "sector": [f"s{k % 3}" for k in which],
        }
    )
    for k in range(files):
        frame[k::files].to_parquet(folder / f"{k}.parquet", row_group_size=40)
    return str(folder)


@pytest.fixture(scope="module")
def source(memory_folder):
    return write(memory_folder / "table-source")


@pytest.fixture(scope="module")
def expected(source, memory_folder):
    """An undisturbed run with one worker."""
    out = memory_folder / "undisturbed-table"
    with pytest.MonkeyPatch.context() as patch:
        for name, (module, value) in SIZES.items():
            patch.setattr(module, name, value)
        report = mr.prepare_table(source, out, workers=1, **OPTIONS)
    assert report.shards > 4
    assert report.rows_sorted
    return tree_digest(out)


class Tiny:
    """Few rows in three parts and three shards, so that a fault can strike at every step."""

    options = {  # noqa: RUF012
        "time": "t",
        "entity": "name",
        "val_last": 0.2,
        "workers": 1,
        "duplicates": "last",
        "categorical": "kind",
    }

    def __init__(self, folder):
        self.source, self.out = write(folder / "in", rows=120, files=3, names=4), folder / "out"
        self.partial = self.out.with_name("out.partial")

    def prepare(self, **options):
        return mr.prepare_table(self.source, self.out, **{**self.options, **options})

    def finished(self, pattern):
        return len(list(self.partial.glob(pattern)))

    def clear(self):
        for path in (self.out, self.partial):
            if path.exists():
                shutil.rmtree(path)


@pytest.fixture
def tiny(tmp_path):
    return Tiny(tmp_path)


@pytest.fixture
def parts_read(monkeypatch):
    """The numbers of the parts that were read, not found finished."""
    found, run = [], part.PartMaker.run

    def counted(self):
        found.append(self._task.number)
        return run(self)

    monkeypatch.setattr(part.PartMaker, "run", counted)
    return found


def moments(steps):
    """Where to strike: at every step in a soak, else at every third, and at all of the last ones, which publish."""
    return [at for at in range(1, len(steps) + 1) if SOAK or at % 5 == 1 or at > len(steps) - 15]


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_makes_the_same_bytes(source, tmp_path, expected, workers):
    with expect_no_leaks(grace_s=20):
        report = mr.prepare_table(source, tmp_path / "out", workers=workers, **OPTIONS)
    assert tree_digest(tmp_path / "out") == expected
    assert os.listdir(tmp_path) == ["out"]
    assert report.fingerprint == mr.open_store(tmp_path / "out", check=True).fingerprint


def test_kill_9_at_every_step_continues_what_was_finished(tiny, parts_read):
    with count_steps() as steps:
        report = tiny.prepare()
    total, whole = len(set(parts_read)), tree_digest(tiny.out)
    assert total >= 3
    assert report.shards >= 3
    for at in moments(steps):
        tiny.clear()
        assert run_forked(tiny.prepare, fault=Fault(at, "kill")) == -9
        if not tiny.out.exists():
            with pytest.raises(mr.StoreError):
                mr.open_store(tiny.out)
        finished, is_there = tiny.finished("parts/*[0-9]/done.json"), tiny.out.exists()
        is_named_last = (tiny.partial / "store.json").exists()
        parts_read.clear()
        again = tiny.prepare()
        where = f"after a kill at step {at}, {steps[at - 1]}"
        assert tree_digest(tiny.out) == whole, where
        assert len(parts_read) == (0 if is_there or is_named_last else total - finished), where
        assert again.fingerprint == mr.open_store(tiny.out).fingerprint
        assert again.columns == report.columns, where
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


SLOW = "import time\n\ndef keep(table):\n    time.sleep(0.05 * (len(table) > 0))\n    return table\n"


def script(source, out, **options):
    """A program that prepares as these tests do, in pieces as small."""
    sizes = "; ".join(f"{module.__name__}.{name} = {value}" for name, (module, value) in SIZES.items())
    modules = ", ".join(sorted({module.__name__ for module, _ in SIZES.values()}))
    return [
        sys.executable,
        "-c",
        f"import millrace as mr, {modules}; {sizes}; mr.prepare_table({source!r}, {str(out)!r}, **{options!r})",
    ]


@pytest.fixture
def slowly(tmp_path, monkeypatch):
    """A transform that changes nothing, slowly."""
    (tmp_path / "slowly.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    return "slowly:keep"


def test_kill_9_at_random_moments_changes_nothing(source, tmp_path, expected, slowly, kill_midway):
    """MILLRACE_SOAK is the number of kills."""
    out = tmp_path / "out"
    kill_midway(script(source, out, workers=2, transform=slowly, **OPTIONS), out, int(SOAK or 3))
    found = tree_digest(out)
    assert {k: v for k, v in found.items() if k.startswith("shards/")} == {
        k: v for k, v in expected.items() if k.startswith("shards/")
    }
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("out")) == ["out"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_said_and_the_rerun_continues(source, expected, workers):
    try:
        with small_disk(400_000) as disk:
            out = disk / "out"
            (disk / "ballast").write_bytes(bytes(310_000))
            with pytest.raises(mr.StoreWriteFailed, match=r"No space left on device.*; free space"):
                mr.prepare_table(source, out, workers=workers, **OPTIONS)
            assert not out.exists()
            (disk / "ballast").unlink()
            subprocess.run(["mount", "-o", "remount,size=8m", str(disk)], check=True)
            mr.prepare_table(source, out, workers=workers, **OPTIONS)
            assert tree_digest(out) == expected
    except NotPossibleHere as reason:
        pytest.skip(str(reason))


def test_a_second_writer_is_refused_also_while_the_first_stands_still(source, tmp_path, expected, slowly):
    out = tmp_path / "out"
    with subprocess.Popen(script(source, out, workers=1, transform=slowly, **OPTIONS)) as first:
        while not list(out.with_name("out.partial").glob("parts/*.tmp")):
            assert first.poll() is None
            time.sleep(0.01)
        with stopped(first.pid), pytest.raises(mr.MillraceError, match=rf"pid {first.pid}|process {first.pid}"):
            mr.prepare_table(source, out, workers=1, transform=slowly, **OPTIONS)
    assert first.returncode == 0
    assert mr.open_store(out, check=True).num_records == 12


def test_a_finished_output_is_complete_and_other_options_are_refused_with_the_difference(tiny):
    first = tiny.prepare()
    before = tree_digest(tiny.out)
    again = tiny.prepare()
    assert (again.is_new, again.fingerprint, again.rows, again.columns) == (
        False,
        first.fingerprint,
        first.rows,
        first.columns,
    )
    with pytest.raises(
        mr.ConfigError,
        match=r"is finished, but with other .*scale was \"standard\", now \"minmax\"; choose another out=",
    ):
        tiny.prepare(scale="minmax")
    os.utime(f"{tiny.source}/1.parquet", ns=(1, 1))
    with pytest.raises(mr.ConfigError, match=r"1\.parquet' was last written 20.* UTC, now 1970-01-01 00:00:00"):
        tiny.prepare()
    shutil.copy(f"{tiny.source}/0.parquet", f"{tiny.source}/9.parquet")
    with pytest.raises(mr.ConfigError, match=r"9\.parquet' is new"):
        tiny.prepare()
    assert tree_digest(tiny.out) == before
    assert not tiny.partial.exists()


@pytest.mark.parametrize("how", ["rewritten", "touched", "removed"])
def test_an_input_that_changes_while_it_is_read_stops_the_run(tiny, monkeypatch, how):
    from millrace.prepare.table.read.chunks import Reader

    batch = Reader._chunk

    def meddle(self, source, first, table):
        path = f"{tiny.source}/1.parquet"
        if source.file.path == path and os.path.exists(path):
            if how == "rewritten":
                pd.DataFrame({"t": [1]}).to_parquet(path + ".new")
                os.replace(path + ".new", path)
            elif how == "touched":
                os.utime(path, ns=(7, 7))
            else:
                os.rename(path, path + ".away")
        return batch(self, source, first, table)

    monkeypatch.setattr(Reader, "_chunk", meddle)
    said = {
        "rewritten": r"changed while it was prepared: [\d,]+ bytes, planned [\d,]+",
        "touched": r"changed while it was prepared: it was written again",
        "removed": r"has gone since the plan",
    }
    with pytest.raises(mr.SourceError, match=rf"1\.parquet' {said[how]}"):
        tiny.prepare()
    assert not tiny.out.exists()


def test_parts_of_an_earlier_start_of_the_machine_are_read_again(tiny, parts_read, monkeypatch):
    """They are not synced: only this start's are known to be whole."""
    with count_steps("rename") as steps:
        tiny.prepare()
    whole, total = tree_digest(tiny.out), len(set(parts_read))
    tiny.clear()
    assert run_forked(tiny.prepare, fault=Fault(len(steps) - 3, "kill", operation="rename")) == -9
    assert tiny.finished("parts/*[0-9]/done.json") == total
    monkeypatch.setattr("millrace.store.platform.boot_id", lambda: "another")
    parts_read.clear()
    tiny.prepare()
    assert len(parts_read) == total
    assert tree_digest(tiny.out) == whole


def test_a_part_that_lost_bytes_is_read_again(tiny, parts_read):
    with count_steps("rename") as steps:
        tiny.prepare()
    whole = tree_digest(tiny.out)
    tiny.clear()
    assert run_forked(tiny.prepare, fault=Fault(len(steps) - 3, "kill", operation="rename")) == -9
    os.truncate(sorted(tiny.partial.glob("parts/*/values.bin"))[1], 8)
    parts_read.clear()
    tiny.prepare()
    assert len(parts_read) == 1
    assert tree_digest(tiny.out) == whole


def test_an_output_that_is_in_the_way_is_refused_before_any_work(tiny):
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
