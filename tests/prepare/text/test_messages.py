"""What the command reads and says: formats, standard input, and what may not be what the user meant."""

import gzip
import importlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.prepare import engines
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.part import PartDone
from millrace.prepare.text.read.framing import read_documents
from millrace.prepare.text.read.sources import cut_parts, find_sources
from millrace.prepare.text.report import ByteTally
from millrace.text import breaks, simple

RECORDS = [{"text": "one, two", "id": 1}, {"text": 'three "four"\nfive', "id": 2}]
FORMATS = {
    "jsonl": "".join(json.dumps(record) + "\n" for record in RECORDS),
    "csv": 'id,text\n1,"one, two"\n2,"three ""four""\nfive"\n',
}


@pytest.fixture
def prepare(tools, tmp_path):
    """The command, in ``tmp_path``, with bytes as tokens."""

    def prepare(*arguments, **options):
        return tools.shell(
            "prepare", "text", *arguments, "--tokenizer", "bytes", "--val", 0, "--workers", 1, cwd=tmp_path, **options
        )

    return prepare


def texts(path):
    store = mr.open_store(path)
    tokens, offsets = store.columns["tokens"], store.offsets[:].tolist()
    return [bytes(tokens[start : stop - 1].tolist()).decode() for start, stop in pairwise(offsets)]


@pytest.mark.parametrize("form", FORMATS)
def test_records_come_from_standard_input_and_from_files_of_any_name(prepare, tmp_path, form):
    (tmp_path / "records.dat").write_text(FORMATS[form])
    for source in ("-", "records.dat"):
        out = tmp_path / f"out{source}"
        done = prepare(source, "--out", out, "--format", form, input=FORMATS[form])
        assert done.returncode == 0, done.stderr
        assert texts(out) == [record["text"] for record in RECORDS]
        assert set(mr.open_store(out).columns["source"][:].tolist()) == {source}


def test_an_unknown_format_is_refused(prepare):
    done = prepare("-", "--out", "out", "--format", "xml", input="")
    assert done.returncode == 1
    assert "--format 'xml'; expected one of text, jsonl, csv, parquet" in done.stderr


@pytest.mark.parametrize("more", [[], ["a.txt"]])
def test_the_same_standard_input_again_is_done_and_another_refused(prepare, tmp_path, more):
    (tmp_path / "a.txt").write_text("a file")
    given = "first\n\nsecond\n" * 20_000  # longer than both ends of it that are compared
    assert prepare("-", *more, "--out", "out", input=given).returncode == 0
    again = prepare("-", *more, "--out", "out", input=given)
    assert (again.returncode, again.stdout.startswith("already complete")) == (0, True), again.stderr
    other = prepare("-", *more, "--out", "out", input=given + "third")
    assert other.returncode == 1
    assert (
        "out is finished, but with other sources or options: '-' had 280,000 bytes, now 280,005; choose" in other.stderr
    )


def test_an_error_in_standard_input_names_it(prepare):
    done = prepare("-", "--out", "out", "--format", "jsonl", input='{"text": "a"}\n{"text"\n')
    assert "error: '-', byte 14: not JSON" in done.stderr


def test_cleaned_code_is_told_once_with_the_remedy(prepare, tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    return 1\n")
    (tmp_path / "b.md").write_text("* a list\n    * in a list")
    (tmp_path / "c.txt").write_text("prose")
    said = "code and markup are cleaned like prose and lose their indentation; --no-normalize keeps it\n"
    for names, files in ((("a.py", "b.md", "c.txt"), "'a.py' and 1 more"), (("c.txt", "b.md"), "'b.md'")):
        done = prepare(*names, "--out", f"out{len(names)}")
        assert (done.stdout + done.stderr).count(f"note: {files}: {said}") == 1
        assert "note: " not in done.stdout
    assert "--no-normalize" not in prepare("a.py", "b.md", "--out", "kept", "--no-normalize").stderr
    assert "--no-normalize" not in prepare("c.txt", "--out", "prose").stderr
    assert texts(tmp_path / "kept")[0] == Path(tmp_path / "a.py").read_text()


def test_what_a_folder_held_besides_is_told(prepare, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("text")
    (tmp_path / "in" / "b.bin").write_text("text")
    (tmp_path / "in" / "loop").symlink_to(".")
    done = prepare("in", "--out", "out")
    assert "note: 'in/loop' left out: a link to a folder: name that folder to follow it\n" in done.stderr
    assert "note: files of other endings left out: 1 .bin\n" in done.stderr
    told = json.loads(prepare("in", "--out", "out2", "--json").stdout)["notes"]
    assert len(told) == 2


def test_what_was_left_out_is_told_where_the_run_fails_too(prepare, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("not json")
    (tmp_path / "in" / "b.docx").write_text("text")
    done = prepare("in", "--out", "out")
    assert "not JSON" in done.stderr
    assert "note: files of other endings left out: 1 .docx\n" in done.stderr


def test_html_that_is_kept_with_its_tags_is_told(prepare, tmp_path):
    (tmp_path / "a.html").write_text("<p>text</p>")
    assert (
        "note: 'a.html': HTML is kept with its tags; --html text takes only its text"
        in prepare("a.html", "--out", "out").stderr
    )


def test_a_vocabulary_of_the_corpus_is_told_before(tools, tmp_path):
    (tmp_path / "a.txt").write_text("one two three")
    for name, said in (("train:300", "a vocabulary is learnt first"), ("char", "read once for its characters")):
        out = tmp_path / name.replace(":", "")
        done = tools.shell("prepare", "text", tmp_path / "a.txt", "--out", out, "--tokenizer", name, "--val", 0)
        assert done.stderr.startswith("note: ")
        assert said in done.stderr
        assert "note" not in done.stdout


@pytest.mark.parametrize(
    ("name", "said"), [("train:10", "has 257 to"), ("train:abc", "expected"), ("train:²", "expected")]
)
def test_a_vocabulary_that_cannot_be_is_refused_before_it_is_learnt(tools, tmp_path, name, said):
    (tmp_path / "a.txt").write_text("one two three")
    done = tools.shell("prepare", "text", tmp_path / "a.txt", "--out", tmp_path / "out", "--tokenizer", name)
    assert (done.returncode, "note" in done.stderr, said in done.stderr) == (1, False, True)


def test_files_that_hold_nothing_are_told(prepare, tmp_path):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "b.parquet")
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "c.txt").write_text("")
    (tmp_path / "d.csv").write_text("text\n")
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(b"\n\n\n"))
    (tmp_path / "f.txt").write_text(" ")  # a document, which is dropped and counted
    (tmp_path / "g.md").write_text("")
    (tmp_path / "h.md").write_text(" \n\t")
    (tmp_path / "i.md").write_text("?")
    for name in ("f.txt", "g.md", "h.md"):
        done = prepare("a.txt", name, "--out", f"with {name}")
        assert f"note: '{name}': no document is in it\n" in done.stderr
        assert "dropped, empty: 1\n" in done.stdout
    assert "no document" not in prepare("a.txt", "i.md", "--out", "one", "--min-chars", 2).stderr
    assert "note: 'c.txt': no document is in it\n" in prepare("a.txt", "c.txt", "--out", "two").stderr
    names = ["b.parquet", "a.txt", "c.txt", "d.csv", "e.txt.gz", "f.txt"]
    assert "note: 'b.parquet' and 4 more: no document is in them\n" in prepare(*names, "--out", "all").stderr


def test_a_slice_in_which_no_document_begins_is_no_empty_file(tmp_path):
    (tmp_path / "a.txt").write_text("word " * 1000)
    options = {"tokenizer": "bytes", "val": 0, "part_bytes": 100, "workers": 1}
    assert mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **options).notes == []


@pytest.mark.parametrize(
    ("options", "is_told"),
    [({"val_tail": True, "dedup": "none"}, True), ({"val_tail": True}, False), ({"dedup": "none"}, False),
     ({"val_tail": True, "dedup": "none", "val": 0}, False)],
)  # fmt: skip
def test_a_tail_that_may_repeat_what_is_trained_on_is_told(tmp_path, options, is_told):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\none\n\nthree\n\nfour")
    given = {"val": 0.5, "tokenizer": "bytes", "workers": 1, **options}
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **given)
    assert ["equal documents may be in train and in val" in note for note in report.notes] == [True] * is_told


def test_near_duplicates_are_counted_apart_from_equal_ones(tmp_path):
    words = [f"word{k}" for k in range(200)]
    first, near = " ".join(words), " ".join([*words[:-1], "other"])
    texts = [first, first, near, "short", near]
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    options = {"dedup": "near", "tokenizer": "bytes", "val": 0, "workers": 1}
    for part_bytes in (1 << 20, 1000):
        path = tmp_path / str(part_bytes)
        report = mr.prepare_text(str(tmp_path / "a.txt"), path, part_bytes=part_bytes, **options)
        assert report.documents == {"train": 2}
        assert report.dropped == {
            "duplicate": 2, "duplicate bytes": len(first) + len(near), "near-duplicate": 1, "near-duplicate bytes": len(near),
        }  # fmt: skip
    (tmp_path / "b.txt").write_text("\n\n".join([*texts, ""]))
    report = mr.prepare_text(str(tmp_path / "b.txt"), path, append=True, **options)
    assert (report.dropped["duplicate"], report.dropped["near-duplicate"]) == (4, 1)


def test_a_store_does_not_depend_on_the_engine_that_is_installed(tmp_path, monkeypatch):
    for k in range(2):
        (tmp_path / f"{k}.txt").write_text(f"text {k}\n\nmore of it")
    reports = {}
    for name in ("millrace", "tiktoken", "tokenizers"):
        monkeypatch.setenv("MILLRACE_BPE", name)
        for k in range(2):  # and an append
            source = str(tmp_path / f"{k}.txt")
            reports[name] = mr.prepare_text(source, tmp_path / name, val=0, workers=1, append=bool(k))
    assert len({report.encoder for report in reports.values()}) > 1
    assert len({report.fingerprint for report in reports.values()}) == 1
    assert len({(tmp_path / name / "store.json").read_bytes() for name in reports}) == 1
    assert b"tiktoken" in (tmp_path / "tiktoken" / "provenance.json").read_bytes()


def test_documents_with_replaced_characters_are_not_called_dropped(prepare, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\nb\xffd")
    done = prepare("a.txt", "--out", "out", "--on-error", "replace")
    assert "\ndocuments with invalid characters replaced: 1\n" in done.stdout
    assert "dropped" not in done.stdout
    skipped = prepare("a.txt", "--out", "skipped", "--on-error", "skip")
    assert "\ndropped, unreadable: invalid utf-8: 1 (named in skipped/quarantine.jsonl)\n" in skipped.stdout


def test_info_after_an_append_tells_of_both(prepare, tools, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\ntwo")
    (tmp_path / "b.txt").write_text("three\n\none\n\n \n\nfour")
    assert prepare("a.txt", "--out", "out").returncode == 0
    assert prepare("b.txt", "--out", "out", "--append").returncode == 0
    report = json.loads(tools.shell("info", tmp_path / "out", "--json").stdout)["meta"]["report"]
    assert report["documents"] == {"train": 4}
    assert report["tokens"] == {"train": 4 + 4 + 6 + 5}
    assert report["shards"] == {"train": 2}
    assert report["dropped"] == {"duplicate": 2, "duplicate bytes": 6, "empty": 1}
    assert report["characters"] == 15


def test_an_append_tells_what_it_added_and_what_the_store_holds(prepare, tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "b.txt").write_text("three\n\none")
    (tmp_path / "c.txt").write_text("")
    first = prepare("a.txt", "--out", "out").stdout
    assert first.startswith("split ")
    assert "added" not in first
    table = "split  documents  tokens  shards\ntrain  {:<9}  {:<6}  {}\n"
    said = prepare("b.txt", "--out", "out", "--append").stdout
    assert said.startswith("added:\n" + table.format(1, 6, 1) + "the store now holds:\n" + table.format(3, 14, 2))
    nothing = prepare("c.txt", "--out", "out", "--append")
    assert re.fullmatch(r"nothing to add to \S+, fingerprint \w+ \(no documents\)\n", nothing.stdout)
    assert "note: 'c.txt': no document is in it\n" in nothing.stderr


def test_what_was_read_is_told_as_text(prepare, tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"word " * 100_000))
    assert re.search(r"\nread 488\.3 KiB of text in \d", prepare("a.txt.gz", "--out", "out").stdout)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"val": 1e-9}, r"'val' would be .* \(val=0\), or .* val=, or the last documents for it with val_tail=True\);"),
     ({"val": 0, "test": 1e-9}, r"'test' would be .* \(test=0\), or .* test=, or the last .* val_tail=True\);"),
     ({"val": 0.3, "test": 0.3, "val_tail": True, "min_chars": 4}, r"'val' would be .* \(a larger val=\); what")],
)  # fmt: skip
def test_an_empty_split_has_remedies_that_fit(tmp_path, options, said):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    given = {"tokenizer": "bytes", "workers": 1, **options}
    with pytest.raises(mr.ConfigError, match=said):
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **given)
    if not options.get("val_tail"):
        report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **{**given, "val_tail": True})
        assert report.documents == {"train": 2, next(name for name in ("val", "test") if options.get(name)): 1}


def test_what_was_dropped_is_told_where_nothing_is_left(prepare, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"one\n\ntwo\n\nb\xffd\n\n ")
    (tmp_path / "empty.txt").write_text("")
    done = prepare("a.txt", "--out", "out", "--min-chars", 10, "--on-error", "skip")
    where = tmp_path / "out.partial" / "parts" / "*" / "quarantine.jsonl"
    assert (
        "no documents are left: dropped were empty: 1, too short: 2, unreadable: invalid utf-8: 1, named in "
        f"{where}; look at them" in done.stderr
    )
    assert len(list(tmp_path.glob(str(where.relative_to(tmp_path))))) == 1
    assert "no documents are left: the sources hold none; look" in prepare("empty.txt", "--out", "other").stderr
    (tmp_path / "a.txt").write_text("one\n\none\n\ntwo")
    for share, said in ((1e-9, "'val' would be empty: 1e-09 of 2 documents"), (1 - 1e-9, "all 2 are in other splits")):
        with pytest.raises(mr.ConfigError, match=said + r" \(dropped were duplicate: 1, duplicate bytes: 3\); "):
            mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "split", tokenizer="bytes", workers=1, val=share)


@pytest.mark.parametrize("piece_bytes", [1 << 20, 50])
def test_a_character_that_an_append_brings_is_told_with_its_document(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(breaks, "SECTION_BYTES", piece_bytes)
    monkeypatch.setattr(simple, "SECTION_BYTES", piece_bytes)
    given = {"tokenizer": "char", "workers": 1, "val": 0}
    (tmp_path / "a.txt").write_text("abc \n")
    (tmp_path / "b.txt").write_text("abc\n\ncab " + "abc " * 50 + "\u00e9\n\nabba")
    mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", **given, normalize=False, dedup="none")
    with pytest.raises(
        mr.SourceError, match=r"b\.txt': the document at byte 5 cannot be encoded: character 'é' is not in"
    ) as caught:
        mr.prepare_text(str(tmp_path / "b.txt"), tmp_path / "out", **given, normalize=False, dedup="none", append=True)
    assert (caught.value.source, caught.value.offset) == (str(tmp_path / "b.txt"), 5)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst", "a.csv"])
@pytest.mark.parametrize("files", [1, 2])
def test_one_large_file_that_is_one_task_moves_the_bar(tmp_path, monkeypatch, name, files):
    zstd = importlib.import_module("backports.zstd" if sys.version_info < (3, 14) else "compression.zstd")
    rows = [f"{k} " + "".join(map(chr, 65 + np.random.default_rng(k).integers(0, 26, 2_000))) for k in range(2_000)]
    data = ("text\n" if name.endswith("csv") else "").encode() + "\n".join(rows).encode()
    pack = {".gz": lambda data: gzip.compress(data, 1), ".zst": zstd.compress, ".csv": bytes}[Path(name).suffix]
    (tmp_path / name).write_bytes(pack(data))
    (tmp_path / "z.txt").write_text("another task")
    monkeypatch.setattr(engines, "EVERY_S", 0.0)
    seen = []
    sources = [str(tmp_path / name), str(tmp_path / "z.txt")][:files]
    mr.prepare_text(
        sources, tmp_path / "out", tokenizer="bytes", val=0, workers=1, document="line", part_bytes=1 << 20,
        progress=lambda stage, done, total, facts: seen.append((stage, done, total, dict(facts))),
    )  # fmt: skip
    read = [entry[1:] for entry in seen if entry[0] == "read"]
    done = [entry[0] for entry in read]
    assert done == sorted(done)
    assert len(set(done)) > 8
    assert done[-1] == read[-1][1] == sum(Path(source).stat().st_size for source in sources)
    assert next(facts["tokens"] for *_, facts in read if facts["tokens"]) < read[-1][2]["tokens"] / 2
    assert (read[-1][2]["files"], read[-1][2]["documents"]) == (files, 2_000 + files - 1)


def test_slices_that_one_long_document_fills_are_done_when_it_is_read(tmp_path):
    (tmp_path / "a.txt").write_text("short\n\n" + "word " * 20_000 + "\n\n" + "last " * 200)
    size = (tmp_path / "a.txt").stat().st_size
    options = ReadOptions(tokenizer="bytes", part_bytes=10_000)
    sources = find_sources([str(tmp_path / "a.txt")])[0]
    parts = cut_parts(sources, options.part_bytes)
    without = [part.number for part in parts if not list(read_documents(sources[0], part.slices[0], options))]
    assert without == list(range(1, len(parts) - 1))
    done = [PartDone(k, 0, "", 0, 0, 0, 0, {}, {}, 0, (0,) if k in without else ()) for k in range(len(parts))]
    rng = np.random.default_rng(5)
    for _ in range(50):
        tally, seen = ByteTally(sources, parts), []
        left = rng.permutation(len(parts)).tolist()
        while left:
            if 0 in left:
                tally.move(0, {"bytes": size})
            seen.append(tally.done)
            tally.add(left[0], done[left.pop(0)])
            seen.append(tally.done)
        assert seen == sorted(seen)
        assert seen[-1] == tally.total == size
    tally = ByteTally(sources, parts)
    for number in range(1, len(parts)):
        tally.add(number, done[number])
    assert tally.done == parts[-1].slices[0].stop - parts[-1].slices[0].start  # the last document alone
    for num_bytes in (30_000, 60_000, 2 * size):
        tally.move(0, {"bytes": num_bytes})
        assert tally.done == min(num_bytes + parts[-1].slices[0].stop - parts[-1].slices[0].start, size)


def test_a_long_document_tells_its_tokens_as_they_come(tmp_path, monkeypatch):
    monkeypatch.setattr(breaks, "SECTION_BYTES", 1000)
    monkeypatch.setattr(simple, "SECTION_BYTES", 1000)
    monkeypatch.setattr(engines, "EVERY_S", 0.0)
    (tmp_path / "a.md").write_text("word " * 2000)
    seen = []
    mr.prepare_text(
        str(tmp_path / "a.md"), tmp_path / "out", tokenizer="bytes", val=0, workers=1,
        progress=lambda stage, done, total, facts: seen.append(facts.get("tokens")) if stage == "read" else None,
    )  # fmt: skip
    assert seen == sorted(seen)
    assert len(set(seen)) > 8
    assert seen[-1] == 10_000  # spaces at the end go, the end of the document comes


def test_what_an_interrupted_run_left_in_the_folder_is_no_source(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo")
    (tmp_path / "bad.jsonl").write_text("{no json\n")
    options = {"tokenizer": "bytes", "workers": 1, "on_error": "skip"}
    for pattern in ("", "**"):
        source, out = str(tmp_path / pattern), tmp_path / f"out{len(pattern)}"
        with pytest.raises(mr.ConfigError, match=r"'val' would be empty.*what was read is kept"):
            mr.prepare_text(source, out, val=1e-9, **options)
        assert list(out.with_name(out.name + ".partial").rglob("quarantine.jsonl"))
        report = mr.prepare_text(source, out, val=0, **options)
        assert (report.documents, report.dropped) == ({"train": 2}, {"unreadable: not JSON": 1})
