"""The losses of steps that nobody has looked at yet: looking waits for the GPU, so it is done now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from millrace.feed.feed import Feed
from millrace.train.dist import World
from millrace.train.nonfinite import check_steps, not_finite
from millrace.train.precision import Precision


class Losses:
    """This rank's losses and gradient norms, kept where they were computed until they are looked at."""

    def __init__(self, world: World, precision: Precision, feed: Feed, run: Path) -> None:
        self._world, self._precision, self._feed, self._run = world, precision, feed, run
        self._steps: list[tuple[Tensor, Tensor]] = []

    def add(self, loss: Tensor, norm: Tensor) -> None:
        self._steps.append((loss, norm))

    def look(self, step: int, saved: int) -> list[tuple[float, float]]:
        """Losses, over all ranks, and norms of the steps up to ``step`` since the last look; stops where one is not finite.

        ``saved`` is the step of the last checkpoint, 0 where there is none.
        """
        if not self._steps:
            return []
        losses: list[float] = self._world.add(torch.stack([loss for loss, _ in self._steps]).double()).tolist()
        norms: list[float] = torch.stack([_whole(norm) for _, norm in self._steps]).tolist()
        self._steps.clear()
        may_overflow = self._precision.scaler.is_enabled()  # such a step was skipped
        check_steps(losses, [0.0] * len(norms) if may_overflow else norms, step, self._feed, self._run, saved)
        if may_overflow and self._precision.has_given_up:
            what = (
                f"the gradient of step {step} is not finite, though its loss is {losses[-1]} and fp16 scaled it by less and less "
                f"(now {self._precision.scaler.get_scale():.2g}); {self._precision.skipped} steps were skipped: take bf16 or fp32"
            )
            raise not_finite(what, step, self._feed.position - self._feed.batch, self._feed, self._run, saved)
        return list(zip(losses, norms, strict=True))


def _whole(norm: Any) -> Tensor:
    """The norm of all shards where a rank has only its own."""
    whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole
