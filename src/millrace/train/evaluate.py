"""Evaluation: every sample of the val split once, over all ranks, weighted by its targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.feed.batch import Batch, part_of
from millrace.feed.feed import Feed
from millrace.order.orders import Sequential
from millrace.train.dist import World
from millrace.train.models.forecast import Forecaster
from millrace.train.nonfinite import tell_samples
from millrace.train.settings import Config
from millrace.train.stepper import Stepper
from millrace.view.view import View


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found; a loss that is not finite is None, and ``problem`` says of which samples."""

    val_loss: float | None
    val_baseline: float | None = None  # where the model has one
    problem: str = ""

    def values(self) -> dict[str, float | None]:
        baseline = {} if self.val_baseline is None else {"val_baseline": self.val_baseline}
        return {"val_loss": self.val_loss, **baseline}


def evaluate(
    view: View,
    stepper: Stepper,
    config: Config,
    world: World,
    to_device: Callable[[Batch], Batch],
    is_asked_to_stop: Callable[[], int] = lambda: 0,
) -> Evaluation | None:
    """The loss over the view, or None where it was left: all ranks ask after each batch and get the same answer."""
    feed = Feed(
        view, batch=max(config.train.batch, world.size), order=Sequential(len(view)), epochs=1, rank=world.rank,
        world=world.size, device=str(world.device),
    )  # fmt: skip
    model = stepper.model
    model.eval()
    sums = []
    try:
        with torch.no_grad(), feed:
            for number, whole in enumerate(feed):
                if config.evaluation.batches and number >= config.evaluation.batches:
                    break
                if is_asked_to_stop():
                    return None
                parts = [_sums(part, stepper, to_device, counts) for part, counts in stepper.parts(whole)]
                sums.append(torch.stack(parts).sum(0))
    finally:
        model.train()
    each = torch.stack(sums)
    total, loss, compared, baseline = world.add(each.sum(0)).tolist()
    if not math.isfinite(loss):
        return Evaluation(None, problem=_problem(each[:, 1], feed, world))
    has_baseline = compared > 0 and math.isfinite(baseline)
    return Evaluation(loss / max(total, 1.0), baseline / compared if has_baseline else None)


def _sums(batch: Batch, stepper: Stepper, to_device: Callable[[Batch], Batch], counts: bool) -> Tensor:
    """Weight and loss times weight of a batch without its padding, then the same of the baseline, which may count less."""
    valid = batch.num_samples if batch.valid is None else int(batch.valid.sum())
    # One row at least, since sharded models run together on all ranks; it then weighs nothing.
    real = to_device(part_of(batch, slice(max(valid, 1))))  # padding is at the end
    loss = stepper.loss(stepper.model, real)
    weight = stepper.weight(real).double() * bool(valid and counts)
    measured = stepper.model.baseline(real) if isinstance(stepper.model, Forecaster) else None
    baseline, compared = measured if measured is not None else (torch.zeros_like(loss), torch.zeros_like(weight))
    compared = compared.double() * bool(valid and counts)
    return torch.stack([weight, loss.double() * weight, compared, baseline.double() * compared])


def _problem(losses: Tensor, feed: Feed, world: World) -> str:
    """Which samples make the loss what it is, of the first batch on any rank that is not finite."""
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    found = -world.largest([-float(min(bad, default=math.inf))])[0]
    if not math.isfinite(found):
        return "the losses of all batches are finite, and their sum is not"
    first = int(found) * feed.batch
    return tell_samples(feed.view, feed.order, first, min(first + feed.batch, len(feed.view)))[1]
