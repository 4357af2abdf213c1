"""``--exclude``: which files are left out, and what is said about them."""

import os
from pathlib import Path

import pytest

import millrace as mr
from millrace.prepare.files import find_files


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes files that hold their own names."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str) -> None:
        for name in names:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(name)

    return make


@pytest.mark.parametrize(
    ("pattern", "left"),
    [
        ("*.bak.txt", ["d/a.txt", "d/drafts/c.txt", "d/drafts/deep/e.txt"]),
        ("drafts/**", ["d/a.txt", "d/b.bak.txt"]),
        ("drafts", ["d/a.txt", "d/b.bak.txt"]),
        ("drafts/", ["d/a.txt", "d/b.bak.txt"]),
        ("**/deep/*", ["d/a.txt", "d/b.bak.txt", "d/drafts/c.txt"]),
        ("d/a.txt", ["d/b.bak.txt", "d/drafts/c.txt", "d/drafts/deep/e.txt"]),
        ("[ab].*", ["d/drafts/c.txt", "d/drafts/deep/e.txt"]),
    ],
)
@pytest.mark.parametrize("given", ["d", "./d", "d/**", "d/"])
def test_excluded_files_are_left_out_however_they_were_given(make, pattern, left, given):
    make("d/a.txt", "d/b.bak.txt", "d/drafts/c.txt", "d/drafts/deep/e.txt")
    files = find_files([given], lambda path: path.endswith(".txt"), "text", exclude=[pattern]).files
    assert [os.path.normpath(file.path) for file in files] == left


def test_excluded_files_are_counted_and_a_pattern_that_matches_nothing_is_named(make):
    make("d/a.txt", "d/b.bak", "d/c.bak", "d/drafts/e.txt", "d/x.log")
    found = find_files(["d"], lambda path: path.endswith(".txt"), "text", exclude=["*.bak", "drafts", "*.tmp"])
    assert [file.path for file in found.files] == ["d/a.txt"]
    assert found.notes == [
        "files of other endings left out: 1 .log",
        "--exclude '*.bak' left out 2 files",
        "--exclude 'drafts' left out 1 folder",
        "--exclude '*.tmp' matches no file; check the pattern",
    ]


def test_files_that_were_named_are_excluded_too_and_nothing_left_is_said(make):
    make("d/a.txt", "e/b.txt")
    found = find_files(["d/a.txt", "e/b.txt"], lambda path: True, "text", exclude=["d/*"])
    assert [file.path for file in found.files] == ["e/b.txt"]
    with pytest.raises(mr.ConfigError, match=r"no files in 'd' \(--exclude '\*' left out 1 file\)"):
        find_files(["d"], lambda path: True, "text", exclude=["*"])
