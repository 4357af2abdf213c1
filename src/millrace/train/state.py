"""The state of one checkpoint, ``state.json`` in its folder: everything of a step except the tensors, and their hashes.

The file holds the hash of its own values, so one changed bit anywhere in a checkpoint is seen. Format 1, of millrace 0.1,
has no such hash.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from millrace.errors import StoreCorrupt, TrainError
from millrace.store import platform
from millrace.store.plain_file import read_plain, unreadable
from millrace.store.strict_json import MAX_BYTES, load_json, sealed, unsealed
from millrace.train.tensors import hash_file

FORMAT = 2
FILE = "state.json"
NAME = re.compile(r"step-[0-9]{8,}")


@dataclass(frozen=True)
class State:
    """Everything of one step except the tensors; ``tensors`` names those by part."""

    step: int
    feed: dict[str, Any]
    precision: dict[str, Any]
    val_loss: float | None = None
    is_sharded: bool = False
    world: int = 1
    format: int = FORMAT
    tensors: dict[str, dict[str, tuple[str, list[int]]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # path within the checkpoint -> xxh3

    @property
    def is_sealed(self) -> bool:
        """Whether damage to ``state.json`` would have been seen."""
        return self.format > 1


class Damage(Exception):
    """Why a checkpoint is damaged; ``Checkpoints`` turns it into a ``TrainError`` with a remedy, or into a line."""


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def step_of(name: str) -> int:
    return int(name.removeprefix("step-"))


def write_state(folder: Path, state: State) -> None:
    platform.write_file(folder / FILE, json.dumps(sealed(vars(state))).encode())


def read_state(folder: Path) -> State:
    """The state in the folder of a checkpoint; ``Damage`` where it is not what was written."""
    path = folder / FILE
    try:
        values, is_sealed = unsealed(load_json(read_plain(str(path), MAX_BYTES, follow=True), str(path)))
        state_format = values.get("format")
        if is_sealed and isinstance(state_format, int) and state_format > FORMAT:
            raise TrainError(f"{path} has format {state_format}; this millrace reads up to {FORMAT}: upgrade it")
        if unknown := values.keys() - {each.name for each in fields(State)}:
            raise ValueError(f"it has the key {min(unknown)!r:.60}")
        state = msgspec.convert(values, State)
        if (state.step, is_sealed) != (step_of(folder.name), state.is_sealed) or not 0 < state.format <= FORMAT:
            has = "has a hash" if is_sealed else "has no hash"
            raise ValueError(f"it is of step {state.step} in format {state.format}, and {has}")
    except (StoreCorrupt, ValueError, msgspec.ValidationError) as error:
        raise Damage(f"{FILE}: {problem_of(error)}") from error
    return state


def check_state(folder: Path) -> State:
    """As ``read_state``, after all bytes of the checkpoint were compared with their hashes."""
    state = read_state(folder)
    for file, expected in state.files.items():
        path = folder / file
        try:
            found = hash_file(path) if path.is_file() else "no such file"
        except OSError as error:
            if not isinstance(problem := unreadable(str(path), error), StoreCorrupt):
                raise problem from error
            found = str(error.strerror)
        if found != expected:
            raise Damage(f"{file} has hash {found}, expected {expected}")
    return state


def problem_of(error: Exception) -> str:
    """What is wrong with a file, without its path and the remedy for a store."""
    if isinstance(error, KeyError):
        return f"it has no {error}"
    return getattr(error, "problem", None) or str(error)
