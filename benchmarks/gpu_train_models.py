"""Models that the runs of benchmarks/gpu_train_check.py name by ``module:callable``."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 512
SCORES = 8192  # of Uneven: what takes the memory


class Uneven(nn.Module):
    """Scores the next token, and counts only some targets: micro-batches of it weigh differently."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.inward, self.outward = nn.Embedding(VOCABULARY, width), nn.Linear(width, SCORES)

    def forward(self, batch: Any) -> Tensor:
        y = batch["y"].masked_fill(batch["y"] % 3 != 0, -100)
        scores = self.outward(self.inward(batch["x"])).flatten(0, 1)
        return functional.cross_entropy(scores, y.flatten(), reduction="sum") / self.targets(batch).clamp(min=1)

    def targets(self, batch: Any) -> Tensor:
        return (batch["y"] % 3 == 0).sum()


class Steep(nn.Module):
    """Its gradients, times the scale that fp16 begins with, are more than a half-precision number holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 1)

    def forward(self, batch: Any) -> Tensor:
        return (self.outward(self.inward(batch["x"])).float() - 10.0).square().mean() * 1000.0
