"""One optimiser step from one batch: micro-batches, ranks, precision, clipping.

The loss is the mean over all valid targets of the global batch: every micro-batch of every rank counts by its targets, so
that k micro-batches on W ranks give the gradient of one large batch, also where they hold different numbers of targets.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from millrace.errors import TrainError
from millrace.feed.batch import Batch
from millrace.order.share import share
from millrace.train.config import Config
from millrace.train.dist import World
from millrace.train.optimizers import learning_rate, set_learning_rate
from millrace.train.precision import Precision


class Stepper:
    """Steps a model; ``forward`` is the model as ranks call it (DDP around it, or itself)."""

    def __init__(
        self,
        model: nn.Module,
        forward: nn.Module,
        optimizer: Optimizer,
        precision: Precision,
        config: Config,
        world: World,
    ) -> None:
        self.model, self.forward, self.optimizer, self.precision = model, forward, optimizer, precision
        self._config, self._world = config, world
        self.micro_batches = micro_batches(config.train.batch, config.train.micro_batch, world)

    def step(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the global loss, and the norm of the gradient; weights are changed."""
        set_learning_rate(self.optimizer, learning_rate(step, self._config))
        self.forward.train()
        while True:
            try:
                loss = self._accumulate(batch)
                break
            except torch.OutOfMemoryError as error:
                self._halve(batch.num_samples, step, error)
        scaler = self.precision.scaler
        if scaler.is_enabled():
            scaler.unscale_(self.optimizer)
        limit = self._config.train.clip or float("inf")
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        self.precision.step(self.optimizer)
        return loss, norm

    def _accumulate(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        parts = batch.micro(self.micro_batches)
        weights = [self.weight(part) for part in parts]
        total = self._world.add(torch.stack(weights).sum().double()).clamp(min=1)
        losses = []
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True), start=1):
            with self._synced(number == len(parts)):
                with self.precision.autocast():
                    loss = self.forward(part)
                of_all = (weight / total).to(loss.dtype)
                # DDP and FSDP divide the sum of gradients by the number of ranks.
                self.precision.scaler.scale(loss * (of_all * self._world.size)).backward()
            losses.append(loss.detach() * of_all)
        return torch.stack(losses).sum()

    def weight(self, batch: Batch) -> Tensor:
        """How much a batch counts: its targets where the model says, else its samples."""
        targets = getattr(self.model, "targets", None)
        if targets is not None:
            found: Tensor = targets(batch)
            return found
        return torch.full((), batch.num_samples, device=self._world.device)

    @contextlib.contextmanager
    def _synced(self, is_last: bool) -> Any:
        """Gradients travel between ranks once per step, with the last micro-batch."""
        if isinstance(self.forward, DistributedDataParallel):
            with contextlib.nullcontext() if is_last else self.forward.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        yield

    def _halve(self, samples: int, step: int, error: BaseException) -> None:
        """Twice as many micro-batches for the same batch; raises where that was not asked for or cannot be."""
        size = -(-samples // self.micro_batches)
        can = self._config.train.halve_on_oom and self._world.size == 1 and size > 1
        if not can:
            why = "" if self._world.size == 1 else " (halve_on_oom is for one process: ranks would wait for each other)"
            raise TrainError(
                f"out of memory at step {step} with micro-batches of {size} samples{why}; set train.micro_batch to "
                f"{max(1, size // 2)} or less, train.recompute = true or a smaller model, then run the same command again",
                step=step,
            ) from error
        self.micro_batches = min(samples, self.micro_batches * 2)
        self.optimizer.zero_grad(set_to_none=True)
        if self._world.device.type == "cuda":
            torch.cuda.empty_cache()


def micro_batches(batch: int, size: int, world: World) -> int:
    """How many forward passes a step takes: the same number on every rank."""
    if size == 0:
        return 1
    sizes = [last - first for first, last in (share(batch, rank, world.size) for rank in range(world.size))]
    return min(-(-max(sizes) // size), min(sizes))
