"""What a second run may not do: another plan in the same folder, changed files, a folder somebody else is writing."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

import millrace as mr
from millrace.prepare.text import part
from millrace.prepare.text.read import reader as reading
from millrace.prepare.text.text import Text
from millrace.testing import stopped, tree_digest

OPTIONS = {"tokenizer": "bytes", "part_bytes": 300, "val": 0, "workers": 1}


class Broken(Exception):
    pass


@pytest.fixture
def source(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"document {k} of the first file" for k in range(40)))
    (tmp_path / "b.txt").write_text("\n\n".join(f"document {k} of the second file" for k in range(40)))
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def interrupt(monkeypatch, source, out, *, after=2, **options):
    """A run that breaks off when some parts are finished."""
    run, done = part.PartMaker.run, []

    def breaking(self):
        if len(done) == after:
            raise Broken
        done.append(self)
        return run(self)

    with monkeypatch.context() as patch:
        patch.setattr(part.PartMaker, "run", breaking)
        with pytest.raises(Broken):
            mr.prepare_text(source, out, **{**OPTIONS, **options})
    assert len(list(out.with_name("out.partial").glob("parts/*[0-9a-f]/done.json"))) == after


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"normalize": False}, r"options: normalize was true, now false"),
        ({"dedup": "none"}, r'options: dedup was "exact", now "none"'),
        ({"tokenizer": "gpt2"}, r'options: tokenizer was "bytes", now "gpt2"'),
        ({"part_bytes": 400}, r"options: part_bytes was 300, now 400"),
    ],
)
def test_other_options_than_those_begun_with_are_refused(source, out, monkeypatch, changed, said):
    interrupt(monkeypatch, source, out)
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(mr.ConfigError, match=rf"out\.partial was begun with other.*{said}"):
            mr.prepare_text(source, out, **{**OPTIONS, **changed})
    report = mr.prepare_text(source, out, **OPTIONS)
    assert any(re.match(r"2 of \d+ parts came from an earlier run", note) for note in report.notes)


def test_a_tokenizer_file_that_changed_is_refused(source, out, monkeypatch, tmp_path):
    for k, text in enumerate(("ab", "abc")):
        mr.prepare_text(source, tmp_path / text, **{**OPTIONS, "tokenizer": f"train:{300 + k}"})
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes((tmp_path / "ab" / "tokenizer.json").read_bytes())
    interrupt(monkeypatch, source, out, tokenizer=str(tokenizer))
    tokenizer.write_bytes((tmp_path / "abc" / "tokenizer.json").read_bytes())
    with pytest.raises(mr.ConfigError, match=r"tokenizer was .* now"):
        mr.prepare_text(source, out, **{**OPTIONS, "tokenizer": str(tokenizer)})


def test_other_shards_than_those_begun_with_are_refused(source, out, monkeypatch):
    def broken(task):
        raise Broken

    with monkeypatch.context() as patch:
        patch.setattr(Text, "write_shard", staticmethod(broken))
        with pytest.raises(Broken):
            mr.prepare_text(source, out, shard_tokens=500, **OPTIONS)
    with pytest.raises(mr.ConfigError, match="shard_tokens was 500, now 600"):
        mr.prepare_text(source, out, shard_tokens=600, **OPTIONS)
    mr.prepare_text(source, out, shard_tokens=500, **OPTIONS)


def test_what_an_error_recommends_continues_the_run(source, out, tmp_path, monkeypatch):
    """Stopping at less leaves finished parts as they are: it is not another plan."""
    for path, more in zip(source, (b"bad \xff here", b"long " * 100), strict=True):
        with open(path, "ab") as file:
            file.write(b"\n\n" + more)
    mr.prepare_text(source, tmp_path / "straight", on_error="skip", max_document=300, long_documents="split", **OPTIONS)
    with pytest.raises(mr.SourceError, match='on_error="skip"'):
        mr.prepare_text(source, out, max_document=300, **OPTIONS)
    with pytest.raises(mr.SourceError, match='long_documents="split"'):
        mr.prepare_text(source, out, on_error="skip", max_document=300, **OPTIONS)
    run = part.PartMaker.run
    read = []
    monkeypatch.setattr(part.PartMaker, "run", lambda self: (read.append(self), run(self))[1])
    mr.prepare_text(source, out, on_error="skip", max_document=300, long_documents="split", **OPTIONS)
    assert len(read) <= 2, "the parts that were whole are kept"
    assert tree_digest(out) == tree_digest(tmp_path / "straight")
    assert list(out.glob("quarantine.jsonl"))


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_larger_limit_continues_where_nothing_too_long_was_set_aside(tmp_path, monkeypatch, ending):
    """Records that were are in no finished part any more: those would be missed."""
    source = tmp_path / f"a.{ending}"
    lines = [f"{k} " + "word " * (k % 9) for k in range(60)]
    source.write_text("\n\n".join([json.dumps({"text": line}) if ending == "jsonl" else line for line in lines]))
    interrupt(monkeypatch, str(source), tmp_path / "out", on_error="skip", max_document=70)
    given = {**OPTIONS, "on_error": "skip", "max_document": 80}
    if ending == "jsonl":
        with pytest.raises(mr.ConfigError, match="max_document was 70, now 80"):
            mr.prepare_text(str(source), tmp_path / "out", **given)
    else:
        assert mr.prepare_text(str(source), tmp_path / "out", **given).documents == {"train": 60}


def test_a_call_that_could_not_begin_leaves_nothing_in_the_way(source, out):
    with pytest.raises(mr.ConfigError, match="neither gpt2"):
        mr.prepare_text(source, out, **{**OPTIONS, "tokenizer": "gpt5"})
    with pytest.raises(mr.ConfigError, match="cannot be loaded"):
        mr.prepare_text(source, out, filter="no_such_module:keep", **OPTIONS)
    assert not out.with_name("out.partial").exists()
    mr.prepare_text(source, out, **OPTIONS)


@pytest.mark.parametrize("how", ["append", "touch", "delete"])
def test_a_file_that_changes_while_it_is_read_stops_the_run(source, out, monkeypatch, how):
    then = os.stat(source[1]).st_mtime_ns

    def disturb(text):
        if "5 of the second" in text:
            with open(source[1], "a") as file:
                file.write("more" if how == "append" else "")
            os.utime(source[1], ns=(then + 1, then + 1))  # now may be the same tick of the clock
            if how == "delete":
                os.rename(source[1], source[1] + ".away")
        return True

    monkeypatch.setattr(reading, "load_function", lambda name, option: disturb)
    with pytest.raises(
        mr.SourceError, match="has gone" if how == "delete" else "changed while it was prepared"
    ) as stop:
        mr.prepare_text(source, out, **OPTIONS)
    assert stop.value.source == source[1]
    assert not out.exists()
    monkeypatch.undo()
    if how == "delete":
        os.rename(source[1] + ".away", source[1])
        os.utime(source[1], ns=(then, then))
        mr.prepare_text(source, out, **OPTIONS)
        assert mr.open_store(out).num_records == 80
    else:
        report = mr.prepare_text(source, out, **OPTIONS)
        assert any(re.search(r"has changed .*b\.txt' (was last written|had)", note) for note in report.notes)


def test_a_file_that_cannot_be_read_is_not_a_failed_write(source, out, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", source[0])
        yield

    monkeypatch.setattr(reading, "read_chunks", refuse)
    with pytest.raises(mr.SourceError, match=r"a\.txt' cannot be read: Permission denied"):
        mr.prepare_text(source, out, **OPTIONS)


def test_the_same_call_again_is_already_complete(source, out, monkeypatch):
    first = mr.prepare_text(source, out, **OPTIONS)
    before = tree_digest(out)
    monkeypatch.setattr(part.PartMaker, "run", lambda self: pytest.fail("read again"))
    again = mr.prepare_text(source, out, **OPTIONS)
    assert first.is_new
    assert not again.is_new
    assert (again.fingerprint, again.documents) == (first.fingerprint, first.documents)
    with pytest.raises(
        mr.ConfigError, match=r"is finished, but with other.*normalize was true, now false.*append=True"
    ):
        mr.prepare_text(source, out, **{**OPTIONS, "normalize": False})
    with pytest.raises(mr.ConfigError, match="shards: shard_tokens was"):
        mr.prepare_text(source, out, shard_tokens=77, **OPTIONS)
    os.utime(source[0])
    with pytest.raises(mr.ConfigError, match=r"options: '\S*a\.txt' was last written "):
        mr.prepare_text(source, out, **OPTIONS)
    assert tree_digest(out) == before


def test_a_second_preparation_is_refused_naming_the_first(source, out, tmp_path):
    (tmp_path / "slow.py").write_text("import time\n\ndef keep(text):\n    time.sleep(600)\n")
    script = f"import millrace as mr; mr.prepare_text({source!r}, {str(out)!r}, filter='slow:keep', **{OPTIONS})"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), *sys.path))}
    first = subprocess.Popen([sys.executable, "-c", script], env=env)
    try:
        while not list(out.with_name("out.partial").glob("parts/*.tmp")):
            assert first.poll() is None
            time.sleep(0.02)
        for _ in range(2):
            with pytest.raises(mr.StoreLocked, match=f"process {first.pid} on .*, started ") as refused:
                mr.prepare_text(source, out, **OPTIONS)
            assert refused.value.owner["pid"] == first.pid
        with stopped(first.pid), pytest.raises(mr.StoreLocked):
            mr.prepare_text(source, out, **OPTIONS)
    finally:
        first.kill()
        first.wait()
    owner = json.loads((out.with_name("out.partial") / "owner.json").read_bytes())
    assert owner["pid"] == first.pid
    with pytest.raises(mr.ConfigError, match="filter was"):  # the lock is free: what stops it is the other plan
        mr.prepare_text(source, out, **OPTIONS)


@pytest.mark.parametrize(
    ("option", "value"), [("tokenizer", "char"), ("val", 0.8), ("test", 0.1), ("val_tail", True), ("normalize", False)]
)
def test_an_append_cannot_change_what_documents_are_or_where_they_go(source, out, option, value):
    made = {"tokenizer": "bytes", "val": 0.3, "workers": 1, "dedup": "none"}
    mr.prepare_text(source[0], out, **made)
    before = tree_digest(out)
    with pytest.raises(mr.ConfigError, match=f"was made with {option}="):
        mr.prepare_text(source[1], out, append=True, workers=1, dedup="none", **{option: value})
    assert tree_digest(out) == before
    mr.prepare_text(source[1], out, append=True, workers=1, dedup="none")  # what is left out is as it was
    store = mr.open_store(out)
    hashes = {name: {tuple(h) for h in store.split(name).columns["hash"][:].tolist()} for name in store.splits}
    assert not hashes["train"] & hashes["val"]


def append(path, out, **given):
    return mr.prepare_text(str(path), out, append=True, workers=1, **given)


def test_an_append_cuts_documents_as_the_store_did(tmp_path, out):
    long = ["".join(f"{number} word {k},  \n" for k in range(80)).strip() for number in range(12)]
    (tmp_path / "a.txt").write_text("\n\n".join(long))
    (tmp_path / "b.txt").write_text("\n\n".join([*long, "new"]))
    cut = {"max_document": 100, "long_documents": "split"}
    mr.prepare_text(str(tmp_path / "a.txt"), out, tokenizer="bytes", val=0.4, workers=1, **cut)
    report = append(tmp_path / "b.txt", out)
    assert (sum(report.documents.values()), report.dropped["duplicate"]) == (1, 12)
    for name, value in (("max_document", 64 << 20), ("long_documents", "stop")):  # which are the defaults
        with pytest.raises(mr.ConfigError, match=f"was made with {name}="):
            append(tmp_path / "b.txt", out, **{name: value})


def test_an_append_may_allow_longer_documents_and_cut_those_but_none_that_the_store_has_whole(tmp_path, out):
    for name, length in (("a", 90), ("b", 150), ("c", 350), ("d", 120)):
        (tmp_path / f"{name}.txt").write_text(name * length)
    mr.prepare_text(str(tmp_path / "a.txt"), out, tokenizer="bytes", val=0, workers=1, max_document=100)
    with pytest.raises(mr.ConfigError, match="was made with max_document=100"):
        append(tmp_path / "b.txt", out, max_document=50, long_documents="split")
    assert append(tmp_path / "b.txt", out, max_document=200).tokens == {"train": 151}
    assert append(tmp_path / "c.txt", out, max_document=200, long_documents="split").tokens == {"train": 352}
    assert append(tmp_path / "d.txt", out).tokens == {"train": 121}
    with pytest.raises(mr.ConfigError, match="was made with max_document=200"):
        append(tmp_path / "c.txt", out, max_document=400)


@pytest.mark.parametrize(
    ("made", "kept"),
    [({"document": "line"}, ["three"]), ({"min_chars": 4}, ["three"]), ({"dedup": "none"}, ["one", "one"]),
     ({"dedup_unit": "line", "document": "file"}, ["three"]), ({"filter": "keeps_long:keep"}, ["three"])],
)  # fmt: skip
def test_an_append_takes_what_is_left_out_from_the_store(tmp_path, out, monkeypatch, made, kept):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "keeps_long.py").write_text("def keep(text):\n    return len(text) > 4\n")
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nfour and more" if "document" not in made else "one\ntwo\n")
    (tmp_path / "b.txt").write_text("one\n\none" if "dedup" in made else "one\ntwo\nthree")
    if set(made) & {"min_chars", "filter"}:
        (tmp_path / "b.txt").write_text("two\n\nthree")
    mr.prepare_text(str(tmp_path / "a.txt"), out, tokenizer="bytes", val=0, workers=1, **made)
    before = mr.open_store(out).num_rows
    append(tmp_path / "b.txt", out)
    store = mr.open_store(out)
    assert store.decode(store.columns["tokens"][before:]).split("<|endoftext|>")[:-1] == kept


def test_an_append_reads_fields_as_the_store_did_unless_they_are_given(tmp_path, out):
    spans = {"loss": [[0, 1]]}
    (tmp_path / "a.dat").write_text(json.dumps({"body": "one", **spans}) + "\n")
    (tmp_path / "b.dat").write_text(json.dumps({"body": "two", **spans}) + "\n")
    (tmp_path / "c.csv").write_text('words,mask\nthree,"[[0, 5]]"\n')
    made = {"format": "jsonl", "text_field": "body", "mask_field": "loss", "normalize": False, "document": "record"}
    mr.prepare_text(str(tmp_path / "a.dat"), out, tokenizer="bytes", val=0, workers=1, **made)
    append(tmp_path / "b.dat", out)
    append(tmp_path / "c.csv", out, format="csv", text_field="words", mask_field="mask", document="record")
    store = mr.open_store(out)
    assert store.decode(store.columns["tokens"][:]) == "one<|endoftext|>two<|endoftext|>three<|endoftext|>"
    assert store.columns["mask"][:].tolist() == [1, 0, 0, 0] * 2 + [1] * 6


def test_the_command_tells_what_is_given_from_what_is_left_out(tools, tmp_path, out):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.txt").write_text("two\nthree")
    made = ("--tokenizer", "bytes", "--document", "line", "--val", 0, "--no-normalize")
    assert tools.shell("prepare", "text", tmp_path / "a.txt", "--out", out, *made).returncode == 0
    for flag, value, name in (("--tokenizer", "gpt2", "tokenizer='bytes'"), ("--val", 0.01, "val=0")):
        refused = tools.shell("prepare", "text", tmp_path / "b.txt", "--out", out, "--append", flag, value)
        assert refused.returncode == 1
        assert f"was made with {name}" in refused.stderr
    assert tools.shell("prepare", "text", tmp_path / "b.txt", "--out", out, "--append").returncode == 0
    store = mr.open_store(out)
    assert store.decode(store.columns["tokens"][:]).split("<|endoftext|>")[:-1] == ["one", "two", "three"]


def test_a_changed_filter_is_another_one_and_is_found_in_the_current_folder(source, out, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keeps_some.py").write_text("def keep(text):\n    return '1' in text\n")
    options = {"tokenizer": "bytes", "val": 0, "workers": 2, "filter": "keeps_some:keep"}
    mr.prepare_text(source, out, **options)
    assert mr.open_store(out).num_records == 26
    (tmp_path / "keeps_some.py").write_text("def keep(text):\n    return '22' in text\n")
    with pytest.raises(mr.ConfigError, match="filter was"):
        mr.prepare_text(source, out, **options)
    with pytest.raises(mr.ConfigError, match="expected module:function"):
        mr.prepare_text(source, tmp_path / "other", **{**options, "filter": ":keep"})


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz", "x.tgz", "x.zip"])
def test_archives_are_refused(tmp_path, name):
    (tmp_path / name).write_bytes(b"whatever")
    with pytest.raises(mr.ConfigError, match="is an archive; unpack it"):
        mr.prepare_text(str(tmp_path / name), tmp_path / "out", tokenizer="bytes")


def test_the_tail_holds_at_least_one_document(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    report = mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="bytes", val_tail=True)
    assert report.documents == {"train": 2, "val": 1}


def test_a_text_cannot_forge_the_end_of_a_document(tmp_path):
    lines = [json.dumps({"text": f"one <|endoftext|> two {k}"}) for k in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    mr.prepare_text(str(tmp_path / "a.jsonl"), tmp_path / "out", tokenizer="train:300", val=0, workers=1)
    store = mr.open_store(tmp_path / "out")
    assert int((store.columns["tokens"][:] == store.tokenizer.end).sum()) == store.num_records == 50
    assert "<|endoftext|>" in store.decode(store.encode("<|endoftext|>"))
