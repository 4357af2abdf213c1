"""Progress of preparations that Python calls: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace as mr
from millrace.cli import prepare_progress
from millrace.prepare.progress import SURVEYS, ProgressLine

TEXT = "import sys, millrace as mr; mr.prepare_text(sys.argv[1], sys.argv[2], tokenizer='bytes', workers=1, val=0.2)"
TABLE = "import sys, millrace as mr; mr.prepare_table(sys.argv[1], sys.argv[2], entity='sensor', time='t', workers=1)"


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "a.txt").write_text("\n\n".join(f"text number {n}" for n in range(50)))
    (tmp_path / "a.csv").write_text("sensor,t,x\n" + "".join(f"s,{n},{n}\n" for n in range(50)))
    return {TEXT: tmp_path / "a.txt", TABLE: tmp_path / "a.csv"}


@pytest.mark.parametrize("code", [TEXT, TABLE], ids=["text", "table"])
def test_on_a_terminal_a_line_shows_how_far_it_is(code, sources, tmp_path):
    mine, theirs = os.openpty()
    process = subprocess.Popen([sys.executable, "-c", code, str(sources[code]), str(tmp_path / "out")], stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while piece := os.read(mine, 4096):
            shown += piece
    os.close(mine)
    assert process.wait() == 0, shown
    assert b"reading: " in shown
    assert b"writing: 100%" in shown


@pytest.mark.parametrize("code", [TEXT, TABLE], ids=["text", "table"])
def test_elsewhere_nothing_is_shown(code, sources, tmp_path):
    command = [sys.executable, "-c", code, str(sources[code]), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("kind", ["text", "table", "records"])
def test_many_files_are_counted_while_they_are_found_and_looked_into(kind, tmp_path):
    """Before there is a plan: both may take minutes on a network drive."""
    ending = {"text": "jsonl", "table": "csv", "records": "jsonl"}[kind]
    (tmp_path / "in").mkdir()
    for k in range(250):
        text = f"t,x\n1,{k}\n" if kind == "table" else f'{{"text": "document {k}"}}\n'
        (tmp_path / "in" / f"{k}.{ending}").write_text(text)
    calls: list[tuple[str, int, int]] = []
    options = {"text": {"tokenizer": "bytes", "val": 0}, "table": {"time": "t"}, "records": {}}[kind]
    prepare = {"text": mr.prepare_text, "table": mr.prepare_table, "records": mr.prepare_records}[kind]
    prepare(str(tmp_path / "in"), tmp_path / "out", workers=1, progress=lambda *call: calls.append(call[:3]), **options)
    stages = [call for call in calls if call[0] in SURVEYS]
    assert stages == [("find", 100, 0), ("find", 200, 0), ("survey", 100, 250), ("survey", 200, 250)]
    assert calls.index(stages[-1]) < next(k for k, call in enumerate(calls) if call[0] == "read")


def test_a_survey_is_shown_in_a_line_or_a_bar(monkeypatch, capsys):
    monkeypatch.setattr(prepare_progress, "FIRST_S", 0)
    shown = prepare_progress.TableProgress()
    with shown:
        shown("find", 12_300, 0, {})
    assert capsys.readouterr().err == "find: 12,300 files\n"
    with prepare_progress.RecordProgress() as shown:
        shown("survey", 300, 1200, {})
    assert capsys.readouterr().err.startswith("survey: 25%, 300 files, about")
    line = ProgressLine(sys.stderr)
    line("find", 12_300, 0, {})
    line("survey", 300, 1200, {})
    assert capsys.readouterr().err.split("\r") == ["finding files: 12,300", "looking into files: 25%"]
