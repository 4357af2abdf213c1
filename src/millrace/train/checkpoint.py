"""Checkpoints on disk: written aside, synced, renamed, read back; only then does ``latest`` name them.

    checkpoints/latest              the name of the newest whole checkpoint; best likewise, by val_loss
    checkpoints/step-00000040/      state.json, model.safetensors, optimizer.safetensors
    checkpoints/step-00000040/      or, sharded: state.json, model/shard-*.safetensors, optimizer/shard-*.safetensors

A kill or a full disk at any moment leaves ``latest`` on a checkpoint that loads.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from millrace.errors import TrainError
from millrace.store import platform
from millrace.train.tensors import hash_file, write_tensors

FORMAT = 1
NAME = re.compile(r"step-[0-9]{8,}")
Parts = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path], dict[str, str]]


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
    tensors: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)  # path within the checkpoint -> xxh3


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def _step(name: str) -> int:
    return int(name.removeprefix("step-"))


class Checkpoints:
    """The checkpoints of a run."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder, self.keep = folder, keep

    def publish(self, state: State, parts: Parts, write: Write | None = None) -> None:
        """Saves a checkpoint. ``write`` makes its files in a folder and returns their hashes; without it, whole tensors."""
        aside, target = self.folder / f"{name_of(state.step)}.partial", self.folder / name_of(state.step)
        with platform.writing(target, "saving"):
            try:
                self._write_aside(aside, state, parts, write)
                if target.exists():  # an earlier start was killed before `latest` named it
                    self._remove(target.name)
                platform.rename(aside, target)
                platform.sync_dir(self.folder)
            except OSError:
                with contextlib.suppress(OSError):  # it takes the space that is missing
                    platform.remove(aside)
                raise
            self.check(target.name)
            self._name("latest", target.name)
            self._forget_old()

    def _write_aside(self, aside: Path, state: State, parts: Parts, write: Write | None) -> None:
        platform.make_dir(self.folder)
        platform.remove(aside)
        platform.make_dir(aside)
        names = {f"{part}.safetensors": part for part in parts}
        hashes = write(aside) if write else {k: write_tensors(aside / k, parts[names[k]]) for k in names}
        tensors = {part: {k: [str(v.dtype), list(v.shape)] for k, v in parts[part].items()} for part in parts}
        data = json.dumps({**vars(state), "tensors": tensors, "files": hashes}, allow_nan=False).encode()
        platform.write_file(aside / "state.json", data)
        platform.sync_dir(aside)

    def _name(self, link: str, name: str) -> None:
        platform.write_file(self.folder / link, f"{name}\n".encode(), mode=0o644)
        platform.sync_dir(self.folder)

    def note_best(self, step: int, val_loss: float) -> None:
        """Makes ``best`` name the checkpoint of a step, with its val_loss."""
        name = name_of(step)
        with platform.writing(self.folder / name, "saving"):
            values = {**vars(self.read(name)), "val_loss": val_loss}
            platform.write_file(self.folder / name / "state.json", json.dumps(values, allow_nan=False).encode())
            platform.sync_dir(self.folder / name)
            self._name("best", name)
            self._forget_old()

    def best_loss(self) -> float | None:
        """The val_loss of ``best``."""
        best = self.resolve("best")
        return None if best is None else self.read(best).val_loss

    def _forget_old(self) -> None:
        for name in self.names()[: -self.keep]:
            if name not in (self.resolve("latest"), self.resolve("best")):
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Renames a checkpoint before it is deleted: a folder with the name of a step is always whole."""
        gone = self.folder / f"{name}.gone"
        platform.remove(gone)
        platform.rename(self.folder / name, gone)
        platform.remove(gone)

    # Reading.

    def names(self) -> list[str]:
        """Every checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if NAME.fullmatch(path.name)), key=_step)

    def resolve(self, link: str) -> str | None:
        """The checkpoint that ``latest`` or ``best`` names, if any."""
        try:
            name = (self.folder / link).read_text().strip()
        except FileNotFoundError:
            return None
        if not NAME.fullmatch(name) or not (self.folder / name).is_dir():
            raise self._damaged(link, f"names {name[:80]!r}, which is not there")
        return name

    def read(self, name: str) -> State:
        path = self.folder / name / "state.json"
        try:
            values = json.loads(path.read_bytes())
            if values["format"] != FORMAT:
                raise TrainError(f"{path} has format {values['format']}; this millrace reads {FORMAT}: upgrade it")
            return State(**values)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged(name, f"state.json: {error}") from error

    def check(self, name: str) -> State:
        """The state of a checkpoint, after all its bytes were compared with their hashes."""
        state = self.read(name)
        for file, expected in state.files.items():
            path = self.folder / name / file
            found = hash_file(path) if path.is_file() else "no such file"
            if found != expected:
                raise self._damaged(name, f"{file} has hash {found}, expected {expected}")
        return state

    def _damaged(self, name: str, why: str) -> TrainError:
        others = ", ".join(other for other in self.names() if other != name)
        remedy = "there is no other: bring it back from a copy, or start another run with --run"
        if others:
            remedy = f"others: {others}; write the name of one into {self.folder / 'latest'} to continue from it"
        return TrainError(f"checkpoint {self.folder / name} is damaged ({why}); {remedy}")

    def sweep(self) -> list[str]:
        """Tidies up after killed runs; returns lines that a person should read.

        Removes half-written and half-removed checkpoints, and steps later than ``latest``. If ``latest`` is missing, it
        names the newest whole checkpoint again.
        """
        if not self.folder.is_dir():
            return []
        lines = []
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".partial", ".gone", ".tmp"):
                platform.remove(path)
        latest = self.resolve("latest")
        if latest is None and self.names():
            latest = self._newest_whole()
            self._name("latest", latest)
            lines.append(f"{self.folder / 'latest'} was missing; it now names {latest}, the newest whole checkpoint")
        later = [name for name in self.names() if latest is not None and _step(name) > _step(latest)]
        for name in later:
            self._remove(name)
        if later:
            lines.append(f"removed {', '.join(later)} from {self.folder}: later than {latest}, which is the latest")
        best = self.folder / "best"
        if best.exists() and not (self.folder / best.read_text().strip()).is_dir():
            platform.remove(best)  # its checkpoint was removed above
        if latest is not None:
            self._forget_old()  # `keep` may be smaller than before
        return lines

    def _newest_whole(self) -> str:
        damages = []
        for name in reversed(self.names()):
            try:
                self.check(name)
                return name
            except TrainError as error:
                damages.append(str(error).partition(";")[0])
        raise TrainError(
            f"{self.folder} has no latest, and no checkpoint in it is whole: {'; '.join(damages)}; bring one back from a copy, "
            "or start another with --run"
        )
