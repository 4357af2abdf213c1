"""Files of a store that are no files: commands name one in one line, and wait for none."""

import os
import shutil
import stat

import pytest

from millrace.cli import run
from millrace.testing import tiny_store

FORMS = {
    "fifo": os.mkfifo,
    "endless": lambda path: os.symlink("/dev/zero", path),
    "circle": lambda path: os.symlink(path, path),
}


@pytest.mark.timeout(60)  # a command that waits for a fifo waits for ever
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["store.json", "provenance.json", "shards"])
def test_a_store_is_not_copied_from_what_is_no_file(form, place, tmp_path, capsys):
    store = tmp_path / "store"
    tiny_store("records", store)
    file = (
        store / place if place != "shards" else sorted(path for path in (store / place).rglob("*") if path.is_file())[0]
    )
    file.unlink()
    FORMS[form](file)
    for command in (
        ["pull", str(store), str(tmp_path / "copy")],
        ["stage", str(store), "--to", str(tmp_path / "copy")],
    ):
        assert run(command) == 1
        problem = capsys.readouterr().err
        assert (problem.count("\n"), str(store) in problem, "connection" in problem) == (1, True, False), problem
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)


@pytest.mark.parametrize(
    "command", [["inspect", "STORE", "--html", "FIFO"], ["bench", "STORE", "--autotune", "--write", "FIFO"]]
)
def test_no_file_takes_the_place_of_a_device_or_a_pipe(command, tmp_path, capsys):
    store, pipe = tmp_path / "store", tmp_path / "pipe"
    tiny_store("records", store)
    os.mkfifo(pipe)
    words = {"STORE": str(store), "FIFO": str(pipe)}
    seconds = ["--seconds", "0.05", "--batch", "2"] if command[0] == "bench" else []
    assert run([*(words.get(word, word) for word in command), *seconds]) == 1
    assert f"{pipe} is " in capsys.readouterr().err
    assert stat.S_ISFIFO(pipe.stat().st_mode)
