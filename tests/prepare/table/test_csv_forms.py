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
        (
            {"sep": ";", "decimal": ","},
            r"a\.csv', line 2: column 'x' holds '\S+,\d+', which is no number; give decimal=','",
            {"decimal": ","},
        ),
        ({"sep": ":"}, "entity='name' is no column; there are name:t:x", {"delimiter": ":"}),
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
    with pytest.raises((mr.SourceError, mr.ConfigError), match=said):
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
    assert report.dropped == {"unreadable time": 1}
    assert report.open().meta["time"]["unit"] == "D"
    wanted = {"time": "t", "time_format": "%Y-%m-%d"}
    with pytest.raises(mr.ConfigError, match="split 'val' would be empty"):
        mr.prepare_table(str(source), tmp_path / "two", on_error="skip", split="time:2031-01-01", **wanted)
    with pytest.raises(mr.SourceError, match="is not in time_format="):  # the part that skipped the row is read again
        mr.prepare_table(str(source), tmp_path / "two", **wanted)


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
        ({"decimal": ",", "delimiter": ","}, "decimal=',' is also the delimiter; give another delimiter="),
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


def test_each_file_shows_its_own_delimiter(tmp_path):
    expected = prepare(write(tmp_path / "plain"), tmp_path / "expected")
    (tmp_path / "in").mkdir()
    for k, (name, sign) in enumerate({"a.csv": ",", "b.csv": ";", "c.csv": "\t", "d.csv": "|", "e.tsv": "\t"}.items()):
        FRAME.iloc[k::5].to_csv(tmp_path / "in" / name, index=False, sep=sign)
    assert prepare(str(tmp_path / "in"), tmp_path / "out").fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("header", "given", "said"),
    [
        (
            "t;x|y",
            {},
            r"delimiter looks like ';', but could be ';' or '\|'; the first line is 't;x\|y': give delimiter=';'",
        ),
        ("t,x", {"decimal": ","}, "',' is the delimiter of its first line, 't,x', and the decimal sign; name another"),
    ],
)
def test_a_header_that_shows_no_one_delimiter_is_refused(tmp_path, header, given, said):
    (tmp_path / "a.csv").write_text(f"{header}\n2020-01-01{header[1]}1\n")
    with pytest.raises(mr.SourceError, match=said):
        mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t", **given)


def test_what_is_quoted_in_a_header_is_no_delimiter(tmp_path):
    (tmp_path / "a.csv").write_text('t;"x, in m|s"\n2020-01-01;1\n')
    assert list(mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t").columns) == ["x, in m|s"]


@pytest.mark.parametrize("form", ["%d/%m/%Y %H:%M", "%d.%m.%y %I:%M %p"])
def test_a_format_is_for_the_files_whose_times_are_texts(tmp_path, form):
    expected = prepare(write(tmp_path / "plain"), tmp_path / "expected").open()
    (tmp_path / "in").mkdir()
    FRAME.iloc[:20].to_csv(tmp_path / "in" / "a.csv", index=False, sep=";", date_format=form)
    FRAME.iloc[20:30].to_parquet(tmp_path / "in" / "b.parquet")
    FRAME.iloc[30:].assign(t=FRAME["t"].dt.strftime(form)).to_parquet(tmp_path / "in" / "c.parquet")
    source = str(tmp_path / "in")
    store = prepare(source, tmp_path / "out", time_format=form, widen=True).open()  # two Parquet files differ
    assert store.meta["time"]["unit"] in ("us", "ns")
    assert store.times()[:].tolist() == expected.times()[:].astype(store.times()[:].dtype).tolist()
    assert store.columns["values"][:].tolist() == expected.columns["values"][:].tolist()
    (tmp_path / "in" / "c.parquet").unlink()
    assert prepare(source, tmp_path / "two", time_format=form).rows == {"train": 30}


def test_files_of_pandas_fit_together_without_a_flag(tmp_path):
    days = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(40) // 2, "D")  # which CSV has as dates
    frame = FRAME.assign(
        t=days, x=FRAME["x"].astype("float32"), n=np.arange(40), v=np.arange(40) * 1.0, id=np.arange(40) % 2
    )
    frame.to_parquet(tmp_path / "all.parquet")
    options = {"time": "t", "entity": "id", "categorical": "name", "features": ["x", "n", "v"], "workers": 1}
    expected = mr.prepare_table(str(tmp_path / "all.parquet"), tmp_path / "expected", **options).open()
    (tmp_path / "in").mkdir()
    frame.iloc[:20].to_csv(tmp_path / "in" / "a.csv")  # with its index, in a column without a name
    frame.iloc[20:].to_parquet(tmp_path / "in" / "b.parquet")
    store = mr.prepare_table(str(tmp_path / "in"), tmp_path / "out", **options).open()
    for column in ("time", "values", "categorical", "name"):
        assert store.columns[column][:].tolist() == expected.columns[column][:].tolist()
    assert store.meta["time"] == expected.meta["time"]
    del options["features"]
    assert list(mr.prepare_table(str(tmp_path / "in"), tmp_path / "every", **options).columns) == ["x", "n", "v"]


def test_dates_and_times_of_csv_files_are_times(tmp_path):
    (tmp_path / "a.csv").write_text("t,x\n2020-01-01,1\n2020-01-02,2\n")
    (tmp_path / "b.csv").write_text("t,x\n2020-01-03 12:00:00,3\n")
    store = mr.prepare_table(str(tmp_path), tmp_path / "out", time="t", workers=1).open()
    assert [str(time) for time in store.times()[:]] == [
        "2020-01-01T00:00:00",
        "2020-01-02T00:00:00",
        "2020-01-03T12:00:00",
    ]


def test_csv_files_that_no_type_fits_are_named_with_the_way_out(tmp_path):
    (tmp_path / "a.csv").write_text("t;x\n2020-01-01;1,5\n")
    (tmp_path / "b.csv").write_text("t;x\n2020-01-02;1.5\n")
    with pytest.raises(
        mr.SourceError,
        match=r"b\.csv', line 2: column 'x' holds '1.5', .* prepare one kind and add the others with append=True",
    ):
        mr.prepare_table(str(tmp_path), tmp_path / "out", time="t", decimal=",")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_format_that_fits_no_time_of_a_file_stops_also_where_rows_are_skipped(tmp_path, kind, on_error):
    good, bad = FRAME.iloc[:30], FRAME.iloc[30:]
    for name, frame, form in (("a", good, "%d/%m/%Y %H:%M"), ("b", bad, "%m-%d-%Y %H:%M")):
        texts = frame.assign(t=frame["t"].dt.strftime(form))
        texts.to_csv(tmp_path / f"{name}.csv", index=False) if kind == "csv" else texts.to_parquet(
            tmp_path / f"{name}.parquet"
        )
    said = r"b\.(csv|parquet)'.*: time='t' holds '02-\d\d-2020 .*time_format='%d/%m/%Y %H:%M'; give time_format='%m-%d-%Y %H:%M'"
    with pytest.raises(mr.MillraceError, match=said):
        prepare(str(tmp_path / f"*.{kind}"), tmp_path / "out", time_format="%d/%m/%Y %H:%M", on_error=on_error)


def test_unreadable_times_are_counted_apart_from_missing_ones(tmp_path):
    texts = ["01/02/2020", "2020-02-03", None, "04/02/2020"]
    pd.DataFrame({"name": ["a", "a", "a", None], "t": texts, "x": range(4)}).to_parquet(tmp_path / "a.parquet")
    report = prepare(str(tmp_path / "a.parquet"), tmp_path / "out", time_format="%d/%m/%Y", on_error="skip")
    assert report.dropped == {"null time or entity": 2, "unreadable time": 1}
    assert report.rows == {"train": 1}


def test_a_word_among_the_numbers_of_a_target_is_named_with_its_line(tmp_path):
    days = [f"2020-01-{day:02d},{'abc' if day == 8 else day}" for day in range(1, 20)]
    (tmp_path / "a.csv").write_text("t,x\n" + "\n".join(days) + "\n")
    said = r"a\.csv', line 9: column 'x' holds 'abc', which is no number; fix it, or leave"
    for named in ({"target": "x"}, {"features": "x"}):
        with pytest.raises(mr.SourceError, match=said):
            mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t", workers=1, **named)


def test_a_delimiter_that_only_some_files_have_is_to_be_left_out(tmp_path):
    for name, sign in {"a": ",", "b": ";"}.items():
        lines = ["t,x", *(f"2020-01-{day:02d},{day}" for day in range(1, 9))]
        (tmp_path / f"{name}.csv").write_text("\n".join(lines).replace(",", sign) + "\n")
    given = {"time": "t", "workers": 1}
    with pytest.raises(mr.SourceError, match=r"b\.csv' is separated by ';', not by ','; .*: leave delimiter= out"):
        mr.prepare_table(str(tmp_path / "*.csv"), tmp_path / "out", delimiter=",", **given)
    assert mr.prepare_table(str(tmp_path / "*.csv"), tmp_path / "out", **given).entities == 2


def test_a_text_column_of_commas_beside_numbers_is_left_out_as_before(tmp_path):
    (tmp_path / "a.csv").write_text("t;x;code\n2020-01-01;1;1,5\n2020-01-02;2;2,5\n")
    report = mr.prepare_table(str(tmp_path / "a.csv"), tmp_path / "out", time="t", workers=1)
    assert list(report.columns) == ["x"]
