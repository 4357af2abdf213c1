"""The pages of ``millrace inspect``: they load nothing, escape everything, say how much was read, and read no more."""

import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.errors import ConfigError
from millrace.report import sample
from millrace.report.blocks import Bars, Facts, Histogram, Lines, Passages, Pictures, Report, Table
from millrace.report.html import page
from millrace.report.runs import run_report
from millrace.report.stores import store_report
from millrace.testing import tiny_store

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\u202egpj.\x00\x1b[31m\u2028"
VOID = {"meta", "img", "link", "br"}


class Checked(HTMLParser):
    """Fails at what a page may not hold, and collects its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "iframe", "object", "embed", "link", "base", "form", "use", "foreignobject"), tag
        for name, value in attributes:
            assert not name.startswith("on"), name
            assert name not in ("style", "srcset", "xlink:href", "action"), name
            assert name != "href" or re.fullmatch(r"#s\d+", value), value
            assert name != "src" or value.startswith("data:image/png;base64,"), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "style":
            assert not re.search(r"url\(|@import|@font-face|expression", data)
        else:
            self.text.append(data)


def checked(report: Report) -> str:
    """The text of a page, after every check."""
    html = page(report)
    assert "Content-Security-Policy" in html
    assert "default-src 'none'" in html
    assert "://" not in re.sub(r">[^<]*<", "><", html)  # only in texts
    reader = Checked()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    text = "".join(reader.text)
    assert not [letter for letter in text if not letter.isprintable() and letter not in "\n\t"]
    return text


def blocks(report: Report, kind: type) -> list:
    return [block for section in report.sections for block in section.blocks if isinstance(block, kind)]


@pytest.mark.parametrize("kind", ["text", "series", "records"])
def test_every_kind_has_a_page(kind, tmp_path, capsys):
    tiny_store(kind, tmp_path / "store")
    out = tmp_path / "page.html"
    assert run(["inspect", str(tmp_path / "store"), "--html", str(out)]) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("store", "page.html")] == []
    text = checked(store_report(mr.open_store(tmp_path / "store")))
    assert out.read_text() == page(store_report(mr.open_store(str(tmp_path / "store"))))
    assert mr.open_store(tmp_path / "store").fingerprint in text
    assert run(["inspect", str(tmp_path / "store")]) == 0
    assert "Overview" in capsys.readouterr().out


def test_text_shows_lengths_folders_endings_and_boundaries(tmp_path):
    for folder, count in (("books", 3), ("books/old", 2), ("web", 1)):
        (tmp_path / "src" / folder).mkdir(parents=True)
        for k in range(count):
            (tmp_path / "src" / folder / f"{k}.{'txt' if k else 'md'}").write_text(f"{folder} {k} " + "x" * 92)
    (tmp_path / "src/odd.exe").write_text("left out")
    mr.prepare_text([tmp_path / "src"], out=tmp_path / "store", tokenizer="bytes", document="file", val=0)
    store = mr.open_store(tmp_path / "store")
    report = store_report(store)
    bars = {block.title: dict(zip(block.names, block.counts, strict=True)) for block in blocks(report, Bars)}
    lengths = np.diff(store.offsets)
    folders = [source.rpartition("/")[0] for source in store.columns["source"][:].tolist()]
    expected = {
        name: float(sum(n for n, f in zip(lengths, folders, strict=True) if f == name)) for name in set(folders)
    }
    assert bars["Tokens by folder"] == expected
    assert set(bars["Tokens by file ending"]) == {".md", ".txt"}
    assert "files of other endings left out: 1 .exe" in checked(report)
    assert sum(bars["Tokens by file ending"].values()) == store.num_rows
    (passages,) = blocks(report, Passages)
    assert any(len(pieces) == 2 for _, pieces in passages.passages)
    assert all("xxx" in pieces[-1] for _, pieces in passages.passages)
    assert "a new document begins" in checked(report)


def test_series_show_original_and_scaled_values_missing_ones_windows_and_times(tmp_path):
    pd = pytest.importorskip("pandas")
    times = pd.date_range("2024-01-01", periods=200, freq="h")
    level = np.arange(200.0) + 1000
    level[5:9] = np.nan
    frame = pd.concat([pd.DataFrame({"who": who, "time": times, "level": level, "flow": 3.0}) for who in "ab"])
    frame.to_parquet(tmp_path / "t.parquet")
    mr.prepare_table(
        [tmp_path / "t.parquet"],
        out=tmp_path / "store",
        entity="who",
        time="time",
        target="level",
        val_from="2024-01-08",
    )
    report = store_report(mr.open_store(tmp_path / "store"))
    drawn = {(block.title, block.note): block for block in blocks(report, Histogram)}
    assert drawn["level", "original"].edges[0] == pytest.approx(1000, abs=0.01)
    assert abs(drawn["level", "scaled"].edges[0]) < 3
    tables = {block.rows[0][0]: block.rows for block in blocks(report, Table)}
    assert next(row for row in tables["feature"] if row[0] == "level")[-1] == "8"
    times = next(block.rows for block in blocks(report, Table) if "first time" in block.rows[0])
    assert times[1:] == [
        ("train", "2024-01-01T00:00:00", "2024-01-07T23:00:00", "336"),
        ("val", "2024-01-08T00:00:00", "2024-01-09T07:00:00", "64"),
    ]
    window = blocks(report, Lines)[0]
    assert [len(xs) for xs, _ in window.curves.values()] == [48, 12]
    checked(report)


def test_records_show_labels_and_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    columns = {"image": mr.Column("uint8"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(
        tmp_path / "store", kind="records", columns=columns, meta={"classes": ["red", "blue"]}
    ) as writer:
        for k in range(6):
            file = io.BytesIO()
            image.new("RGB", (20, 30), (250, 0, 0) if k % 3 else (0, 0, 250)).save(file, "png")
            data = np.frombuffer(file.getvalue() if k < 5 else b"\x89PNG broken", np.uint8)
            writer.append({"image": data, "label": int(k % 3 == 0)})
    report = store_report(mr.open_store(tmp_path / "store"))
    labels = next(block for block in blocks(report, Bars) if block.title == "label")
    assert dict(zip(labels.names, labels.counts, strict=True)) == {"0 red": 4, "1 blue": 2}
    (pictures,) = blocks(report, Pictures)
    assert [caption for caption, _ in pictures.pictures] == ["1 blue", "0 red", "0 red", "1 blue", "0 red"]
    shown = np.asarray(image.open(io.BytesIO(pictures.pictures[0][1])))
    assert shown.shape[2] == 3
    assert shown[50, 50].tolist() == [0, 0, 250]
    assert "1 more could not be read" in checked(report)


def test_windows_are_shown_in_a_size_that_fits_into_the_split(tmp_path):
    pd = pytest.importorskip("pandas")
    times = pd.date_range("2024-01-01", periods=60, freq="h")
    pd.DataFrame({"who": "a", "time": times, "level": range(60)}).to_parquet(tmp_path / "t.parquet")
    mr.prepare_table([tmp_path / "t.parquet"], out=tmp_path / "s", entity="who", time="time", val_from="2024-01-02")
    window = blocks(store_report(mr.open_store(tmp_path / "s")), Lines)[0]
    assert [len(xs) for xs, _ in window.curves.values()] == [16, 4]


def test_infinite_values_and_spans_beyond_any_float_do_no_harm():
    values = np.array([[np.inf, -1e308], [1.0, 1e308], [np.nan, 0.0]] * 40)
    report = store_report(mr.from_arrays({"values": values}, [0, 120], kind="series"))
    table = next(block.rows for block in blocks(report, Table) if block.rows[0][0] == "feature")
    assert [row[5] for row in table] == ["NaN or infinite", "66.7%", "0.0%"]
    titles = [block.title for block in blocks(report, Histogram)]
    assert "feature 0" in titles
    assert "feature 1" not in titles
    checked(report)


def test_numbers_of_records_are_drawn(tmp_path, capsys):
    hits = np.arange(300.0).reshape(100, 3)
    hits[0, 1] = np.nan
    columns = {"hits": mr.Column("float64", (3,)), "angle": mr.Column("float32", (2,), per="record")}
    with mr.StoreWriter(tmp_path / "s", kind="records", columns=columns) as writer:
        for k in range(10):
            writer.append({"hits": hits[10 * k : 10 * k + 10], "angle": [k, 2 * k]})
    drawn = {block.title: block for block in blocks(store_report(mr.open_store(tmp_path / "s")), Histogram)}
    assert [name for name in drawn if "[" in name] == ["hits[0]", "hits[1]", "hits[2]", "angle[0]", "angle[1]"]
    assert sum(drawn["hits[2]"].counts) == 100
    assert drawn["hits[1]"].note == "1.0% NaN or infinite"
    assert drawn["angle[1]"].highest == 18
    assert run(["inspect", str(tmp_path / "s")]) == 0
    assert "hits[1] (1.0% NaN or infinite): 4 to 298" in capsys.readouterr().out


def test_one_long_document_is_read_in_many_places(tmp_path):
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    report = store_report(mr.open_store(tmp_path / "tokens.bin"))
    (passages,) = blocks(report, Passages)
    firsts = [int(pieces[-1].split()[0]) for _, pieces in passages.passages]
    assert len(firsts) == 6
    assert firsts[0] == 0
    assert firsts[-1] == 60_000 - 240
    assert "60,000 tokens with 60,000 different ids" in checked(report)


def test_hostile_names_are_only_shown(tmp_path):
    columns = {"tokens": mr.Column("uint16"), "source": mr.Column("string", per="record")}
    with mr.StoreWriter(tmp_path / "text", kind="text", columns=columns) as writer:
        for k in range(3):
            writer.append({"tokens": np.arange(5, dtype=np.uint16), "source": f"{HOSTILE}/{k}.{HOSTILE}"})
    store = mr.from_arrays(
        {"values": np.ones((200, 1)), "name": [HOSTILE]}, [0, 200], kind="series", meta={"features": [HOSTILE]}
    )
    columns = {"hits": mr.Column("float32"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(tmp_path / "rec", kind="records", columns=columns, meta={"classes": [HOSTILE]}) as writer:
        writer.append({"hits": np.ones(2, np.float32), "label": 0})
    line = json.dumps(
        {"time": HOSTILE, "command": [HOSTILE], "fingerprint": mr.open_store(tmp_path / "rec").fingerprint}
    )
    (tmp_path / "rec" / "provenance.json").chmod(0o644)
    (tmp_path / "rec" / "provenance.json").write_text(line + "\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 2.0, "verdict": HOSTILE}) + "\n")
    reports = [store_report(mr.open_store(tmp_path / name)) for name in ("text", "rec")]
    for report in (*reports, store_report(store), run_report(tmp_path / "run")):
        text = checked(report)
        assert "<script>" in text, report.title  # as text, after the parser turned escapes back
        assert "\\u202e" in text


def test_only_a_sample_is_read(tmp_path, monkeypatch):
    columns = {"hits": mr.Column("float32"), "label": mr.Column("int64", per="record")}
    with mr.StoreWriter(tmp_path / "store", kind="records", columns=columns, shard_bytes=400) as writer:
        for k in range(600):
            writer.append({"hits": np.full(4, k, np.float32), "label": k % 3})
    monkeypatch.setattr(sample, "SHARDS", 3)
    monkeypatch.setattr(sample, "RECORDS", 12)
    store = mr.open_store(tmp_path / "store")
    assert store.num_shards > 20
    chosen = sample.Sample(store, 5)
    assert [piece.number for piece in chosen.pieces] == [piece.number for piece in sample.Sample(store, 5).pieces]
    names = {store.shard_name(piece.number) for piece in chosen.pieces}
    for folder in (tmp_path / "store/shards").iterdir():
        if folder.name not in names:
            shutil.rmtree(folder)  # whoever touched it would fail
    assert f"a sample of 12 of 600 records, from 3 of {store.num_shards} shards" in checked(store_report(store, seed=5))


def test_a_run_shows_its_curves_starts_and_verdict(tmp_path, capsys):
    lines = [{"step": k, "loss": 5 - k / 100, "wait": 0.25, "samples_per_s": 100.0} for k in range(1, 1001)]
    lines += [{"step": 1000, "val_loss": 3.5}, {"step": 1000, "verdict": "input-bound: disk"}, {"step": "x"}, [1], 7]
    text = "\n".join(map(json.dumps, lines)) + '\nnot json\n{"step": 1001, "loss": 9'
    (tmp_path / "metrics.jsonl").write_text(text)
    (tmp_path / "feed.jsonl").write_text(
        "".join(json.dumps({"step": s, "position": 8 * s, "batch": 8}) + "\n" for s in (1, 400))
    )
    report = run_report(tmp_path)
    loss = next(block for block in blocks(report, Lines) if block.title == "Loss")
    assert set(loss.curves) == {"train", "val"}
    assert len(loss.curves["train"][0]) == 400
    assert loss.marks == [400.0]
    shown = checked(report)
    assert "input-bound: disk" in shown
    assert "25.0% of the time: training often waits for data" in shown
    assert "up to step 1,000" in shown
    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sections"][0]["title"] == "Verdict"


@pytest.mark.parametrize(
    "line", ['{"step": 1, "loss": NaN}', '{"step": 1, "loss": 1e999}', f'{{"step": 1, "a": {10**400}}}', ""]
)
def test_odd_numbers_of_a_run_do_no_harm(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    checked(run_report(tmp_path))


def test_what_is_neither_a_store_nor_a_run_is_one_line(tmp_path, capsys):
    with pytest.raises(ConfigError, match="not the folder of a training run"):
        run_report(tmp_path)
    assert run(["inspect", str(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
    tiny_store("text", tmp_path / "store")
    assert run(["inspect", str(tmp_path / "store"), "--html", str(tmp_path / "none/page.html")]) == 1
    assert "give one such as report.html" in capsys.readouterr().err


def test_an_empty_store_has_a_page(tmp_path):
    with mr.StoreWriter(Path(tmp_path / "store"), kind="records", columns={"hits": mr.Column("float32")}):
        pass
    checked(store_report(mr.open_store(tmp_path / "store")))


def test_verdicts_that_follow_each_other_share_a_row_with_what_to_change(tmp_path, capsys):
    said = [("compute-bound", None), ("input-bound: disk", "copy the store"), ("input-bound: disk", "copy the store")]
    lines = [{"step": 10 * k, "verdict": name, "remedy": remedy} for k, (name, remedy) in enumerate(said, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run(["inspect", str(tmp_path)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "10 compute-bound 20 to 30 input-bound: disk copy the store" in printed


def test_a_line_that_says_something_else_for_once_makes_no_rows(tmp_path):
    names = ["balanced", "compute-bound", "balanced", "balanced", "compute-bound", "balanced", "input-bound: disk"]
    lines = [{"step": k, "verdict": name, "remedy": name[:3]} for k, name in enumerate(names, 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = (block for block in blocks(run_report(tmp_path), Table) if block.rows[0][1] == "verdict")
    assert table.rows[1:] == [
        ("1 to 6", "balanced (2 of 6 lines said otherwise)", "bal"),
        ("7", "input-bound: disk", "inp"),
    ]


def test_a_run_over_a_mixture_names_every_source(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    sources = [{"store": "/web", "weight": 3}, {"store": "/books", "weight": 0.5}]
    values = {"config": {"data": {"sources": sources}}, "store": {"path": "/web", "fingerprint": "ab" * 16}}
    (tmp_path / "run.json").write_text(json.dumps(values))
    facts = dict(next(block for block in blocks(run_report(tmp_path), Facts)).rows)
    assert facts["source 1"] == f"/web, fingerprint {'ab' * 16}, weight 3"
    assert facts["source 2"] == "/books, weight 0.5"
    assert "store" not in facts


def test_sections_without_anything_are_left_out(tmp_path, capsys):
    with mr.StoreWriter(tmp_path / "s", kind="records", columns={"label": mr.Column("int64", per="record")}) as writer:
        writer.append({"label": 3})
    report = store_report(mr.open_store(tmp_path / "s"))
    assert "the only record" in report.subtitle
    assert all(section.blocks for section in report.sections)
    assert run(["inspect", str(tmp_path / "s")]) == 0
    printed = capsys.readouterr().out
    assert "Lengths" not in printed  # there are no rows
    assert "label: 3 (1)" in printed
