"""Checkpoints on disk: written aside, synced, renamed, read back; only then does ``latest`` name them.

    checkpoints/latest              the name of the newest whole checkpoint; best likewise, by val_loss
    checkpoints/step-00000040/      state.json, model.safetensors, optimizer.safetensors
    checkpoints/step-00000040/      or, sharded: state.json, model/shard-*.safetensors, optimizer/shard-*.safetensors

A kill or a full disk at any moment leaves ``latest`` on a checkpoint that loads. Every byte is under a hash: those of the
tensors are in ``state.json``, which holds its own. A damaged checkpoint is set aside, and the one before it is used.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from millrace.errors import StoreCorrupt, TrainError
from millrace.store import platform
from millrace.store.plain_file import read_plain
from millrace.train.state import (
    FORMAT,
    NAME,
    Damage,
    State,
    check_state,
    name_of,
    problem_of,
    read_state,
    step_of,
    write_state,
)
from millrace.train.tensors import write_tensors

LINK_BYTES = 256  # of ``latest`` and ``best``, which hold a name
Parts = Mapping[str, Mapping[str, Tensor]]
Write = Callable[[Path], dict[str, str]]


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
        tensors = {part: {k: (str(v.dtype), list(v.shape)) for k, v in parts[part].items()} for part in parts}
        write_state(aside, replace(state, tensors=tensors, files=hashes))
        platform.sync_dir(aside)

    def _name(self, link: str, name: str) -> None:
        path = self.folder / link
        if os.path.lexists(path) and not path.is_file() and not path.is_symlink():  # a folder or a pipe, and not ours
            self._rename_aside(link)
        platform.write_file(self.folder / link, f"{name}\n".encode(), mode=0o644)
        platform.sync_dir(self.folder)

    def note_best(self, step: int, val_loss: float) -> None:
        """Makes ``best`` name the checkpoint of a step, with its val_loss."""
        name = name_of(step)
        with platform.writing(self.folder / name, "saving"):
            write_state(self.folder / name, replace(self.read(name), val_loss=val_loss, format=FORMAT))
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

    @property
    def has_any(self) -> bool:
        """Whether a checkpoint was saved, readable or not."""
        return bool(self.names()) or os.path.lexists(self.folder / "latest")

    def names(self) -> list[str]:
        """Every checkpoint, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted((path.name for path in self.folder.iterdir() if NAME.fullmatch(path.name)), key=step_of)

    def resolve(self, link: str) -> str | None:
        """The checkpoint that ``latest`` or ``best`` names, if any."""
        try:
            return self._resolve(link)
        except Damage as why:
            raise self.damaged(link, str(why)) from why

    def _resolve(self, link: str) -> str | None:
        path = self.folder / link
        if not os.path.lexists(path):
            return None
        try:
            name = read_plain(str(path), LINK_BYTES, follow=True).decode().strip()
        except (StoreCorrupt, UnicodeDecodeError) as error:
            raise Damage(problem_of(error)) from error
        if not NAME.fullmatch(name) or not (self.folder / name).is_dir():
            raise Damage(f"names {name[:80]!r}, which is not there")
        return name

    def pick(self, link: str) -> str | None:
        """As ``resolve``, for whoever only reads: refuses a ``best`` that is not the best."""
        name = self.resolve(link)
        if link == "best" and name is not None:
            lowest = _lowest({other: self.read(other).val_loss for other in self.names()})
            if name != lowest:
                raise self.damaged(link, f"names {name}, and {lowest or 'none'} has the lowest val_loss")
        return name

    def read(self, name: str) -> State:
        """The state of a checkpoint, with the hash that its file holds."""
        try:
            return read_state(self.folder / name)
        except Damage as why:
            raise self.damaged(name, str(why)) from why

    def check(self, name: str) -> State:
        """The state of a checkpoint, after all its bytes were compared with their hashes."""
        try:
            return check_state(self.folder / name)
        except Damage as why:
            raise self.damaged(name, str(why)) from why

    def damaged(self, name: str, why: str) -> TrainError:
        """The error for a checkpoint, or for ``latest`` or ``best``, that cannot be used."""
        others = ", ".join(other for other in self.names() if other != name)
        remedy = "there is no other: bring it back from a copy, or start another run with --run"
        if others:
            remedy = f"others: {others}; write the name of one into {self.folder / 'latest'} to continue from it"
        if name == "best":
            remedy = "take the latest checkpoint; millrace train names the best again when the run continues"
        return TrainError(f"checkpoint {self.folder / name} is damaged ({why}); {remedy}")

    # Tidying up.

    def sweep(self) -> list[str]:
        """Tidies up after killed runs and damage; returns lines that a person should read.

        Removes half-written and half-removed checkpoints, and steps later than ``latest``. Damaged checkpoints are set
        aside. Then ``latest`` names the newest whole one, and ``best`` that with the lowest val_loss.
        """
        if not os.path.lexists(self.folder):
            return []
        if not self.folder.is_dir():
            raise TrainError(f"{self.folder} is not a folder; move it away, or start another run with --run")
        with platform.writing(self.folder, "tidying up"):
            return self._tidy()

    def _tidy(self) -> list[str]:
        for path in sorted(self.folder.iterdir()):
            if path.suffix in (".partial", ".gone", ".tmp"):
                platform.remove(path)
        lines = self._mend_latest()
        latest = self.resolve("latest")
        later = [name for name in self.names() if latest is not None and step_of(name) > step_of(latest)]
        for name in later:
            with contextlib.suppress(Damage):
                if self._resolve("best") == name:
                    platform.remove(self.folder / "best")
            self._remove(name)
        if later:
            lines.append(f"removed {', '.join(later)} from {self.folder}: later than {latest}, which is the latest")
        if latest is not None:
            lines += self._mend_best()
            self._forget_old()  # `keep` may be smaller than before
        return lines

    def _mend_latest(self) -> list[str]:
        """Makes ``latest`` name a whole checkpoint: the one it names, or the one before it; says what it changed."""
        named: str | None = None
        try:
            named = self._resolve("latest")
            problem = "" if named is not None else "was missing"
        except Damage as why:
            problem = f"is damaged ({why})"
        names = [name for name in self.names() if named is None or step_of(name) <= step_of(named)]
        if not names and problem == "was missing":
            return []  # nothing was saved yet
        whole, damages = self._newest_whole(names)
        if whole is None:
            problems = [f"{self.folder / 'latest'} {problem}"] if problem else []
            problems += [f"{name} is damaged ({why})" for name, why in damages.items()]
            raise TrainError(
                f"no checkpoint in {self.folder} is whole: {'; '.join(problems)}; bring one back from a copy, or start another "
                "run with --run"
            )
        lines = [self._set_aside(name, why) for name, why in damages.items()]
        if named != whole:
            self._name("latest", whole)
            what = f"{self.folder / 'latest'} {problem}; it" if problem else "latest"
            lines.append(f"{what} now names {whole}, the newest whole checkpoint")
        return lines

    def _newest_whole(self, names: list[str]) -> tuple[str | None, dict[str, str]]:
        """The last of these checkpoints that is whole, and what is wrong with those after it."""
        damages: dict[str, str] = {}
        for name in reversed(names):
            try:
                check_state(self.folder / name)
                return name, damages
            except Damage as why:
                damages[name] = str(why)
        return None, damages

    def _mend_best(self) -> list[str]:
        """Makes ``best`` name the checkpoint with the lowest val_loss; says what it changed."""
        lines: list[str] = []
        losses: dict[str, float | None] = {}
        for name in self.names():
            try:
                losses[name] = read_state(self.folder / name).val_loss
            except Damage as why:
                lines.append(self._set_aside(name, str(why)))
        lowest, problem = _lowest(losses), None
        try:
            named = self._resolve("best")
            problem = f"named {named}" if named not in (None, lowest) else None
        except Damage as why:
            named, problem = None, f"is damaged ({why})"
        if lowest is None and (named is not None or problem is not None):
            self._rename_aside("best")
        elif lowest is not None and named != lowest:
            self._name("best", lowest)
        if problem is not None:
            lines.append(f"{self.folder / 'best'} {problem}; by their val_loss the best is now {lowest or 'none'}")
        return lines

    def _set_aside(self, name: str, why: str) -> str:
        """Renames a damaged checkpoint, which is never used and never removed; returns the line that says so."""
        self._rename_aside(name)
        return f"checkpoint {self.folder / name} is damaged ({why}); it is not used, and kept as {name}.damaged"

    def _rename_aside(self, name: str) -> None:
        platform.remove(self.folder / f"{name}.damaged")
        platform.rename(self.folder / name, self.folder / f"{name}.damaged")


def _lowest(losses: Mapping[str, float | None]) -> str | None:
    """The checkpoint with the lowest val_loss; of several the oldest, as they come."""
    evaluated = {name: loss for name, loss in losses.items() if loss is not None}
    return min(evaluated, key=evaluated.__getitem__, default=None)
