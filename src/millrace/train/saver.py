"""Saving beside the training: the state is copied, then a thread writes it; the time the training stood is measured."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from millrace.store import platform
from millrace.train.checkpoint import Checkpoints, Parts, State, name_of
from millrace.train.dist import World
from millrace.train.state import is_sharded, snapshot, staged, sync_sharded, tensors_of, write_sharded


@dataclass(frozen=True)
class Saved:
    """One finished save."""

    step: int
    stall_s: float  # how long the training stood still for it
    write_s: float


class Saver:
    """Saves checkpoints, one after the other; a failed one raises at the next call."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, asynchronous: bool) -> None:
        self._checkpoints, self._world, self._asynchronous = checkpoints, world, asynchronous
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-checkpoint")
        self._group: Any = None
        self._jobs: list[Future[Saved | None]] = []
        self._done: list[Saved] = []

    def save(self, state: State, model: nn.Module, optimizer: Optimizer) -> None:
        started = time.perf_counter()
        self.finish()
        parts = tensors_of(model, optimizer)
        publish = self._checkpoints.publish
        if is_sharded(model):
            state, publish = dataclasses.replace(state, is_sharded=True), self._publish_sharded
            self._prepare_sharded(state)
        elif not self._world.is_first:
            return
        if self._asynchronous:
            parts = staged(parts) if state.is_sharded else snapshot(parts, self._copies)
        stall_s = time.perf_counter() - started

        def write() -> Saved:
            publish(state, parts)
            whole_s = time.perf_counter() - started
            return (
                Saved(state.step, stall_s, whole_s - stall_s)
                if self._asynchronous
                else Saved(state.step, *[whole_s] * 2)
            )

        self._do(write)

    def note_best(self, step: int, val_loss: float) -> None:
        """The checkpoint of a step, saved or being saved, is the best so far."""
        if self._world.is_first:
            self._do(lambda: self._checkpoints.note_best(step, val_loss))

    def _do(self, job: Callable[[], Saved | None]) -> None:
        self._jobs.append(self._thread.submit(job))
        if not self._asynchronous:
            self.finish()

    def _shards(self, state: State) -> Path:
        """Where all ranks write into before the first publishes it."""
        return self._checkpoints.folder / f"{name_of(state.step)}.shards.partial"

    def _prepare_sharded(self, state: State) -> None:
        """An empty folder for the shards, and a process group that saving has for itself."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
        if self._world.is_first:
            with platform.writing(self._shards(state), "saving"):
                platform.remove(self._shards(state))
                platform.make_dir(self._shards(state))
        self._world.wait()

    def _publish_sharded(self, state: State, parts: Parts) -> None:
        """All ranks write their shards; the first publishes them, and alone raises what failed on any."""
        shards = self._shards(state)
        if not self._world.is_first:
            with contextlib.suppress(OSError):
                write_sharded(parts, shards, self._group)
            return

        def move(aside: Path) -> dict[str, str]:
            for part in parts:
                if (shards / part).is_dir():
                    platform.rename(shards / part, aside / part)
            return sync_sharded(parts, aside)

        with platform.writing(self._checkpoints.folder / name_of(state.step), "saving"):
            try:
                write_sharded(parts, shards, self._group)
                self._checkpoints.publish_by(state, parts, move)
            finally:
                with contextlib.suppress(OSError):  # what is half written takes the room that is missing
                    platform.remove(shards)

    def finish(self) -> None:
        """Waits for what is under way; raises what it raised."""
        while self._jobs:
            self._collect()

    def close(self) -> None:
        """Waits for what is under way, however it ends."""
        self._thread.shutdown()

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call."""
        while self._jobs and self._jobs[0].done():
            self._collect()
        done, self._done = self._done, []
        return done

    def _collect(self) -> None:
        saved = self._jobs.pop(0).result()
        if saved is not None:
            self._done.append(saved)
