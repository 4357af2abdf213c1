"""Saves while training goes on: copies the state, then a thread writes it. Measures how long training paused."""

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
from millrace.train.checkpoint import Checkpoints, Parts
from millrace.train.dist import World, hold
from millrace.train.model_state import copy_shards, copy_whole, is_sharded, sync_shards, tensors_of, write_shards
from millrace.train.state import State, name_of


@dataclass(frozen=True)
class Save:
    """A finished save."""

    step: int
    stall_s: float  # how long training paused for it
    write_s: float


class Saver:
    """Saves checkpoints, one after the other. If one fails, the next call raises its error."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, asynchronous: bool) -> None:
        self._checkpoints, self._world, self._asynchronous = checkpoints, world, asynchronous
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="millrace-checkpoint")
        self._group: Any = None
        self._jobs: list[Future[Save | None]] = []
        self._done: list[Save] = []

    def save(self, state: State, model: nn.Module, optimizer: Optimizer) -> None:
        started = time.perf_counter()
        self.finish()
        parts = tensors_of(model, optimizer)
        publish: Callable[[State, Parts], None] = self._checkpoints.publish
        if is_sharded(model):
            state, publish = dataclasses.replace(state, is_sharded=True), self._publish_sharded
            self._prepare_sharded(state)
        elif not self._world.is_first:
            return
        if self._asynchronous:
            parts = copy_shards(parts) if state.is_sharded else copy_whole(parts, self._copies)
        stall_s = time.perf_counter() - started

        def write() -> Save:
            publish(state, parts)
            whole_s = time.perf_counter() - started
            times = (stall_s, whole_s - stall_s) if self._asynchronous else (whole_s, whole_s)
            return Save(state.step, *times)

        self._do(write)

    def note_best(self, step: int, val_loss: float) -> None:
        """Makes ``best`` name the checkpoint of a step, once it is saved."""
        if self._world.is_first:
            self._do(lambda: self._checkpoints.note_best(step, val_loss))

    def _do(self, job: Callable[[], Save | None]) -> None:
        self._jobs.append(self._thread.submit(job))
        if not self._asynchronous:
            self.finish()

    def _shards(self, state: State) -> Path:
        """The folder that all ranks write into before the first rank publishes it."""
        return self._checkpoints.folder / f"{name_of(state.step)}.shards.partial"

    def _prepare_sharded(self, state: State) -> None:
        """Makes an empty folder for the shards, and a process group for saving alone."""
        if self._group is None:
            self._group = distributed.new_group(backend="gloo")
            hold(self._group)
        if self._world.is_first:
            with platform.writing(self._shards(state), "saving"):
                platform.remove(self._shards(state))
                platform.make_dir(self._shards(state))
        self._world.wait()

    def _publish_sharded(self, state: State, parts: Parts) -> None:
        """Writes the shards of every rank. The first rank publishes them, and raises the error of any rank."""
        shards = self._shards(state)
        if not self._world.is_first:
            with contextlib.suppress(OSError):
                write_shards(parts, shards, self._group)
            return

        def move(aside: Path) -> dict[str, str]:
            for part in parts:
                if (shards / part).is_dir():
                    platform.rename(shards / part, aside / part)
            return sync_shards(parts, aside)

        with platform.writing(self._checkpoints.folder / name_of(state.step), "saving"):
            try:
                write_shards(parts, shards, self._group)
                self._checkpoints.publish(state, parts, move)
            finally:
                with contextlib.suppress(OSError):  # they take the space that is missing
                    platform.remove(shards)

    def finish(self) -> None:
        """Waits for saves under way; raises their errors."""
        while self._jobs:
            self._collect()

    def close(self) -> None:
        """Waits for saves under way, and ignores their errors."""
        self._thread.shutdown()

    def poll(self) -> list[Save]:
        """The saves that ended since the last call."""
        while self._jobs and self._jobs[0].done():
            self._collect()
        done, self._done = self._done, []
        return done

    def _collect(self) -> None:
        save = self._jobs.pop(0).result()
        if save is not None:
            self._done.append(save)
