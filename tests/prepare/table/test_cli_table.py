"""``millrace prepare table`` as a person meets it: flags, progress, the closing table, errors of one line, what head shows."""

import json
import os
import re
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

import millrace as mr
from millrace.cli import prepare_progress, run


@pytest.fixture
def folder(tmp_path):
    """Three entities of 100 days in a file each, one in no order; some prices are missing."""
    (tmp_path / "prices").mkdir()
    rng = np.random.default_rng(4)
    for k, name in enumerate(("AAA", "BB", "C c")):
        price = rng.normal(100, 5, 100).round(2)
        price[[3, 50]] = np.nan
        frame = pd.DataFrame(
            {
                "date": pd.date_range("2022-01-01", periods=100, tz="UTC"),
                "close": price,
                "volume": rng.integers(0, 9, 100) * 100,
                "mood": np.where(np.arange(100) % 3 == 0, None, "calm"),
                "founded": 1990 + k,
                "country": ["DE", "FR", "DE"][k],
            }
        )
        frame = frame.sample(frac=1, random_state=1) if k == 2 else frame
        frame.to_parquet(tmp_path / "prices" / f"{name}.parquet")
    return tmp_path


@pytest.fixture
def source(folder):
    return str(folder / "prices")


@pytest.fixture
def out(folder):
    return str(folder / "out")


def prepare(source, out, *arguments):
    return run(["prepare", "table", source, "--out", out, "--time", "date", *arguments, "--workers", "1"])


FULL = (
    "--features",
    "close,volume",
    "--target",
    "close",
    "--static",
    "founded,country",
    "--categorical",
    "mood",
    "--where",
    "volume < 800",
    "--val-from",
    "2022-03-22",
    "--lookback",
    "10",
    "--horizon",
    "2",
)


def test_the_summary_counts_splits_windows_columns_and_what_was_dropped(source, out, capsys):
    assert prepare(source, out, *FULL) == 0
    said = capsys.readouterr().out
    store = mr.open_store(out)
    lines = {line.split("  ")[0]: line.split() for line in said.splitlines()}
    for split in ("train", "val"):
        part = store.split(split)
        rows = int((part.cuts[1] - part.cuts[0]).sum())
        windows = len(mr.Windows(part, lookback=10, horizon=2))
        assert lines[split][1:] == [f"{rows:,}", f"{windows:,}"]
    assert "windows of 10 + 2" in said
    assert re.search(r"^3 entities in 1 shard, [\d.]+ KiB$", said, re.MULTILINE)
    facts = store.manifest.scaling["statistics"]
    assert lines["close"][1:5] == [f"{facts[key][0]:.6g}" for key in ("mean", "std", "min", "max")]
    assert lines["column"] == ["column", "mean", "std", "min", "max", "nulls", "filled"]
    gone = 300 - int(store.offsets[-1])
    assert f"dropped, where: {gone}\n" in said
    assert re.search(r"sorted by entity and time: \d+ rows came in another order", said)
    assert re.search(r"read 300 rows in [\d.]+ s: [\d,]+ rows/s", said)
    assert said.splitlines()[-2:] == [
        f"wrote {os.path.realpath(out)}, fingerprint {store.fingerprint}",
        f"next: millrace head {out}",
    ]
    assert "there is no validation split" not in said


def test_the_next_command_shows_names_times_and_values_as_they_were(source, out, folder, capsys):
    assert prepare(source, out, *FULL) == 0
    following = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ").split()
    done = subprocess.run([sys.executable, "-m", *following, "-n", "1"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    original = pd.read_parquet(folder / "prices" / "AAA.parquet").query("volume < 800").reset_index(drop=True)
    assert re.fullmatch(rf"record 0 'AAA': {len(original)} rows \(the first 5 shown\)", lines[0])
    assert lines[1].split() == ["time", "close", "volume", "mood"]
    for k in range(3):
        row = original.loc[k]
        cells = lines[2 + k].split()
        assert cells[0].startswith(str(row["date"].date()))
        assert cells[0].endswith("Z")
        assert float(cells[1]) == pytest.approx(row["close"], abs=1e-3)
        assert float(cells[2]) == pytest.approx(row["volume"], abs=1e-2)
        assert cells[3:] == ([] if row["mood"] is None or row["mood"] != row["mood"] else [row["mood"]])
    assert run(["head", out, "--split", "val", "-n", "2", "--rows", "2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [entry["series"][0]["time"][:10] for entry in shown] == [
        "2022-03-22",
        "2022-03-23",
    ]  # of BB's no row of the 22nd was taken
    assert [entry["columns"]["name"] for entry in shown] == ["AAA", "BB"]
    later = original[original["date"] >= "2022-03-22"]
    assert shown[0]["rows"] == {"rows": len(later)}
    assert shown[0]["series"][0]["close"] == pytest.approx(later["close"].iloc[0], abs=1e-3)


def test_json_is_the_report(source, out, capsys):
    assert prepare(source, out, "--val-last", "0.1", "--json") == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["fingerprint"] == mr.open_store(out).fingerprint
    assert report["rows"] == {"train": 270, "val": 30}
    assert list(report["columns"]) == ["close", "volume", "founded"]
    assert report["columns"]["close"]["nulls"] == 6


def test_the_same_command_again_is_complete_and_another_is_refused(source, out, capsys):
    assert prepare(source, out) == 0
    assert "there is no validation split; --split tail:0.1 or --split time:TIME makes one" in capsys.readouterr().out
    assert prepare(source, out) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"already complete: {os.path.realpath(out)}, fingerprint {mr.open_store(out).fingerprint}"
    ]
    assert prepare(source, out, "--min-rows", "2") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "min_rows was 1, now 2" in said
    assert said.count("\n") == 1


def test_every_option_reaches_the_function(source, folder, capsys):
    """The command line and the function make the same store."""
    from millrace.testing import tree_digest

    flags = """
        --entity country,founded --features close --target volume --known-future volume --nulls drop --nulls volume=value:0
        --duplicates mean --min-rows 2 --calendar month,dayofweek --scale robust --per-entity --fit-on all --dtype bfloat16
        --val 0.2 --test 0.1 --gap 1 --on-error skip --widen --strict --shard-bytes 1KiB --categorical mood
    """
    assert prepare(source, str(folder / "one"), *flags.split()) == 0
    mr.prepare_table(
        source,
        folder / "two",
        workers=1,
        time="date",
        entity=["country", "founded"],
        features="close",
        target="volume",
        known_future="volume",
        nulls={"*": "drop", "volume": "value:0"},
        duplicates="mean",
        min_rows=2,
        calendar=["month", "dayofweek"],
        scale="robust",
        per_entity=True,
        fit_on="all",
        dtype="bfloat16",
        val=0.2,
        test=0.1,
        gap=1,
        on_error="skip",
        widen=True,
        strict=True,
        shard_bytes=1024,
        categorical="mood",
    )
    assert tree_digest(folder / "one") == tree_digest(folder / "two")
    assert (
        prepare(source, str(folder / "three"), "--split-by", "entity", "--val-entities", "BB", "--test-entities", "C c")
        == 0
    )
    assert {
        name: part.num_records
        for name in ("train", "val", "test")
        if (part := mr.open_store(folder / "three").split(name))
    } == {"train": 1, "val": 1, "test": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scale", "log"], "--scale 'log'; expected one of standard, minmax, robust, none"),
        (["--dtype", "float8"], "--dtype 'float8'; expected one of float32, float16, bfloat16"),
        (["--nulls", "zero"], "--nulls 'zero' of '*'; expected one of ffill, drop, interpolate, mask, value:NUMBER"),
        (["--nulls", "close=value:nan"], "value needs a finite number, such as value:0"),
        (["--duplicates", "some"], "expected one of error, first, last, mean"),
        (["--freq", "1M"], "--freq '1M'; expected a number and one of ns, us, ms, s, min, h, D, W"),
        (["--freq", "0D"], "--freq '0D'; expected"),
        (["--freq", "1ns"], "--freq 1ns is not a whole number of us, the unit of the times"),
        (["--val", "1.5"], "--val 1.5; expected a share from 0 to less than 1"),
        (["--val", "0.6", "--test", "0.5"], "leave nothing for train"),
        (
            ["--val-from", "2022-02-01", "--val-last", "0.1"],
            "--val-from/--test-from and --val-last/--test-last are different ways to split",
        ),
        (["--val-entities", "BB"], "--val-entities needs --split-by entity"),
        (
            ["--split-by", "entity", "--gap", "3", "--val", "0.3"],
            "a split by entity has no times, shares of rows or gap",
        ),
        (["--split-by", "entity", "--val-entities", "XX"], "the split names entity 'XX', which is not in the table"),
        (
            ["--val-from", "2022-03-01", "--test-from", "2022-02-01"],
            "val begins at 2022-03-01, test at 2022-02-01; val must begin first",
        ),
        (["--min-rows", "0"], "--min-rows 0"),
        (["--min-rows", "1000"], "no entity has --min-rows 1000 rows left; the longest of 3 was read with 100"),
        (["--engine", "spark"], "--engine 'spark'; expected local, ray or dask"),
        (["--transform", "nothing"], "expected module:function"),
        (["--gap", "3"], "--gap 3 needs a cut in time; give --split time:2024-03-01"),
        (["--refit"], "--refit is for --append"),
        (["--calendar", "season"], "--calendar 'season'; expected one of minute, hour"),
        (["--where", "volume >"], "--where 'volume >' cannot be read"),
        (["--entity", "@file,mood"], "@file stands alone, or give columns"),
        (
            ["--entity", "nobody"],
            "--entity 'nobody' is no column; there are date, close, volume, mood, founded, country",
        ),
        (["--known-future", "holiday"], "--known-future 'holiday' is neither a feature nor categorical"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments, said, source, out, capsys):
    assert prepare(source, out, *arguments) == 1
    printed = capsys.readouterr()
    (error,) = [line for line in printed.err.splitlines() if not line.startswith("note: ")]
    assert error.startswith("error: ")
    assert said in error
    assert printed.out == ""
    assert not os.path.exists(out)


def test_an_append_needs_no_option_of_the_store(source, out, folder, capsys):
    assert prepare(source, out, *FULL) == 0
    later = pd.read_parquet(folder / "prices" / "AAA.parquet")
    later["date"] += pd.Timedelta(days=100)
    (folder / "later").mkdir()
    later.to_parquet(folder / "later" / "AAA.parquet")
    capsys.readouterr()
    assert run(["prepare", "table", str(folder / "later"), "--out", out, "--append"]) == 0
    kept = int((later["volume"] < 800).sum())
    assert f"added {kept} rows to 1 entity" in capsys.readouterr().out


def test_wrong_usage_is_exit_code_2(source, capsys):
    assert run(["prepare", "table", source, "--out", "x"]) == 2
    assert run(["prepare", "table", "--time", "t"]) == 2
    assert run(["prepare", "table", source, "--out", "x", "--time", "t", "--workers", "0"]) == 2


def test_help_names_every_option_and_ends_with_an_example(capsys):
    assert run(["prepare", "table", "--help"]) == 0
    said = re.sub(r"[\s│]+", " ", capsys.readouterr().out)
    assert "Example: millrace prepare table prices/*.parquet --out store --entity symbol --time date" in said
    from millrace.prepare.split_forms import TABLE_FORMS, older_options
    from millrace.prepare.table.options import TableOptions

    for field in (*TableOptions.__struct_fields__, "split"):
        is_hidden = field in older_options(TABLE_FORMS)  # --split stands for it
        assert (f"--{field.replace('_', '-')} " in said) != is_hidden


def test_progress_is_plain_lines_where_there_is_no_terminal(source, out, capsys, monkeypatch):
    monkeypatch.setattr(prepare_progress, "EVERY_S", 0.0)
    assert prepare(source, out) == 0
    lines = capsys.readouterr().err.splitlines()
    assert re.match(
        r"read: 100%, 1 part, 300 rows, [\d,]+ rows/s, .*iB memory", next(x for x in lines if x.startswith("read: 100"))
    )
    assert any(re.match(r"measure: 100%, 1 entity group,", line) for line in lines)
    assert any(re.match(r"write: 100%, 1 shard, 300 rows, [\d,]+ rows/s", line) for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_a_closed_pipe_is_no_traceback(source, out):
    command = f"{sys.executable} -m millrace prepare table {source} --out {out} --time date --workers 1 | true"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert mr.open_store(out).num_records == 3


def test_head_names_what_is_static_and_info_says_how_it_was_scaled(source, out, folder, capsys):
    assert prepare(source, out, *FULL) == 0
    capsys.readouterr()
    original = pd.read_parquet(folder / "prices" / "AAA.parquet").iloc[0]
    assert run(["head", out, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        rf"^  static  founded {original['founded']:.6g}, country {original['country']}$", said, re.MULTILINE
    )
    assert run(["head", out, "-n", "1", "--json"]) == 0
    static = json.loads(capsys.readouterr().out)[0]["static"]
    assert static == {"founded": pytest.approx(original["founded"]), "country": original["country"]}
    assert run(["info", out]) == 0
    said = capsys.readouterr().out
    assert "Values are scaled: standard, all records together, fitted on the train rows.\n" in said
    assert re.search(r"categories +mood: calm.*; country: DE, FR$", said, re.MULTILINE)


def test_the_search_for_quartiles_is_shown(source, out):
    said = []
    mr.prepare_table(source, out, time="date", scale="robust", progress=lambda *told: said.append(told))
    passes = [facts["quartiles"] for stage, _, _, facts in said if stage == "measure" and "quartiles" in facts]
    assert passes == list(range(1, len(passes) + 1)) != []


def test_rows_of_an_earlier_attempt_are_not_claimed_again(source, out, capsys, monkeypatch):
    from millrace.prepare.table.read import sources

    monkeypatch.setattr(sources, "PART_BYTES", 1)

    class Interrupted(Exception):
        pass

    def stop(stage, done, total, facts):
        if stage == "read" and done == 1:
            raise Interrupted

    with pytest.raises(Interrupted):
        mr.prepare_table(source, out, time="date", workers=1, progress=stop)
    said = []
    report = mr.prepare_table(source, out, time="date", workers=1, progress=lambda *told: said.append(told))
    kept = report.rows_kept
    assert 0 < kept < report.rows_read == 300
    read = [told for told in said if told[0] == "read"]
    assert [told[1] for told in read] == list(range(read[0][2] + 1))
    assert read[-1][3]["rows"] == 300 - kept
    from millrace.cli import prepare_table

    prepare_table.show(report, out, 10, 2)
    assert f"read {300 - kept} rows in" in (text := capsys.readouterr().out)
    assert f"; {kept} rows had been read before" in text
