"""Advice in the caller's own terms. Messages are written once, with flags; a Python call gets arguments instead.

``in_python`` wraps ``prepare_text`` and ``prepare_table``: ``--on-error skip`` becomes ``on_error="skip"`` in their errors
and notes. The commands call the function inside, ``with_flags(prepare_text)``.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import msgspec

from millrace.errors import MillraceError
from millrace.prepare.progress import default_progress

Given = ParamSpec("Given")
Report = TypeVar("Report", bound=msgspec.Struct)

NAMES = {"stall": "stall_s"}  # flags that are not called like their argument
INVERTED = {"no-normalize": "normalize=False", "no-dedup": 'dedup="none"'}
# These words continue the sentence; any other word after a flag is its value.
NO_VALUES = "a and gave gives if is left must names needs or out rules too was with"
WORDS = re.compile(
    r"""(?<![\w/.-])millrace\ (?:prepare|train|gc|explain|head|info|verify)\b[^;)]*  # a command stays as it is
    | (?<!\w)(?:'[^']*'|"[^"]*")                                                     # and what is quoted
    | (?<![\w-])--(?P<flag>[a-z]+(?:-[a-z]+)*)(?![\w-])
      (?:\ (?P<value>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+-\d\d-\d\d\ [\d:.]*\d|(?!--)[^\s;()'"]*[^\s;:,.()'"/]))?""",
    re.VERBOSE,
)


def in_python(
    *structs: type[msgspec.Struct], **more: Any
) -> Callable[[Callable[Given, Report]], Callable[Given, Report]]:
    """Lets a preparation name arguments, not flags. Its options are the fields of ``structs`` and ``more``."""

    def wrap(prepare: Callable[Given, Report]) -> Callable[Given, Report]:
        defaults = {name: argument.default for name, argument in inspect.signature(prepare).parameters.items()}
        defaults |= more | {field.name: field.default for struct in structs for field in msgspec.structs.fields(struct)}

        @functools.wraps(prepare)
        def call(*args: Given.args, **options: Given.kwargs) -> Report:
            show: Any = options.get("progress") or default_progress()

            def progress(stage: str, done: int, total: int, facts: Mapping[str, Any]) -> None:
                told = {"note": python_terms(facts["note"], defaults)} if "note" in facts else {}
                show(stage, done, total, {**facts, **told})

            options["progress"] = progress
            try:
                report: Any = prepare(*args, **options)
            except MillraceError as error:
                error.args = (python_terms(str(error), defaults), *error.args[1:])
                raise
            notes = [python_terms(note, defaults) for note in report.notes]
            return msgspec.structs.replace(report, notes=notes)  # type: ignore[no-any-return]

        return call

    return wrap


def with_flags(prepare: Callable[Given, Report]) -> Callable[Given, Report]:
    """The same preparation for a command, with flags in its messages."""
    inside: Callable[Given, Report] = inspect.unwrap(prepare)
    return inside


def python_terms(message: str, defaults: Mapping[str, Any]) -> str:
    """A message with flags written as arguments; ``defaults`` has the arguments by name.

    >>> python_terms("fix it, or go on with --on-error skip or --restart", {"on_error": "stop", "restart": False})
    'fix it, or go on with on_error="skip" or restart=True'
    """

    def replace(match: re.Match[str]) -> str:
        flag, value = match["flag"], match["value"]
        if flag is None:
            return match[0]
        name, rest = NAMES.get(flag, flag.replace("-", "_")), "" if value is None else f" {value}"
        if flag in INVERTED:
            return INVERTED[flag] + rest
        if name not in defaults:
            return match[0]
        if isinstance(defaults[name], bool):
            return f"{name}=True{rest}"
        return f"{name}={rest}" if value is None or value in NO_VALUES.split() else f"{name}={_literal(value)}"

    return WORDS.sub(replace, message)


def _literal(value: str) -> str:
    """The value of a flag as Python writes it."""
    if value[0] in "'\"" or re.fullmatch(r"-?\d+(\.\d+)?", value):
        return value
    if size := re.fullmatch(r"(\d+)MiB", value):
        return f"{size[1]} << 20"
    column, equals, policy = value.rpartition("=")
    if equals:
        return f'{{"{column}": "{policy}"}}'
    names = [f'"{name}"' for name in value.split(",")]
    return names[0] if len(names) == 1 else f"[{', '.join(names)}]"
