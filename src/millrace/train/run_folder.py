"""The run folder: the settings of a run, the store it reads, and the lock on it.

RUN/run.json        resolved configuration, store and its fingerprint, versions, threads, ranks
RUN/metrics.jsonl   losses; RUN/feed.jsonl which samples each step held (millrace explain RUN --step N)
RUN/checkpoints/    see checkpoint.py
RUN/data/           the store made from --input
RUN/rank-N.log      with --ranks: what the libraries of rank N wrote to standard error
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
from millrace.errors import ConfigError, StoreCorrupt, TrainError
from millrace.identity import digest
from millrace.store import platform
from millrace.store.lock import FolderLock
from millrace.store.plain_file import read_plain
from millrace.store.store import Store
from millrace.store.strict_json import MAX_BYTES, load_json, sealed, unsealed
from millrace.train.config import as_dict, parse_config
from millrace.train.dist import World
from millrace.train.metrics import last_saved
from millrace.train.settings import FORECASTERS, Config
from millrace.train.state import problem_of
from millrace.train.tensors import hash_file

NAME, DATA = "run.json", "data"
KEYS = {
    "config",
    "input",
    "store",
    "versions",
    "threads",
    "ranks",
    "device",
}  # of a file without a hash, of millrace 0.1
# Sections that a run with a checkpoint cannot change: the state would not fit, or the samples would be others.
FIXED = ("model", "data")
FREE = {
    "data.store",
    "data.sources",
    "data.allow_mixed_tokenizers",
    "data.column",
    "data.input",
    "data.prepare",
    "data.val_split",
    "data.queue",
    "data.processes",
    "data.workers",
    "data.depth",
}  # input_changes compares two of them
SAME_RESULT = {"workers", "stall_s"}  # options of a preparation that do not change its result
Change = tuple[str, Any, Any]  # a key, its value before, and now


@dataclass(frozen=True)
class RunFile:
    """The contents of ``run.json``."""

    config: Config
    store: str
    fingerprint: str
    threads: int
    input_hash: str | None = None  # that of data.input when the run began


def read_run(folder: Path) -> RunFile | None:
    """The run in a folder, if one began there."""
    path = folder / NAME
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        values, is_sealed = unsealed(load_json(read_plain(str(path), MAX_BYTES, follow=True), str(path)))
        if not is_sealed and (unknown := values.keys() - KEYS):
            raise ValueError(f"it has the key {min(unknown)!r:.60}")
        config = parse_config(values["config"], str(path))
        # A store inside the run folder moves with it.
        store = str(folder / DATA) if config.data.input else str(values["store"]["path"])
        return RunFile(config, store, str(values["store"]["fingerprint"]), int(values["threads"]), values.get("input"))
    except (StoreCorrupt, ValueError, KeyError, TypeError) as error:
        raise TrainError(
            f"{path} is damaged ({problem_of(error)}); bring it back from a copy, or start another run with --run"
        ) from error


def earlier_run(
    folder: Path, config: Config, resume: str, has_saved: bool, say: Callable[[str], None]
) -> RunFile | None:
    """The run that a trainer continues, if one began in the folder; refuses what it cannot continue.

    A run without a checkpoint has nothing to lose: with other settings it begins again, and a line says what changed.
    """
    if resume not in ("auto", "never"):
        raise ConfigError(f"resume={resume!r}; expected auto or never")
    before = read_run(folder)
    if before is None and has_saved:
        raise TrainError(
            f"{folder} has checkpoints and no {NAME}, which says what they were trained on; bring it back from a copy, or start "
            "another run with --run"
        )
    if before is None:
        return None
    if not has_saved and (saved := last_saved(folder)) is not None:
        raise TrainError(
            f"{folder} has saved {saved}, by its metrics, and has no checkpoint now; bring it back from a copy, or start another "
            "run with --run"
        )
    if resume == "never" and has_saved:
        raise ConfigError(f"{folder} holds a run already; drop --resume never to continue it, or give another --run")
    changes = [*setting_changes(before, config), *input_changes(before, config)]
    if changes and not has_saved:
        said = ", ".join(f"{key} was {_shown(old)} and is {_shown(new)}" for key, old, new in changes)
        say(f"note: {said}; no checkpoint was saved before, so the run begins again")
        return None
    for key, old, new in changes:
        raise ConfigError(
            f"{key} was {_shown(old)} in the run {folder} and is {_shown(new)} now; a run cannot change it: set it back, or "
            "start another with --run"
        )
    now = input_hash(config.data.input)
    if now is not None and before.input_hash is not None and now != before.input_hash:
        say(f"note: {config.data.input} has changed since the run began; the run goes on with what it held then")
    if before.threads != torch.get_num_threads():
        say(
            f"note: the run began with {before.threads} threads, now {torch.get_num_threads()}: the last bits of "
            f"losses will differ; set train.threads = {before.threads} for an exact continuation"
        )
    return before


def _shown(value: Any) -> str:
    """The value as TOML writes it: tuples are lists."""
    return json.dumps(value) if isinstance(value, tuple) else repr(value)


def existing_run(folder: Path) -> RunFile:
    """The run in a folder, for commands that need one."""
    found = read_run(folder)
    if found is None:
        raise ConfigError(f"{folder} is not the folder of a training run (it has no {NAME}); give what --run was")
    return found


def write_run(folder: Path, config: Config, store: Store, world: World, before: RunFile | None) -> None:
    values = {
        "config": as_dict(config),
        "input": input_hash(config.data.input) if before is None else before.input_hash,
        "store": {"path": store.path, "fingerprint": store.fingerprint, "kind": store.kind},
        "versions": {
            "millrace": __version__, "python": python_platform.python_version(), "torch": torch.__version__,
            "numpy": numpy.__version__,
        },
        "threads": torch.get_num_threads() if before is None else before.threads,  # at the first start
        "ranks": world.size,
        "device": str(world.device) if world.device.type == "cpu" else torch.cuda.get_device_name(world.device),
    }  # fmt: skip
    with platform.writing(folder / NAME):
        platform.make_dir(folder)
        platform.write_file(folder / NAME, json.dumps(sealed(values), indent=1).encode(), mode=0o644)
        platform.sync_dir(folder)


def as_begun(config: Config, before: RunFile) -> Config:
    """The configuration with the mask that a forecaster began with, which the file need not name."""
    begun, given = before.config.data.include, config.data.include
    if config.model.kind not in FORECASTERS or set(begun) != {*given, "mask"}:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, include=begun))


def setting_changes(before: RunFile, config: Config) -> list[Change]:
    """What differs in the model, the view or the optimiser: a trained state would not fit."""
    old, new = _flat(before.config), _flat(as_begun(config, before))
    fixed = [key for key in old if key.partition(".")[0] in FIXED and key not in FREE]
    return [(key, old[key], new[key]) for key in (*fixed, "optimizer.name", "train.seed") if old[key] != new[key]]


def input_changes(before: RunFile, config: Config) -> list[Change]:
    """Another input, or other options of its preparation. The same input may lie elsewhere, or be gone."""
    old, new = before.config.data, config.data
    if not new.input:
        return []  # a store is known by its fingerprint
    old_options, new_options = (
        {k: value for k, value in data.prepare.items() if k not in SAME_RESULT} for data in (old, new)
    )
    if old.input and old_options != new_options:
        return [("data.prepare", old_options, new_options)]
    is_elsewhere = not old.input or os.path.realpath(old.input) != os.path.realpath(new.input)
    is_other = is_elsewhere and before.input_hash != (input_hash(new.input) or "gone")
    return [("data.input", old.input, new.input)] if is_other else []


def input_hash(name: str) -> str | None:
    """The hash of a file, or of all files of a folder; None if nothing can be read."""
    path = Path(name)
    files = [] if not name else sorted(path.rglob("*")) if path.is_dir() else [path]
    try:
        parts = [part for file in files if file.is_file() for part in (str(file.relative_to(path)), hash_file(file))]
    except OSError:
        return None
    return digest("input", *parts) if parts else None


def _flat(config: Config) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in as_dict(config).items() for key, value in values.items()}


@contextlib.contextmanager
def lock_run(folder: Path, world: World) -> Iterator[None]:
    """Locks the run folder: one trainer at a time. The first rank holds the lock, and it ends with the process."""
    if not world.is_first:
        yield
        return
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--run {folder} is a file; give the run a folder of its own")
    lock = FolderLock(folder, folder, folder)
    is_held, is_new = False, not folder.exists()
    while not is_held:  # again if somebody renamed or removed the folder meanwhile
        with platform.writing(folder):
            platform.make_dir(folder)
        is_held = lock.acquire()
    try:
        lock.write_owner()
        yield
    finally:
        with contextlib.suppress(OSError):
            if is_new and os.listdir(folder) == ["owner.json"]:  # nothing began: leave no folder behind
                platform.remove(folder)
        lock.release()
