"""``--split time:2024-03-01``: one word for the options that decide what val and test are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from millrace.errors import ConfigError


class SplitForm(NamedTuple):
    """What may follow a word and its colon: a value for val, and after a comma one for test."""

    example: str
    options: tuple[str, str]  # those of val and of test
    fixed: Mapping[str, Any] = {}


TABLE_FORMS = {
    "time": SplitForm("time:2024-03-01,2024-06-01", ("val_from", "test_from")),
    "span": SplitForm("span:0.1,0.1", ("val", "test")),
    "tail": SplitForm("tail:0.1,0.1", ("val_last", "test_last")),
    "entity": SplitForm("entity:0.1,0.1", ("val", "test"), {"split_by": "entity"}),
    "entities": SplitForm("entities:A,B;C", ("val_entities", "test_entities"), {"split_by": "entity"}),
}
TEXT_FORMS = {
    "hash": SplitForm("hash:0.01,0.01", ("val", "test"), {"val_tail": False}),
    "tail": SplitForm("tail:0.01,0.01", ("val", "test"), {"val_tail": True}),
}


def expand_split(given: Mapping[str, Any], forms: Mapping[str, SplitForm]) -> dict[str, Any]:
    """The options with ``split`` replaced by those it stands for.

    >>> expand_split({"split": "tail:0.1", "gap": 2}, TABLE_FORMS)
    {'gap': 2, 'val_last': 0.1}
    """
    options = dict(given)
    text = options.pop("split", None)
    if text is None:
        return options
    if both := older_options(forms) & {name for name, value in options.items() if value is not None}:
        raise ConfigError(f"--split {text!r} and --{min(both).replace('_', '-')}: give one of them")
    word, _, rest = str(text).partition(":")
    parts = [part.strip() for part in rest.split(";" if word == "entities" else ",")]
    try:
        if len(parts) > 2 or not any(parts):
            raise ValueError
        form = forms[word]
        values = {name: _value(word, part) for name, part in zip(form.options, parts, strict=False) if part}
    except (KeyError, ValueError):
        known = ", ".join(form.example for form in forms.values())
        raise ConfigError(f"--split {text!r}; expected one of {known}, where the second value is test") from None
    return {**options, **form.fixed, **values}


def older_options(forms: Mapping[str, SplitForm]) -> set[str]:
    """The options that ``split`` stands for."""
    return {name for form in forms.values() for name in (*form.options, *form.fixed)}


def _value(word: str, text: str) -> Any:
    if word == "time":
        return text
    if word == "entities":
        return [name.strip() for name in text.split(",") if name.strip()]
    share = float(text)
    if not 0 <= share < 1:
        raise ValueError
    return share
