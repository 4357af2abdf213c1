"""The reference of the configuration: every key of the code, with what it takes, its default and its meaning."""

from __future__ import annotations

import dataclasses
import json
import runpy
import tomllib
from pathlib import Path

from millrace.cli import run as millrace
from millrace.train import keys
from millrace.train.config import as_dict, parse_config
from millrace.train.settings import Config

REPOSITORY = Path(__file__).parents[2]


def test_every_key_is_there_with_a_meaning():
    expected = [f"{section}.{name}" for section, values in as_dict(Config()).items() for name in values]
    assert [key.name for key in keys.every_key()] == expected
    for key in keys.every_key():
        assert key.meaning.endswith("."), key
        assert key.type, key


def test_the_defaults_are_toml_that_gives_the_default_configuration():
    written = "\n".join(f"{key.name} = {keys.toml(key.default)}" for key in keys.every_key())
    assert parse_config(tomllib.loads(written)) == Config()


def test_the_page_is_what_the_code_says():
    page = REPOSITORY / "docs/guide/configuration.md"
    made = runpy.run_path(str(REPOSITORY / "tools/configuration_page.py"))["page"]()
    assert page.read_text() == made, "write it again: python tools/configuration_page.py > docs/guide/configuration.md"


def test_the_command_prints_every_key_and_needs_no_configuration(capsys):
    assert millrace(["train", "--keys"]) == 0
    shown = capsys.readouterr().out
    assert "[train]  How long, how much at once" in shown
    assert "  train.max_steps = 100\n      an integer, 1 or more. Steps of the whole run." in shown
    assert millrace(["train", "--keys", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in found] == [key.name for key in keys.every_key()]
    assert found[0].keys() == {each.name for each in dataclasses.fields(keys.Key)}


def test_without_a_configuration_the_usage_is_wrong(capsys):
    assert millrace(["train"]) == 2
    assert "give a TOML file or a preset, e.g. nano" in capsys.readouterr().err
