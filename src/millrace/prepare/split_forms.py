"""``--split time:2024-03-01``: one word for the options that decide what val and test are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from millrace.errors import ConfigError, did_you_mean
from millrace.prepare.plan import differences


class SplitForm(NamedTuple):
    """What may follow a word and its colon: a value for val, and after a comma one for test."""

    example: str
    options: tuple[str, ...]  # those of val and of test
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
RECORD_FORMS = {
    "hash": SplitForm("hash:0.01,0.01", ("val", "test"), {"val_tail": False}),
    "tail": SplitForm("tail:0.01,0.01", ("val", "test"), {"val_tail": True}),
    "keys": SplitForm("keys:A,B;C", ("val_keys", "test_keys")),
    "list": SplitForm("list:val.txt,test.txt", ("val_list", "test_list")),
    "folder": SplitForm("folder", (), {"split_folders": True}),
}
LISTS = ("entities", "keys")  # words whose values are names, with ; before those of test


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
        raise ConfigError(f"give either --split or --{min(both).replace('_', '-')}, not both")
    word, _, rest = str(text).partition(":")
    parts = [part.strip() for part in rest.split(";" if word in LISTS else ",")]
    known = ", ".join(form.example for form in forms.values())
    if (form := forms.get(word)) is None:
        near = did_you_mean(word, forms)
        raise ConfigError(
            f"--split {text!r} begins with no known word{near}; expected one of {known}, where the second value is test"
        )
    if not form.options and not rest:
        return {**options, **form.fixed}
    if len(parts) > 2 or not any(parts):
        raise ConfigError(f"--split {text!r} needs one value, or two: the second is test; give {form.example}")
    values = {name: _value(text, word, part) for name, part in zip(form.options, parts, strict=False) if part}
    return {**options, **form.fixed, **values}


def plan_changes(old: Any, new: Any, key: str, forms: Mapping[str, SplitForm]) -> list[str]:
    """How two plans differ, with the splits among their options ``key`` as ``--split`` writes them."""
    before, after = (
        {**plan, key: _with_split(plan[key], forms)} if isinstance(plan.get(key), dict) else plan for plan in (old, new)
    )
    return differences(before, after) or differences(old, new)


def _with_split(options: Mapping[str, Any], forms: Mapping[str, SplitForm]) -> dict[str, Any]:
    fitting = [
        (len(form.fixed), word, [options.get(name) for name in form.options])
        for word, form in forms.items()
        if form.fixed.items() <= options.items() and (any(map(options.get, form.options)) or not form.options)
    ]
    rest = {name: value for name, value in options.items() if name not in older_options(forms)}
    if fitting:
        _, word, both = max(fitting, key=lambda form: form[0])
        values = both if both and both[-1] else both[:1]
        texts = [
            ",".join(value) if isinstance(value, list) else "" if value is None else str(value) for value in values
        ]
        rest["--split"] = f"{word}:{(';' if word in LISTS else ',').join(texts)}".removesuffix(":")
    return rest


def older_options(forms: Mapping[str, SplitForm]) -> set[str]:
    """The options that ``split`` stands for."""
    return {name for form in forms.values() for name in (*form.options, *form.fixed)}


def _value(split: str, word: str, text: str) -> Any:
    if word in ("time", "list"):
        return text
    if word in LISTS:
        return [name.strip() for name in text.split(",") if name.strip()]
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(
            f"--split {split!r}: {text!r} is no share; give a number from 0 to below 1, such as {word}:0.1"
        )
    return share
