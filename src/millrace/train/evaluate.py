"""Evaluation: every sample of the val split once, over all ranks, weighted by its targets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from millrace.feed.batch import Batch
from millrace.feed.feed import Feed
from millrace.order.orders import Sequential
from millrace.train.config import Config
from millrace.train.dist import World
from millrace.train.stepper import Stepper
from millrace.view.view import View


def evaluate(
    view: View, stepper: Stepper, config: Config, world: World, to_device: Callable[[Batch], Batch]
) -> dict[str, float]:
    """``val_loss`` over the view, and ``val_baseline`` where the model has one."""
    feed = Feed(
        view, batch=max(config.train.batch, world.size), order=Sequential(len(view)), epochs=1, rank=world.rank,
        world=world.size, device=str(world.device),
    )  # fmt: skip
    model = stepper.model
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    with torch.no_grad(), feed:
        for number, whole in enumerate(feed):
            if config.evaluation.batches and number >= config.evaluation.batches:
                break
            for batch in whole.micro(min(stepper.micro_batches, whole.num_samples)):
                sums += _sums(batch, stepper, to_device)
    model.train()
    total, loss, baseline = world.add(sums).tolist()
    found = {"val_loss": loss / max(total, 1.0)}
    if math.isfinite(baseline):
        found["val_baseline"] = baseline / max(total, 1.0)
    return found


def _sums(batch: Batch, stepper: Stepper, to_device: Callable[[Batch], Batch]) -> Any:
    """Weight, loss times weight, baseline times weight of a batch without its padding."""
    valid = batch.num_samples if batch.valid is None else int(batch.valid.sum())
    # One row at least, since sharded models run together on all ranks; it then weighs nothing.
    real = to_device(_first(batch, max(valid, 1)))
    with stepper.precision.autocast():
        loss = stepper.model(real)
        measure = getattr(stepper.model, "baseline", None)
        measured = None if measure is None else measure(real)
        baseline = torch.full_like(loss, float("nan")) if measured is None else measured
    weight = stepper.weight(real).double() * bool(valid)
    return torch.stack([weight, loss.double() * weight, baseline.double() * weight])


def _first(batch: Batch, rows: int) -> Batch:
    """The first rows of a batch: padding is at its end."""
    return Batch({name: value[:rows] for name, value in batch.items()})
