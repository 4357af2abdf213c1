"""What a user may not expect of a table is said when it is prepared, not found out in training."""

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.cli import run
from millrace.prepare.table.settle.time_steps import Steps, irregular_note, show_step


def frame(**columns):
    times = pd.date_range("2022-01-01", periods=100, freq="h")
    return pd.DataFrame({"name": ["a", "b"] * 50, "t": times.repeat(2)[:100], "x": np.arange(100.0), **columns})


def notes(table, folder, **options):
    table.to_parquet(folder / "a.parquet")
    given = {"time": "t", "entity": "name", "workers": 1, **options}
    return mr.prepare_table(str(folder / "a.parquet"), folder / "out", **given).notes


def test_a_plain_table_has_no_notes(tmp_path):
    assert notes(frame(), tmp_path) == []


def test_text_columns_that_are_left_out_are_named_with_how_to_take_them(tmp_path):
    table = frame(venue="N", sector=pd.Categorical(["tech"] * 100), flag=True)
    assert notes(table, tmp_path) == [
        "columns left out, since they hold no numbers: flag (bool), sector (string), venue (string); "
        'categorical=["flag", "sector", "venue"] takes them as categories'
    ]


def test_columns_that_were_chosen_leave_out_the_others_without_a_word(tmp_path):
    assert notes(frame(venue="N"), tmp_path, features=["x"]) == []


def test_columns_that_are_mostly_missing_are_named_with_their_share(tmp_path):
    mostly = np.where(np.arange(100) % 10 < 7, np.nan, 1.0 + np.arange(100))
    seldom = np.where(np.arange(100) % 10 < 5, np.nan, 1.0 + np.arange(100))
    assert notes(frame(mostly=mostly, seldom=seldom), tmp_path) == [
        'mostly missing: mostly (70%); they are filled: leave them out with features=, or mark them: nulls={"COLUMN": "mask"}'
    ]


@pytest.mark.parametrize("small", [False, True])
def test_irregular_times_are_counted(tmp_path, monkeypatch, small):
    """Entities looked at together or one by one, in slices too."""
    from millrace.prepare.table.settle import index, index_files

    if small:
        monkeypatch.setattr(index, "slice_rows", lambda features: 7)
        monkeypatch.setattr(index_files, "slice_rows", lambda features: 7)
    table = frame().drop(index=[20, 21, 40])
    assert notes(table, tmp_path) == [
        "irregular times: the most common step is 1h, but 3 of 95 steps are others (gaps, or extra rows), and a window "
        'counts rows, not time; freq="1h" makes a regular grid'
    ]


def test_rows_of_entities_that_are_dropped_do_not_count(tmp_path):
    table = pd.concat(
        [frame(), frame().head(3).assign(name="c", t=pd.to_datetime(["2022-01-01", "2022-01-05", "2022-01-06"]))]
    )
    assert notes(table, tmp_path, min_rows=10) == []


def test_a_step_is_shown_as_freq_takes_it():
    assert [show_step(step, unit) for step, unit in [(60, "s"), (90, "s"), (7, "D"), (1, "D"), (36 * 10**11, "ns"), (5, None)]] == [
        "1min", "90s", "1W", "1D", "1h", "5",
    ]  # fmt: skip


def test_more_different_steps_than_are_kept_are_still_counted():
    steps = Steps()
    for first in range(1, 9000, 3000):
        steps.add(np.arange(first, first + 3000))
    steps.add(np.full(20_000, 5))
    assert irregular_note(steps.counts, "s").startswith(
        "irregular times: the most common step is 5s, but 8,999 of 29,000 steps"
    )


def prepare(folder, *arguments):
    return run(
        ["prepare", "table", str(folder / "in"), "--out", str(folder / "out"), "--entity", "name", "--time", "t",
         "--workers", "1", *arguments]
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    frame().to_csv(tmp_path / "in" / "a.csv", index=False)
    return tmp_path


def test_windows_that_are_longer_than_every_entity_are_said_with_the_longest(folder, capsys):
    assert prepare(folder, "--lookback", "60", "--horizon", "4") == 0
    assert (
        "note: no entity is as long as a window of 60 + 4 rows: the longest, 'a', has 50; train with a smaller lookback or horizon"
        in capsys.readouterr().out
    )


def test_a_split_without_windows_is_said(folder, capsys):
    assert prepare(folder, "--val-last", "0.1", "--lookback", "10", "--horizon", "6") == 0
    printed = capsys.readouterr().out
    assert "note: split 'val' holds no window of 10 + 6 rows: all 6 rows of a horizon must lie in it" in printed
    assert "split 'train' holds no window" not in printed


def test_the_flags_that_messages_name_are_those_of_the_command(folder, capsys):
    given = frame().assign(t=frame()["t"].dt.strftime("%d/%m/%Y %H:%M"), name="Mü")
    given = given.rename(columns={"x": "x|y"})
    given.iloc[::2].to_csv(folder / "in" / "a.csv", index=False, sep=";", decimal=",", encoding="latin-1")
    (folder / "in" / "b.csv").write_text("nothing of use\n1\n")
    assert prepare(folder) == 1
    assert "a.csv': the delimiter looks like ';', but could be ';' or '|'" in capsys.readouterr().err
    arguments = ["--delimiter", ";", "--decimal", ",", "--encoding", "latin-1", "--time-format", "%d/%m/%Y %H:%M"]
    assert prepare(folder, *arguments, "--exclude", "b.csv", "--restart") == 0
    assert "50 rows" in capsys.readouterr().out
    assert mr.open_store(folder / "out").columns["name"][0] == "Mü"
