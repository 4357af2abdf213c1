"""The reference of every configuration key, made from ``settings.py``, for ``millrace train --keys`` and its page.

``docs/guide/configuration.md`` is ``page()``; write it again with ``python -m millrace.train.keys > docs/guide/configuration.md``.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from typing import Any

from millrace.train.settings import Config, every_field

NAMES = "a list of names, or one name"
KINDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "tuple[str, ...]": NAMES,
    "tuple[float, float]": "two numbers",
    "dict[str, Any]": "a table",
}


@dataclass(frozen=True)
class Key:
    """One key of the configuration: its name, what it takes, its default and its meaning."""

    name: str
    type: str
    default: Any
    meaning: str


def sections() -> dict[str, str]:
    """The sections in order, each with a line about it."""
    return {each.name: str(each.default_factory.__doc__).splitlines()[0] for each in dataclasses.fields(Config)}


def every_key() -> list[Key]:
    """Every key, in the order of the sections."""
    return [
        Key(
            name,
            _takes(field),
            {} if field.default is dataclasses.MISSING else field.default,
            field.metadata["meaning"],
        )
        for name, field in every_field()
    ]


def expected(name: str) -> str:
    """What a key takes, in words.

    >>> expected("train.max_steps"), expected("train.device")
    ('an integer, 1 or more', 'auto, cpu or cuda')
    """
    return next(key.type for key in every_key() if key.name == name)


def _takes(field: dataclasses.Field[Any]) -> str:
    if field.metadata["choices"]:
        *others, last = field.metadata["choices"]
        return f"{', '.join(others)} or {last}"
    least = "" if field.metadata["least"] is None else f", {field.metadata['least']} or more"
    below = ", below 1" if field.metadata["below"] == 1 else ""  # other limits only catch mistakes
    return KINDS[str(field.type)] + least + below


def toml(value: Any) -> str:
    """A default, written as TOML."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(toml, value))}]"
    return str(value)


def as_json() -> list[dict[str, Any]]:
    """Every key for programs."""
    return [dataclasses.asdict(key) for key in every_key()]


def lines() -> list[str]:
    """The reference for a terminal."""
    text: list[str] = []
    for section, about in sections().items():
        text += [*([""] if text else []), f"[{section}]  {about}"]
        for key in every_key():
            if key.name.startswith(f"{section}."):
                text += [f"  {key.name} = {toml(key.default)}", f"      {key.type}. {key.meaning}"]
    return text


INTRODUCTION = """\
# Configuration

A configuration is a TOML file with the keys below. Leave out what should keep its default.
`--set train.batch=64` changes a key for one run. This page is made from the code. The same
reference on a terminal, and for machines:

```console
$ millrace train --keys
$ millrace train --keys --json
```

The presets are such files. Python reads them, and checks every key and value:

```python
from millrace.train.config import load_config

print(load_config("nano", ["train.batch=64"]).train)
```
"""


def page() -> str:
    """The text of ``docs/guide/configuration.md``."""
    parts = [INTRODUCTION]
    for section, about in sections().items():
        rows = [
            f"| `{key.name}` | {key.type} | `{toml(key.default)}` | {key.meaning} |"
            for key in every_key()
            if key.name.startswith(f"{section}.")
        ]
        heading = [f"## [{section}]", "", about, "", "| key | takes | default | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*heading, *rows]) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(page())
