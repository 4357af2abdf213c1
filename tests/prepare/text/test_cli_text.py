"""``millrace prepare text`` as a person meets it: flags old and new, the closing table, errors of one line."""

import contextlib
import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios

import pytest

import millrace as mr
from millrace.cli import prepare_progress, run
from millrace.cli.prepare_text import count
from millrace.cli.spellings import modern


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "tale.txt"
    path.write_text("\n\n".join(f"The tale number {k}  is long." for k in [*range(300), 7]))
    return str(path)


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


def prepare(*arguments):
    return run(["prepare", "text", *arguments, "--workers", "1"])


@pytest.mark.parametrize(
    ("text", "number"),
    [("10M", 10_000_000), ("64MiB", 64 << 20), ("1.5k", 1500), ("10_000", 10_000), ("2GiB", 2 << 30), ("7", 7)],
)
def test_sizes_are_read(text, number):
    assert count(text) == number


@pytest.mark.parametrize("text", ["ten", "10 apples", "-5", "", "1e6", "10MB2"])
def test_a_size_that_is_none_is_wrong_usage(text, source, out, capsys):
    assert prepare(source, "--out", out, f"--shard-tokens={text}") == 2
    assert "is not a number such as 10M or 64MiB" in re.sub(r"[\s│]+", " ", capsys.readouterr().err)


def test_the_closing_table_counts_and_names_the_next_command(source, out, capsys):
    assert prepare(source, "--out", out, "--tokenizer", "bytes", "--val", "0.1", "--shard-tokens", "2k") == 0
    said = capsys.readouterr().out
    store = mr.open_store(out)
    rows = {
        line.split()[0]: line.split()[1:] for line in said.splitlines() if line.startswith(("split", "train", "val"))
    }
    assert rows["split"] == ["documents", "tokens", "shards"]
    shards = [folder.name for folder in (mr_path(out) / "shards").iterdir()]
    for split in ("train", "val"):
        part = store.split(split)
        count_of = sum(name.startswith(split) for name in shards)
        assert rows[split] == [f"{part.num_records:,}", f"{part.num_rows:,}", f"{count_of:,}"]
    assert "dropped, duplicate: 1\n" in said
    characters = sum(len(f"The tale number {k} is long.") for k in range(300))
    assert f"{characters / (characters + 300):.2f} characters per token (bytes)\n" in said
    assert said.splitlines()[-1] == f"next: millrace head {out}"


def mr_path(out):
    from pathlib import Path

    return Path(out)


def test_json_is_the_report(source, out, capsys):
    assert prepare(source, "--out", out, "--tokenizer", "bytes", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fingerprint"] == mr.open_store(out).fingerprint
    assert sum(report["documents"].values()) == 300


def test_the_same_command_again_is_complete_and_another_is_refused(source, out, capsys):
    assert prepare(source, "--out", out, "--tokenizer", "bytes") == 0
    assert prepare(source, "--out", out, "--tokenizer", "bytes") == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("already complete: ")
    assert prepare(source, "--out", out, "--tokenizer", "char") == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert 'tokenizer was "bytes", now "char"' in said
    assert said.count("\n") == 1


def test_an_append_of_nothing_new_says_so(source, out, capsys):
    assert prepare(source, "--out", out, "--tokenizer", "bytes") == 0
    assert prepare(source, "--out", out, "--append") == 0
    assert "nothing to add" in capsys.readouterr().out.splitlines()[-1]


def test_the_flags_of_earlier_scripts_do_the_same(source, tmp_path, capsys):
    from millrace.testing import tree_digest

    (tmp_path / "b.txt").write_text("one  more\n\none  more")
    old = [
        "--input_files",
        source,
        str(tmp_path / "b.txt"),
        "--out_dir",
        str(tmp_path / "old"),
        "--tokenization",
        "bytes",
    ]
    old += ["--tokens_per_shard", "3000", "--no_normalize", "--no_dedup"]
    new = [source, str(tmp_path / "b.txt"), "--out", str(tmp_path / "new"), "--tokenizer", "bytes"]
    new += ["--shard-tokens", "3k", "--no-normalize", "--no-dedup"]
    assert prepare(*old) == prepare(*new) == 0
    assert tree_digest(tmp_path / "old") == tree_digest(tmp_path / "new")
    assert sum(mr.prepare_text([source, str(tmp_path / "b.txt")], tmp_path / "new", tokenizer="bytes", shard_tokens=3000,
                               normalize=False, dedup="none").documents.values()) == 303  # fmt: skip


def test_old_flags_with_an_equals_sign_and_of_other_commands():
    given = ["prepare", "text", "--input_files=a.txt", "--out_dir=x", "--tokens_per_shard=10M"]
    assert modern(given) == ["prepare", "text", "a.txt", "--out=x", "--shard-tokens=10M"]
    assert modern(["head", "--out_dir"]) == ["head", "--out_dir"]
    assert modern(["prepare", "text", "--", "--out_dir"]) == ["prepare", "text", "--", "--out_dir"]


def test_old_flags_are_not_shown(capsys):
    assert run(["prepare", "text", "--help"]) == 0
    said = capsys.readouterr().out
    assert "_" not in "".join(re.findall(r"--[a-z_-]+", said))
    assert (
        re.sub(r"\s+", " ", said)
        .strip()
        .endswith("Example: millrace prepare text books/*.txt --out corpus --tokenizer gpt2")
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["missing.txt"], "missing.txt' does not exist"),
        (["SOURCE", "--tokenizer", "gpt9"], "neither gpt2"),
        (["SOURCE", "--document", "page"], "--document 'page'; expected one of line, blank-line, file, record"),
        (["SOURCE", "--val", "1.5"], "--val 1.5"),
        (["SOURCE", "--engine", "rya"], "--engine 'rya'; expected local, ray or dask"),
        (
            ["SOURCE", "--address", "tcp://there:8786"],
            "--address tcp://there:8786 is for clusters; choose --engine ray",
        ),
        (["SOURCE", "--filter", "nothing"], "expected module:function"),
        (["SOURCE", "--tokenizer", "bytes", "--val", "0.0000001"], "--val 0"),
        (["SOURCE", "--max-document", "10"], "--long-documents split"),
    ],
)
def test_an_error_is_one_line_and_exit_code_1(arguments, said, source, out, capsys):
    given = [source if argument == "SOURCE" else argument for argument in arguments]
    assert prepare(*given, "--out", out) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_progress_is_plain_lines_where_there_is_no_terminal(source, out, capsys, monkeypatch):
    monkeypatch.setattr(prepare_progress, "EVERY_S", 0.0)
    assert prepare(source, "--out", out, "--tokenizer", "bytes") == 0
    lines = capsys.readouterr().err.splitlines()
    read = next(line for line in lines if line.startswith("read: 100"))
    facts = r"1 of 1 files, \d\S* MB/s, \S+ tokens/s, .*iB memory, 0\.3% repeats, \S+ KiB of text"
    assert re.match(rf"read: 100%, {facts}, about 0 s left", read)
    assert any(re.match(r"write: \d+%, \d+ shards?,", line) for line in lines)
    assert not any("\x1b" in line or "\r" in line for line in lines)


FACTS = [" of 1 files", " MB/s", " tokens/s", "iB memory", " repeats", " of text"]


@pytest.mark.parametrize(("width", "count"), [(60, 2), (80, 3), (100, 4), (120, 5), (160, 6)])
def test_a_terminal_shows_what_fits_its_width_and_always_bar_share_and_time_left(source, out, width, count):
    main, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    command = [sys.executable, "-m", "millrace", "prepare", "text", source, "--out", out, "--tokenizer", "bytes"]
    environ = {key: value for key, value in os.environ.items() if key != "COLUMNS"} | {"TERM": "xterm"}
    process = subprocess.Popen([*command, "--workers", "1"], stderr=terminal, stdout=subprocess.DEVNULL, env=environ)
    os.close(terminal)
    said = b""
    with contextlib.suppress(OSError):  # how the end of a terminal is told
        while block := os.read(main, 1 << 16):
            said += block
    os.close(main)
    assert process.wait() == 0
    lines = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()))
    last = next(line for line in reversed(lines) if line.startswith("read"))
    assert re.match(r"read +━+ 100% \d:\d\d:\d\d 1 of 1 files,", last), last
    assert [fact for fact in FACTS if fact in last] == FACTS[:count]
    assert max(map(len, lines)) <= width
    assert "…" not in said.decode()


def test_a_start_without_a_rate_shows_none(capsys, monkeypatch):
    monkeypatch.setattr(prepare_progress, "EVERY_S", 0.0)
    counts = {"files": 0, "all_files": 3, "bytes": 0, "tokens": 0, "documents": 0, "repeats": 0}
    prepare_progress.TextProgress()("read", 0, 1000, counts)
    assert re.fullmatch(r"read: 0%, 0 of 3 files, \S+ .iB memory\n", capsys.readouterr().err)


def test_the_rate_of_a_stage_counts_from_its_beginning(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(prepare_progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(prepare_progress, "EVERY_S", 0.0)
    progress = prepare_progress.TextProgress()
    now[0] += 50  # in which a vocabulary was learnt
    counts = {"files": 0, "all_files": 1, "tokens": 0, "documents": 0, "repeats": 0}
    progress("read", 30_000_000, 100_000_000, {**counts, "bytes": 30_000_000, "begins": True})  # by an earlier run
    now[0] += 10
    progress("read", 80_000_000, 100_000_000, {**counts, "bytes": 80_000_000})
    first, last = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"read: 30%, 0 of 1 files, \S+ .iB memory", first)
    assert last.startswith("read: 80%, 0 of 1 files, 5.0 MB/s, ")
    assert last.endswith(", about 4 s left")


def test_a_shorter_fact_stands_for_one_that_does_not_fit():
    assert prepare_progress.fit_facts(["files", "12 MB/s", "a long one", "3 %"], 20) == "files, 12 MB/s, 3 %"
    assert [prepare_progress.thousands(n) for n in (0, 999, 1000, 12_345, 3_400_000, 5e9)] == [
        "0", "999", "1.0K", "12.3K", "3.4M", "5.0G",
    ]  # fmt: skip


def test_head_shows_the_text_with_its_end(source, out, capsys):
    assert prepare(source, "--out", out, "--tokenizer", "bytes", "--val", "0") == 0
    capsys.readouterr()
    assert run(["head", out, "--records", "2"]) == 0
    said = capsys.readouterr().out
    assert "'The tale number 0 is long.<|endoftext|>'" in said
    assert "'The tale number 1 is long.<|endoftext|>'" in said
    assert f"source  {os.path.basename(source)!r}" in said


def test_head_marks_text_that_goes_on(tmp_path, out, capsys):
    (tmp_path / "a.txt").write_text("x" * 99 + "\n\n" + "y" * 100)
    assert prepare(str(tmp_path / "a.txt"), "--out", out, "--tokenizer", "bytes", "--val", "0") == 0
    capsys.readouterr()
    assert run(["head", out]) == 0
    lines = capsys.readouterr().out.splitlines()
    texts = [line for line in lines if line.startswith("  text")]
    assert texts == [f"  text  '{'x' * 99}<|endoftext|>'", f"  text  '{'y' * 100}'…"]
    assert run(["head", out, "--json"]) == 0
    assert [entry["truncated"] for entry in json.loads(capsys.readouterr().out)] == [False, True]


def test_the_next_command_can_be_given_as_it_is_told(source, tmp_path, capsys):
    out = str(tmp_path / "with a space")
    assert prepare(source, "--out", out, "--tokenizer", "bytes", "--val", "0") == 0
    told = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(told.removeprefix("next: ")) == ["millrace", "head", out]


def test_standard_input_is_a_source(out, tools):
    done = tools.shell("prepare", "text", "-", "--out", out, "--tokenizer", "bytes", "--val", "0", input="one\n\ntwo")
    assert done.returncode == 0, done.stderr
    store = mr.open_store(out)
    assert store.decode(store.columns["tokens"][:]) == "one<|endoftext|>two<|endoftext|>"
