"""Files that are fixed, removed or added between two attempts: what was read of the others is kept."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.read import csv_files, part, sources
from millrace.testing import Fault, run_forked, tree_digest

OPTIONS = {"time": "t", "entity": "name", "workers": 1, "duplicates": "last"}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(sources, "PART_BYTES", 600)


@pytest.fixture
def files_read(monkeypatch):
    """The names of the files whose parts were read, not found finished."""
    found, run = [], part.PartMaker.run

    def counted(self):
        done = run(self)
        found.extend(Path(source.file.path).name for source in self._task.sources)
        return done

    monkeypatch.setattr(part.PartMaker, "run", counted)
    return found


def frame(seed, rows=40):
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "name": rng.choice(["a", "b", "c"], rows),
            "t": pd.Timestamp("2022-01-01") + pd.to_timedelta(rng.permutation(500)[:rows], "h"),
            "x": rng.normal(5, 2, rows),
        }
    )


def write_files(folder, count=6, rows=40):
    folder.mkdir()
    for k in range(count):
        frame(k, rows).to_csv(folder / f"{k}.csv", index=False)
    return folder


def stop_midway(folder, out):
    """An attempt that ends when all parts are read."""
    broken = {**OPTIONS, "val_from": "2050-01-01"}
    with pytest.raises(mr.ConfigError, match="2050"):
        mr.prepare_table(str(folder), out, **broken)


def scratch(folder, out, **options):
    """What an undisturbed run makes of the files as they are now."""
    mr.prepare_table(str(folder), out, **{**OPTIONS, **options})
    return tree_digest(out)


def test_a_file_that_does_not_fit_is_fixed_and_only_it_is_read_again(tmp_path, files_read, monkeypatch):
    monkeypatch.setattr(csv_files, "CSV_BLOCK", 500)  # so that it is found only when all of the file is read
    folder, out, told = write_files(tmp_path / "in"), tmp_path / "out", []
    text = (folder / "4.csv").read_text()
    (folder / "4.csv").write_text(text + "a,2023-01-01,oops\n")
    with pytest.raises(mr.SourceError, match=r"4\.csv', line 42: column 'x' holds 'oops'"):
        mr.prepare_table(str(folder), out, **OPTIONS)
    assert files_read == ["0.csv", "1.csv", "2.csv", "3.csv"]
    (folder / "4.csv").write_text(text)
    files_read.clear()
    report = mr.prepare_table(str(folder), out, **OPTIONS, progress=lambda *call: told.append(call[3].get("note")))
    assert files_read == ["4.csv", "5.csv"]
    assert report.rows_kept == 160
    assert any("4.csv' had " in note and "what was read of other files is kept" in note for note in told if note)
    assert tree_digest(out) == scratch(folder, tmp_path / "other")


@pytest.mark.parametrize("change", ["removed", "added", "renamed", "touched", "other order"])
def test_other_sources_are_taken_and_those_that_stayed_are_not_read_again(tmp_path, files_read, change):
    folder, out = write_files(tmp_path / "in"), tmp_path / "out"
    stop_midway(folder, out)
    files_read.clear()
    given = [str(folder)]
    expected = {"removed": [], "added": ["25.csv"], "renamed": ["9.csv"], "touched": ["2.csv"], "other order": []}
    if change == "removed":
        (folder / "2.csv").unlink()
    elif change == "added":
        frame(77).to_csv(folder / "25.csv", index=False)
    elif change == "renamed":
        (folder / "2.csv").rename(folder / "9.csv")
    elif change == "touched":
        os.utime(folder / "2.csv", ns=(7, 7))
    else:
        given = [str(folder / f"{k}.csv") for k in (3, 0, 5, 1, 2, 4)]
    mr.prepare_table(given, out, **OPTIONS)
    assert files_read == expected[change]
    mr.prepare_table(given, tmp_path / "other", **OPTIONS)
    assert tree_digest(out) == tree_digest(tmp_path / "other")


def test_small_files_that_share_parts_stay_where_they_were_when_one_goes(tmp_path, monkeypatch, files_read):
    monkeypatch.setattr(sources, "PART_BYTES", 3000)
    folder, out = write_files(tmp_path / "in", count=60, rows=8), tmp_path / "out"
    stop_midway(folder, out)
    files_read.clear()
    (folder / "0.csv").unlink()
    mr.prepare_table(str(folder), out, **OPTIONS)
    assert len(files_read) < 20
    assert tree_digest(out) == scratch(folder, tmp_path / "other")


def test_any_changes_between_any_attempts_end_in_the_same_store(tmp_path):
    rng = np.random.default_rng(11)
    folder, out = write_files(tmp_path / "in"), tmp_path / "out"
    for attempt in range(6):
        run_forked(
            lambda: mr.prepare_table(str(folder), out, **OPTIONS), fault=Fault(int(rng.integers(20, 90)), "kill")
        )
        if out.exists():
            shutil.rmtree(out)
        for k in rng.choice(8, 2, replace=False).tolist():
            path = folder / f"{k}.csv"
            if path.exists() and rng.random() < 0.4:
                path.unlink()
            else:
                frame(int(rng.integers(1000)), 30).to_csv(path, index=False)
        if attempt % 2:
            mr.prepare_table(str(folder), out, **OPTIONS)
            assert tree_digest(out) == scratch(folder, tmp_path / f"other {attempt}")
            shutil.rmtree(out)


def test_rows_that_were_skipped_are_looked_at_again_when_they_are_to_stop(tmp_path, files_read):
    folder, out = write_files(tmp_path / "in", count=3), tmp_path / "out"
    with open(folder / "1.csv", "a") as file:
        file.write("a,,1.0\n")
    skipping = {**OPTIONS, "on_error": "skip", "val_from": "2050-01-01"}
    with pytest.raises(mr.ConfigError, match="2050"):
        mr.prepare_table(str(folder), out, **skipping)
    files_read.clear()
    with pytest.raises(mr.SourceError, match=r"1\.csv', row 40: column 't' is null"):
        mr.prepare_table(str(folder), out, **OPTIONS)
    assert files_read == []
    report = mr.prepare_table(str(folder), out, **{**OPTIONS, "on_error": "skip"})
    assert files_read == ["1.csv"]
    assert report.dropped["null time or entity"] == 1
