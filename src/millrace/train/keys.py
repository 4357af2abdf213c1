"""The reference of every configuration key, made from ``settings.py``, for ``millrace train --keys``."""

from __future__ import annotations

import dataclasses
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
    "tuple[dict[str, Any], ...]": "a list of tables",
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
        *others, last = (choice if isinstance(choice, str) else toml(choice) for choice in field.metadata["choices"])
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
