"""Which files are taken, in which order, under which names, and how they are cut into parts."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import millrace as mr
from millrace.errors import ConfigError, SourceError
from millrace.prepare.files import check_unchanged
from millrace.prepare.text.options import ReadOptions
from millrace.prepare.text.read.sources import Part, Source, SourceSlice, cut_parts, find_sources

CHOSEN = {"tokenizer": "bytes", "val": 0, "document": "file"}


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Writes files, each holding its own name in hex."""
    monkeypatch.chdir(tmp_path)

    def make(*names: str) -> None:
        for name in names:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(os.fsencode(name).hex().encode())

    return make


def found(*arguments: str) -> list[str]:
    return [source.path for source in find_sources(arguments)[0]]


def test_arguments_stand_as_given_and_names_by_their_bytes(make):
    make("d/b.txt", "d/B.txt", "d/é.txt", "d/z.txt", "d/a/9.txt", "d/a/10.txt", "d/a.txt", "x.txt", "w.txt")
    inside = ["d/B.txt", "d/a/10.txt", "d/a/9.txt", "d/a.txt", "d/b.txt", "d/z.txt", "d/é.txt"]
    assert found("x.txt", "d", "w.txt") == ["x.txt", *inside, "w.txt"]
    assert found("w.txt", "x.txt") == ["w.txt", "x.txt"]
    assert found("d/*.txt") == [name for name in inside if "/a/" not in name]


def test_a_pattern_that_meets_a_folder_and_its_files_takes_each_once(make):
    make("d/a.txt", "d/e/b.txt", "d/e/f/c.txt")
    assert found("d/**") == ["d/a.txt", "d/e/b.txt", "d/e/f/c.txt"]
    assert found("d/**/*.txt") == ["d/a.txt", "d/e/b.txt", "d/e/f/c.txt"]
    assert found("d/*") == ["d/a.txt", "d/e/b.txt", "d/e/f/c.txt"]


def test_a_name_that_looks_like_a_pattern_is_a_name(make):
    make("a[1].txt", "a1.txt")
    assert found("a[1].txt") == ["a[1].txt"]


def test_folders_give_files_of_known_endings_that_are_not_hidden(make):
    make("d/a.txt", "d/b.JSONL", "d/c.csv.gz", "d/d.md.zst", "d/e.png", "d/noending", "d/.hidden.txt", "d/.git/f.txt")
    assert found("d") == ["d/a.txt", "d/b.JSONL", "d/c.csv.gz", "d/d.md.zst"]
    assert found("d/noending", "d/.hidden.txt") == ["d/noending", "d/.hidden.txt"]


def test_endings_say_what_a_file_holds(make):
    make("a.txt", "a.py", "a.md.gz", "a.jsonl.zst", "a.csv", "noending", "a.TXT")
    kinds = {source.path: (source.format, source.document, source.compression) for source in find_sources(["*"])[0]}
    assert kinds == {
        "a.txt": ("text", "blank-line", None), "a.TXT": ("text", "blank-line", None), "a.py": ("text", "file", None),
        "a.md.gz": ("text", "file", "gzip"), "a.jsonl.zst": ("jsonl", "record", "zstd"), "a.csv": ("csv", "record", None),
        "noending": ("text", "blank-line", None),
    }  # fmt: skip
    assert {
        source.document for source in find_sources(["*"], ReadOptions(document="line"))[0] if source.format == "text"
    } == {"line"}
    with pytest.raises(ConfigError, match=r"record for 'a\.txt'"):
        find_sources(["a.txt"], ReadOptions(document="record"))


def test_a_file_named_twice_is_refused_however_it_is_named(make):
    make("d/a.txt", "d/b.txt")
    os.symlink("d/a.txt", "link.txt")
    for again in ("d/a.txt", "./d/a.txt", "d/../d/a.txt", "link.txt"):
        for arguments in (["d/a.txt", again], ["d", "d/a.txt", again]):
            with pytest.raises(ConfigError, match=r"given twice: 'd/a\.txt' and .*name each once"):
                find_sources(arguments)


@pytest.mark.parametrize("second", ["d", "d/*", "d/**", "./d"])
def test_a_file_named_and_met_in_a_folder_is_taken_once_where_it_first_stands(make, second):
    make("d/a.txt", "d/b.txt")
    first, notes = find_sources(["d/b.txt", second])
    assert [Path(source.path).name for source in first] == ["b.txt", "a.txt"]
    assert [note for note in notes if "b.txt' left out: met again" in note]
    assert [Path(source.path).name for source in find_sources([second, "d/b.txt"])[0]] == ["a.txt", "b.txt"]


def test_a_walk_takes_a_file_once_and_names_what_it_left_out(make):
    make("d/a.txt", "d/b.txt", "d/x.png", "d/y.PNG", "d/z.tar.gz", "d/noending", "d/.hidden")
    os.link("d/a.txt", "d/c.txt")
    os.symlink("b.txt", "d/e.txt")
    sources, notes = find_sources(["d"])
    assert [source.path for source in sources] == ["d/a.txt", "d/b.txt"]
    assert notes == [
        "'d/c.txt' and 1 more left out: met again, and taken once",
        "files of other endings left out: 2 .png, 1 without one, 1 .tar.gz",
    ]


def test_the_output_and_other_stores_are_no_sources(make, tmp_path):
    make("d/a.txt")
    for argument, more in (("d", "corpus"), ("d/**", "corpus2"), (".", "corpus3")):
        Path("d/bad.jsonl").write_text("{no json\n")
        report = mr.prepare_text(argument, f"d/{more}", workers=1, on_error="skip", **CHOSEN)
        assert (Path("d") / more / "quarantine.jsonl").exists()
        assert report.documents == {"train": 1}
        assert not mr.prepare_text(argument, f"d/{more}", workers=1, on_error="skip", **CHOSEN).is_new
    assert [note for note in report.notes if "d/corpus' and 1 more left out: a store, which is no source" in note]


def test_what_is_no_plain_file_is_refused_by_name(make):
    make("d/a.txt")
    os.mkfifo("d/pipe.txt")
    with pytest.raises(SourceError, match=r"'d/pipe\.txt' is not a plain file"):
        find_sources(["d"])
    with pytest.raises(SourceError, match=r"'d/pipe\.txt' is not a plain file"):
        find_sources(["d/pipe.txt"])


@pytest.mark.parametrize(
    ("name", "target"), [("loop", "loop"), ("up", "."), ("gone.txt", "nowhere"), ("other", "/tmp")]
)
def test_links_that_are_broken_or_lead_to_folders_are_left_out_by_name(make, name, target):
    make("d/a.txt")
    os.symlink(target, f"d/{name}")
    sources, (note,) = find_sources(["d"])
    assert [source.path for source in sources] == ["d/a.txt"]
    assert note.startswith(f"'d/{name}' left out: a link ")
    if target == ".":
        assert found("d/up") == ["d/up/a.txt"]  # named, it is followed


@pytest.mark.parametrize("pattern", ["d/**", "./d/**", "d/**/*", "d/*", "**/*.txt", "**"])
def test_patterns_do_not_go_round_in_loops(make, pattern):
    make("d/a.txt", "d/e/b.txt", "d/e/f/c.txt", "d/.hidden/g.txt")
    for folder in ("d", "d/e", "d/e/f"):
        for k in range(12):  # each within each: glob would go through thousands of millions of names
            os.symlink("..", f"{folder}/up{k}")
    os.symlink("nowhere.txt", "d/gone.txt")
    sources, notes = find_sources([pattern])
    assert [source.path.removeprefix("./") for source in sources] == ["d/a.txt", "d/e/b.txt", "d/e/f/c.txt"]
    assert all(source.path.startswith("./") == pattern.startswith("./") for source in sources)
    assert [note for note in notes if "gone.txt' left out: a link that leads nowhere" in note]
    assert [note for note in notes if "left out: a link to a folder" in note]


def test_two_stars_match_as_they_do_for_glob(make):
    make("d/a.txt", "d/e/b.txt", "d/e/f/c.dat", "d/e/f/a.txt", "x/d/a.txt", "a.txt", "d/e f/[a].txt")
    for pattern in ("**", "**/*.txt", "d/**", "d/**/*.txt", "**/d/*", "d/**/f/**", "**/e*/*", "*/**/a.txt", "d/e f/**"):
        files = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        assert {source.path for source in find_sources([pattern])[0]} >= files
        folders = [path for path in glob.glob(pattern, recursive=True) if os.path.isdir(path)]
        if not folders or pattern.endswith("**"):
            assert {source.path for source in find_sources([pattern])[0]} == files


def test_a_file_that_is_no_text_is_refused_by_name(make):
    Path("a.bin").write_bytes(b"abc\0def")
    with pytest.raises(SourceError, match=r"'a\.bin' is binary: byte 3 is 0, .* with --format"):
        find_sources(["a.bin"])
    assert find_sources(["a.bin"], ReadOptions(format="text"))[0][0].format == "text"
    for packed, compression in (("a.parquet.gz", "gzip"), ("a b.parquet.zst", "zstd")):
        make(packed)
        source = find_sources([packed])[0][0]
        assert (source.format, source.document, source.compression) == ("parquet", "record", compression)


def test_a_format_stands_above_the_ending(make):
    make("a.txt", "b", "c.json.gz")
    sources, _ = find_sources(["a.txt", "b", "c.json.gz"], ReadOptions(document="line", format="jsonl"))
    assert [(source.format, source.document, source.compression) for source in sources] == [
        ("jsonl", "record", None), ("jsonl", "record", None), ("jsonl", "record", "gzip"),
    ]  # fmt: skip


def test_a_link_to_a_file_is_that_file(make):
    make("a.txt")
    os.mkdir("d")
    os.symlink("../a.txt", "d/b.txt")
    assert found("d") == ["d/b.txt"]


@pytest.mark.parametrize("argument", ["missing.txt", "no*thing", "", "new\nline"])
def test_an_argument_that_is_nothing_is_named_in_one_line(make, argument):
    with pytest.raises(ConfigError, match="does not exist and matches nothing") as caught:
        find_sources([argument])
    assert repr(argument) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_without_files_to_read_says_so(make):
    make("d/a.png")
    with pytest.raises(ConfigError, match=r"no files in 'd' \(files of other endings left out: 1 \.png\); give"):
        find_sources(["d"])


NAMES = [
    "a b.txt",
    "new\nline.txt",
    os.fsdecode(b"bytes \xff\xfe.txt"),
    "quote'\".txt",
    "é" * 100 + ".txt",
    "\x1b[31m.txt",
]


@pytest.mark.parametrize("workers", [1, 2])
def test_files_of_any_name_are_prepared_and_stored_under_a_printable_one(make, tmp_path, workers):
    make(*(f"d/{name}" for name in NAMES))
    mr.prepare_text("d", tmp_path / "out", workers=workers, part_bytes=20, **CHOSEN)
    store = mr.open_store(tmp_path / "out", check=True)
    names = sorted(NAMES, key=os.fsencode)
    shown = [os.fsencode(name).decode(errors="backslashreplace") for name in names]
    assert [store.columns["source"][k] for k in range(len(store.offsets) - 1)] == shown
    again = mr.prepare_text("d", tmp_path / "out", workers=workers, part_bytes=20, **CHOSEN)
    assert not again.is_new


@pytest.mark.parametrize("name", NAMES)
def test_errors_about_a_file_of_any_name_are_one_printable_line(make, tmp_path, name):
    make(f"d/{name}")
    Path(f"d/{name}").write_bytes(b"\xff")
    with pytest.raises(SourceError, match="byte 0") as caught:
        mr.prepare_text("d", tmp_path / "out", workers=1, **CHOSEN)
    str(caught.value).encode()
    assert str(caught.value).isprintable()
    (source,) = find_sources(["d"])[0]
    os.remove(source.location)
    with pytest.raises(SourceError, match="has gone"):
        check_unchanged(source)


def test_two_names_that_would_be_shown_alike_are_refused(make):
    make(os.fsdecode(b"d/\xff.txt"), "d/\\xff.txt")
    with pytest.raises(ConfigError, match="given twice"):
        find_sources(["d"])


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.jsonl", "a.csv", "a.txt.gz"])
def test_files_of_nothing_are_no_documents(make, tmp_path, name):
    make("z.txt")
    Path(name).write_bytes(b"")
    Path("blank.txt").write_bytes(b" \n\t\r\n\n \n")
    report = mr.prepare_text([name, "blank.txt", "z.txt"], tmp_path / "out", tokenizer="bytes", val=0, workers=1)
    assert report.documents == {"train": 1}


def sized(*sizes: int, document: str = "line") -> list[Source]:
    return [
        Source(f"{k}.txt", size, 0, "", f"{k}.txt", format="text", document=document) for k, size in enumerate(sizes)
    ]


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 100))
def test_parts_cover_every_byte_once_in_order(sizes, part_bytes):
    parts = cut_parts(sized(*sizes), part_bytes)
    assert [part.number for part in parts] == list(range(len(parts)))
    units = [unit for part in parts for unit in part.slices]
    at = dict.fromkeys(range(len(sizes)), 0)
    for unit in units:
        assert unit.start == at[unit.source]
        at[unit.source] = sizes[unit.source] if unit.stop < 0 else unit.stop
        assert at[unit.source] - unit.start <= part_bytes
    assert list(at.values()) == sizes
    assert [unit.source for unit in units] == sorted(unit.source for unit in units)
    for part in parts:
        weight = sum((sizes[unit.source] if unit.stop < 0 else unit.stop) - unit.start for unit in part.slices)
        assert weight <= part_bytes


def test_parts_are_the_same_every_time():
    sources = sized(1000, 10, 10, 0, 95)
    assert cut_parts(sources, 100) == cut_parts(list(sources), 100)
    assert cut_parts(sized(250), 100) == [
        Part(0, (SourceSlice(0, 0, 83),)),
        Part(1, (SourceSlice(0, 83, 166),)),
        Part(2, (SourceSlice(0, 166, 250),)),
    ]


def test_whole_files_are_never_cut():
    assert [part.slices for part in cut_parts(sized(1000, 7, document="file"), 100)] == [
        (SourceSlice(0, 0, -1),),
        (SourceSlice(1, 0, -1),),
    ]
