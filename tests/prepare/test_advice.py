"""Who calls from Python is advised in Python; who uses the commands is advised in flags."""

import ast
import inspect
import itertools
import re
from pathlib import Path

import msgspec
import pytest
import typer

import millrace as mr
from millrace.cli import run
from millrace.cli.app import app
from millrace.prepare import advice
from millrace.prepare.table.options import TableOptions
from millrace.prepare.text.options import ReadOptions, ShardOptions

STRUCTS = {"text": (ReadOptions, ShardOptions), "table": (TableOptions,)}
PREPARE = {"text": mr.prepare_text, "table": mr.prepare_table}
OF_THE_COMMAND = {"--json", "--help", "--lookback", "--horizon"}  # no messages of a preparation name them


def defaults(kind):
    found = {name: given.default for name, given in inspect.signature(PREPARE[kind]).parameters.items()}
    return found | {field.name: field.default for kind in STRUCTS[kind] for field in msgspec.structs.fields(kind)}


def flags(kind):
    command = typer.main.get_command(app).commands["prepare"].commands[kind]
    given = {flag for option in command.params for flag in option.opts if flag.startswith("--")}
    return sorted(given - OF_THE_COMMAND)


@pytest.mark.parametrize(("kind", "flag"), [(kind, flag) for kind in STRUCTS for flag in flags(kind)])
def test_every_flag_becomes_an_argument_that_is_taken(tmp_path, kind, flag):
    prepare = advice.in_python(*STRUCTS[kind], refit=False, split=None)

    def fails(
        paths, out, *, progress=None, workers=None, engine="local", address=None, append=False, restart=False, exclude=(),
        same_source=None, max_skipped=0.01, stall_s=0, **options,
    ):  # fmt: skip
        raise mr.ConfigError(f"go on with {flag}, if you can")

    with pytest.raises(mr.ConfigError) as caught:
        prepare(fails)("a", "b")
    told = re.fullmatch(r"go on with (\w+)=(True|False|\"none\"|), if you can", str(caught.value))
    assert told, caught.value
    value = {"True": True, "False": False, '"none"': "none", "": None}[told[2]]
    given = {"paths": str(tmp_path / "none.csv"), "out": tmp_path / "out", told[1]: value}
    given["out"] = given["out"] or tmp_path / "out"
    try:  # a wrong value may be refused, and there is no file; the name must be known
        PREPARE[kind](**({"time": "t"} if kind == "table" else {}) | given)
    except (mr.MillraceError, TypeError) as error:
        assert not re.search("unknown|unexpected", str(error))  # noqa: PT017


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("go on with --on-error skip; or --restart", 'go on with on_error="skip"; or restart=True'),
        ("cut them (--max-document 4MiB --long-documents split)", 'cut them (max_document=4 << 20 long_documents="split")'),
        ("leave it out (--val 0), or a larger --val", "leave it out (val=0), or a larger val="),
        ("with a larger --stall if it is slow; --stall 60", "with a larger stall_s= if it is slow; stall_s=60"),
        ("leave --no-dedup out; --no-normalize keeps it", 'leave dedup="none" out; normalize=False keeps it'),
        ("--filter a.b:c raised E: --x", 'filter="a.b:c" raised E: --x'),
        ("its window (zstd --long) needs more", "its window (zstd --long) needs more"),
        ("'a --restart b': it's --restart", "'a --restart b': it's restart=True"),
        ("use: millrace prepare text x --out S; or --append", "use: millrace prepare text x --out S; or append=True"),
    ],
)  # fmt: skip
def test_values_and_what_is_no_flag_of_ours(message, expected):
    assert advice.python_terms(message, defaults("text")) == expected


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("--val-from 2023-01-01 10:00 must lie before", 'val_from="2023-01-01 10:00" must lie before'),
        ("--categorical a,b takes them", 'categorical=["a", "b"] takes them'),
        ("mark them: --nulls COLUMN=mask", 'mark them: nulls={"COLUMN": "mask"}'),
        ("--val-from/--test-from and --val", "val_from=/test_from= and val="),
        ("--time 't' holds 'x', which --time-format '%d' is not", "time='t' holds 'x', which time_format='%d' is not"),
    ],
)
def test_values_of_tables(message, expected):
    assert advice.python_terms(message, defaults("table")) == expected


def literals(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_a_word_behind_a_flag_is_a_value_or_known_to_be_none():
    """A new message such as "--gap wants ..." needs its verb in NO_VALUES."""
    takes = {
        "first",
        "near",
        "line",
        "record",
        "all",
        "split",
        "replace",
        "skip",
        "entity",
        "latin",
        "utf",
        "text",
        "raw",
        "time",  # these begin a form of --split
        "tail",
        "entities",
        "ray",
        "dask",
        "list",
        "folder",
        "own",
        "keep",
    }
    is_bool = {name for kind in STRUCTS for name, default in defaults(kind).items() if isinstance(default, bool)}
    is_bool |= {"refit", "no_dedup", "no_normalize"}
    paths = Path(advice.__file__).parent.rglob("*.py")
    for text in itertools.chain.from_iterable(map(literals, paths)):
        for flag, word in re.findall(r"(?<![\w-])--([a-z-]+) ([a-z]+)", text):
            assert flag.replace("-", "_") in is_bool or word in takes | {*advice.NO_VALUES.split()}, (
                f"--{flag} {word}: {text}"
            )


def test_the_error_is_the_same_one(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x\xff\n")
    with pytest.raises(mr.SourceError, match='on_error="skip"') as caught:
        mr.prepare_text(str(tmp_path / "a.txt"), tmp_path / "out", tokenizer="bytes", workers=1)
    assert (caught.value.source, caught.value.offset) == (str(tmp_path / "a.txt"), 1)
    assert caught.traceback[-1].path.name != "advice.py"


TEXT, CSV = "héllo\n" * 30, "name;t;x|y\na;2020-01-01;1|2\n"
TABLE = "name,t,x,word\n" + "".join(f"a,2020-01-{day:02},{day},w\n" for day in range(1, 20))
MISTAKES = {
    "latin-1": ("text", TEXT.encode("latin-1"), {}, [], 'encoding="latin-1"', "--encoding latin-1"),
    "no split": ("text", b"one\ntwo\n", {"val": 1e-9}, ["--val", "1e-9"], "(val=0)", "(--val 0)"),
    "delimiter": ("table", CSV.encode(), {}, [], "give delimiter=';'", "give --delimiter ';'"),
    "outside": (
        "table", TABLE.encode(), {"val_from": "2031-01-01"}, ["--val-from", "2031-01-01"],
        '(split="tail:0.1")', "(--split tail:0.1)",
    ),
    "min rows": ("table", TABLE.encode(), {"min_rows": 99}, ["--min-rows", "99"], "no entity has min_rows=99", "has --min-rows 99"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_in_the_terms_of_the_caller(tmp_path, capsys, mistake):
    kind, data, options, arguments, python, flag = MISTAKES[mistake]
    source = tmp_path / ("a.txt" if kind == "text" else "a.csv")
    source.write_bytes(data)
    options |= {"tokenizer": "bytes"} if kind == "text" else {"time": "t"}
    arguments = [*arguments, *(["--tokenizer", "bytes"] if kind == "text" else ["--time", "t"]), "--workers", "1"]
    with pytest.raises(mr.MillraceError) as caught:
        PREPARE[kind](str(source), tmp_path / "out", workers=1, **options)
    assert python in str(caught.value)
    assert "--" not in str(caught.value)
    assert run(["prepare", kind, str(source), "--out", str(tmp_path / "out"), *arguments]) == 1
    assert flag in " ".join(capsys.readouterr().err.split())


def test_notes_too_are_told_so_and_the_store_keeps_them_as_they_were(tmp_path, capsys):
    (tmp_path / "a.csv").write_text(TABLE)
    told = []
    report = mr.prepare_table(str(tmp_path), tmp_path / "out", time="t", entity="name", exclude="b*", workers=1)
    assert any('categorical="word" takes them' in note for note in report.notes)
    assert any("--categorical word" in note for note in report.open().meta["report"]["notes"])
    with pytest.raises(mr.MillraceError):
        mr.prepare_table(
            str(tmp_path / "a.csv"), tmp_path / "o2", time="t", exclude=["b*"], min_rows=99, workers=1,
            progress=lambda stage, done, total, facts: told.append(facts.get("note")),
        )  # fmt: skip
    assert "exclude='b*' matches no file; check the pattern" in told
    source = str(tmp_path / "a.csv")
    assert run(["prepare", "table", source, "--out", str(tmp_path / "o3"), "--time", "t", "--entity", "name"]) == 0
    assert "--categorical word takes them" in capsys.readouterr().err
