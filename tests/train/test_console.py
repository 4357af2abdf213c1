"""Where training that Python calls shows its progress: on a terminal or in a notebook, else nowhere."""

from __future__ import annotations

import os
import sys

from millrace.train.trainer import train

from .conftest import config_of


def test_python_calls_show_progress_on_a_terminal_only(tokens, tmp_path, monkeypatch, capfd):
    train(config_of(tokens, train__max_steps=2), tmp_path / "quiet")
    assert capfd.readouterr() == ("", "")
    mine, theirs = os.openpty()
    os.set_blocking(mine, False)  # nothing shown is an error, not a hang
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        train(config_of(tokens, train__max_steps=2), tmp_path / "watched")
        monkeypatch.undo()
        shown = os.read(mine, 1 << 16).decode()
    os.close(mine)
    assert "step 2/2, loss" in shown


def test_a_notebook_counts_as_watched(tokens, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    train(config_of(tokens, train__max_steps=2), tmp_path / "run")
    assert "step 2/2, loss" in capsys.readouterr().err
