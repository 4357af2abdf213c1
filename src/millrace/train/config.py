"""Reads a configuration: from TOML to the frozen dataclasses of ``settings.py``. Every key and value is checked.

``load_config`` reads a file, or a preset of ``configs/``, then applies ``--set a.b=c`` of the command line. The result is
saved with the run.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import math
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError, StoreCorrupt, did_you_mean
from millrace.store.plain_file import read_plain
from millrace.store.strict_json import MAX_DEPTH, check_depth
from millrace.train.keys import NAMES, expected
from millrace.train.settings import FORECASTERS, OWN_MODELS, every_field
from millrace.train.settings import Config as Config

SECTIONS = {each.name: each for each in dataclasses.fields(Config)}
PRESETS = Path(__file__).parent / "configs"
MAX_BYTES = 1 << 20  # of a file; the presets have 1 KB
# a.a.a... = 1: tomllib takes 16 s for one of 50,000 parts, and its time grows with their square.
DEEP_KEY = re.compile(rf"^[ \t]*\[*(?:[^=\s.,#]+\.){{{MAX_DEPTH}}}", re.MULTILINE)


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), data: Mapping[str, str] | None = None
) -> Config:
    """The configuration of a TOML file or preset, changed by ``key=value`` overrides and by ``data`` for its section."""
    name = os.fspath(path)
    if name.removesuffix(".toml") in presets() and not os.path.isfile(name):  # a file that exists comes first
        name = str(PRESETS / f"{name.removesuffix('.toml')}.toml")
    try:
        values = _toml(read_plain(name, MAX_BYTES, follow=True).decode())
    except StoreCorrupt as error:
        remedy = f"give a TOML file, or a preset: {', '.join(presets())}"
        near = did_you_mean(Path(name).stem, presets())
        raise ConfigError(f"{name} {error.problem}{near}; {remedy}") from error
    except ValueError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    changed = copy.deepcopy(values)
    for override in overrides:
        _override(changed, override)
    if data and isinstance(changed.setdefault("data", {}), dict):
        changed["data"] |= data
    try:
        return parse_config(changed, name)
    except ConfigError as error:
        parse_config(values, name)  # raises if the file itself is wrong
        if not overrides:
            raise
        problem = str(error)
    return parse_config(changed, _source_of(problem, overrides, name))


def _source_of(problem: str, overrides: Sequence[str], name: str) -> str:
    """Where a wrong value comes from: the ``--set`` that an error names by key or section, else the whole configuration."""
    by_key = {override.partition("=")[0].strip(): override for override in overrides}  # the last of a key counts
    keys = [key for key in by_key if re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", problem)]
    keys = keys or [key for key in by_key if f"unknown key {key.partition('.')[0]};" in problem]
    return " ".join(f"--set {by_key[key]:.200}" for key in keys) or f"{name}, as changed by --set"


def _toml(text: str) -> dict[str, Any]:
    """The values of a TOML text; ``ValueError`` where it is none, or nests deeper than what handles them later."""
    try:
        if DEEP_KEY.search(text):
            raise RecursionError
        values = tomllib.loads(text)
        check_depth(values)
    except RecursionError:
        raise ValueError(f"it nests deeper than {MAX_DEPTH}") from None
    return values


def presets() -> list[str]:
    """The names of the configurations that come with millrace."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def parse_config(values: Mapping[str, Any], name: str = "the configuration") -> Config:
    """The configuration with these nested values. An unknown key is refused with the nearest known one."""
    _check_keys(values, SECTIONS, "", name)
    for section, given in values.items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: {section} = {given!r:.80}; expected a table [{section}]")
        _check_keys(given, dict.fromkeys(_names(SECTIONS[section])), f"{section}.", name)
    values = {section: {key: _as_list(section, key, given[key]) for key in given} for section, given in values.items()}
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        key = str(error).partition(" - at `$.")[2].rstrip("`").partition("[")[0]
        section, _, part = key.partition(".")
        raise ConfigError(f"{name}: {key} = {values[section][part]!r:.80}; expected {expected(key)}") from error
    _check_values(config, name)
    return config


def as_dict(config: Config) -> dict[str, Any]:
    """Plain values, to save with a run; ``parse_config`` reads them back."""
    return dataclasses.asdict(config)


def value_of(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def _check_keys(given: Mapping[str, Any], known: Mapping[str, Any], prefix: str, name: str) -> None:
    for key in given:
        if key not in known:
            others = [section for section in SECTIONS.values() if prefix and key in _names(section)]
            near = prefix + difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
            near = f"{others[0].name}.{key}" if others else near
            raise ConfigError(
                f"{name}: unknown key {prefix}{key!s:.80}; did you mean {near}? ({', '.join(sorted(known))})"
            )


def _names(section: dataclasses.Field[Any]) -> set[str]:
    return {each.name for each in dataclasses.fields(section.default_factory)}  # type: ignore[arg-type]


def _as_list(section: str, key: str, value: Any) -> Any:
    """A single name as a list of one, for keys that take a list: ``--set data.target=temp``."""
    is_name = isinstance(value, str) and value and expected(f"{section}.{key}") == NAMES
    return [value] if is_name else value


def _check_values(config: Config, name: str) -> None:
    for key, field in every_field():
        value, least, below = value_of(config, key), field.metadata["least"], field.metadata["below"]
        if field.metadata["choices"] and value not in field.metadata["choices"]:
            raise ConfigError(f"{name}: {key} = {value!r}; expected {expected(key)}")
        if least is not None and not value >= least:
            raise ConfigError(f"{name}: {key} = {value}; expected {least} or more")
        if below is not None and not value < below:
            raise ConfigError(f"{name}: {key} = {value}; expected less than {below:g}")
    betas = config.optimizer.betas
    if not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(f"{name}: optimizer.betas = {list(betas)}; expected two numbers from 0 to below 1")
    _check_sources(config.data.sources, name)
    for key in ("data.prepare", "model.options"):
        _check_plain(value_of(config, key), key, name)
    model, train, data = config.model, config.train, config.data
    kind, is_fsdp = model.kind, train.parallel == "fsdp2"
    for is_wrong, message in (
        (kind not in OWN_MODELS and ":" not in kind,
         f"model.kind = {kind!r}; expected {', '.join(OWN_MODELS)} or module:callable"),
        (kind in ("gpt", "transformer") and model.width % model.heads,
         f"model.width = {model.width} is not a multiple of model.heads = {model.heads}"),
        (model.document_mask and kind in FORECASTERS, f"model.document_mask is for gpt; leave it out for {kind}"),
        (data.processes and not data.transform,
         "data.processes is for data.transform; name a function, or leave it out: batches without one need no Python"),
        (data.pack and kind in FORECASTERS, f"data.pack is for text; leave it out for {kind}"),
        (data.pack and data.stride,
         f"data.stride = {data.stride} with data.pack: packed samples do not overlap; leave one of them out"),
        (train.recompute and kind == "lstm", "train.recompute is for gpt and transformer; leave it out for lstm"),
        (data.sources and (data.store or data.input),
         f"both data.sources and {'a store' if data.store else 'an input'} are given; list all stores in data.sources"),
        (data.store and data.input,
         f"both a store ({data.store}) and an input ({data.input}) are given; give one: --store for prepared data, --input for "
         "a small file to be prepared within the run"),
        (config.optimizer.name == "adafactor" and is_fsdp,
         "torch's Adafactor cannot step on the sharded parameters of fsdp2; take adamw, or parallel = 'ddp'"),
        (train.precision == "fp16" and is_fsdp,
         "fp16 with its gradient scaler is for ddp; with fsdp2 take precision = 'bf16'"),
    ):  # fmt: skip
        if is_wrong:
            raise ConfigError(f"{name}: {message}")


def _check_sources(sources: Sequence[Mapping[str, Any]], name: str) -> None:
    for source in sources:
        weight = source.get("weight")
        is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool) and 0 <= weight < math.inf
        if source.keys() != {"store", "weight"} or not isinstance(source["store"], str) or not is_number:
            raise ConfigError(f"{name}: data.sources has {source}; expected a store and its weight, a number from 0 on")
    if sources and not any(source["weight"] for source in sources):
        raise ConfigError(f"{name}: every weight of data.sources is 0; raise one of them")


def _check_plain(value: Any, key: str, name: str) -> None:
    """Refuses values that JSON cannot hold, such as dates: they are saved with the run."""
    if isinstance(value, (dict, list)):
        for part, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(each, f"{key}.{part}", name)
    elif not isinstance(value, (str, int, float)):
        raise ConfigError(f"{name}: {key} is a {type(value).__name__}; expected text or a number: put it in quotes")


def _override(values: dict[str, Any], text: str) -> None:
    """Applies ``train.max_steps=50``. The value is read as TOML, or else as a plain string."""
    key, equals, written = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name or "." in name:
        raise ConfigError(f"--set {text:.200}: expected section.key=value, e.g. --set train.max_steps=50")
    try:
        value = _toml(f"value = {written.strip()}")["value"]
    except ValueError as error:
        value = written.strip()
        if value[:1] in ("{", "["):  # the shell has removed the quotes inside
            example = (
                f"--set '{key.strip()}={{name=\"text\"}}'" if value[0] == "{" else f"--set '{key.strip()}=[\"text\"]'"
            )
            raise ConfigError(f"--set {text:.200}: the value is not TOML; quote it for the shell: {example}") from error
    part = values.setdefault(section, {})
    if not isinstance(part, dict):
        raise ConfigError(f"--set {text:.200}: {section} is {part!r}, not a table")
    part[name] = value
