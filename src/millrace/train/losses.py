"""Losses and gradient norms of steps, looked at now and then, since looking waits for the GPU.

A loss or gradient that is not finite ends the run with its step, its samples, and the rows they came from.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from millrace.errors import TrainError
from millrace.feed.explain import describe
from millrace.feed.feed import Feed
from millrace.order.orders import Order
from millrace.train.dist import World
from millrace.train.precision import Precision
from millrace.view.view import View

MAX_ROWS = 4  # samples whose rows a message shows
MAX_SAMPLES = 20  # samples that it lists


class Losses:
    """This rank's losses and gradient norms, left on the device until ``look``."""

    def __init__(self, world: World, precision: Precision, feed: Feed, run: Path) -> None:
        self._world, self._precision, self._feed, self._run = world, precision, feed, run
        self._steps: list[tuple[Tensor, Tensor]] = []

    def add(self, loss: Tensor, norm: Tensor) -> None:
        self._steps.append((loss, norm))

    def look(self, step: int, saved: int) -> list[tuple[float, float]]:
        """Losses over all ranks, and norms, of the steps since the last look; raises if one is not finite.

        ``step`` is the last of them. ``saved`` is the step of the last checkpoint, or 0.
        """
        if not self._steps:
            return []
        losses: list[float] = self._world.add(torch.stack([loss for loss, _ in self._steps]).double()).tolist()
        # With shards, a rank has only the norm of its own.
        whole: list[Any] = [norm.full_tensor() if isinstance(norm, DTensor) else norm for _, norm in self._steps]
        norms: list[float] = torch.stack(whole).tolist()
        self._steps.clear()
        may_overflow = self._precision.scaler.is_enabled()  # such a step was skipped
        for behind, loss, norm in zip(range(len(losses), 0, -1), losses, norms, strict=True):
            if not math.isfinite(loss):
                raise self._not_finite(f"the loss of step {step - behind + 1} is {loss}", step, saved, behind)
            if not may_overflow and not math.isfinite(norm):
                what = f"the gradient of step {step - behind + 1} has norm {norm}, though its loss is {loss}"
                raise self._not_finite(what, step, saved, behind)
        if may_overflow and self._precision.has_given_up:
            what = (
                f"the gradient of step {step} is not finite, though its loss is {losses[-1]} and fp16 scaled it by less and less "
                f"(now {self._precision.scaler.get_scale():.2g}); {self._precision.skipped} steps were skipped: take bf16 or fp32"
            )
            raise self._not_finite(what, step, saved, 1)
        return list(zip(losses, norms, strict=True))

    def _not_finite(self, what: str, step: int, saved: int, behind: int) -> TrainError:
        """The error for the batch that is ``behind`` batches before the feed's position, with its samples."""
        feed, step = self._feed, step - behind + 1
        first = feed.position - behind * feed.batch
        samples, description = describe_samples(feed.view, feed.order, first, first + feed.batch)
        checkpoint = f"the last checkpoint is that of step {saved}" if saved else "there is no checkpoint yet"
        explain = f"all of them: millrace explain {self._run} --step {step}"
        return TrainError(f"{what}; {description}; {explain}; {checkpoint}", step=step, samples=samples)


def describe_samples(view: View, order: Order, first: int, last: int) -> tuple[list[int], str]:
    """The samples of positions [first, last) that hold values that are not finite, else all, and their rows."""
    batch = describe(view, order, np.arange(first, last), 0)
    bad = sorted(_bad_samples(view, batch.samples))
    rows = "; ".join([_rows(row) for row in batch.rows if not bad or row["sample"] in bad][:MAX_ROWS])
    samples = bad or batch.samples.tolist()
    names = f"{samples[:MAX_SAMPLES]}"
    if len(samples) > MAX_SAMPLES:
        names += f" and {len(samples) - MAX_SAMPLES} more"
    if bad:
        return samples, f"samples {names} hold values that are not finite ({rows})"
    return samples, f"samples {names} hold only finite values: lower optimizer.lr, or look at the model ({rows})"


def _bad_samples(view: View, samples: Any) -> set[int]:
    """Samples with a float that is NaN or infinite."""
    bad: set[int] = set()
    for value in view[samples].values():
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            rows = ~np.isfinite(value.reshape(len(value), -1)).all(axis=1)
            bad |= set(samples[rows].tolist())
    return bad


def _rows(row: dict[str, Any]) -> str:
    first, stop = row.get("rows", (0, 1))
    columns = ", ".join(f"{name}={str(value)[:60]}" for name, value in row.get("columns", {}).items() if name != "hash")
    text = f"sample {row['sample']}: rows {first:,} to {stop - 1:,} of record {row.get('record')}"
    return f"{text} ({columns})" if columns else text
