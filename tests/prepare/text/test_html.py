"""``--html text``: of HTML pages their text, one document each, also of pages that are damaged or meant to do harm."""

import gzip
import json
import sys

import msgspec
import pytest

import millrace as mr
from millrace.prepare.text.read.html import page_text, tree
from millrace.store import manifest as manifests

OPTIONS = {"tokenizer": "bytes", "val": 0, "workers": 1, "normalize": False}
PAGE = """<!doctype html>
<head><noscript><p>no scripts</p></noscript><title>A &amp; B</title><style>p > b {}</style>
<script>if (a <b) document.write("<p>no</p>")</script></head>
<h1>Head</h1>one
  two <b>thr</b>ee<br>four<table><tr><td>x<td>y<tr><th>z</table><!-- no -->
<pre>
def f():

    return 1
</pre><ul><li>first<li>second</ul><template>no</template><noscript>no</noscript><iframe><p>no</iframe>&lt;end&gt;"""
TEXT = "A & B\nHead\none two three\nfour\nx y\nz\ndef f():\n\n    return 1\nfirst\nsecond\n<end>"


def prepared(path, out, **options):
    """Its texts."""
    mr.prepare_text(str(path), out, **{**OPTIONS, "html": "text", **options})
    store = mr.open_store(out)
    return store.decode(store.columns["tokens"][:]).split("<|endoftext|>")[:-1]


def test_a_page_gives_its_text_by_lines():
    assert page_text(PAGE) == TEXT


def test_text_that_looks_like_tags_stays():
    assert page_text("<title>On <b>bold</b> & <em ></title><textarea><i>x</i></textarea>&lt;b>") == (
        "On <b>bold</b> & <em >\n<i>x</i>\n<b>"
    )
    assert page_text("<p><b>bo<i>ld</b> and</i> <blink>more</blink> <a href=x>li</a>nk") == "bold and more link"


@pytest.mark.parametrize("page", ["", "\0", "<!-- only -->", "<p>", "<script>x", "<", "<p"])
def test_a_page_without_text_is_empty(page):
    assert page_text(page).strip("<") == ""


HOSTILE = {  # pages, and the text that they have
    "unclosed": ("<b><p><table><td><a href='" + "x" * 100, ""),
    "text behind unclosed": ("<div><b><i><td>text<p", "text"),
    "deep": ("<span>" * 100_000 + "text", "text"),
    "deep and closed": ("<span>" * 100_000 + "text" + "</span>" * 100_000, "text"),
    "deep blocks": ("<div>" * 10_000 + "text", "text"),
    "deep templates": ("<template>" * 100_000 + "no", ""),
    "deep tables": ("<table><td>" * 10_000 + "text", "text"),
    "ends of nothing": ("</p></div></b></table></html></body>" * 1_000 + "text", "text"),
    "a large attribute": ("<p title='" + "x>" * 5_000_000 + "'>text", "text"),
    "many attributes": ("<p " + " ".join(f"a{k}" for k in range(5_000)) + ">text", "text"),
    "a selection that is copied": (
        "<select>" + "<button><selectedcontent></selectedcontent></button>" * 3 + "<option>text</select>",
        "text",
    ),
    "odd characters": ("a&#xD800;&#0;&#x110000;\0b", "a\ufffd\ufffd\ufffdb"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_page_gives_what_text_it_has(name):
    page, expected = HOSTILE[name]
    assert page_text(page).strip() == expected


def test_styles_that_are_not_closed_are_not_repeated_in_each_paragraph():
    page = "<p>" + "".join(f"<B id={k}>" for k in range(300)) + "<p>text" * 300
    assert sum(1 for _ in tree(page).traverse()) < 1_000  # else 90,000: the memory would be that of the square


@pytest.mark.parametrize("name", ["a.html", "a.htm", "A.HTML", "a.html.gz"])
@pytest.mark.parametrize("options", [{}, {"document": "line"}, {"format": "text"}, {"part_bytes": 10}])
def test_a_file_is_one_document_at_its_start(tmp_path, name, options):
    (tmp_path / "in").mkdir()
    data = f"<p>one\n\n<p>two{' ' * 100}".encode()
    (tmp_path / "in" / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (tmp_path / "in" / "b.txt").write_text("<p>plain")
    assert prepared(tmp_path / "in", tmp_path / "out", **options) == ["one\ntwo", "<p>plain"]
    assert mr.open_store(tmp_path / "out").columns["offset"][:].tolist() == [0, 0]


def test_pages_are_cleaned_compared_and_counted_by_their_text(tmp_path):
    for name, page in (
        ("a", "<p>one   two"),
        ("b", "<h1 id=b>one two</h1>"),
        ("c", "<p>x"),
        ("d", "<script>no</script>"),
    ):
        (tmp_path / f"{name}.html").write_text(page)
    options = {**OPTIONS, "normalize": True, "html": "text", "min_chars": 3}
    report = mr.prepare_text(str(tmp_path / "*.html"), tmp_path / "out", **options)
    assert report.documents == {"train": 1}
    assert [note.split("'")[2] for note in report.notes] == [": no document is in it"]
    assert {reason: report.dropped[reason] for reason in ("duplicate", "too short", "empty")} == {
        "duplicate": 1, "too short": 1, "empty": 1,
    }  # fmt: skip


@pytest.mark.parametrize("dedup_unit", ["document", "line"])
@pytest.mark.parametrize("tokenizer", ["char", "train:300"])
def test_a_vocabulary_is_made_of_the_text(tmp_path, tokenizer, dedup_unit):
    (tmp_path / "a.html").write_text("<p title=QQQQ>one one two" * 50)
    prepared(tmp_path / "a.html", tmp_path / "out", tokenizer=tokenizer, dedup_unit=dedup_unit)
    learnt = (tmp_path / "out" / "tokenizer.json").read_text()
    assert ("Q" if tokenizer == "char" else "QQ") not in learnt
    store = mr.open_store(tmp_path / "out")
    assert store.decode(store.columns["tokens"][:]).startswith("one one two")


def test_a_large_page_is_one_document(tmp_path):
    (tmp_path / "a.html").write_text("<p>some words of a <b>line</b></p>\n" * 60_000)
    (found,) = prepared(tmp_path / "a.html", tmp_path / "out")
    assert found == "\n".join(["some words of a line"] * 60_000)


@pytest.mark.parametrize("long_documents", ["stop", "split"])
def test_a_page_over_the_limit_is_never_cut(tmp_path, long_documents):
    (tmp_path / "a.html").write_text("<p>text" * 10)
    with pytest.raises(mr.SourceError, match="raise max_document=, or leave the file out: a page is never cut"):
        prepared(tmp_path / "a.html", tmp_path / "out", max_document=20, long_documents=long_documents)


def test_invalid_characters_are_for_the_policy(tmp_path):
    (tmp_path / "a.html").write_bytes(b"<p>caf\xe9 one")
    (tmp_path / "b.html").write_bytes(b"<p>two")
    path = tmp_path / "*.html"
    with pytest.raises(mr.SourceError, match=r"a\.html', byte 6: invalid utf-8 .*encoding=\"latin-1\""):
        prepared(path, tmp_path / "out")
    assert prepared(path, tmp_path / "skip", on_error="skip") == ["two"]
    assert prepared(path, tmp_path / "replace", on_error="replace") == ["caf\ufffd one", "two"]
    assert prepared(path, tmp_path / "latin", encoding="latin-1") == ["café one", "two"]


def test_without_the_library_one_line_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>text")
    (tmp_path / "b.txt").write_text("text")
    monkeypatch.setitem(sys.modules, "selectolax", None)
    with pytest.raises(mr.ConfigError) as caught:
        mr.prepare_text(
            [str(tmp_path / "b.txt"), str(tmp_path / "a.html")], tmp_path / "out", **OPTIONS, html="text", part_bytes=1
        )
    assert str(caught.value) == "html=\"text\" needs selectolax; pip install '.[html]'"
    assert not (tmp_path / "out.partial").exists()  # nothing was done before
    assert prepared(tmp_path / "b.txt", tmp_path / "out") == ["text"]  # which has no page


def without_html(out):
    """The store as a version made it that did not have the option."""
    path = out / "store.json"
    manifest = manifests.decode(path.read_bytes(), str(path))
    manifest.meta["options"].pop("html")
    for place in (path, out / "snapshots" / f"{manifest.fingerprint}.json"):
        place.chmod(0o644)
        place.write_bytes(manifests.encode(msgspec.structs.replace(manifest)))
    path = out / "provenance.json"
    made = json.loads(path.read_bytes())
    del made["plan"]["options"]["html"]
    path.chmod(0o644)
    path.write_text(json.dumps(made) + "\n")


@pytest.mark.parametrize(("was", "is_old"), [("raw", False), ("raw", True), ("text", False)])
def test_an_append_reads_pages_as_the_store_was_made(tmp_path, was, is_old):
    for name in "abc":
        (tmp_path / f"{name}.html").write_text(f"<p>{name}")
    out = tmp_path / "out"
    prepared(tmp_path / "a.html", out, html=was)
    if is_old:
        without_html(out)
        assert not mr.prepare_text(str(tmp_path / "a.html"), out, **OPTIONS).is_new
    now = "text" if was == "raw" else "raw"
    with pytest.raises(mr.ConfigError, match=f"made with html='{was}'; an append cannot have html='{now}'"):
        prepared(tmp_path / "b.html", out, append=True, html=now)
    mr.prepare_text(str(tmp_path / "b.html"), out, append=True, workers=1)
    found = prepared(tmp_path / "c.html", out, append=True, html=was)
    assert found == (["<p>a", "<p>b", "<p>c"] if was == "raw" else ["a", "b", "c"])


def test_a_finished_store_of_the_other_kind_is_another_store(tmp_path):
    (tmp_path / "a.html").write_text("<p>a")
    prepared(tmp_path / "a.html", tmp_path / "out")
    with pytest.raises(mr.ConfigError, match='html was "text", now "raw"'):
        prepared(tmp_path / "a.html", tmp_path / "out", html="raw")


def test_an_interrupted_run_goes_on_with_its_own_kind_alone(tmp_path):
    (tmp_path / "a.html").write_text("<p>a")
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\nnot JSON\n')
    paths, out = [str(tmp_path / name) for name in ("a.html", "b.jsonl")], tmp_path / "out"
    with pytest.raises(mr.SourceError, match="not JSON"):
        mr.prepare_text(paths, out, **OPTIONS, part_bytes=1)
    plan = tmp_path / "out.partial" / "plan.json"
    with pytest.raises(mr.ConfigError, match='html was "raw", now "text"'):
        mr.prepare_text(paths, out, **OPTIONS, part_bytes=1, html="text")
    options = json.loads(plan.read_bytes())
    del options["options"]["html"]
    plan.write_text(json.dumps(options))  # of a version that did not have the option
    with pytest.raises(mr.ConfigError, match='html was "raw", now "text"'):
        mr.prepare_text(paths, out, **OPTIONS, part_bytes=1, html="text")
    assert mr.prepare_text(paths, out, **OPTIONS, part_bytes=1, on_error="skip").documents == {"train": 2}


def test_the_command_has_it_and_names_it(tools, tmp_path):
    (tmp_path / "a.html").write_text("<p>text")
    command = ("prepare", "text", tmp_path / "a.html", "--tokenizer", "bytes", "--val", 0, "--workers", 1)
    raw = tools.shell(*command, "--out", tmp_path / "raw")
    assert "HTML is kept with its tags; --html text takes only its text" in raw.stderr
    done = tools.shell(*command, "--out", tmp_path / "out", "--html", "text")
    assert (done.returncode, "note:" in done.stderr) == (0, False)
    assert mr.open_store(tmp_path / "out").num_rows == len("text") + 1
    refused = tools.shell(*command, "--out", tmp_path / "no", "--html", "prose")
    assert "--html 'prose'; expected one of raw, text" in refused.stderr
