"""The command line as a person or a script meets it: output, errors, exit codes."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import millrace as mr
from millrace.cli import run
from millrace.cli.app import app
from millrace.cli.bench import write_settings
from millrace.testing import tiny_store

COMMANDS = sorted(command.name for command in app.registered_commands)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "events"
    tiny_store("records", path)
    return path


def shell(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "millrace", *arguments], capture_output=True, text=True, timeout=60, **options
    )


def test_the_commands_are_those_documented() -> None:
    assert COMMANDS == [
        "augment", "bench", "demo", "doctor", "explain", "export", "forecast", "gc", "generate", "head", "info", "inspect", "plan",
        "pull", "push", "stage", "train", "verify", "verify-resume", "watch", "worker",
    ]  # fmt: skip


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_ends_with_an_example(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*([command] if command else []), "--help"]) == 0
    text = re.sub(r"\s+", " ", capsys.readouterr().out).strip()
    example = text.rpartition("Example: ")[2]
    assert example.startswith(f"millrace {command or ''}".strip())


def test_the_top_level_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {command} " in listed for command in COMMANDS)
    assert "..." not in listed.partition("Commands:")[2], "a description is cut short"


@pytest.mark.parametrize("command", ["info", "head", "inspect", "verify", "gc", "verify-resume", "doctor"])
def test_json_is_json(command: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = [] if command == "doctor" else [str(store)]
    options = ["--trials", "2", "--steps", "4", "--batch", "4"] if command == "verify-resume" else []
    assert run([command, *target, *options, "--json"]) == 0
    json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_info_says_what_is_there(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = mr.open_store(store)
    assert run(["info", str(store), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fingerprint"] == opened.fingerprint
    assert facts["records"] == opened.num_records
    assert {name: entry["dtype"] for name, entry in facts["columns"].items()} == {
        name: column.dtype for name, column in opened.layout.columns.items()
    }
    assert sum(split["records"] for split in facts["splits"].values()) == opened.num_records
    assert run(["info", str(store)]) == 0
    shown = capsys.readouterr().out
    assert opened.fingerprint in shown
    assert all(name in shown for name in opened.columns)


def test_info_of_a_foreign_layout_says_what_it_was_taken_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "x.bin")
    assert run(["info", str(tmp_path / "x.bin")]) == 0
    assert "headerless .bin of uint16" in capsys.readouterr().out
    assert run(["verify", str(tmp_path / "x.bin")]) == 1
    assert "has no hashes" in capsys.readouterr().err


def test_head_shows_values(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    opened = mr.open_store(store)
    assert run(["head", str(store), "-n", "2", "--from", "1", "--rows", "3", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [entry["record"] for entry in shown] == [1, 2]
    start, stop = opened.offsets[1:3].tolist()
    assert shown[0]["columns"]["hits"] == opened.columns["hits"][start : min(stop, start + 3)].tolist()
    assert shown[0]["columns"]["key"] == opened.columns["key"][1]
    assert run(["head", str(store)]) == 0
    assert opened.columns["key"][0] in capsys.readouterr().out
    assert run(["head", str(store), "--from", "999999"]) == 0
    assert "no records" in capsys.readouterr().out


def test_verify_exits_1_and_names_the_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_store("text", tmp_path / "s")
    assert run(["verify", str(tmp_path / "s")]) == 0
    victim = next(path for path in (tmp_path / "s" / "shards").rglob("tokens.*") if path.stat().st_size)
    os.chmod(victim, 0o644)
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    assert run(["verify", str(tmp_path / "s")]) == 1
    shown = capsys.readouterr().out
    assert str(victim) in shown
    assert "block 0" in shown
    assert "records 0 to" in shown


def test_gc_keeps_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"x": mr.Column("uint8")}
    with mr.StoreWriter(tmp_path / "s", columns=columns) as writer:
        writer.append({"x": [1]})
    with mr.StoreWriter(tmp_path / "s", append=True) as writer:
        writer.append({"x": [2]})
    first = mr.open_store(tmp_path / "s").manifest.parent
    assert run(["gc", str(tmp_path / "s")]) == 0
    mr.open_store(tmp_path / "s", snapshot=first)
    assert run(["gc", str(tmp_path / "s"), "--keep", "1", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"would remove snapshots/{first}.json (no longer used)" in said
    assert "; 1 snapshot kept, the newest " in said
    mr.open_store(tmp_path / "s", snapshot=first)
    assert run(["gc", str(tmp_path / "s"), "--keep", "1"]) == 0
    with pytest.raises(mr.StoreNotFound):
        mr.open_store(tmp_path / "s", snapshot=first)
    assert mr.open_store(tmp_path / "s", check=True).columns["x"][:].tolist() == [1, 2]


def test_an_error_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = shell("info", str(tmp_path / "nothing"))
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr


def test_wrong_usage_is_exit_code_2() -> None:
    for arguments in (["info"], ["no-such-command"], ["info", "x", "--no-such-option"]):
        done = shell(*arguments)
        assert done.returncode == 2, done
        assert "Traceback" not in done.stderr


def test_our_bug_keeps_its_traceback(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cli.info.describe", lambda store: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(["info", str(store)])


def test_ctrl_c_is_exit_code_130_and_says_how_to_continue(store: Path, monkeypatch, capsys) -> None:
    def interrupt(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("millrace.cli.info.describe", interrupt)
    assert run(["info", str(store)]) == 130
    assert f"millrace info {store}" in capsys.readouterr().err


def test_a_reader_that_stops_reading_is_no_traceback(store: Path) -> None:
    command = f"{sys.executable} -m millrace head {store} -n 10000 --rows 10000 | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


def test_a_plain_terminal_and_locale_are_enough(store: Path) -> None:
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "TERM": "dumb", "COLUMNS": "20", "PYTHONUTF8": "0"}
    for command in ("info", "head", "verify"):
        done = shell(command, str(store), env=environment)
        assert done.returncode == 0, done.stderr


def test_version_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"millrace {mr.__version__}"
    assert run(["doctor"]) == 0
    from millrace.store import platform

    shown = capsys.readouterr().out
    assert ("C core      in use" in shown) == platform.HAS_CORE


# Modules in the place of real ones, which interrupt the command that imports them: twice, or once more as it ends.
TWICE = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
finally:
    os.kill(os.getpid(), signal.SIGINT)
"""
AS_IT_ENDS = """
import os, signal, sys, threading, time, traceback
main = threading.main_thread().ident
def again():
    while not any(frame.name == "_threads_end" for frame in traceback.extract_stack(sys._current_frames()[main])):
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
threading.Thread(target=again).start()
os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize(("name", "text"), [("typer", TWICE), ("torch", TWICE), ("torch", AS_IT_ENDS)])
def test_two_ctrl_c_while_a_command_imports_are_one_line(name, text, tmp_path):
    (tmp_path / f"{name}.py").write_text(text)
    command = ["train", "nano", "--store", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "millrace", *command], env=os.environ | {"PYTHONPATH": str(tmp_path)}, cwd=tmp_path,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"interrupted; run it again with: millrace train nano --store {tmp_path}\n"


def test_a_page_or_settings_never_replace_what_is_no_file(store: Path, tmp_path: Path, capsys) -> None:
    """Written by rename: as root, --html /dev/null made a plain file of the device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        assert run(["inspect", str(store), "--html", str(tmp_path / name)]) == 1
        assert f"--html {tmp_path / name} is not the name of a file" in capsys.readouterr().err
        with pytest.raises(mr.ConfigError, match=f"{name} is not a plain file; give another file to --write"):
            write_settings(str(tmp_path / name), {"depth": 3})
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
