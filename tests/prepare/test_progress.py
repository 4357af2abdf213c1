"""Progress of preparations that Python calls: on a terminal, and nowhere else."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

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
