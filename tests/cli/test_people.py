"""What a person reads: ``info``, ``head`` and ``explain`` on a table, a text and arrays of one's own."""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.cli.printing import shorten
from millrace.feed.explain import describe_samples
from millrace.testing import tiny_store

DAY = datetime.date(2024, 1, 1)


def write_table(path: Path, first: int) -> None:
    """30 days of two entities; every third volume is exactly zero, though the mean is half a million."""
    with open(path, "w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["ticker", "day", "close", "volume"])
        for ticker in ("ACME", "Bäcker"):
            for k in range(first, first + 30):
                day = DAY + datetime.timedelta(days=k)
                lines.writerow([ticker, day.isoformat(), 100 + k / 8, 0 if k % 3 == 0 else 10_007 * k + 200_000])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table prepared from one file and appended to from another: two snapshots."""
    folder = tmp_path_factory.mktemp("people")
    write_table(folder / "january.csv", 0)
    write_table(folder / "february.csv", 30)
    options = ["--entity", "ticker", "--time", "day", "--target", "close", "--split", "time:2024-01-25"]
    with contextlib.chdir(folder):
        assert run(["prepare", "table", "january.csv", "--out", "prices", *options]) == 0
        assert run(["prepare", "table", "february.csv", "--out", "prices", "--append"]) == 0
    return folder / "prices"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]):
    def say(*arguments: object) -> str:
        capsys.readouterr()
        assert run([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return say


WINDOWS = ("--lookback", 8, "--horizon", 2, "--batch", 4)


def test_explain_names_entity_times_and_files_of_a_table(table: Path, said) -> None:
    found = json.loads(said("explain", table, "--step", 2, *WINDOWS, "--json"))
    assert [Path(file).name for file in found["sources"][str(table)]] == ["january.csv", "february.csv"]
    store = mr.open_store(table)
    for row in found["rows"]:
        start = row["rows"][0]
        assert row["entity"] == store.columns["name"][row["record"]]
        dates = np.datetime_as_string(store.times(np.arange(start, start + 10))).tolist()
        assert row["input"] == {"rows": [start, start + 8], "times": [dates[0], dates[7]]}
        assert row["target"] == {"rows": [start + 8, start + 10], "times": [dates[8], dates[9]]}
    shown = said("explain", table, "--step", 2, *WINDOWS)
    for row in found["rows"]:
        one = next(line.split() for line in shown.splitlines() if line.split()[0] == str(row["position"]))
        first, last = row["input"]["times"]
        assert one[1:6] == [str(row["sample"]), row["entity"], first, "to", last]
    assert "prepared from january.csv and february.csv." in shown
    assert "does not record which file or line" in shown


def test_explain_of_an_earlier_snapshot_names_only_its_files(table: Path, tmp_path: Path, said) -> None:
    first = mr.open_store(table).manifest.parent
    view = mr.Windows(mr.open_store(table, snapshot=first).split("train"), lookback=4, horizon=1)
    next(iter(mr.Feed(view, batch=2, device="numpy", run=tmp_path / "run")))
    shown = said("explain", tmp_path / "run", "--step", 1)
    assert "prepared from january.csv." in shown


def test_explain_without_provenance_still_explains(table: Path, tmp_path: Path, said) -> None:
    for damage in (None, b"", b"\xff not json\n[1]\n" + b"[" * 100_000, b'{"plan": {"sources": 3}, "time": 5}\n'):
        shutil.copytree(table, tmp_path / "copy")
        (tmp_path / "copy" / "provenance.json").unlink()
        if damage is not None:
            (tmp_path / "copy" / "provenance.json").write_bytes(damage)
        assert "ACME" in said("explain", tmp_path / "copy", "--step", 1, *WINDOWS)
        assert re.search(r"written on \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\.", said("info", tmp_path / "copy"))
        shutil.rmtree(tmp_path / "copy")


def test_the_times_of_a_lead_and_of_whole_records() -> None:
    arrays = {"values": np.arange(9.0), "time": np.arange(100, 109), "name": ["a", "b"]}
    store = mr.from_arrays(arrays, [0, 4, 9], per={"name": "record"}, kind="series")
    (row,) = describe_samples(mr.Windows(store, lookback=2, horizon=1, lead=1), np.array([2]))
    assert (row["entity"], row["input"]["times"], row["target"]["times"]) == ("b", (105, 106), (108, 108))
    rows = describe_samples(mr.Records(store), np.array([1, 0]))
    assert [(row["entity"], row["times"]) for row in rows] == [("b", (104, 108)), ("a", (100, 103))]
    empty = mr.from_arrays({"time": np.zeros(0), "x": np.zeros(0)}, [0, 0], kind="series")
    (row,) = describe_samples(mr.Records(empty), np.array([0]))
    assert (row["entity"], row["rows"], "times" in row) == ("0", (0, 0), False)


def test_a_long_path_is_whole_in_a_pipe_and_has_an_ellipsis_on_a_terminal(tmp_path: Path, said, monkeypatch) -> None:
    source = "folder/" + "a-long-name-" * 12 + "end.txt"
    with mr.StoreWriter(
        tmp_path / "s",
        kind="text",
        columns={"tokens": mr.Column("uint16"), "source": mr.Column("string", per="record")},
    ) as writer:
        writer.append({"tokens": range(9), "source": source})
    step = ("explain", tmp_path / "s", "--step", 1, "--length", 2, "--batch", 1)
    assert source in said(*step)
    for columns in (80, 200):
        monkeypatch.setattr("millrace.cli.printing.terminal_columns", lambda columns=columns: columns)
        shown = said(*step)
        assert re.search(r"  folder/\S*\.\.\.\S*end\.txt", shown)
        assert max(map(len, shown.splitlines())) <= max(columns, 90)


@pytest.mark.parametrize("width", range(5, 40))
def test_what_is_cut_has_an_ellipsis_and_fits(width: int) -> None:
    for length in (width - 1, width, width + 1, 3 * width):
        text = "abcdefghij" * 20
        short = shorten(text[:length], width)
        assert len(short) <= width
        assert (short == text[:length]) if length <= width else "..." in short


def test_info_says_it_in_sentences_and_tables(table: Path, said) -> None:
    shown = said("info", table)
    assert f"{table} is a millrace store of series (a table), format version 1." in shown
    assert "It holds 120 rows in 2 entities (a record each): " in shown
    assert "Each row has 2 features: close and volume; the target is close." in shown
    assert "Entities are identified by ticker." in shown
    assert "The column time counts days since 1970-01-01; store.times() gives dates." in shown
    assert "Splits by time, val from 2024-01-25" in shown
    assert "from 2 source files." in shown
    assert re.search(r"\d+\.\d KiB in 1 shard\.", shown)
    assert not re.search(r"[{}']", shown), "a Python value"


def test_info_says_that_files_are_entities(tmp_path: Path, said) -> None:
    (tmp_path / "a.csv").write_text("when,x\n2024-01-01,1\n2024-01-02,2\n")
    mr.prepare_table(tmp_path / "a.csv", tmp_path / "out", entity="@file", time="when", workers=1)
    assert "Entities are identified by the names of the files." in said("info", tmp_path / "out")


def test_snapshots_are_in_order_with_dates_and_the_current_one_marked(tmp_path: Path, said) -> None:
    for k in range(6):  # within a second, so that only the order of their lines tells
        with mr.StoreWriter(tmp_path / "s", **({"append": True} if k else {"columns": {"x": mr.Column("uint8")}})) as w:
            w.append({"x": [k]})
    newest = mr.open_store(tmp_path / "s")
    chain = [newest.fingerprint]
    while (parent := mr.open_store(tmp_path / "s", snapshot=chain[0]).manifest.parent) is not None:
        chain.insert(0, parent)
    facts = json.loads(said("info", tmp_path / "s", "--json"))
    assert [snapshot["fingerprint"] for snapshot in facts["snapshots"]] == chain
    lines = said("info", tmp_path / "s").partition("Snapshots, oldest first\n")[2].splitlines()[1:7]
    assert [line.split()[2] for line in lines] == chain
    assert [line.endswith("current") for line in lines] == [False] * 5 + [True]
    assert all(re.match(r"  \d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", line) for line in lines)
    older = said("info", tmp_path / "s", "--snapshot", chain[1])
    assert f"{chain[1]}  shown here" in older
    assert f"{chain[5]}  current" in older


def test_info_of_text_and_own_arrays(tmp_path: Path, said) -> None:
    tiny_store("text", tmp_path / "text")
    assert re.search(
        r"holds [\d,]+ tokens in 30 documents \(a record each\): [\d.]+ KiB in", said("info", tmp_path / "text")
    )
    with mr.StoreWriter(
        tmp_path / "own", columns={"x": mr.Column("float32", (2, 3))}, meta={"note": "line\nend " + "y" * 400}
    ) as writer:
        writer.append({"x": np.zeros((1, 2, 3))})
    shown = said("info", tmp_path / "own")
    assert "It holds 1 row in 1 record: " in shown
    assert re.search(r"x +float32 +2 x 3 +row +1", shown)
    assert re.search(r"note +line\\nend y+\.\.\.y+", shown)


def test_head_shows_an_exact_zero_as_0(table: Path, said) -> None:
    shown = said("head", table, "-n", 1, "--rows", 6).splitlines()
    assert [line.split()[2] for line in shown[2:]] == ["0", "210007", "220014", "0", "240028", "250035"]
    assert len({len(line) for line in shown[1:]}) == 1, "aligned"
    values = [row["volume"] for row in json.loads(said("head", table, "-n", 1, "--rows", 6, "--json"))[0]["series"]]
    assert (values[0], values[3]) == (0.0, 0.0)
    assert values[1] == pytest.approx(210007)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("scale", [["--scale", "standard", "--per-entity"], ["--scale", "minmax"]])
def test_zeros_of_every_scaling(table: Path, tmp_path: Path, said, dtype: str, scale: list[str]) -> None:
    source = table.parent / "january.csv"
    said(
        "prepare",
        "table",
        source,
        "--out",
        tmp_path / "s",
        "--entity",
        "ticker",
        "--time",
        "day",
        *scale,
        "--dtype",
        dtype,
    )
    shown = said("head", tmp_path / "s", "-n", 2, "--rows", 4).splitlines()
    assert [shown[k].split()[2] for k in (2, 5, 8, 11)] == ["0"] * 4
    assert all(float(shown[k].split()[2]) > 200_000 for k in (3, 4, 9, 10))


def test_head_shows_the_names_of_classes_on_one_line(tmp_path: Path, said) -> None:
    columns = {"x": mr.Column("float32"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(tmp_path / "s", columns=columns, meta={"classes": ["a\x1b[2J\nb"]}) as writer:
        writer.append({"x": [1.0], "label": 0})
    assert said("head", tmp_path / "s").splitlines()[-1] == r"  label  0 (a\x1b[2J\nb)"


def test_head_shows_tiny_numbers_as_tiny(tmp_path: Path, said) -> None:
    with mr.StoreWriter(tmp_path / "s", columns={"x": mr.Column("float64", (2,))}) as writer:
        writer.append({"x": [[0.0, 1e-9], [-0.0, -0.00001], [1234567.0, 0.5]]})
    assert [line.split() for line in said("head", tmp_path / "s").splitlines()[2:]] == [
        ["0", "1e-09"], ["0", "-1e-05"], ["1234567", "0.5"],
    ]  # fmt: skip
