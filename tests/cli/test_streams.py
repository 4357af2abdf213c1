"""Commands whose output is full, closed or gone, on a machine without /proc, and with names no file system takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace as mr
from millrace.cli import run
from millrace.testing import tiny_store

pytestmark = pytest.mark.own_process
MILLRACE = f"{sys.executable} -m millrace"
COMMANDS = {
    "--help": 0,
    "--version": 0,
    "doctor": 0,
    "info store": 0,
    "info store --json": 0,
    "head store": 0,
    "verify store": 0,
    "gc store": 0,
    "explain store --step 1 --length 8": 0,
    "verify-resume store --length 8 --trials 1 --steps 2 --batch 2": 0,
    "prepare text notes.txt --out made --tokenizer bytes --val 0 --workers 1": 0,
    "info nothing": 1,
    "info": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_store("text", tmp_path / "store")
    (tmp_path / "notes.txt").write_text("water turns the wheel\n" * 9)
    return tmp_path


def shell(command: str, folder: Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], cwd=folder, stderr=subprocess.PIPE, text=True, timeout=60, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_output_is_one_line_and_exit_code_1(folder: Path, command: str) -> None:
    done = shell(f"{MILLRACE} {command} >/dev/full", folder)
    assert done.returncode == (COMMANDS[command] or 1)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
    if COMMANDS[command] == 0:
        assert done.stderr.endswith(
            "error: standard output cannot be written: No space left on device; free space, or send it elsewhere\n"
        )


def test_a_full_output_without_a_buffer(folder: Path) -> None:
    done = shell(f"{MILLRACE} info store >/dev/full", folder, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize("streams", ["2>&-", "2>/dev/full", "2>&- >&- <&-"])
@pytest.mark.parametrize(
    "command", ["info store", "info nothing", "info", "prepare text notes.txt --out made --tokenizer bytes --val 0"]
)
def test_a_closed_or_full_standard_error_changes_no_exit_code(folder: Path, command: str, streams: str) -> None:
    expected = COMMANDS.get(command, 0)
    assert shell(f"{MILLRACE} {command} {streams}", folder, stdout=subprocess.DEVNULL).returncode == expected
    if command.startswith("prepare"):
        assert mr.open_store(folder / "made", check=True).num_records == 1
        assert run(["verify", str(folder / "made")]) == 0


def test_nothing_opened_takes_the_number_of_a_closed_stream(folder: Path) -> None:
    code = (
        "import os, sys; from millrace.cli import streams; streams.prepare(); "
        "names = [os.readlink(f'/proc/self/fd/{n}') for n in (0, 1, 2)]; sys.exit(names != ['/dev/null'] * 3)"
    )
    assert shell(f'{sys.executable} -c "{code}" <&- >&- 2>&-', folder).returncode == 0


def test_a_reader_that_went_away_is_silent(folder: Path) -> None:
    """The pipe is closed before the command starts, whatever its buffer."""
    for environment in ({}, {"PYTHONUNBUFFERED": "1"}):
        reader, writer = os.pipe()
        os.close(reader)
        done = shell(f"{MILLRACE} head store", folder, stdout=writer, env={**os.environ, **environment})
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, "")


def can_unshare() -> bool:
    return (
        subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0 if os.name == "posix" else False
    )


@pytest.mark.skipif(not can_unshare(), reason="no right to make a mount namespace")
def test_without_proc_everything_works(folder: Path) -> None:
    (folder / "t.csv").write_text("id,time,v\n" + "".join(f"a,{k},{k}\n" for k in range(9)))
    commands = [
        "doctor",
        "info store",
        "prepare text notes.txt --out made --tokenizer bytes --val 0 --workers 1",
        "prepare table t.csv --out table --entity id --time time --workers 1",
        "verify table",
    ]
    script = " && ".join(f"{MILLRACE} {command} >/dev/null" for command in commands)
    done = shell(f"unshare -m bash -c 'mount -t tmpfs none /proc && {script}'", folder)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


LEASE = """
import json, os, socket, sys
from pathlib import Path
from millrace.store import lock
lock.HAS_FLOCK = False
folder = Path(sys.argv[1])
(folder / "lease").write_text(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "create_time": 0.0}))
try:
    lock.FolderLock(folder, folder, folder).acquire()
except lock.StoreLocked:
    sys.exit(7)
"""


@pytest.mark.skipif(not can_unshare(), reason="no right to make a mount namespace")
def test_without_proc_a_live_lease_is_not_taken_over(tmp_path: Path) -> None:
    """No process can be looked up there, so none is known to be dead."""
    (tmp_path / "lease.py").write_text(LEASE)
    (tmp_path / "folder").mkdir()
    command = f"unshare -m bash -c 'mount -t tmpfs none /proc && {sys.executable} lease.py folder'"
    done = shell(command, tmp_path)
    assert done.returncode == 7, done.stderr


LONG = {"name": "n" * 300, "path": "abcdefghi/" * 500}
PLACES = [
    ["info", "X"],
    ["head", "X"],
    ["verify", "X"],
    ["gc", "X"],
    ["explain", "X", "--step", "1"],
    ["verify-resume", "X"],
    ["prepare", "text", "notes.txt", "--out", "X"],
    ["prepare", "text", "X", "--out", "made"],
    ["prepare", "table", "t.csv", "--out", "X", "--entity", "a", "--time", "b"],
    ["prepare", "table", "X", "--out", "made", "--entity", "a", "--time", "b"],
    ["generate", "X", "--prompt", "a"],
    ["demo", "--out", "X"],
]


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("arguments", PLACES, ids=" ".join)
def test_names_that_are_too_long_are_one_line(
    folder: Path, arguments: list[str], kind: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "t.csv").write_text("a,b,c\n1,2,3\n")
    capsys.readouterr()
    assert run([LONG[kind] if argument == "X" else argument for argument in arguments]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("error: ")
    assert len([line for line in shown if line.startswith("error")]) == 1
    if arguments[0] != "prepare" or arguments[2] != "X":
        assert "choose a shorter one" in shown[-1]
        assert len(shown[-1]) < 250
