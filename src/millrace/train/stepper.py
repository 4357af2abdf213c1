"""One optimiser step from one batch: micro-batches, ranks, precision, clipping.

The loss is the mean over all valid targets of the global batch. Every micro-batch of every rank counts by its targets, so k
micro-batches on W ranks give the gradient of one large batch, even with different numbers of targets.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from millrace.errors import ConfigError, TrainError
from millrace.feed.batch import Batch
from millrace.order.orders import share
from millrace.train.dist import World
from millrace.train.optimizers import learning_rate, set_learning_rate
from millrace.train.out_of_memory import is_out_of_memory, memory_for
from millrace.train.parallel import share_buffers
from millrace.train.precision import Precision
from millrace.train.profile import Stage, no_stage
from millrace.train.seeds import seed_step
from millrace.train.settings import OWN_MODELS, Config

SMALLER_STATE = "take optimizer.name = 'adafactor', train.parallel = 'fsdp2' on several GPUs or a smaller model"


class Stepper:
    """Steps a model. ``forward`` is the model as ranks call it: with DDP around it, or itself."""

    def __init__(
        self, model: nn.Module, forward: nn.Module, optimizer: Optimizer, precision: Precision, config: Config,
        world: World,
    ) -> None:  # fmt: skip
        self.model, self.forward, self.optimizer, self.precision = model, forward, optimizer, precision
        self.config, self.world = config, world
        self.forward_s = 0.0  # in forward passes, on the host: there no rank waits for another
        self.stage: Stage = no_stage  # the trainer's, while it profiles
        self._parameters, self._modules = list(model.parameters()), list(forward.modules())
        self.micro_batches = micro_batches(config.train.batch, config.train.micro_batch, world)
        # Ranks that may run out of memory one by one exchange gradients after the backward pass, when all have theirs. A
        # user's model does so in its first step, and always if a parameter is in no loss: DDP would wait for its gradient.
        is_ddp = isinstance(forward, DistributedDataParallel)
        self._may_lack = is_ddp and config.model.kind not in OWN_MODELS
        self._exchanges_late = is_ddp and (config.train.halve_on_oom or self._may_lack)

    def step(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Changes the weights; returns this rank's part of the global loss, and the norm of the gradient."""
        set_learning_rate(self.optimizer, learning_rate(step, self.config))
        if not all(module.training for module in self._modules):  # a model may have changed its mode
            self.forward.train()
        loss = self._accumulated(batch, step)
        with self.stage("optimizer"):
            scaler = self.precision.scaler
            if scaler.is_enabled():
                scaler.unscale_(self.optimizer)
            limit = self.config.train.clip or float("inf")
            norm = nn.utils.clip_grad_norm_(self._parameters, limit)
            with memory_for(f"for the state of the optimiser at step {step}", SMALLER_STATE, step=step):
                self.precision.step(self.optimizer)
            share_buffers(self.model, self.world)
        return loss, norm

    def _accumulated(self, batch: Batch, step: int) -> Tensor:
        """Computes the gradients of a batch. If memory runs out, repeats it in smaller parts, if asked to."""
        while True:
            failure: BaseException | None = None
            seed_step(self.config.train.seed, step, self.world.rank)  # a repeated pass draws the same numbers
            try:
                loss = self._accumulate(batch)
            except (RuntimeError, MemoryError) as error:
                if "Expected to have finished reduction in the prior iteration" in str(error):
                    raise self._not_in_the_loss(str(error), step - 1) from error
                if not is_out_of_memory(error):
                    raise
                failure = error
            failed = failure is not None
            if self._exchanges_late:
                failed = bool(self.world.largest([float(failed)])[0])
            if not failed:
                break
            self._halve(step, failure)
        if self._exchanges_late:
            self._exchange_gradients()
        return loss

    def _accumulate(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.parts(batch)
        weights = [self.weight(part) * counts for part, counts in parts]
        total = self.world.add(_sum(weights).to(torch.float64, copy=True)).clamp(min=1)
        losses = []
        for number, ((part, _), weight) in enumerate(zip(parts, weights, strict=True), start=1):
            with self._synced(number == len(parts) and not self._exchanges_late):
                began = perf_counter()
                with self.stage("forward"):
                    loss = self.loss(self.forward, part)
                self.forward_s += perf_counter() - began
                of_all = (weight / total).to(loss.dtype)
                # DDP and FSDP divide the sum of gradients by the number of ranks.
                with self.stage("backward"):
                    scaled: Any = self.precision.scaler.scale(loss * (of_all * self.world.size))
                    scaled.backward()
            losses.append(loss.detach() * of_all)
        return _sum(losses)

    def parts(self, batch: Batch) -> list[tuple[Batch, bool]]:
        """The micro-batches, and whether each counts. All ranks need as many, so some may count for nothing."""
        parts = batch.micro(min(self.micro_batches, batch.num_samples))
        return [(part, True) for part in parts] + [(parts[-1], False)] * (self.micro_batches - len(parts))

    def loss(self, forward: nn.Module, batch: Batch) -> Tensor:
        """The loss of a batch. A user's model may return anything, so it is checked."""
        with self.precision.autocast():
            loss = forward(batch)
        if not isinstance(loss, Tensor):
            wrong = f"returned {type(loss).__name__}"
        elif loss.dim():
            wrong = f"returned a tensor of shape {list(loss.shape)}"
        elif not loss.is_floating_point():
            wrong = f"returned a loss of {loss.dtype}"
        elif torch.is_grad_enabled() and not loss.requires_grad:
            wrong = "returned a loss that does not depend on its parameters"
        else:
            return loss
        raise ConfigError(
            f"model.kind = {self.config.model.kind!r} {wrong}; expected the loss of the batch: a floating-point tensor without "
            "dimensions, such as a mean, computed with the model's parameters"
        )

    def weight(self, batch: Batch) -> Tensor:
        """How much a batch counts: by its targets if the model counts them, else by its samples."""
        targets: Any = getattr(self.model, "targets", None)
        count = batch.num_samples if targets is None else targets(batch)
        if isinstance(count, (int, float)):
            return torch.full((), count, device=self.world.device)
        if not isinstance(count, Tensor) or count.dim():
            what = f"shape {list(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
            raise ConfigError(
                f"model.kind = {self.config.model.kind!r}: targets(batch) returned {what}; expected one number, how many "
                "targets the batch has"
            )
        return count

    @contextlib.contextmanager
    def _synced(self, is_last: bool) -> Any:
        """Exchanges gradients between ranks once per step, with the last micro-batch."""
        if isinstance(self.forward, DistributedDataParallel):
            with contextlib.nullcontext() if is_last else self.forward.no_sync():
                yield
            return
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(is_last)
        yield

    def _exchange_gradients(self) -> None:
        """Averages gradients over the ranks, as DDP does. A parameter in no loss of any rank gets none."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        own = [parameter.grad is not None for parameter in parameters]
        has_any = self.world.largest([float(has) for has in own])
        is_lacking = self.world.largest([float(not all(own))])[0]
        for parameter, has in zip(parameters, has_any, strict=True):
            if has:
                if parameter.grad is None:  # another rank has one
                    parameter.grad = torch.zeros_like(parameter)
                self.world.add(parameter.grad.div_(self.world.size))
        if self._may_lack:
            self._may_lack = False
            self._exchanges_late = self.config.train.halve_on_oom or bool(is_lacking)

    def _not_in_the_loss(self, message: str, step: int) -> ConfigError:
        """The error for parameters that DDP waited for; its message numbers them."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        numbers = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        numbered = [names[int(number)] for number in numbers[1].split()] if numbers else ["some of its parameters"]
        return ConfigError(
            f"model.kind = {self.config.model.kind!r}: the loss of step {step} does not depend on {', '.join(numbered)}, that of "
            "the first step did; let every loss depend on it (if need be times 0), or set train.halve_on_oom = true: gradients "
            "are then exchanged after the backward pass, whichever there are"
        )

    def _halve(self, step: int, error: BaseException | None) -> None:
        """Doubles the number of micro-batches; raises if that was not asked for or is impossible."""
        most = largest_share(self.config.train.batch, self.world)
        size = -(-most // self.micro_batches)
        is_possible = self.world.size == 1 or self._exchanges_late
        if not (self.config.train.halve_on_oom and is_possible and size > 1):
            why = ""
            if self.config.train.halve_on_oom and not is_possible:
                why = " (halve_on_oom is not for fsdp2, whose ranks wait for each other within a pass)"
            raise TrainError(
                f"out of memory at step {step} with micro-batches of {size} samples{why}; set train.micro_batch to "
                f"{max(1, size // 2)} or less, train.recompute = true or a smaller model, then run the same command again",
                step=step,
            ) from error
        self.micro_batches = min(most, self.micro_batches * 2)
        self.optimizer.zero_grad(set_to_none=True)
        if error is not None:
            traceback.clear_frames(error.__traceback__)  # they hold the tensors of the failed pass
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()


def _sum(values: list[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.stack(values).sum()


def largest_share(batch: int, world: World) -> int:
    return max(last - first for first, last in (share(batch, rank, world.size) for rank in range(world.size)))


def micro_batches(batch: int, size: int, world: World) -> int:
    """The number of forward passes of a step, the same on every rank."""
    return -(-largest_share(batch, world) // size) if size else 1
