"""Files that cannot be used are told all at once, before any work; they can be skipped or excluded."""

import pandas as pd
import pytest

import millrace as mr
from millrace.prepare.table.read import part


def frame(rows=10):
    times = pd.Timestamp("2022-01-01") + pd.to_timedelta(range(rows), "h")
    return pd.DataFrame({"name": "a", "t": times, "x": range(rows), "y": 1.5})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Two good files among bad ones of each kind."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    frame().to_csv("in/good.csv", index=False)
    frame().assign(name="b").to_csv("in/good2.csv", index=False)
    frame().drop(columns="t").to_csv("in/no_time.csv", index=False)
    (tmp_path / "in/rubbish.parquet").write_bytes(b"rubbish" * 9)
    frame().rename(columns={"y": "y|z"}).to_csv("in/semicolon.csv", index=False, sep=";")
    (tmp_path / "in/readme.txt").write_text("hello")
    return tmp_path / "in"


OPTIONS = {"time": "t", "entity": "name", "workers": 1}
REASONS = (
    r"'in/no_time\.csv' lacks column 't' \| 'in/rubbish\.parquet' is not readable as parquet: .*"
    r" \| 'in/semicolon\.csv': the delimiter looks like ';'"
)


def test_all_files_that_cannot_be_used_are_told_before_any_work(folder, monkeypatch):
    monkeypatch.setattr(part.PartMaker, "run", lambda self: pytest.fail("work was done"))
    said = rf"^3 of 5 files cannot be used: {REASONS}.*; fix them, leave them out with exclude=, or skip them with on_error="
    with pytest.raises(mr.SourceError, match=said):
        mr.prepare_table("in", "out", **OPTIONS)
    assert not list(folder.parent.glob("out*"))


def test_they_can_be_skipped_and_are_counted(folder):
    report = mr.prepare_table("in", "out", **OPTIONS, on_error="skip", max_skipped=0.6)
    assert report.dropped == {"files that cannot be used": 3}
    assert any(
        note.startswith("""3 files skipped (on_error="skip"): 'in/no_time.csv' lacks""") for note in report.notes
    )
    expected = mr.prepare_table(["in/good.csv", "in/good2.csv"], "other", **OPTIONS)
    assert report.fingerprint == expected.fingerprint
    assert not mr.prepare_table("in", "out", **OPTIONS, on_error="skip").is_new


def test_they_can_be_excluded(folder):
    given = ["no_*", "*.parquet", "in/semicolon.csv"]
    report = mr.prepare_table("in", "out", **OPTIONS, exclude=given)
    assert report.rows == {"train": 20}
    assert "exclude='no_*' left out 1 file" in report.notes


def test_a_column_that_no_file_has_is_a_mistake_and_no_reason_to_skip(folder):
    for name in ("no_time.csv", "rubbish.parquet", "semicolon.csv"):
        (folder / name).unlink()
    for wrong, said in {"X": "did you mean 'x'", "xx": "there are name, t, x, y"}.items():
        with pytest.raises(mr.ConfigError, match=rf"target='{wrong}' is no column.*{said}"):
            mr.prepare_table("in", "out", **OPTIONS, target=wrong, on_error="skip")


def test_where_all_are_bad_nothing_is_skipped(folder):
    for name in ("good.csv", "good2.csv", "no_time.csv"):
        (folder / name).unlink()
    with pytest.raises(mr.SourceError, match=r"2 of 2 files cannot be used"):
        mr.prepare_table("in", "out", **OPTIONS, on_error="skip")


@pytest.mark.parametrize("append", [False, True])
def test_files_of_other_endings_are_also_told_when_a_run_fails(folder, append):
    if append:
        mr.prepare_table("in/good.csv", "out", **OPTIONS)
    told = []
    with pytest.raises(mr.SourceError):
        mr.prepare_table("in", "out", append=append, **OPTIONS, progress=lambda *call: told.append(call[3].get("note")))
    same = ["'in/good.csv': in the store already, and skipped"] if append else []
    assert told == ["files of other endings left out: 1 .txt", *same]


def test_a_text_as_target_is_named_with_the_numbers_there_are(folder):
    said = r"target='name' is also entity|target='kind' is string; a target is a number: choose another \(x, y\), give decimal="
    frame().assign(kind="k").to_csv("in/good.csv", index=False)
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_table("in/good.csv", "out", **OPTIONS, target="kind")
