"""Writes ``docs/reference/cli.md`` and ``docs/reference/api.md`` from the code: python tools/reference.py.

``tests/docs/test_reference.py`` checks that the two pages are those of the code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

import millrace as mr
from millrace.errors import MillraceError
from millrace.prepare.records.options import RecordOptions
from millrace.prepare.table.options import TableOptions
from millrace.prepare.text.options import ReadOptions, ShardOptions

FOLDER = Path(__file__).parents[1] / "docs/reference"
MADE = "This page is made from the code by `tools/reference.py`."
WIDTH = 96  # of a help text
GROUPS = {
    "Stores": ("open_store", "from_arrays", "from_pandas", "StoreWriter", "Store", "Column", "Cuts", "export", "push", "pull"),
    "Preparing": ("prepare_text", "prepare_table", "prepare_records"),
    "Views": (
        "Windows", "Blocks", "Records", "Packed", "cu_seqlens", "Subset", "Concat", "sorted_by", "random_split", "k_fold",
        "View", "from_spec",
    ),
    "Orders and mixtures": ("Shuffled", "BlockShuffled", "Sequential", "Mixture", "MixtureOrder", "balanced", "Warmup"),
    "Feeds": ("Feed", "Batch", "Ragged", "Spans"),
    "Runs": ("open_run",),
}  # fmt: skip

# What the ``**options`` of a function are.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "prepare_text": (ReadOptions, ShardOptions),
    "prepare_table": (TableOptions,),
    "prepare_records": (RecordOptions,),
}


def help_of(*words: str) -> str:
    """What ``millrace WORDS --help`` prints."""
    from millrace.cli import run

    printed = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(WIDTH)
    try:
        with contextlib.redirect_stdout(printed):
            assert run([*words, "--help"]) == 0
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.__setitem__("COLUMNS", before)
    return "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())


def commands() -> Iterator[tuple[str, ...]]:
    """Every command, also those of ``prepare`` and ``queue``."""
    from millrace.cli import app

    for name in app.COMMANDS:
        yield (name,)
    for group in app.app.registered_groups:
        assert group.typer_instance is not None
        for command in group.typer_instance.registered_commands:
            yield (str(group.name), str(command.name))


def cli_page() -> str:
    """The reference of the command line."""
    introduction = f"""\
# Commands

{MADE}
A terminal shows the same: `millrace COMMAND --help`.

Exit codes: 0 done, 1 an error in one line, 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. Most commands
take `--json` and then print one JSON object.
"""
    parts = [introduction, _help((), "millrace")]
    parts += [_help(words, "millrace " + " ".join(words)) for words in sorted(commands())]
    return "\n".join(parts)


def _help(words: tuple[str, ...], title: str) -> str:
    return f"## {title}\n\n```text\n{help_of(*words)}\n```\n"


def api_page() -> str:
    """The reference of the names of ``millrace``, ``millrace.images`` and ``millrace.augment``."""
    grouped = {name for names in GROUPS.values() for name in names}
    errors = [
        name for name in mr.__all__ if inspect.isclass(value := getattr(mr, name)) and issubclass(value, MillraceError)
    ]
    missing = set(mr.__all__) - grouped - set(errors) - {"__version__"}
    assert not missing, f"put {', '.join(sorted(missing))} into GROUPS of tools/reference.py"
    introduction = f"# Python\n\n{MADE} The examples run as tests.\n\n```text\nimport millrace as mr\n```\n"
    parts = [introduction]
    for group, names in GROUPS.items():
        parts += [f"## {group}\n", *(_entry(f"mr.{name}", getattr(mr, name)) for name in names)]
    for package in (mr.images, mr.augment):
        short = package.__name__.replace("millrace", "mr")
        parts.append(f"## {short}\n\n{prose(inspect.getdoc(package) or '')}\n")
        parts += [_entry(f"{short}.{name}", getattr(package, name)) for name in package.__all__]
    rows = [f"| `mr.{name}` | {_parents(getattr(mr, name))} | {_first(getattr(mr, name))} |" for name in errors]
    parts.append("\n".join(["## Errors\n", "| error | is also | means |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _parents(error: type) -> str:
    return ", ".join(f"`{base.__name__}`" for base in error.__bases__ if base is not object)


def _first(value: Any) -> str:
    """The first line of a docstring, for a cell of a table."""
    return _names((inspect.getdoc(value) or "").splitlines()[0])


def _names(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text)


def _entry(name: str, value: Any) -> str:
    parts = [f"### {name}\n", f"```text\n{_signature(name, value)}\n```\n"]
    if doc := inspect.getdoc(value):
        parts.append(prose(doc) + "\n")
    if inspect.isclass(value):
        rows = [f"| `{shown}` | {about} |" for shown, about in _members(value)]
        if rows:
            parts.append("\n".join(["| | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _members(value: type) -> Iterator[tuple[str, str]]:
    """The documented public methods and properties that a class or our classes above it define, first lines only."""
    seen: set[str] = set()
    for each in value.__mro__:
        if not each.__module__.startswith("millrace"):
            continue
        for name, member in vars(each).items():
            inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if (
                name.startswith("_")
                or name in seen
                or not callable(inner)
                or not inner.__doc__
                or inspect.isclass(inner)
            ):
                continue
            seen.add(name)
            shown = name if isinstance(member, property) else _signature(name, inner, is_short=True)
            yield shown.replace("|", "\\|"), _first(inner).replace("|", "\\|")


def _signature(name: str, value: Any, *, is_short: bool = False) -> str:
    """The call as a person writes it: names and defaults, with annotations only where they are short."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    shown = []
    kinds = inspect.Parameter
    parameters = [each for each in signature.parameters.values() if each.name != "self"]
    if inspect.isclass(value) and dataclasses.is_dataclass(value):
        parameters = [each for each in parameters if not each.name.startswith("_")]
    options = parameters.pop() if name.rpartition(".")[2] in OPTIONS else None  # its names are those of the structs
    for k, each in enumerate(parameters):
        if each.kind is kinds.KEYWORD_ONLY and (k == 0 or parameters[k - 1].kind is kinds.POSITIONAL_OR_KEYWORD):
            shown.append("*")
        star = {kinds.VAR_POSITIONAL: "*", kinds.VAR_KEYWORD: "**"}.get(each.kind, "")
        shown.append(f"{star}{each.name}{_default(each.default)}")
    if options is not None:
        fields = [each for struct in OPTIONS[name.rpartition(".")[2]] for each in msgspec.structs.fields(struct)]
        made = [
            each.default if each.default_factory is msgspec.NODEFAULT else each.default_factory() for each in fields
        ]
        shown += [f"{each.name}{_default(default)}" for each, default in zip(fields, made, strict=True)]
    line = f"{name}({', '.join(shown)})"
    return line if is_short or len(line) <= WIDTH else _wrapped(name, shown)


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty or value is msgspec.NODEFAULT:
        return ""
    text = repr(value)
    return "=..." if " at 0x" in text or "<" in text or len(text) > 30 else f"={text}"


def _wrapped(name: str, shown: list[str]) -> str:
    return f"{name}(\n{textwrap.fill(', '.join(shown), WIDTH - 4, initial_indent='    ', subsequent_indent='    ')}\n)"


def prose(doc: str) -> str:
    """A docstring as Markdown: names in one backtick, examples in fences, lines that fit."""
    parts = []
    for block in re.split(r"\n\s*\n", doc):
        if ">>>" in block:
            before, _, example = block.partition(">>>")
            if before.strip():
                parts.append(_filled(before))
            parts.append(
                f"```pycon\n{textwrap.dedent('>>>' + example) if not before.strip() else '>>>' + example}\n```"
            )
        elif block.lstrip() != block and "\n" in block:
            parts.append(f"```text\n{textwrap.dedent(block)}\n```")
        else:
            parts.append(_filled(block))
    return "\n\n".join(parts)


def _filled(text: str) -> str:
    return textwrap.fill(_names(" ".join(text.split())), WIDTH, break_long_words=False, break_on_hyphens=False)


PAGES = {"cli.md": cli_page, "api.md": api_page}


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, made in PAGES.items():
        (FOLDER / name).write_text(made())


if __name__ == "__main__":
    sys.exit(write())
