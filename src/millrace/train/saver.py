"""Saving beside the training: the state is copied, then a thread writes it; the time the training stood is measured."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn
from torch.optim import Optimizer

from millrace.store import platform
from millrace.train.checkpoint import Checkpoints, State, name_of
from millrace.train.dist import World
from millrace.train.state import is_sharded, snapshot, sync_sharded, tensors_of, write_sharded


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
        self._jobs: list[Future[Saved | None]] = []
        self._done: list[Saved] = []

    def save(self, state: State, model: nn.Module, optimizer: Optimizer) -> None:
        started = time.perf_counter()
        self.finish()
        parts = tensors_of(model, optimizer)
        if is_sharded(model):
            self._save_sharded(dataclasses.replace(state, is_sharded=True), parts)
            self._done.append(Saved(state.step, *[time.perf_counter() - started] * 2))
            return
        if not self._world.is_first:
            return
        if not self._asynchronous:
            self._checkpoints.publish(state, parts)
            self._done.append(Saved(state.step, *[time.perf_counter() - started] * 2))
            return
        snapshot(parts, self._copies)
        stall_s = time.perf_counter() - started

        def write() -> Saved:
            self._checkpoints.publish(state, self._copies)
            return Saved(state.step, stall_s, time.perf_counter() - started - stall_s)

        self._do(write)

    def note_best(self, step: int, val_loss: float) -> None:
        """The checkpoint of a step, saved or being saved, is the best so far."""
        if self._world.is_first:
            self._do(lambda: self._checkpoints.note_best(step, val_loss))

    def _do(self, job: Callable[[], Saved | None]) -> None:
        if self._asynchronous:
            self._jobs.append(self._thread.submit(job))
        else:
            job()

    def _save_sharded(self, state: State, parts: dict[str, dict[str, Tensor]]) -> None:
        """All ranks write into one folder aside; the first publishes it."""
        shards = self._checkpoints.folder / f"{name_of(state.step)}.shards.partial"
        if self._world.is_first:
            platform.remove(shards)
            platform.make_dir(shards)
        self._world.wait()
        write_sharded(parts, shards)
        self._world.wait()
        if self._world.is_first:

            def move(aside: Path) -> dict[str, str]:
                for part in parts:
                    if (shards / part).is_dir():
                        platform.rename(shards / part, aside / part)
                return sync_sharded(parts, aside)

            self._checkpoints.publish_by(state, parts, move)
            platform.remove(shards)
        self._world.wait()

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
