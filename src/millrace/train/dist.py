"""The ranks of a run: this process among them, their sums, and the decisions they share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from millrace.errors import ConfigError, MillraceError, TrainError, reason
from millrace.feed.world import launched_world

# The command puts a list here. It holds the process groups until the process ends: a group of gloo that is freed while one
# of its threads waits for Python never ends.
held: list[Any] | None = None


@dataclass(frozen=True)
class World:
    """This process among the ranks of a run."""

    rank: int
    size: int
    device: torch.device
    control: Any = None  # a process group on the CPU, for decisions of all ranks
    store: Any = None  # shared by the ranks, readable even when some have ended

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def add(self, value: Tensor) -> Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(value)
        return value

    def largest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks, so that all ranks decide the same."""
        if self.size == 1:
            return values
        shared = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(shared, op=distributed.ReduceOp.MAX, group=self.control)
        return shared.tolist()

    def gather(self, value: float) -> tuple[float, ...]:
        """The value of every rank, on every rank."""
        if self.size == 1:
            return (value,)
        shared = torch.zeros(self.size, dtype=torch.float64)
        shared[self.rank] = value
        distributed.all_reduce(shared, group=self.control)
        return tuple(shared.tolist())

    def wait(self) -> None:
        if self.size > 1:
            distributed.barrier(group=self.control)


def start_world(device: str, timeout_s: int) -> World:
    """Joins the process group that torchrun describes, if any, and chooses the device."""
    if "WORLD_SIZE" not in os.environ and (launched := launched_world()) is not None:
        raise ConfigError(
            f"{launched}, but RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set, so every task would train alone; start "
            f"the ranks by torchrun or --ranks, or, for a run of each task, call env -u {launched.split('=')[0]} millrace train"
        )
    size = _number("WORLD_SIZE", 1)
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if size > 1 and name not in os.environ]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE = {size}, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; unset WORLD_SIZE, and "
            f"start the ranks with millrace train ... --ranks {size}, or by torchrun"
        )
    rank = _number("RANK", 0)
    if not 0 <= rank < size:
        raise ConfigError(f"RANK = {rank} and WORLD_SIZE = {size}; expected ranks from 0 to {size - 1}")
    chosen = _device(device, _number("LOCAL_RANK", 0))
    if size == 1:
        return World(0, 1, chosen)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    timeout = timedelta(seconds=timeout_s)
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    control = distributed.new_group(backend="gloo", timeout=timeout) if chosen.type == "cuda" else None
    hold(distributed.group.WORLD, control)
    return World(rank, size, chosen, control, store)


def hold(*groups: Any) -> None:
    """Keeps process groups until the process ends, if it is that of the command."""
    if held is not None:
        held.extend(groups)


def _number(name: str, default: int) -> int:
    """A number that torchrun puts into the environment."""
    value = os.environ.get(name, str(default))
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} = {value!r} in the environment; expected a number, as torchrun sets it") from None


def end_world(world: World) -> None:
    if world.size > 1 and distributed.is_initialized():
        distributed.destroy_process_group()


@contextlib.contextmanager
def rank_errors(world: World) -> Iterator[None]:
    """Turns an error of torch within the block into a remedy, if it means that another rank is gone."""
    try:
        yield
    except RuntimeError as error:
        if world.size == 1 or not (isinstance(error, distributed.DistError) or "gloo" in reason(error).lower()):
            raise
        raise TrainError(
            "another rank has ended or does not answer; see its own message, then run the same command again: it continues "
            "from the last checkpoint",
            is_about_ranks=True,
        ) from error


def is_reported_elsewhere(error: MillraceError, world: World) -> bool:
    """Whether another rank prints this error or its cause: one message is enough."""
    if world.size == 1:
        return False
    try:
        if getattr(error, "is_about_ranks", False):
            return bool(world.store.add("millrace/errors", 0) or world.store.add("millrace/lost", 1) > 1)
        world.store.add("millrace/errors", 1)
        return bool(world.store.add(f"millrace/error/{error}", 1) > 1)
    except RuntimeError:  # the rank that kept the store has gone
        return False


def _device(wanted: str, local_rank: int) -> torch.device:
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError("train.device = 'cuda', but torch sees no GPU; take device = 'cpu', or see `millrace doctor`")
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))  # so that all ranks say the same
    if processes > torch.cuda.device_count():
        raise ConfigError(
            f"{processes} processes, but there are {torch.cuda.device_count()} GPUs; lower --ranks (or torchrun's --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)
