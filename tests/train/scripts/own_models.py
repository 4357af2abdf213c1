"""Models as users write them: a module that takes a batch and returns a loss."""

import json
import os
import signal

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
    """Counts only targets above 0, so that samples have very different numbers of them, and in the format of sums."""

    def targets(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["y"] > 0).double().sum()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        squares = (self.layer(batch["x"][:, -1])[:, None] - batch["y"]).square()
        return (squares * (batch["y"] > 0)).sum() / self.targets(batch).clamp(min=1)


class Hungry(Linear):
    """Runs out of memory on more samples than ``most``, as a GPU does, on one rank or all; it has drawn by then."""

    def __init__(self, features: int, targets: int, most: int, rank: int | None = None) -> None:
        super().__init__(features, targets)
        self.most, self.rank, self.seen = most, rank, []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.seen.append(len(batch["x"]))
        batch["x"] = x = nn.functional.dropout(batch["x"], 0.2, self.training)  # a second pass must not find it
        is_small = self.rank is not None and self.rank != int(os.environ["RANK"])
        if len(x) > self.most and not is_small:
            raise torch.OutOfMemoryError(f"tried to hold {len(x)} samples")
        return super().forward(batch)


class Endless(Linear):
    """Asks the CPU for more memory than there can be, in training or in evaluation."""

    def __init__(self, features: int, targets: int, training: bool) -> None:
        super().__init__(features, targets)
        self.when = training

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if self.training == self.when:
            torch.empty(1 << 55)
        return super().forward(batch)


class NoGradient(Linear):
    """From the given training pass on the loss is finite and its gradient is not: the root of 0."""

    def __init__(self, features: int, targets: int, at: int) -> None:
        super().__init__(features, targets)
        self.at, self.passes = at, 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.passes += self.training
        loss = super().forward(batch)
        return loss + (self.layer.weight.sum() * 0).sqrt() if self.passes >= self.at else loss


class Scripted(Linear):
    """Its losses on the val split after each step are given."""

    def __init__(self, features: int, targets: int, val_losses: list[float]) -> None:
        super().__init__(features, targets)
        self.val_losses = val_losses
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.steps += self.training
        return super().forward(batch) if self.training else torch.tensor(self.val_losses[int(self.steps) - 1])


class Terminated(Linear):
    """Its process gets SIGTERM in the first evaluation, where ``log`` does not exist yet; it notes every val batch there."""

    def __init__(self, features: int, targets: int, log: str) -> None:
        super().__init__(features, targets)
        self.log = log

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        if not self.training:
            if not os.path.exists(self.log):
                os.kill(os.getpid(), signal.SIGTERM)
            with open(self.log, "a") as file:
                file.write(f"{len(batch['x'])}\n")
        return super().forward(batch)


class Returns(Linear):
    """A model that is wrong about what a loss is."""

    def __init__(self, features: int, targets: int, what: str) -> None:
        super().__init__(features, targets)
        self.what = what
        if what == "complex":
            self.register_buffer("turns", torch.ones(3, dtype=torch.complex64))

    def targets(self, batch: dict[str, Tensor]) -> Tensor | int:
        return batch["y"].sum(dim=0) if self.what == "targets" else batch["y"].numel()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().forward(batch)
        wrong = {"dict": {"loss": loss}, "vector": loss.reshape(1), "constant": loss.detach(), "integer": loss.long()}
        return wrong.get(self.what, loss)


class Turning(Linear):
    """A complex buffer that is not saved: it must keep its imaginary part."""

    def __init__(self, features: int, targets: int) -> None:
        super().__init__(features, targets)
        self.register_buffer("turns", torch.full((3,), 1j), persistent=False)


class Normed(Linear):
    """Keeps running means of what it saw, which on every rank is something else."""

    def __init__(self, features: int, targets: int) -> None:
        super().__init__(features, targets)
        self.norm = nn.BatchNorm1d(features)
        self.register_buffer("turns", torch.full((3,), 1j), persistent=False)
        self.register_buffer("is_used", torch.tensor(False))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.is_used.fill_(True)
        x = batch["x"]
        return super().forward({**batch, "x": self.norm(x.flatten(0, 1)).view_as(x)})


class Spare(Linear):
    """Its second layer is in no loss, or only in those of one rank, or only in those of some training passes."""

    def __init__(self, features: int, targets: int, rank: int = -1, until: int = 0) -> None:
        super().__init__(features, targets)
        self.spare, self.rank, self.until, self.passes = nn.Linear(features, targets), rank, until, 0

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.passes += self.training
        loss = super().forward(batch)
        is_used = self.passes <= self.until or self.rank == int(os.environ.get("RANK", "0"))
        return loss + self.spare(batch["x"][:, -1]).square().mean() if is_used else loss


class Untrained(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["y"].mean()


def not_a_module() -> int:
    return 3
