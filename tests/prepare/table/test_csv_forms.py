"""CSV files that are written another way: what is wrong and what to give is said; given that, the same store comes out."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import millrace as mr
from millrace.prepare.table.read.time_format import guess_formats, parse_times

FRAME = pd.DataFrame(
    {
        "name": ["Müller", "Straße"] * 20,
        "t": pd.Timestamp("2020-01-31 23:00") + pd.to_timedelta(np.arange(40) * 13, "h"),
        "x": np.arange(40) / 8,
    }
)


def write(folder, form="%Y-%m-%d %H:%M:%S", encoding="utf-8", **options):
    folder.mkdir(exist_ok=True)
    FRAME.to_csv(folder / "a.csv", index=False, date_format=form, encoding=encoding, **options)
    return str(folder / "a.csv")


def prepare(source, out, **options):
    given = {"time": "t", "entity": "name", "workers": 1, **options}
    return mr.prepare_table(source, out, **given)


@pytest.mark.parametrize(
    ("written", "said", "given"),
    [
        ({"sep": ";"}, r"a\.csv': the delimiter looks like ';'.*'name;t;x': give delimiter=';'", {"delimiter": ";"}),
        ({"sep": "\t"}, r"the delimiter looks like '\\t'.* give delimiter='\\t'", {"delimiter": "\\t"}),
        ({"sep": "|"}, r"the delimiter looks like '\|'.* give delimiter='\|'", {"delimiter": "|"}),
        ({"sep": ";", "decimal": ","}, "the delimiter looks like ';'", {"delimiter": ";", "decimal": ","}),
        (
            {"encoding": "latin-1"},
            r"a\.csv': column 'name' is not UTF-8: it holds b'M.xfcller'; name the encoding of .*encoding=.latin-1.",
            {"encoding": "latin-1"},
        ),
        ({"encoding": "utf-16"}, r"a\.csv' is not UTF-8; .* encoding=.utf-16.", {"encoding": "utf-16"}),
        (
            {"form": "%d/%m/%Y %H:%M"},
            r"a\.csv', line 2: time='t' holds '31/01/2020 23:00', which is no time such as .*: time_format='%d/%m/%Y %H:%M'",
            {"time_format": "%d/%m/%Y %H:%M"},
        ),
        ({"form": "%d.%m.%y %I:%M %p"}, "holds '31.01.20 11:00 PM'", {"time_format": "%d.%m.%y %I:%M %p"}),
    ],
)
def test_what_to_give_is_said_and_then_the_store_is_that_of_a_plain_file(tmp_path, written, said, given):
    expected = prepare(write(tmp_path / "plain"), tmp_path / "expected")
    source = write(tmp_path / "in", **written)
    with pytest.raises(mr.SourceError, match=said):
        prepare(source, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
    report = prepare(source, tmp_path / "out", **given)
    assert report.fingerprint == expected.fingerprint
    assert report.open().meta["time"] == {"column": "t", "unit": "s", "zone": None}


def test_a_header_that_is_not_utf_8_is_said(tmp_path):
    (tmp_path / "a.csv").write_bytes("t,größe\n2020-01-01,1\n2020-01-02,2\n".encode("cp1252"))
    with pytest.raises(mr.SourceError, match=r"a\.csv': its first line is not UTF-8; .*such as encoding=.latin-1."):
        mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t")
    report = mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t", encoding="cp1252")
    assert list(report.columns) == ["größe"]


def test_bytes_far_down_that_are_not_utf_8_are_said_with_their_line(tmp_path, monkeypatch):
    from millrace.prepare.table.read import csv_files

    monkeypatch.setattr(csv_files, "CSV_BLOCK", 200)
    lines = [f"a{k},2020-01-01,1" for k in range(50)]
    (tmp_path / "a.csv").write_bytes(("name,t,x\n" + "\n".join(lines)).encode() + b"\nM\xfcller,2020-01-01,1\n")
    with pytest.raises(mr.SourceError, match=r"a\.csv', line 52: column 'name' is not UTF-8; .*encoding=.latin-1."):
        prepare(str(tmp_path / "a.csv"), tmp_path / "out")


def test_days_that_could_be_months_are_named_both_ways(tmp_path):
    (tmp_path / "a.csv").write_text("t,x\n01/02/2020,1\n02/03/2020,2\n")
    with pytest.raises(mr.SourceError, match=r"time_format='%d/%m/%Y' \(or '%m/%d/%Y'"):
        mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t")


def test_times_in_two_formats_are_named_with_both_lines(tmp_path):
    source = tmp_path / "a.csv"
    source.write_text("t,x\n2020-01-01,1\n2020-01-02,2\n03/01/2020,3\n2020-01-04,4\n")
    said = r"a\.csv', line 4: time='t' holds '03/01/2020', but line 2 holds '2020-01-01'; write all in one format"
    with pytest.raises(mr.SourceError, match=said):
        mr.prepare_table(str(source), tmp_path / "out", time="t")
    said = r"a\.csv', line 4: time='t' holds '03/01/2020', which is not in time_format='%Y-%m-%d'; fix it, or drop"
    with pytest.raises(mr.SourceError, match=said):
        mr.prepare_table(str(source), tmp_path / "out", time="t", time_format="%Y-%m-%d")
    report = mr.prepare_table(str(source), tmp_path / "out", time="t", time_format="%Y-%m-%d", on_error="skip")
    assert report.dropped == {"null time or entity": 1}
    assert report.open().meta["time"]["unit"] == "D"


@pytest.mark.parametrize(
    "form", ["%d/%m/%Y", "%d/%m/%Y %H:%M:%S", "%Y%m%d", "%d %b %Y", "%d.%m.%y %H:%M", "%Y-%m-%d %H:%M:%S.%f"]
)
def test_texts_become_the_times_that_python_reads(form):
    """Also those that Arrow reads wrongly: 31 February, a year of two digits, hours without a zero."""
    from datetime import datetime

    rng = np.random.default_rng(4)
    whole = [pd.Timestamp(int(s), unit="s").strftime(form) for s in rng.integers(0, 4 * 10**9, 200)]
    odd = [
        "31/02/2020",
        "1/2/2020",
        "1/2/20",
        "20200230",
        " 01/01/2020",
        "1/1/2020 1:02:61",
        "",
        "x",
        None,
        "30.02.20 1:00",
    ]
    found = parse_times(pa.array([*whole, *odd], pa.string()), form).to_pylist()
    for text, time in zip([*whole, *odd], found, strict=True):
        try:
            expected = None if text is None else datetime.strptime(text, form)
        except ValueError:
            expected = None
        assert (time is None) == (expected is None), text
        if expected is not None:
            assert pd.Timestamp(time) == pd.Timestamp(expected), text
    assert form in guess_formats(whole)


def test_texts_and_numbers_of_parquet_files_are_read_by_the_format_too(tmp_path):
    FRAME.assign(t=FRAME["t"].dt.strftime("%d/%m/%Y %H:%M")).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(mr.ConfigError, match=r"time='t' is string; expected .*time_format=, such as '%d/%m/%Y %H:%M'"):
        prepare(str(tmp_path / "a.parquet"), tmp_path / "out")
    made = prepare(str(tmp_path / "a.parquet"), tmp_path / "out", time_format="%d/%m/%Y %H:%M")
    assert made.fingerprint == prepare(write(tmp_path / "plain"), tmp_path / "expected").fingerprint
    days = pd.DataFrame({"t": [20200131, 20200201], "x": [1.0, 2.0]})
    days.to_parquet(tmp_path / "b.parquet")
    store = mr.prepare_table(str(tmp_path / "b.parquet"), tmp_path / "days", time="t", time_format="%Y%m%d").open()
    assert store.columns["time"][:].tolist() == [18292, 18293]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"delimiter": ";;"}, "delimiter=';;'; expected one character"),
        ({"delimiter": "\n"}, "expected one character"),
        ({"encoding": "latin-9000"}, "encoding='latin-9000' is unknown; expected latin-1"),
        ({"decimal": ","}, "decimal=',' is also the delimiter; give delimiter= too"),
        ({"decimal": "x"}, r"decimal='x'; expected '\.' or ','"),
        ({"time_format": "dd/mm/yyyy"}, r"time_format='dd/mm/yyyy'; expected a day in codes of strptime"),
        ({"time_format": "%d/%Q"}, "expected a day in codes of strptime"),
        ({"time_format": "%H:%M"}, "expected a day in codes of strptime"),
    ],
)
def test_what_is_no_form_is_refused_before_any_file_is_opened(tmp_path, given, said):
    with pytest.raises(mr.ConfigError, match=said):
        prepare("nowhere.csv", tmp_path / "out", **given)


def test_an_append_may_be_of_files_that_are_written_another_way(tmp_path):
    prepare(write(tmp_path / "in"), tmp_path / "out")
    later = FRAME.assign(t=FRAME["t"] + pd.Timedelta(days=90))
    later.to_csv(tmp_path / "b.csv", index=False, sep=";", date_format="%d/%m/%Y %H:%M")
    given = {"append": True, "delimiter": ";", "time_format": "%d/%m/%Y %H:%M", "workers": 1}
    assert mr.prepare_table(str(tmp_path / "b.csv"), tmp_path / "out", **given).added["rows"] == 40
