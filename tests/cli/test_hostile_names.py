"""Strings from data that attack the terminal: through every command, in what it prints when it succeeds and when it fails."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import millrace as mr
from millrace.cli import run
from millrace.cli.app import app
from millrace.queues.open import open_queue
from millrace.train.console import StreamConsole

CONTROLS = "".join(map(chr, (*range(1, 32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))))
ATTACK = f"n\x1b[2J\x1b]8;;h:e\x1b\\[red]{CONTROLS}\u2028\u2029\nerror: forged\rgone"
FOLDER = f"{ATTACK}\udcff"  # a name on disk need not be UTF-8
LONG = "x" * 100_000
COMMANDS = sorted(str(command.name) for command in app.registered_commands)
SAMPLES = {"text": ["--length", "8"], "series": ["--lookback", "4", "--horizon", "2"], "records": []}


def assert_printable(text: str) -> None:
    lines = text.split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.startswith(("error: forged", "gone"))] == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / FOLDER
    folder.mkdir()
    return folder


def write_sources(folder: Path) -> dict[str, Path]:
    ending = f"{ATTACK[:40]}\udcff"
    text, lines, table = folder / f"{ending}.txt", folder / f"{ending}.jsonl", folder / f"{ending}.csv"
    text.write_text("some words\n" * 90)
    lines.write_text("".join(json.dumps({"text": f"{ATTACK}{k}", "x": k, ATTACK: k}) + "\n" for k in range(40)))
    written = io.StringIO()
    writer = csv.writer(written)
    writer.writerow(["entity", "time", f"v{ATTACK}"])
    writer.writerows([f"{ATTACK}{entity}", row, row / 2] for entity in range(2) for row in range(60))
    table.write_text(written.getvalue(), newline="")
    return {"text": text, "lines": lines, "series": table}


@pytest.fixture(scope="module")
def sources(folder):
    return write_sources(folder)


@pytest.fixture(scope="module")
def stores(folder, sources):
    columns = {
        "x": mr.Column("float32", (2,)),
        "name": mr.Column("string", per="record"),
        "class": mr.Column("dictionary", per="record"),
    }
    meta = {ATTACK: ATTACK, "features": [ATTACK, "b"], "report": {ATTACK: ATTACK}}
    with mr.StoreWriter(folder / "records", columns=columns, meta=meta, splits=("train", "val")) as writer:
        for record in range(8):
            cells = {"x": [[record, 1]] * 3, "name": f"{ATTACK}{record}", "class": f"{ATTACK}{record % 2}"}
            writer.append(cells, split="val" if record == 7 else "train")
    mr.prepare_text([sources["text"], sources["lines"]], folder / "text", tokenizer="bytes", val=0)
    mr.prepare_table(sources["series"], folder / "series", entity="entity", time="time", val_from="50")
    return {kind: folder / kind for kind in SAMPLES}


def printed(capsys, *arguments: object) -> tuple[int, str, str]:
    code = run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    assert_printable(captured.out + captured.err)
    return code, captured.out, captured.err


@pytest.mark.parametrize("kind", ["text", "lines", "series"])
def test_what_a_preparation_prints_is_printable(folder, sources, kind, capsys):
    out, source = folder / f"{kind}-out", sources[kind]
    options = {
        "text": ["text", source, "--tokenizer", "bytes", "--val", "0"],
        "lines": ["records", source, "--format", "jsonl", "--rename", f"{ATTACK}=y"],
        "series": ["table", source, "--entity", "entity", "--time", "time", "--val-from", "50"],
    }[kind]
    code, said, _ = printed(capsys, "prepare", *options, "--out", out)
    assert (code, "next: millrace head $'/" in said) == (0, True)
    code, said, _ = printed(capsys, "prepare", *options, "--out", out)
    assert (code, "already complete" in said) == (0, True)
    assert printed(capsys, "prepare", *options, "--out", f"{out}/x/y", "--val-from", ATTACK)[0] in (1, 2)


REFUSED = {
    "text": [["--text-field", ATTACK], ["--tokenizer", ATTACK], ["--encoding", ATTACK], ["--filter", f"{ATTACK}:f"]],
    "table": [["--entity", ATTACK], ["--entity", "entity", "--time", f"w{ATTACK}"], ["--target", ATTACK], ["--where", ATTACK]],
    "records": [["--format", "jsonl"], ["--rename", ATTACK], ["--split", ATTACK], ["--map", ATTACK]],
}  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind, some in REFUSED.items() for each in some])
def test_what_refuses_a_preparation_is_printable(folder, sources, kind, options, capsys):
    source = sources["series" if kind == "table" else "lines"]
    code, _, said = printed(capsys, "prepare", kind, source, "--out", folder / "refused", *options)
    assert (code in (1, 2), bool(said)) == (True, True)


def readings(path: Path, kind: str) -> dict[str, list[object]]:
    """The commands that read a store, as they succeed."""
    samples = SAMPLES[kind]
    measured = {"doctor": [path, "--seconds", 0.01], "bench": [path, "--batch", 2, "--seconds", 0.01]}
    return {
        **(measured if kind == "records" else {}),  # they take the longest
        "info": [path], "head": [path], "inspect": [path], "verify": [path], "gc": [path],
        "explain": [path, *samples, "--batch", 2, "--step", 1],
        "verify-resume": [path, *samples, "--batch", 2, "--steps", 3, "--trials", 2],
        "plan": [path, *samples, "--mb-per-s", 1],
        "stage": [path, "--to", f"{path}-staged"], "push": [path, f"{path}-pushed"], "pull": [f"{path}-pushed", f"{path}-pulled"],
        "export": [path, "--to", "npy", "--out", f"{path}-npy"],
    }  # fmt: skip


@pytest.mark.parametrize("kind", SAMPLES)
def test_what_commands_print_of_a_store_is_printable(stores, kind, capsys):
    for command, arguments in readings(stores[kind], kind).items():
        code, said, problem = printed(capsys, command, *arguments)
        assert (code, bool(said)) == (0, True), problem
        if command in ("info", "head", "inspect", "verify", "gc", "explain"):
            code, said, problem = printed(capsys, command, *arguments, "--json")
            assert code == 0, problem
            json.loads(said)


def test_names_are_shown_with_escapes(stores, capsys):
    shown = [printed(capsys, command, stores["records"])[1] for command in ("info", "head", "inspect")]
    assert all(r"n\x1b[2J\x1b]8;;h:e\x1b" in text for text in shown)


FAILURES = {
    **{
        name: ["{}"]
        for name in ("info", "head", "inspect", "verify", "gc", "doctor", "bench", "plan", "watch", "generate")
    },
    "explain": ["{}", "--batch", "2", "--step", "1"],
    "verify-resume": ["{}", "--batch", "2"],
    "forecast": ["{}", "--entity", ATTACK],
    "augment": ["{}", "--out", "{}-out", "--copies", "1", "--flip", "1"],
    "export": ["{}", "--to", "npy", "--out", "{}-out"],
    "pull": ["{}", "{}-out"],
    "push": ["{}", "{}-out"],
    "stage": ["{}", "--to", "{}-out"],
    "train": ["nano", "--store", "{}", "--run", "{}-run", "--set", f"{ATTACK}=1"],
    "worker": ["memory://hostile", "--run", ATTACK],
    "demo": ["--out", "."],
}


def test_every_command_has_a_failure_here():
    assert sorted(FAILURES) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_what_a_command_prints_when_it_fails_is_printable(command, folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "gpt").mkdir(exist_ok=True)  # what demo refuses to write over
    arguments = [word.format(folder / ATTACK) if word.startswith("{}") else word for word in FAILURES[command]]
    code, _, said = printed(capsys, command, *arguments)
    assert (code, said.startswith("error: ")) == (1, True)
    assert printed(capsys, command, f"--{ATTACK}", *arguments)[0] == 2
    assert printed(capsys, ATTACK, *arguments)[0] == 2


def test_a_store_with_hostile_names_that_is_damaged_is_reported_in_printable_lines(stores, tmp_path, capsys):
    copy = tmp_path / FOLDER
    mr.pull(stores["records"], copy)
    shard = next(path for path in (copy / "shards").rglob("*") if path.is_file() and path.stat().st_size)
    shard.write_bytes(bytes([shard.read_bytes()[0] ^ 1]) + shard.read_bytes()[1:])
    code, said, _ = printed(capsys, "verify", copy)
    assert (code, "damaged" in said) == (1, True)
    manifest = json.loads((copy / "store.json").read_text())
    (copy / "store.json").write_text(json.dumps({**manifest, ATTACK: 1, "kind": ATTACK}))
    assert printed(capsys, "info", copy)[0] == 1


def test_what_a_notebook_shows_of_a_store_is_printable(stores):
    assert repr(mr.open_store(stores["records"])).isprintable()


def test_runs_and_workers_of_a_queue_are_shown_in_printable_lines(capsys):
    queue = open_queue("memory://hostile-names")
    queue.offer(ATTACK, "link", "/folder", [])
    queue.lease(ATTACK, ATTACK, {"threads": ATTACK, "made": 1, "seconds": 1})
    code, said, _ = printed(capsys, "queue", "status", "memory://hostile-names")
    assert (code, said.count(r"n\x1b[2J") >= 2) == (0, True)
    assert printed(capsys, "queue", "status", f"memory://{ATTACK}")[0] in (0, 1)
    assert printed(capsys, "queue", "drain", f"redis://{ATTACK}", "--run", ATTACK)[0] == 1


def test_keys_of_a_configuration_are_shown_in_printable_lines(folder, stores, capsys):
    config = folder / "own.toml"
    config.write_text(f"[train]\n{json.dumps(ATTACK)} = 1\n".replace("\x7f", ""))
    assert printed(capsys, "train", config, "--store", stores["text"], "--run", folder / "run")[0] == 1
    config.write_text(f"[{ATTACK}")
    assert printed(capsys, "train", config, "--store", stores["text"], "--run", folder / "run")[0] == 1


def test_long_names_are_cut(capsys, tmp_path):
    code, _, said = printed(capsys, "prepare", "text", __file__, "--out", tmp_path / "out", "--text-field", LONG)
    assert (code, len(said) < 10_000) == (1, True)
    with mr.StoreWriter(tmp_path / "store", columns={"x": mr.Column("int8")}, meta={"names": [LONG]}) as writer:
        writer.append({"x": [1]})
    code, said, _ = printed(capsys, "info", tmp_path / "store")
    assert (code, max(map(len, said.splitlines())) < 1000) == (0, True)


def test_a_message_of_a_training_is_one_printable_line():
    stream = io.StringIO()
    console = StreamConsole(stream)
    console.say(ATTACK)
    console.show(ATTACK)
    assert stream.getvalue().count("\n") == 2
    assert_printable(stream.getvalue())


@pytest.mark.parametrize("kind", [mr.ConfigError, mr.SourceError, mr.StoreCorrupt])
def test_the_message_of_an_error_is_printable_for_every_caller(kind):
    error = kind(f"column {ATTACK} is unknown", path=FOLDER)
    assert str(error).isprintable()
    assert error.path == FOLDER  # what a program reads stays as it is


def test_warnings_and_tracebacks_of_a_command_are_printable():
    script = f"""
import warnings
from millrace.cli import streams
streams.prepare()
warnings.warn({ATTACK!r})
raise ValueError({ATTACK!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, timeout=60)
    said = done.stderr.decode()
    assert (done.returncode, said.count("forged") >= 2, "Traceback" in said) == (1, True, True)
    assert [
        letter for letter in said if not letter.isprintable() and letter not in "\n\t"
    ] == []  # they have several lines


@pytest.mark.skipif(os.name == "nt", reason="no pseudo terminals there")
def test_a_terminal_gets_no_escape_of_the_data_beside_the_progress_bar(tmp_path):
    """rich writes escape sequences of its own, and reads [red] as markup."""
    import pty

    folder = tmp_path / FOLDER
    folder.mkdir()
    write_sources(folder)
    (folder / f"{ATTACK}.unknown").write_text("left out, with a note")
    command = [sys.executable, "-m", "millrace", "prepare", "text", str(folder), "--tokenizer", "bytes", "--val", "0"]
    master, terminal = pty.openpty()
    command += ["--text-field", "text", "--out", str(tmp_path / "out"), "--exclude", "*.csv"]
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, stdin=terminal)
    os.close(terminal)
    shown = b""
    try:
        while chunk := os.read(master, 65536):
            shown += chunk
    except OSError:  # Linux: the last writer has gone
        pass
    os.close(master)
    assert process.wait(60) == 0, shown
    assert [
        attack
        for attack in (b"\x1b[2J", b"\x1b]8;;", "\u202e".encode(), b"\nerror: forged", b"\x07")
        if attack in shown
    ] == []
