"""The run folder: what a run was told and on what it ran, and who may write there.

RUN/run.json        resolved configuration, store and its fingerprint, versions, threads, ranks
RUN/metrics.jsonl   losses; RUN/feed.jsonl which samples each step held (millrace explain RUN --step N)
RUN/checkpoints/    see checkpoint.py
RUN/data/           the store that --input was prepared into
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import platform as python_platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from millrace import __version__
from millrace.errors import ConfigError, TrainError
from millrace.identity import digest
from millrace.store import platform
from millrace.store.lock import FolderLock
from millrace.store.store import Store
from millrace.train.config import as_dict, parse_config
from millrace.train.dist import World
from millrace.train.settings import FORECASTERS, Config
from millrace.train.tensors import hash_file

NAME, DATA = "run.json", "data"
# What a run cannot change on its way: the state would not fit, or it would be another line of samples.
FIXED = ("model", "data")
FREE = {"data.store", "data.input", "data.prepare", "data.val_split"}  # check_input looks at two of them
SAME_RESULT = {"workers", "stall_s"}  # options of a preparation that do not change what it makes


@dataclass(frozen=True)
class Run:
    """What ``run.json`` says."""

    config: Config
    store: str
    fingerprint: str
    threads: int
    input_hash: str | None = None  # of data.input when the run began


def read_run(folder: Path) -> Run | None:
    """The run in a folder, if one began there."""
    path = folder / NAME
    try:
        values = json.loads(path.read_bytes())
        config = parse_config(values["config"], str(path))
        # One within the run goes where the run goes.
        store = str(folder / DATA) if config.data.input else values["store"]["path"]
        return Run(config, store, values["store"]["fingerprint"], values["threads"], values.get("input"))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise TrainError(f"{path} is damaged ({error}); use another --run, or remove it") from error


def earlier_run(folder: Path, config: Config, resume: str, has_saved: bool, say: Callable[[str], None]) -> Run | None:
    """The run that a trainer continues, if one began in the folder; refuses what it cannot continue."""
    if resume not in ("auto", "never"):
        raise ConfigError(f"resume={resume!r}; expected auto or never")
    before = read_run(folder)
    if before is None:
        return None
    if resume == "never" and has_saved:
        raise ConfigError(
            f"{folder} holds a run already; leave --resume never out to continue it, or give another --run"
        )
    check_same(before, config, folder)
    check_input(before, config, folder, say)
    if before.threads != torch.get_num_threads():
        say(
            f"note: the run began with {before.threads} threads, now {torch.get_num_threads()}: the last bits of "
            f"losses will differ; set train.threads = {before.threads} for an exact continuation"
        )
    return before


def existing_run(folder: Path) -> Run:
    """The run in a folder, for commands that need one."""
    found = read_run(folder)
    if found is None:
        raise ConfigError(f"{folder} is not the folder of a training run (it has no {NAME}); give what --run was")
    return found


def write_run(folder: Path, config: Config, store: Store, world: World, before: Run | None) -> None:
    values = {
        "config": as_dict(config),
        "input": input_hash(config.data.input) if before is None else before.input_hash,
        "store": {"path": store.path, "fingerprint": store.fingerprint, "kind": store.kind},
        "versions": {
            "millrace": __version__,
            "python": python_platform.python_version(),
            "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "threads": torch.get_num_threads() if before is None else before.threads,  # with which it began
        "ranks": world.size,
        "device": str(world.device) if world.device.type == "cpu" else torch.cuda.get_device_name(world.device),
    }
    with platform.writing(folder / NAME):
        platform.make_dir(folder)
        platform.write_file(folder / NAME, json.dumps(values, indent=1).encode(), mode=0o644)
        platform.sync_dir(folder)


def as_begun(config: Config, before: Run) -> Config:
    """A run of a forecaster goes on with the mask that it began with, which its configuration need not name."""
    begun, given = before.config.data.include, config.data.include
    if config.model.kind not in FORECASTERS or set(begun) != {*given, "mask"}:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, include=begun))


def check_same(before: Run, config: Config, folder: Path) -> None:
    """Refuses a continuation with another model, view or optimiser; names the key."""
    old, new = _flat(before.config), _flat(as_begun(config, before))
    for key in old:
        fixed = (key.split(".")[0] in FIXED and key not in FREE) or key in ("optimizer.name", "train.seed")
        if fixed and old[key] != new[key]:
            raise ConfigError(_refusal(key, old[key], new[key], folder))


def check_input(before: Run, config: Config, folder: Path, say: Callable[[str], None]) -> None:
    """Refuses another input, or its preparation with other options; the same may lie elsewhere, or be gone."""
    old, new = before.config.data, config.data
    if not new.input:
        return  # a store is known by its fingerprint
    old_options, new_options = (
        {key: value for key, value in data.prepare.items() if key not in SAME_RESULT} for data in (old, new)
    )
    if old.input and old_options != new_options:
        raise ConfigError(_refusal("data.prepare", old_options, new_options, folder))
    now = input_hash(new.input)
    is_equal = now is not None and now == before.input_hash
    if not is_equal and (not old.input or os.path.realpath(old.input) != os.path.realpath(new.input)):
        raise ConfigError(_refusal("data.input", old.input, new.input, folder))
    if now is not None and before.input_hash is not None and not is_equal:
        say(f"note: {new.input} has changed since the run began; the run goes on with what it held then")


def input_hash(name: str) -> str | None:
    """Of all that a file or the files of a folder hold; None where there is none that can be read."""
    path = Path(name)
    files = [] if not name else sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        parts = [part for file in files if file.is_file() for part in (str(file.relative_to(path)), hash_file(file))]
    except OSError:
        return None
    return digest("input", *parts) if parts else None


def _refusal(key: str, old: Any, new: Any, folder: Path) -> str:
    return (
        f"{key} was {old!r} in the run {folder} and is {new!r} now; a run cannot change it: set it back, or start another "
        "with --run"
    )


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in as_dict(config).items() for key, value in values.items()}


@contextlib.contextmanager
def locked(folder: Path, world: World) -> Iterator[None]:
    """One trainer per run folder, held by its first rank; the lock dies with its process."""
    if not world.is_first:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run {folder} is a file; give the run a folder of its own")
    lock = FolderLock(folder, folder, folder)
    is_held, is_new = False, not folder.exists()
    while not is_held:  # again where somebody renamed or removed the folder meanwhile
        with platform.writing(folder):
            platform.make_dir(folder)
        is_held = lock.acquire()
    try:
        lock.write_owner()
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_new and os.listdir(folder) == ["owner.json"]:  # nothing began: a mistake leaves no folder behind
                platform.remove(folder)
        lock.release()
