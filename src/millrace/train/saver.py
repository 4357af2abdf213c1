"""Saving beside the training: the state is copied, then a thread writes it; the time the training stood is measured."""

from __future__ import annotations

import dataclasses
import threading
import time
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
    """Saves checkpoints, at most one at a time; a failed one raises at the next call."""

    def __init__(self, checkpoints: Checkpoints, world: World, *, asynchronous: bool) -> None:
        self._checkpoints, self._world, self._asynchronous = checkpoints, world, asynchronous
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
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

        def write() -> None:
            try:
                self._checkpoints.publish(state, self._copies)
                self._done.append(Saved(state.step, stall_s, time.perf_counter() - started - stall_s))
            except BaseException as error:  # noqa: BLE001 - it is raised again where the training is
                self._error = error

        self._thread = threading.Thread(target=write, name="millrace-checkpoint")
        self._thread.start()

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
        """Waits for the save under way; raises what it raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def close(self) -> None:
        """Waits for the save under way, however it ends."""
        if self._thread is not None:
            self._thread.join()

    def poll(self) -> list[Saved]:
        """The saves that ended since the last call."""
        self._raise()
        done, self._done = self._done, []
        return done

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
