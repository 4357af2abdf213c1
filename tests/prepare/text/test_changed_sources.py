"""A command whose files were fixed, removed or added keeps what it has finished of the others."""

import json
import os
import shutil

import pytest

import millrace as mr
from millrace.prepare.text import part
from millrace.testing import Fault, count_steps, run_forked, tree_digest

OPTIONS = {"tokenizer": "bytes", "val": 0.1, "workers": 1, "part_bytes": 2_000, "shard_tokens": 3_000}
LINES = {"dedup_unit": "line"}


class Corpus:
    """Eight files of about half a part each, with lines and documents that several of them have."""

    def __init__(self, folder):
        self.folder, self.out = folder / "in", folder / "out"
        self.folder.mkdir()
        for k in range(8):
            self.write(f"{k}.txt", k)

    def write(self, name, number, extra=""):
        documents = [f"document {number * (n % 3)} {n}\nline {n % 7}\n" + "abc " * (n % 20) for n in range(17)]
        (self.folder / name).write_text("\n\n".join([*documents, extra]))

    def prepare(self, **options):
        return mr.prepare_text(str(self.folder), self.out, **{**OPTIONS, **options})

    def from_scratch(self, **options):
        """The digest of a store that an undisturbed run makes of the files as they are now."""
        mr.prepare_text(str(self.folder), self.out.with_name("fresh"), **{**OPTIONS, **options})
        return tree_digest(self.out.with_name("fresh"))


@pytest.fixture
def corpus(tmp_path):
    return Corpus(tmp_path)


class Broken(Exception):
    pass


def interrupt(monkeypatch, corpus, *, after, **options):
    run, done = part.PartMaker.run, []

    def breaking(self):
        if len(done) == after:
            raise Broken
        done.append(self)
        return run(self)

    with monkeypatch.context() as patch:
        patch.setattr(part.PartMaker, "run", breaking)
        with pytest.raises(Broken):
            corpus.prepare(**options)


def fix(corpus):
    corpus.write("3.txt", 3, "a document that was added when the file was fixed")


def touch(corpus):
    os.utime(corpus.folder / "3.txt", ns=(10**18, 10**18))


def rewrite(corpus):
    """The same size and time, other bytes."""
    path = corpus.folder / "3.txt"
    times = path.stat()
    with open(path, "r+b") as file:
        file.write(b"DOCUMENT")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def remove(corpus):
    (corpus.folder / "3.txt").unlink()


def add(corpus):
    corpus.write("2b.txt", 11)


@pytest.mark.parametrize("options", [{}, LINES, {"dedup": "near"}, {"tokenizer": "char"}])
@pytest.mark.parametrize("change", [fix, touch, rewrite, remove, add])
def test_parts_of_unchanged_files_are_kept_and_the_store_is_that_of_the_files_now(
    corpus, monkeypatch, parts_read, change, options
):
    interrupt(monkeypatch, corpus, after=3, **options)
    finished = len(parts_read)
    change(corpus)
    expected = corpus.from_scratch(**options)
    parts_read.clear()
    report = corpus.prepare(**options)
    assert tree_digest(corpus.out) == expected
    assert any("has changed since this was begun: '" in note for note in report.notes)
    if "tokenizer" not in options and options != LINES:  # of these others may change too
        assert finished == 3
        assert "2 of" in " ".join(report.notes)
        assert all(number > 0 for number in parts_read), "the first part holds none of the changed files"


@pytest.mark.parametrize("change", [fix, remove, add])
def test_shards_that_were_written_are_made_anew_of_parts_that_gave_their_tokens_back(corpus, change):
    with count_steps() as steps:
        corpus.prepare()
    shutil.rmtree(corpus.out)
    truncations = [at for at, (what, _) in enumerate(steps, 1) if what == "truncate"]
    at = truncations[len(truncations) // 2]
    assert run_forked(corpus.prepare, fault=Fault(at, "kill")) == -9
    change(corpus)
    report = corpus.prepare()
    assert "parts were read again: the shards made of them are gone" in " ".join(report.notes)
    assert tree_digest(corpus.out) == corpus.from_scratch()


def test_a_kill_at_any_step_of_the_run_after_a_change_changes_nothing(corpus, monkeypatch):
    """First with other files, then killed with these: the third run ends it."""
    partial = corpus.out.with_name("out.partial")
    interrupt(monkeypatch, corpus, after=3)
    fix(corpus)
    shutil.copytree(partial, partial.with_name("begun"))
    with count_steps() as steps:
        corpus.prepare()
    expected = tree_digest(corpus.out)
    assert expected == corpus.from_scratch()
    for at in (at for at in range(1, len(steps) + 1) if at < 20 or at % 9 == 0):
        shutil.rmtree(corpus.out, ignore_errors=True)
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(partial.with_name("begun"), partial)
        assert run_forked(corpus.prepare, fault=Fault(at, "kill")) == -9
        corpus.prepare()
        assert tree_digest(corpus.out) == expected, f"after a kill at step {at}, {steps[at - 1]}"


def test_a_vocabulary_of_the_corpus_is_made_again_and_a_note_says_so(corpus, monkeypatch):
    interrupt(monkeypatch, corpus, after=3, tokenizer="char")
    corpus.write("9.txt", 9, "a character that no file had: ß")
    expected = corpus.from_scratch(tokenizer="char")
    report = corpus.prepare(tokenizer="char")
    assert "the tokenizer char is made of all files, so they may all be read again" in " ".join(report.notes)
    assert tree_digest(corpus.out) == expected


def test_another_order_of_files_keeps_their_parts(tmp_path, monkeypatch, parts_read):
    corpus = Corpus(tmp_path)
    paths = [str(corpus.folder / f"{k}.txt") for k in range(8)]
    options = {**OPTIONS, "part_bytes": 500}
    mr.prepare_text(paths[::-1], tmp_path / "expected", **options)
    monkeypatch.setattr(Corpus, "prepare", lambda self: mr.prepare_text(paths, self.out, **options))
    interrupt(monkeypatch, corpus, after=8)
    parts_read.clear()
    report = mr.prepare_text(paths[::-1], corpus.out, **options)
    assert tree_digest(corpus.out) == tree_digest(tmp_path / "expected")
    assert "8 of" in " ".join(report.notes)
    assert "come in another order" in " ".join(report.notes)


def test_files_come_back_to_the_parts_that_were_made_of_them(corpus, monkeypatch, parts_read):
    """A command with too few files loses nothing: parts stay until the store is there."""
    interrupt(monkeypatch, corpus, after=3)
    with monkeypatch.context() as patch:
        patch.setattr(part.PartMaker, "run", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            mr.prepare_text(str(corpus.folder / "7.txt"), corpus.out, **OPTIONS)
    parts_read.clear()
    report = corpus.prepare()
    assert "3 of" in " ".join(report.notes)
    assert tree_digest(corpus.out) == corpus.from_scratch()


def test_an_append_whose_files_were_fixed_keeps_its_parts_too(corpus, monkeypatch, tmp_path):
    (tmp_path / "base.txt").write_text("base one\n\nbase two\n\nline 3\n\n" + "base three " * 20)
    for out in (corpus.out, tmp_path / "fresh"):
        mr.prepare_text(str(tmp_path / "base.txt"), out, tokenizer="bytes", val=0.1, workers=1)
    interrupt(monkeypatch, corpus, after=3, append=True)
    fix(corpus)
    report = corpus.prepare(append=True)
    assert "2 of" in " ".join(report.notes)
    mr.prepare_text(str(corpus.folder), tmp_path / "fresh", append=True, **OPTIONS)
    assert tree_digest(corpus.out) == tree_digest(tmp_path / "fresh")


def test_restart_begins_afresh_and_removes_nothing_of_others(corpus, monkeypatch, parts_read):
    interrupt(monkeypatch, corpus, after=3)
    with pytest.raises(mr.ConfigError, match=r"normalize was true, now false; .* begin afresh with restart=True"):
        corpus.prepare(normalize=False)
    parts_read.clear()
    report = corpus.prepare(normalize=False, restart=True)
    assert 0 in parts_read
    assert not any("earlier run" in note for note in report.notes)
    assert tree_digest(corpus.out) == corpus.from_scratch(normalize=False)
    before = tree_digest(corpus.out)
    assert not corpus.prepare(normalize=False, restart=True).is_new, "a finished store is never removed"
    assert tree_digest(corpus.out) == before


def test_restart_leaves_a_folder_alone_that_is_not_ours(corpus):
    mine = corpus.out.with_name("out.partial")
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(mr.ConfigError, match=r"out\.partial.* is not an unfinished store"):
        corpus.prepare(restart=True)
    assert os.listdir(mine) == ["thesis.txt"]


def test_the_command_has_exclude_and_restart(tools, tmp_path):
    for name in ("a.txt", "b.txt", "b.bak.txt"):
        (tmp_path / name).write_text(f"text of {name}")
    command = ("prepare", "text", tmp_path, "--out", tmp_path / "out", "--tokenizer", "bytes", "--val", "0")
    done = tools.shell(*command, "--exclude", "*.bak.txt", "--exclude", "a.*", "--restart", "--json")
    assert json.loads(done.stdout)["documents"] == {"train": 1}
    assert "--exclude 'a.*' left out 1 file" in json.loads(done.stdout)["notes"]
