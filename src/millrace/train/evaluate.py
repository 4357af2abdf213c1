"""Evaluation: samples of the val split, each once, over all ranks, weighted by their targets.

Their number depends on the configuration and the split, never on the clock: a resumed run evaluates the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.feed.batch import Batch, part_of
from millrace.feed.feed import Feed
from millrace.order.orders import Order, Sequential, Shuffled
from millrace.train.dist import World
from millrace.train.losses import describe_samples
from millrace.train.models.forecaster import Forecaster
from millrace.train.settings import Config
from millrace.train.stepper import Stepper
from millrace.view.view import View


@dataclass(frozen=True)
class EvaluationResult:
    """The result of an evaluation. A loss that is not finite is None, and ``problem`` names the samples."""

    val_loss: float | None
    val_baseline: float | None = None  # if the model has one
    problem: str = ""
    samples: int = 0

    def values(self) -> dict[str, float | None]:
        baseline = {} if self.val_baseline is None else {"val_baseline": self.val_baseline}
        return {"val_loss": self.val_loss, **baseline}

    def line(self, of: int) -> str:
        """The line for a person; the split has ``of`` samples."""
        parts = [f"val_loss {self.val_loss:.4f}"]
        if self.val_loss is not None and self.val_baseline:
            ratio = self.val_loss / self.val_baseline
            is_same = f"{ratio:.3f}" == "1.000"
            better = "about the same as" if is_same else "better than" if ratio < 1 else "worse than"
            parts.append(f"{better} repeating the last value: {ratio:.3f}x its error")
        if self.samples < of:
            parts.append(f"{self.samples:,} of {of:,} samples of the split")
        return parts[0] + (f" ({'; '.join(parts[1:])})" if parts[1:] else "")


def num_batches(config: Config, samples: int, batch: int) -> int:
    """How many batches one evaluation takes: ``evaluation.batches``, or a share of the steps between two evaluations.

    A batch here costs about a third of a training step, so the default share of 0.25 takes about a tenth of the time.
    """
    asked = config.evaluation
    whole = -(-samples // batch)
    if asked.batches:
        return min(whole, asked.batches)
    between = min(asked.every or config.train.max_steps, config.train.max_steps)
    return min(whole, max(1, int(between * asked.max_share))) if asked.max_share else whole


def evaluation_order(samples: int, *, is_whole: bool) -> Order:
    """All samples in their order, or some spread over the split: the same ones in every evaluation and run."""
    return Sequential(samples) if is_whole else Shuffled(samples, seed=0)


def evaluate(
    view: View,
    stepper: Stepper,
    is_asked_to_stop: Callable[[], int] = lambda: 0,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> EvaluationResult | None:
    """The loss over the view; None if a signal ended it. All ranks ask before each batch, and get the same answer.

    ``progress`` is called before each batch with the number of batches done, and of all.
    """
    config, world, model = stepper.config, stepper.world, stepper.model
    batch = max(config.train.batch, world.size)
    count = num_batches(config, len(view), batch)
    order = evaluation_order(len(view), is_whole=count * batch >= len(view))
    feed = Feed(
        view, batch=batch, order=order, epochs=1, rank=world.rank, world=world.size, device=str(world.device)
    )  # fmt: skip
    model.eval()
    sums = []
    try:
        with torch.no_grad(), feed:
            for number, whole in enumerate(feed):
                if number >= count:
                    break
                if is_asked_to_stop():
                    return None
                progress(number, count)
                parts = [_sums(part, stepper, counts) for part, counts in stepper.parts(whole)]
                sums.append(torch.stack(parts).sum(0))
    finally:
        model.train()
    each = torch.stack(sums)
    total, loss, compared, baseline = world.add(each.sum(0)).tolist()
    if not math.isfinite(loss):
        return EvaluationResult(None, problem=_problem(each[:, 1], feed, world))
    has_baseline = compared > 0 and math.isfinite(baseline)
    samples = min(count * batch, len(view))
    return EvaluationResult(loss / max(total, 1.0), baseline / compared if has_baseline else None, samples=samples)


def _sums(batch: Batch, stepper: Stepper, counts: bool) -> Tensor:
    """Weight, and loss times weight, of a batch without its padding; then the same for the baseline."""
    valid = batch.num_samples if batch.valid is None else int(batch.valid.sum())
    # At least one row, since sharded models run on all ranks together; it then weighs nothing.
    real = stepper.precision.to_device(part_of(batch, slice(max(valid, 1))))  # padding is at the end
    loss = stepper.loss(stepper.model, real)
    weight = stepper.weight(real).double() * bool(valid and counts)
    measured = stepper.model.baseline(real) if isinstance(stepper.model, Forecaster) else None
    baseline, compared = measured if measured is not None else (torch.zeros_like(loss), torch.zeros_like(weight))
    compared = compared.double() * bool(valid and counts)
    return torch.stack([weight, loss.double() * weight, compared, baseline.double() * compared])


def _problem(losses: Tensor, feed: Feed, world: World) -> str:
    """Which samples of the first bad batch on any rank make the loss infinite or NaN."""
    bad = (~losses.isfinite()).nonzero().flatten().tolist()
    first_bad = -world.largest([-float(min(bad, default=math.inf))])[0]
    if not math.isfinite(first_bad):
        return "the losses of all batches are finite, but their sum is not"
    first = int(first_bad) * feed.batch
    return describe_samples(feed.view, feed.order, first, min(first + feed.batch, len(feed.view)))[1]
