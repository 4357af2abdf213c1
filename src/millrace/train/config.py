"""What a training run is told: TOML to frozen dataclasses, every key known, every value checked.

``load_config`` reads a file, or a preset of ``configs/``, and the ``--set a.b=c`` of the command line; the resolved values
are saved with the run.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import ConfigError


@dataclass(frozen=True)
class Data:
    """Which store, and what a sample of it is."""

    store: str = ""  # a prepared store or a foreign layout; or `input`, a small file prepared within the run
    input: str = ""
    split: str = "train"
    val_split: str = "val"
    length: int = 256  # text: tokens of a block
    lookback: int = 64  # series: rows of x
    horizon: int = 8  # series: rows of y
    lead: int = 0
    stride: int = 0  # 0: `length` for text, 1 for series
    inputs: tuple[str, ...] = ()  # series: features of x; empty: those the store names so, else all
    target: tuple[str, ...] = ()  # series: features of y, likewise
    # series: static, static_categorical, categorical, known_future, mask, time; forecasters have the mask of a store anyway
    include: tuple[str, ...] = ()
    prepare: dict[str, Any] = field(default_factory=dict)  # options of the preparation of `input`


@dataclass(frozen=True)
class Model:
    """Which model, and its size."""

    kind: str = "gpt"  # gpt, lstm, transformer, or module:callable
    layers: int = 4
    heads: int = 4
    width: int = 128
    dropout: float = 0.0
    vocabulary: int = 0  # 0: that of the store, rounded up to a multiple of 64
    document_mask: bool = False  # gpt: attention stays within a document
    normalize: bool = True  # forecasters: each window relative to its last row, in units of its spread
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of module:callable


@dataclass(frozen=True)
class Train:
    """How long, how much at once, in which precision, on what."""

    max_steps: int = 100
    batch: int = 32  # global: samples per optimiser step, over all ranks and micro-batches
    micro_batch: int = 0  # samples per forward pass of a rank; 0: its whole share
    halve_on_oom: bool = False
    seed: int = 0
    log_every: int = 10
    precision: str = "fp32"  # fp32, bf16, fp16, fp64
    clip: float = 1.0  # gradient norm; 0: none
    device: str = "auto"  # auto, cpu, cuda
    threads: int = 0  # of torch on the CPU; 0: its default
    parallel: str = "ddp"  # ddp, fsdp2
    compile: bool = False
    recompute: bool = False  # activation checkpointing: less memory, a second forward pass
    deterministic: bool = False  # on a GPU: only kernels that give the same bits again, as those of a CPU do
    tensorboard: bool = True  # where it is installed
    timeout_s: int = 600  # how long a rank waits for the others


@dataclass(frozen=True)
class Optimizer:
    """Which optimiser, and its learning rate over the steps."""

    name: str = "adamw"  # adamw, adafactor, sgd
    lr: float = 1e-3
    min_lr: float = 0.0
    schedule: str = "cosine"  # cosine, linear, constant
    warmup: int = 0  # steps
    decay_steps: int = 0  # where the schedule ends; 0: at max_steps
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    momentum: float = 0.0  # sgd


@dataclass(frozen=True)
class Checkpoint:
    """When state is saved, and how much of it is kept.

    It is always saved at the end, on SIGTERM and SIGINT, and after an evaluation that is better than all before.
    """

    every: int = 100  # steps; 0: only at the end
    every_minutes: float = 0.0
    keep: int = 2  # newest ones; the one with the best val_loss is kept besides
    asynchronous: bool = True


@dataclass(frozen=True)
class Evaluation:
    """When the val split is evaluated, and how much of it."""

    every: int = 0  # steps; 0: only at the end
    batches: int = 0  # 0: all of it, each sample once


@dataclass(frozen=True)
class Config:
    """A training run."""

    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluation: Evaluation = field(default_factory=Evaluation)


SECTIONS = {each.name: each for each in dataclasses.fields(Config)}
CHOICES = {
    "train.precision": ("fp32", "bf16", "fp16", "fp64"),
    "train.device": ("auto", "cpu", "cuda"),
    "train.parallel": ("ddp", "fsdp2"),
    "optimizer.name": ("adamw", "adafactor", "sgd"),
    "optimizer.schedule": ("cosine", "linear", "constant"),
}
POSITIVE = (
    "data.length", "data.lookback", "data.horizon", "model.layers", "model.heads", "model.width", "train.max_steps",
    "train.batch", "train.log_every", "train.timeout_s", "checkpoint.keep",
)  # fmt: skip
FROM_ZERO = (
    "data.lead", "data.stride", "model.vocabulary", "model.dropout", "train.micro_batch", "train.seed", "train.clip",
    "train.threads", "optimizer.lr", "optimizer.min_lr", "optimizer.warmup", "optimizer.decay_steps",
    "optimizer.weight_decay", "optimizer.momentum", "checkpoint.every", "checkpoint.every_minutes", "evaluation.every",
    "evaluation.batches",
)  # fmt: skip
BELOW = {
    "model.dropout": 1,
    "train.batch": 2**31,
    "train.threads": 4096,
    "checkpoint.every_minutes": 1e9,
    "optimizer.lr": 1e9,
}
FORECASTERS = ("lstm", "transformer")
OWN_MODELS = ("gpt", *FORECASTERS)
PRESETS = Path(__file__).parent / "configs"


def load_config(
    path: str | os.PathLike[str], overrides: Sequence[str] = (), data: Mapping[str, str] | None = None
) -> Config:
    """The configuration in a TOML file or preset, changed by ``key=value`` overrides and by what ``data`` gives for its section."""
    name = _file(os.fspath(path))
    try:
        with open(name, "rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read: {error.strerror}; give a TOML file, or a preset: {', '.join(presets())}"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    changed = copy.deepcopy(values)
    for override in overrides:
        _override(changed, override)
    if data:
        changed["data"] = {**changed.get("data", {}), **data}
    try:
        return parse_config(changed, name)
    except ConfigError:
        parse_config(values, name)
        if not overrides:
            raise
    return parse_config(changed, " ".join(f"--set {override}" for override in overrides))  # the file alone is right


def presets() -> list[str]:
    """The configurations that come with millrace, by name."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def _file(name: str) -> str:
    """The file of a configuration; one that is there goes before a preset of its name."""
    is_preset = name.removesuffix(".toml") in presets() and not os.path.isfile(name)
    return str(PRESETS / f"{name.removesuffix('.toml')}.toml") if is_preset else name


def parse_config(values: Mapping[str, Any], name: str = "the configuration") -> Config:
    """The configuration that nested values say; unknown keys are refused with the nearest that is known."""
    _check_keys(values, SECTIONS, "", name)
    for section, given in values.items():
        if not isinstance(given, Mapping):
            raise ConfigError(f"{name}: {section} = {given!r}; expected a table [{section}]")
        _check_keys(given, dict.fromkeys(_names(SECTIONS[section])), f"{section}.", name)
    try:
        config = msgspec.convert(values, Config)
    except msgspec.ValidationError as error:
        what, _, key = str(error).partition(" - at `$.")
        raise ConfigError(f"{name}: {key.rstrip('`')}: {what[:1].lower()}{what[1:]}") from error
    _check_values(config, name)
    return config


def as_dict(config: Config) -> dict[str, Any]:
    """Plain values, as they are saved with a run and read back by ``parse_config``."""
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
            raise ConfigError(f"{name}: unknown key {prefix}{key}; did you mean {near}? ({', '.join(sorted(known))})")


def _names(section: dataclasses.Field[Any]) -> set[str]:
    return {each.name for each in dataclasses.fields(section.default_factory)}  # type: ignore[arg-type]


def _check_values(config: Config, name: str) -> None:
    for key, allowed in CHOICES.items():
        if value_of(config, key) not in allowed:
            raise ConfigError(f"{name}: {key} = {value_of(config, key)!r}; expected one of {', '.join(allowed)}")
    for keys, least in ((POSITIVE, 1), (FROM_ZERO, 0)):
        for key in keys:
            if not value_of(config, key) >= least:
                raise ConfigError(f"{name}: {key} = {value_of(config, key)}; expected {least} or more")
    for key, limit in BELOW.items():
        if not value_of(config, key) < limit:
            raise ConfigError(f"{name}: {key} = {value_of(config, key)}; expected less than {limit:g}")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas):
        raise ConfigError(
            f"{name}: optimizer.betas = {list(config.optimizer.betas)}; expected two numbers from 0 to below 1"
        )
    for key in ("data.prepare", "model.options"):
        _check_plain(value_of(config, key), key, name)
    kind, heads, width = config.model.kind, config.model.heads, config.model.width
    if kind not in OWN_MODELS and ":" not in kind:
        raise ConfigError(f"{name}: model.kind = {kind!r}; expected {', '.join(OWN_MODELS)} or module:callable")
    if kind in ("gpt", "transformer") and width % heads:
        raise ConfigError(f"{name}: model.width = {width} is not a multiple of model.heads = {heads}")
    if config.model.document_mask and kind in FORECASTERS:
        raise ConfigError(f"{name}: model.document_mask is for gpt; leave it out for {kind}")
    if config.train.recompute and kind == "lstm":
        raise ConfigError(f"{name}: train.recompute is for gpt and transformer; leave it out for lstm")
    if config.data.store and config.data.input:
        raise ConfigError(
            f"{name}: both a store ({config.data.store}) and an input ({config.data.input}) are given; give one: "
            "--store for prepared data, --input for a small file to be prepared within the run"
        )
    if config.optimizer.name == "adafactor" and config.train.parallel == "fsdp2":
        raise ConfigError(
            f"{name}: torch's Adafactor cannot step on the sharded parameters of fsdp2; take adamw, or parallel = 'ddp'"
        )
    if config.train.precision == "fp16" and config.train.parallel == "fsdp2":
        raise ConfigError(f"{name}: fp16 with its gradient scaler is for ddp; with fsdp2 take precision = 'bf16'")


def _check_plain(value: Any, key: str, name: str) -> None:
    """What is saved with a run is JSON, which has no dates."""
    if isinstance(value, (dict, list)):
        for part, each in value.items() if isinstance(value, dict) else enumerate(value):
            _check_plain(each, f"{key}.{part}", name)
    elif not isinstance(value, (str, int, float)):
        raise ConfigError(f"{name}: {key} is a {type(value).__name__}; expected text or a number: put it in quotes")


def _override(values: dict[str, Any], text: str) -> None:
    """``train.max_steps=50``: the value as TOML reads it, else a plain string."""
    key, equals, written = text.partition("=")
    section, dot, name = key.strip().partition(".")
    if not equals or not dot or not name or "." in name:
        raise ConfigError(f"--set {text}: expected section.key=value, e.g. --set train.max_steps=50")
    try:
        value = tomllib.loads(f"value = {written.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = written.strip()
    part = values.setdefault(section, {})
    if not isinstance(part, dict):
        raise ConfigError(f"--set {text}: {section} is {part!r}, not a table")
    part[name] = value
