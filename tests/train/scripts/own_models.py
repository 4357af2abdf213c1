"""Models as users write them: a module that takes a batch and returns a loss."""

import json
import os

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """Predicts y from the last row of x; knows nothing of masks or weights."""

    def __init__(self, features: int, targets: int) -> None:
        super().__init__()
        self.layer = nn.Linear(features, targets)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return (self.layer(batch["x"][:, -1])[:, None] - batch["y"]).square().mean()


class Remembers(Linear):
    """Also writes down which samples each training step of each rank held."""

    def __init__(self, features: int, targets: int, log: str) -> None:
        super().__init__(features, targets)
        self.log = log

    def forward(self, batch) -> Tensor:
        if self.training and batch.positions is not None:
            line = {
                "ranks": int(os.environ["WORLD_SIZE"]),
                "positions": batch.positions.tolist(),
                "samples": batch.samples.tolist(),
            }
            with open(self.log, "a") as file:
                file.write(json.dumps(line) + "\n")
        return super().forward(batch)


class Uneven(Linear):
    """Counts only targets above 0, so that samples have very different numbers of them."""

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["y"] > 0).sum()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        squares = (self.layer(batch["x"][:, -1])[:, None] - batch["y"]).square()
        return (squares * (batch["y"] > 0)).sum() / self.targets(batch).clamp(min=1)


class Hungry(Linear):
    """Runs out of memory on more samples than ``most``, as a GPU does."""

    def __init__(self, features: int, targets: int, most: int) -> None:
        super().__init__(features, targets)
        self.most, self.seen = most, []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen.append(len(batch["x"]))
        if len(batch["x"]) > self.most:
            raise torch.OutOfMemoryError(f"tried to hold {len(batch['x'])} samples")
        return super().forward(batch)


def not_a_module() -> int:
    return 3
